"""Worker threads of the cache: they wait for external stores and hash large inputs."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Workers:
    """At most `waiting_limit` pieces of work wait for one of the threads. The threads begin with the first work."""

    def __init__(self, count: int, waiting_limit: int) -> None:
        self._count = count
        self._waiting_limit = waiting_limit
        self._changed = threading.Condition()
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._free_count = 0
        self._is_closed = False

    def post(self, work: Callable[[], None]) -> bool:
        """Have the work done soon, and return at once. False, and it is not done, when too much waits already."""
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._waiting_limit:
                return False
            self._waiting.append(work)
            if len(self._waiting) > self._free_count and len(self._threads) < self._count:
                self._start_thread()
            if not self._threads:
                self._waiting.pop()
                return False
            self._changed.notify()
        return True

    def close(self, timeout_s: float) -> None:
        """Finish what waits, take nothing new, and wait for the threads; for at most `timeout_s` each."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._live, name="edge-cache", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system grants no further thread: those that live do the work, if there are any
            return
        self._threads.append(thread)

    def _live(self) -> None:
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
                # The next requests need this thread; the work itself answers for what it was done for.
                log.exception("work for the response cache failed")
            # Not to hold the last request while waiting for the next.
            del work
