"""Inline execution: whether the thread that brings a request runs the model. The one rule on that question.

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
_MEASURED_EVERY = 8
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

    Reading a thread's processor time is a system call, twice a run. So of a model whose runs are short every eighth run
    is measured, and each of the next 16 after one that took twice the usual time.
    """

    def __init__(self, info: SessionInfo, is_decoupled: bool) -> None:
        self._info = info
        self._is_decoupled = is_decoupled
        self.needed_hold_us = needed_hold_us(info, is_decoupled, UNLIMITED_US)
        self.depends_on_runs = needed_hold_us(info, is_decoupled, 0.0) == 0.0
        """Whether runs have to be told of: `begin` and `end` around each."""
        self._run_us = UNLIMITED_US
        self._walls_us: deque[float] = deque(maxlen=_WINDOW)
        self._processor_us = -1.0
        self._runs = 0
        self._measured_until = 0

    def begin(self) -> int:
        """Return the thread's processor time in nanoseconds if this run is to be measured, else -1."""
        self._runs += 1
        if self._run_us > _ALWAYS_MEASURED_US or self._runs <= self._measured_until or not self._runs % _MEASURED_EVERY:
            return time.thread_time_ns()
        return -1

    def end(self, wall_ns: int, began_ns: int) -> None:
        """Note a run that took `wall_ns`, on the thread that called `begin`, which returned `began_ns`."""
        wall_us = wall_ns / 1000
        self._walls_us.append(wall_us)
        if wall_us > 2 * self._run_us:
            self._measured_until = self._runs + _MEASURED_AFTER_SLOW
        if began_ns >= 0:
            self._learn((time.thread_time_ns() - began_ns) / 1000)

    def _learn(self, processor_us: float) -> None:
        """Decide anew, after a run that was measured."""
        if self._processor_us < 0:
            self._processor_us = processor_us
        else:
            self._processor_us += _NEWEST_PART * (processor_us - self._processor_us)
        walls_us = sorted(self._walls_us.copy())
        self._run_us = max(walls_us[len(walls_us) // 4], self._processor_us)
        self.needed_hold_us = needed_hold_us(self._info, self._is_decoupled, self._run_us)
