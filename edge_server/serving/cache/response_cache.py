"""Class `ResponseCache`, the server's cache of responses: a store, its worker threads, and the hit and miss
counters."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edge_server.config import LocalCache, RedisCache
from edge_server.core.model_statistics import CacheStatistics
from edge_server.core.request_response import Response
from edge_server.serving.cache.cached_response import (
    CachedResponse,
    CorruptEntry,
    ResponseStore,
    StoreUnreachable,
    size_of,
    to_cached_response,
)
from edge_server.serving.cache.local_store import LocalStore
from edge_server.serving.cache.worker_threads import Workers

log = logging.getLogger(__name__)

_WORKER_COUNT = 4
_MAX_WAITING_JOBS = 64
"""Most lookups and answers that wait for a thread. Further requests are computed, further answers not stored."""

_MAX_WAITING_BYTES = 64 << 20
"""Most bytes of answers that wait to be stored in another process."""


class ResponseCache:
    """Thread-safe. Never raises for a failure of the store: an answer that cannot be read is a miss, and is counted.

    `losses` are counted by reason: "too_big" for the store, "busy" (too much waits for the store), "unreachable",
    "corrupt".
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._workers = Workers(_WORKER_COUNT, _MAX_WAITING_JOBS)
        self._lock = threading.Lock()
        self._counts = CacheStatistics(store.capacity_bytes)
        self._waiting_bytes = 0
        self._knows_corrupt = False

    @property
    def is_remote(self) -> bool:
        return self._store.is_remote

    @property
    def limit_s(self) -> float:
        return self._store.limit_s

    def is_available(self) -> bool:
        """Return whether the store is expected to answer. Returns at once."""
        if self._store.is_available():
            return True
        self.count_loss("unreachable")
        return False

    def get(self, key: bytes) -> CachedResponse | None:
        """Return the response stored under the key; None if there is none, or it cannot be read."""
        started_ns = time.monotonic_ns()
        answer = None
        try:
            answer = self._store.get(key)
        except StoreUnreachable:
            self.count_loss("unreachable")
        except CorruptEntry as error:
            self.count_corrupt(key, str(error))
        with self._lock:
            self._counts.lookup.add(time.monotonic_ns() - started_ns)
            if answer is None:
                self._counts.miss_count += 1
            else:
                self._counts.hit_count += 1
        return answer

    def store(self, key: bytes, response: Response) -> None:
        """Store a copy of the response: at once, or soon on another thread if that may wait."""
        size_bytes = size_of(response)
        if size_bytes > self._store.entry_limit_bytes:
            self.count_loss("too_big")
        elif not self.is_remote:
            self._put(key, to_cached_response(response))
        else:
            self._put_later(key, response, size_bytes)

    def post(self, work: Callable[[], None]) -> bool:
        """Run the work on a thread that may wait. Return False if too much waits already."""
        if self._workers.post(work):
            return True
        self.count_loss("busy")
        return False

    def count_loss(self, reason: str) -> None:
        """Count a lookup or an answer that the cache could not serve."""
        with self._lock:
            self._counts.losses[reason] += 1

    def count_corrupt(self, key: bytes, reason: str) -> None:
        """Count a corrupt entry. Only the first one is logged."""
        self.count_loss("corrupt")
        if not self._knows_corrupt:
            self._knows_corrupt = True
            log.warning(
                "the response cache holds an entry that is not what was stored, %s: %s; it is computed anew, "
                "and more of the kind are only counted",
                key.hex(), reason,
            )  # fmt: skip

    def statistics(self) -> CacheStatistics:
        """Return a consistent copy of the counts."""
        with self._lock:
            counts = self._counts.copy()
        counts.entry_count, counts.size_bytes, counts.eviction_count = self._store.contents()
        return counts

    def close(self) -> None:
        """Store the waiting answers, as far as that is quick, and close the store."""
        self._workers.close(self._store.limit_s + 1.0)
        self._store.close()

    def _put(self, key: bytes, answer: CachedResponse) -> None:
        started_ns = time.monotonic_ns()
        try:
            self._store.put(key, answer)
        except StoreUnreachable:
            self.count_loss("unreachable")
            return
        with self._lock:
            self._counts.insertion.add(time.monotonic_ns() - started_ns)

    def _put_later(self, key: bytes, response: Response, size_bytes: int) -> None:
        with self._lock:
            fits = self._waiting_bytes + size_bytes <= _MAX_WAITING_BYTES
            if fits:
                self._waiting_bytes += size_bytes
        if not fits:
            self.count_loss("busy")
            return
        answer = to_cached_response(response)

        def work() -> None:
            try:
                self._put(key, answer)
            finally:
                self._subtract_waiting(size_bytes)

        if not self.post(work):
            self._subtract_waiting(size_bytes)

    def _subtract_waiting(self, size_bytes: int) -> None:
        with self._lock:
            self._waiting_bytes -= size_bytes


def make_cache(chosen: LocalCache | RedisCache) -> ResponseCache:
    """Return the server's cache. Raises ServingFault if the library of Redis is missing."""
    if isinstance(chosen, LocalCache):
        return ResponseCache(LocalStore(chosen.size_bytes))
    # Imported only for Redis.
    from edge_server.serving.cache.redis_store import RedisStore

    return ResponseCache(RedisStore(chosen))
