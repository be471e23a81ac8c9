"""Rule that decides whether the thread that received a request also runs the model, instead of handing it to another
thread.

A front end states how long its thread may be held, `hold_us`: 0 for never, a few hundred microseconds for a thread that
reads for many clients, math.inf for a thread that would only wait. SessionInfo states what kind of runs a session has.
The version measures how long its runs take. A request runs inline if `hold_us > needed_hold_us`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque

from edge_server.backends.base import SessionInfo

UNLIMITED_US = sys.float_info.max
"""Needed hold of a run that may take any time: larger than any finite hold, smaller than math.inf."""

_WINDOW = 8
_NEWEST_PART = 0.2
"""Weight of the newest measured run in the mean processor time."""

_ALWAYS_MEASURED_US = 100.0
"""A model whose runs take longer has all of them measured: that adds less than one percent to them. A single run that
takes less is no reason to measure: no front end minds being held for so long."""
_SKIPPED = 15
_MEASURED_AFTER_SLOW = 16


def needed_hold_us(info: SessionInfo, is_decoupled: bool, run_us: float) -> float:
    """Return how many microseconds a caller must allow its thread to be held to run a batch inline.

    `run_us` is the usual run time, UNLIMITED_US before it is known. Returns math.inf, which nothing exceeds, for a
    session that keeps its own thread. Returns UNLIMITED_US if a run may wait for this server or for anything else
    without limit, and for a decoupled model, which may take any time between its responses.
    """
    if info.keeps_thread:
        return math.inf
    if is_decoupled or not info.only_computes:
        return UNLIMITED_US
    return run_us


class InlineRule:
    """Inline rule of one version. Learns how long a run holds a thread: the lower quartile of the wall times of the
    latest runs, or the mean of their processor times if that is longer. Several threads use it; a lost update of the
    counts of runs to measure or to skip does no harm.

    Both are needed. A run that waits for a device uses no processor time but holds the thread, so wall time counts. A
    run that is preempted, or waits for the GIL, has a long wall time that says nothing about the model; therefore the
    lower quartile is used, and a model counts as slow if three of four runs are slow. A model with a few very long runs
    would still count as fast; its mean processor time shows them, and other threads cannot increase it.

    Reading the processor time costs a system call before and after a run. So of a model with short runs only every 16th
    run is measured, and the next 16 after a run that took twice the usual time and over 100 µs.
    """

    def __init__(self, info: SessionInfo, is_decoupled: bool) -> None:
        self._info = info
        self._is_decoupled = is_decoupled
        self.needed_hold_us = needed_hold_us(info, is_decoupled, UNLIMITED_US)
        self.depends_on_runs = needed_hold_us(info, is_decoupled, 0.0) == 0.0
        """Whether `begin` and `end` must be called around each run."""
        self.slow_ns = 0.0
        """Longest time of a run that is not measured; a longer one must be reported as well."""
        self._walls_us: deque[float] = deque(maxlen=_WINDOW)
        self._processor_us = -1.0
        self.runs_to_skip = 0
        """Number of further runs that are not measured. The executor decrements it itself for lone requests, which
        saves a call."""
        self._runs_to_measure = _MEASURED_AFTER_SLOW
        self._lock = threading.Lock()
        """Guards the times of the latest runs."""

    def begin(self) -> int:
        """Return the thread's processor time in nanoseconds if the run that begins is to be measured, else 0."""
        if self.runs_to_skip > 0:
            self.runs_to_skip -= 1
            return 0
        return time.thread_time_ns()

    def end(self, wall_ns: int, began_ns: int) -> None:
        """Record a run for which `begin`, on the same thread, returned `began_ns`; or a run longer than `slow_ns`."""
        if began_ns:
            self.note(wall_ns, time.thread_time_ns() - began_ns)
        elif wall_ns > self.slow_ns:
            self._runs_to_measure = _MEASURED_AFTER_SLOW
            self.runs_to_skip = 0

    def note(self, wall_ns: int, processor_ns: int) -> None:
        """Learn from a run that held its thread for `wall_ns` and used `processor_ns` of processor time."""
        with self._lock:
            self._walls_us.append(wall_ns / 1000)
            if self._processor_us < 0:
                self._processor_us = processor_ns / 1000
            else:
                self._processor_us += _NEWEST_PART * (processor_ns / 1000 - self._processor_us)
            walls_us = sorted(self._walls_us)
            run_us = max(walls_us[len(walls_us) // 4], self._processor_us)
        self.needed_hold_us = needed_hold_us(self._info, self._is_decoupled, run_us)
        self.slow_ns = 1000 * max(2 * run_us, _ALWAYS_MEASURED_US)
        self._runs_to_measure -= 1
        is_known = self._runs_to_measure <= 0 and run_us <= _ALWAYS_MEASURED_US
        self.runs_to_skip = _SKIPPED if is_known else 0
