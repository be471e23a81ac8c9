"""Inline execution rule: decides whether the thread that received a request runs the model.

A front end says for how long its thread may be held, `hold_us`: 0 for never, a few hundred microseconds for a thread
that reads for many clients, math.inf for one that would only wait. A session says what its runs are, see SessionInfo.
How long they take the version learns from its own runs. A request is run inline if `hold_us > needed_hold_us`.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque

from edge_server.backends.base import SessionInfo

UNLIMITED_US = sys.float_info.max
"""Needed of a caller whose run may take any time: no finite hold is more, and math.inf is."""

_WINDOW = 8
_NEWEST_PART = 0.2
"""How much the newest measured run counts in the mean of the processor time."""

_ALWAYS_MEASURED_US = 100.0
"""Of runs longer than this each is measured: it costs them less than a hundredth."""
_SKIPPED = 15
_MEASURED_AFTER_SLOW = 16


def needed_hold_us(info: SessionInfo, is_decoupled: bool, run_us: float) -> float:
    """Return for how many microseconds a caller's thread has to be willing to be held, to run a batch inline.

    `run_us` is how long runs take, UNLIMITED_US before that is known. math.inf, which nothing exceeds, for a session
    that keeps its thread; UNLIMITED_US where a run may wait for an answer of this server, or for anything else without
    end, and for a decoupled model, which may take any time between its responses.
    """
    if info.keeps_thread:
        return math.inf
    if is_decoupled or not info.only_computes:
        return UNLIMITED_US
    return run_us


class InlineRule:
    """One version's. Learns how long a thread is held by a run: the lower quartile of the latest runs' wall times, or
    the mean of their processor times where that is more. Used by several threads; a lost update is made up for by the
    next run.

    Neither alone is right. A run that waits (for a GPU, for a device) uses no processor time, but holds the thread:
    wall time tells. A run that is preempted, or waits for the GIL, takes long once, and says nothing of the model: on a
    busy machine most runs may, so a low quantile of wall times is taken, and a model counts as slow when three of four
    of its runs are. A model that computes for long now and then would pass there, and is told by its mean processor
    time, which no other thread can raise.

    Reading a thread's processor time is a system call, twice a run. So of a model whose runs are short only every
    16th run is measured, and each of the next 16 after one that took twice the usual time.
    """

    def __init__(self, info: SessionInfo, is_decoupled: bool) -> None:
        self._info = info
        self._is_decoupled = is_decoupled
        self.needed_hold_us = needed_hold_us(info, is_decoupled, UNLIMITED_US)
        self.depends_on_runs = needed_hold_us(info, is_decoupled, 0.0) == 0.0
        """Whether runs have to be told of: `begin` and `end` around each."""
        self.slow_ns = 0.0
        """How long a run may take that is not measured: a longer one has to be told of as well."""
        self._walls_us: deque[float] = deque(maxlen=_WINDOW)
        self._processor_us = -1.0
        self.runs_to_skip = 0
        """How many more runs are not measured. The executor counts it down itself for lone requests: a call less."""
        self._runs_to_measure = _MEASURED_AFTER_SLOW

    def begin(self) -> int:
        """Return the thread's processor time if the run that begins is to be measured, else 0. In nanoseconds."""
        if self.runs_to_skip > 0:
            self.runs_to_skip -= 1
            return 0
        return time.thread_time_ns()

    def end(self, wall_ns: int, began_ns: int) -> None:
        """Note a run for which `begin`, on the same thread, returned `began_ns`; or one longer than `slow_ns`."""
        if began_ns:
            self.note(wall_ns, time.thread_time_ns() - began_ns)
        elif wall_ns > self.slow_ns:
            self._runs_to_measure = _MEASURED_AFTER_SLOW
            self.runs_to_skip = 0

    def note(self, wall_ns: int, processor_ns: int) -> None:
        """Learn from a run that held its thread for `wall_ns`, and used the processor for `processor_ns` of it."""
        self._walls_us.append(wall_ns / 1000)
        if self._processor_us < 0:
            self._processor_us = processor_ns / 1000
        else:
            self._processor_us += _NEWEST_PART * (processor_ns / 1000 - self._processor_us)
        walls_us = sorted(self._walls_us.copy())
        run_us = max(walls_us[len(walls_us) // 4], self._processor_us)
        self.needed_hold_us = needed_hold_us(self._info, self._is_decoupled, run_us)
        self.slow_ns = 2000 * run_us
        self._runs_to_measure -= 1
        is_known = self._runs_to_measure <= 0 and run_us <= _ALWAYS_MEASURED_US
        self.runs_to_skip = _SKIPPED if is_known else 0
