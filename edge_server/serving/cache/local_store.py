"""Store of cached responses in this process's memory; the least recently used are removed first."""

from __future__ import annotations

import threading
from collections import OrderedDict

from edge_server.serving.cache.cached_response import CachedResponse


class LocalStore:
    """Holds at most `capacity_bytes` by the sizes of the answers. See ResponseStore."""

    is_remote = False
    limit_s = 0.0

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.entry_limit_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, CachedResponse] = OrderedDict()
        self._size_bytes = 0
        self._eviction_count = 0

    def is_available(self) -> bool:
        return True

    def get(self, key: bytes) -> CachedResponse | None:
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
            return answer

    def put(self, key: bytes, answer: CachedResponse) -> None:
        if answer.size_bytes > self.capacity_bytes:
            raise ValueError(f"an answer of {answer.size_bytes} bytes in a cache of {self.capacity_bytes}")
        # Freed after the lock is released: returning a big array to the system takes time.
        gone: list[CachedResponse] = []
        with self._lock:
            before = self._answers.pop(key, None)
            if before is not None:
                self._size_bytes -= before.size_bytes
                gone.append(before)
            while self._size_bytes + answer.size_bytes > self.capacity_bytes:
                _, oldest = self._answers.popitem(last=False)
                self._size_bytes -= oldest.size_bytes
                self._eviction_count += 1
                gone.append(oldest)
            self._answers[key] = answer
            self._size_bytes += answer.size_bytes

    def contents(self) -> tuple[int, int, int]:
        with self._lock:
            return len(self._answers), self._size_bytes, self._eviction_count

    def close(self) -> None:
        with self._lock:
            self._answers.clear()
            self._size_bytes = 0
