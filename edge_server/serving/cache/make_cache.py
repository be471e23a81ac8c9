"""Creation of the response cache that `--cache-config` asks for, with its store."""

from __future__ import annotations

from edge_server.config import CacheConfig, LocalCache, choose_cache
from edge_server.serving.cache.local_store import LocalStore
from edge_server.serving.cache.response_cache import ResponseCache


def make_cache(config: CacheConfig) -> ResponseCache | None:
    """Return the server's cache; None if the options ask for none. Raises ServingFault if its library is missing."""
    chosen = choose_cache(config)
    if chosen is None:
        return None
    if isinstance(chosen, LocalCache):
        return ResponseCache(LocalStore(chosen.size_bytes))
    # Imported only for Redis.
    from edge_server.serving.cache.redis_store import RedisStore

    return ResponseCache(RedisStore(chosen))
