"""The response cache's settings: how `--cache-config` is read, and what the settings of one cache come to.

Triton gives one setting a flag: `--cache-config=local,size=1048576`, `--cache-config=redis,host=box
--cache-config=redis,port=6379`. Several in one flag are read too, with commas between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edge_server.config.kinds import ConfigError, Kind, integer, nearest, parse_boolean
from edge_server.config.slices import CacheConfig, CacheSettings

_FLAG = "--cache-config"

_MILLISECONDS = integer(1, 60_000)


@dataclass(frozen=True, slots=True)
class LocalCache:
    """A cache in the server's own memory, of at most `size_bytes`."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class RedisCache:
    """A Redis server. The names are those of Triton's Redis cache, with "_ms" where they are milliseconds.

    There 0, for ever, is what the time limits are by default; here a request never waits long for a cache. An entry
    is forgotten `ttl_s` seconds after it was stored; 0: never.
    """

    host: str
    port: int
    user: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    connect_timeout_ms: int = 250
    socket_timeout_ms: int = 100
    pool_size: int = 4
    wait_timeout_ms: int = 100
    ttl_s: int = 86_400
    uses_tls: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""


_LOCAL: Mapping[str, tuple[str, Kind]] = {"size": ("size_bytes", integer(0, 2**50))}
_TEXT = Kind("text", str)
_REDIS: Mapping[str, tuple[str, Kind]] = {
    "host": ("host", _TEXT),
    "port": ("port", integer(1, 65_535)),
    "user": ("user", _TEXT),
    "password": ("password", Kind("text", str, is_secret=True)),
    "db": ("db", integer(0, 2**31 - 1)),
    "connect_timeout": ("connect_timeout_ms", _MILLISECONDS),
    "socket_timeout": ("socket_timeout_ms", _MILLISECONDS),
    "pool_size": ("pool_size", integer(1, 64)),
    "wait_timeout": ("wait_timeout_ms", _MILLISECONDS),
    "ttl": ("ttl_s", integer(0, 2**31 - 1)),
    "tls_enabled": ("uses_tls", Kind("boolean", parse_boolean)),
    "cert": ("cert", _TEXT),
    "key": ("key", _TEXT),
    "cacert": ("cacert", _TEXT),
}
_CACHES = {"local": _LOCAL, "redis": _REDIS}

_CREDENTIALS = {"user": "TRITONCACHE_REDIS_USERNAME", "password": "TRITONCACHE_REDIS_PASSWORD"}
"""Triton's variables for what should not stand on a command line."""


def parse_cache_settings(text: str) -> CacheSettings:
    """Read `<cache>,<setting>=<value>` with any number of settings; values may hold commas and equals signs."""
    name, comma, rest = text.partition(",")
    known = _CACHES.get(name)
    if known is None:
        raise ValueError(f"expected {' or '.join(_CACHES)} before the first comma{nearest(name, _CACHES)}")
    if not comma:
        raise ValueError(f"expected {name},<setting>=<value>")
    # A comma ends a value only where the name of a setting follows: passwords have commas too.
    parts = re.split(rf",(?=(?:{'|'.join(known)})=)", rest)
    values = []
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise ValueError(f"expected {name},<setting>=<value>")
        if key not in known:
            raise ValueError(f"'{name}' has no setting '{key[:80]}'{nearest(key, known)} (of {', '.join(known)})")
        values.append((key, value))
    return CacheSettings(name, tuple(values))


CACHE_SETTINGS = Kind("cache,setting=value", parse_cache_settings, is_secret=True)


def with_credentials(config: CacheConfig, environ: Mapping[str, str]) -> CacheConfig:
    """Return the settings with what the environment says of Redis; a flag goes before it."""
    if not any(item.cache == "redis" for item in config.settings):
        return config
    given = tuple((key, environ[name]) for key, name in _CREDENTIALS.items() if environ.get(name))
    return replace(config, settings=(CacheSettings("redis", given), *config.settings)) if given else config


def chosen_cache(config: CacheConfig) -> LocalCache | RedisCache | None:
    """Return the one cache that is asked for, None when none is. Raises ConfigError."""
    names = sorted({item.cache for item in config.settings})
    if len(names) > 1 or (names == ["redis"] and config.byte_size):
        raise ConfigError(f"{_FLAG}: expected one cache, given redis and local")
    values: dict[str, Any] = {}
    for item in config.settings:
        known = _CACHES[item.cache]
        for key, text in item.values:
            name, kind = known[key]
            try:
                values[name] = kind.parse(text)
            except ValueError as error:
                raise ConfigError(f"{_FLAG}={item.cache},{key}: {error}") from error
    if names == ["redis"]:
        return _redis(values)
    size_bytes: int = values.get("size_bytes", config.byte_size)
    return LocalCache(size_bytes) if size_bytes else None


def _redis(values: Mapping[str, Any]) -> RedisCache:
    for key in ("host", "port"):
        if key not in values:
            raise ConfigError(f"{_FLAG}=redis needs host and port, there is no {key}")
    return RedisCache(**values)
