"""Threads for slow work of the response cache: waiting for an external store, and hashing large inputs."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Workers:
    """At most `waiting_limit` jobs wait for a thread. The threads start with the first job."""

    def __init__(self, count: int, waiting_limit: int) -> None:
        self._count = count
        self._waiting_limit = waiting_limit
        self._changed = threading.Condition()
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._free_count = 0
        self._is_closed = False

    def post(self, work: Callable[[], None]) -> bool:
        """Run the job soon, and return at once. Return False, without running it, if too many wait already."""
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._waiting_limit:
                return False
            self._waiting.append(work)
            if len(self._waiting) > self._free_count and len(self._threads) < self._count:
                thread = threading.Thread(target=self._run_jobs, name="edge-cache", daemon=True)
                # The system may refuse a further thread: the existing ones do the work, if there are any.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._threads.append(thread)
            if not self._threads:
                self._waiting.pop()
                return False
            self._changed.notify()
        return True

    def close(self, timeout_s: float) -> None:
        """Finish the waiting jobs, accept no more, and wait at most `timeout_s` for each thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run_jobs(self) -> None:
        while True:
            with self._changed:
                self._free_count += 1
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                self._free_count -= 1
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:
                # The next requests need this thread; the job itself handles errors of its request.
                log.exception("work for the response cache failed")
            # Drop the reference to the last request before waiting for the next.
            del work
