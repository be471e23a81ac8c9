"""Store of cached responses in a Redis server, shared between machines and kept over restarts.

Redis may be slow or unreachable. Each call has a time limit, and after a failed call the store counts as unreachable
for a while, so that requests do not wait for it one after the other. Entries expire by themselves: their keys include
the digest of the model's files, so entries of a replaced model are never asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from edge_server.config import RedisCache
from edge_server.errors import ServingFault, install_hint
from edge_server.serving.cache.cached_response import CachedResponse, CorruptEntry, StoreUnreachable
from edge_server.serving.cache.serialization import pack, unpack

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    raise ServingFault(
        f"--cache-config=redis needs a library that is not there ({error}); {install_hint('redis')}"
    ) from error

log = logging.getLogger(__name__)

_PREFIX = b"edge_server:answer:"
_ENTRY_LIMIT_BYTES = 64 << 20
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
"""How long Redis is not called after a failed call; the time doubles with each further one."""

Result = TypeVar("Result")


class RedisStore:
    """See ResponseStore. Connects at the first call, so a server starts without a running Redis."""

    is_remote = True
    entry_limit_bytes = _ENTRY_LIMIT_BYTES
    capacity_bytes = 0

    def __init__(self, config: RedisCache) -> None:
        self.limit_s = (config.wait_timeout_ms + config.connect_timeout_ms + config.socket_timeout_ms) / 1000
        self._where = f"{config.host}:{config.port}"
        self._ttl_s = config.ttl_s
        self._client = redis.Redis(connection_pool=_pool(config))
        self._lock = threading.Lock()
        self._failure_count = 0
        self._ask_again_at_s = 0.0

    def is_available(self) -> bool:
        return time.monotonic() >= self._ask_again_at_s

    def get(self, key: bytes) -> CachedResponse | None:
        # At most the largest allowed entry, whatever was written there; empty if there is none.
        data = self._ask(lambda: self._client.getrange(_PREFIX + key, 0, _ENTRY_LIMIT_BYTES))
        if len(data) > _ENTRY_LIMIT_BYTES:
            raise CorruptEntry(f"it is larger than {_ENTRY_LIMIT_BYTES} bytes")
        return unpack(data) if data else None

    def put(self, key: bytes, answer: CachedResponse) -> None:
        data = pack(answer)
        if len(data) > _ENTRY_LIMIT_BYTES:
            return
        self._ask(lambda: self._client.set(_PREFIX + key, data, ex=self._ttl_s or None))

    def contents(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def close(self) -> None:
        self._client.connection_pool.disconnect()

    def _ask(self, call: Callable[[], Result]) -> Result:
        """Return the result of the call. While Redis is unreachable, only one call at a time tests it again."""
        with self._lock:
            now = time.monotonic()
            if now < self._ask_again_at_s:
                raise StoreUnreachable
            if self._failure_count:
                self._ask_again_at_s = now + self.limit_s
        try:
            result = call()
        except (redis.RedisError, OSError) as error:
            with self._lock:
                self._failure_count += 1
                pause_s = min(_FIRST_PAUSE_S * 2 ** (min(self._failure_count, 16) - 1), _MAX_PAUSE_S)
                self._ask_again_at_s = time.monotonic() + pause_s
                is_first = self._failure_count == 1
            if is_first:
                log.warning(
                    "the response cache in Redis at %s cannot be used, requests are computed: %s: %s",
                    self._where, type(error).__name__, error,
                )  # fmt: skip
            raise StoreUnreachable from error
        if self._failure_count:
            with self._lock:
                was_away = self._failure_count > 0
                self._failure_count, self._ask_again_at_s = 0, 0.0
            if was_away:
                log.info("the response cache in Redis at %s can be used again", self._where)
        return result


def _pool(config: RedisCache) -> redis.BlockingConnectionPool:
    tls = {}
    if config.uses_tls:
        tls = {
            "connection_class": redis.SSLConnection,
            "ssl_certfile": config.cert or None,
            "ssl_keyfile": config.key or None,
            "ssl_ca_certs": config.cacert or None,
        }
    return redis.BlockingConnectionPool(
        host=config.host,
        port=config.port,
        db=config.db,
        username=config.user or None,
        password=config.password or None,
        max_connections=config.pool_size,
        timeout=config.wait_timeout_ms / 1000,
        socket_connect_timeout=config.connect_timeout_ms / 1000,
        socket_timeout=config.socket_timeout_ms / 1000,
        retry=Retry(NoBackoff(), 0),  # the pauses above decide when to retry
        **tls,
    )
