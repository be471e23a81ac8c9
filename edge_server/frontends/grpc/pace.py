"""Which thread should compute a stream's next request: a rule without a clock and without threads.

A stream's own thread may run a request itself, which spares two thread switches but stops reading meanwhile. That pays
when the run is over before a switch would be, or when the client waits for each answer anyway. A client that sends
ahead must be read on, so that its requests can wait together and share a batch.
"""

from __future__ import annotations

QUICK_S = 0.0005
"""A run of up to this is not worth a switch of threads. Switching twice costs 50 to 100 us on a small board."""

_RUNS_BEFORE_CHANGING = 3
"""Runs in a row that contradict `is_quick` before it changes: a busy machine makes any single run look slow."""

_PROBE_EVERY = 64
_CALM_BEFORE_RUNNING = 2
_RUNS_BEFORE_ASKING = 16
_CALM_BEFORE_ALONE = 32


class Pace:
    """Watches the requests of one stream and decides. Used by the stream's reading thread only."""

    def __init__(self) -> None:
        self.is_quick = True
        self._calm = 0
        self._calm_and_quick = 0
        self._changes = 0
        self._runs = 0
        self._count = 0

    def may_run(self, is_idle: bool) -> bool:
        """Return whether the reading thread may run the request that it just read.

        `is_idle`: all requests before it have been answered. After a few requests in a row that found the stream
        idle the client is taken to wait for answers; since a request run here always leaves the stream idle, the
        question is asked anew after some runs.
        """
        self._count += 1
        if not is_idle:
            self._calm = self._runs = self._calm_and_quick = 0
        else:
            self._calm += 1
        if self.is_quick or self._count % _PROBE_EVERY == 0:
            return True
        if self._calm <= _CALM_BEFORE_RUNNING:
            return False
        self._runs += 1
        if self._runs == _RUNS_BEFORE_ASKING:
            self._calm = self._runs = 0
        return True

    def answered(self, seconds: float | None) -> None:
        """Learn from the request just submitted: how long it ran here, None when its answer is still to come."""
        if seconds is None:
            self._calm_and_quick = 0
            return
        was_quick = seconds <= QUICK_S
        self._calm_and_quick = self._calm_and_quick + 1 if was_quick else 0
        self._changes = self._changes + 1 if was_quick is not self.is_quick else 0
        if self._changes == _RUNS_BEFORE_CHANGING:
            self.is_quick = was_quick
            self._changes = 0

    @property
    def may_be_alone(self) -> bool:
        """Whether one thread could both read and send: for a while, each request was answered before the next."""
        return self._calm_and_quick >= _CALM_BEFORE_ALONE
