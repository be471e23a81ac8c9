"""Settings of the response cache, and the parser of Triton's `--cache-config`.

Triton uses one flag for each value: `--cache-config=local,size=1048576`, or `--cache-config=redis,host=box
--cache-config=redis,port=6379`. One flag may also hold several values, with commas between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, replace
from typing import Any

from edge_server.config.setting import SHOWN_SECRET, ConfigError, Kind, integer, nearest, parse_boolean, setting
from edge_server.record import record

_FLAG = "--cache-config"

_MILLISECONDS = integer(1, 60_000)
_TEXT = Kind("text", str)


def _value(key: str, kind: Kind, default: Any = MISSING, *, repr: bool = True) -> Any:
    """Return a field of a cache. `key`: its name in --cache-config."""
    return field(default=default, repr=repr, metadata={"key": key, "kind": kind})


@record(frozen=True, slots=True)
class LocalCache:
    """Cache in the server's own memory."""

    size_bytes: int = _value("size", integer(0, 2**50))


@record(frozen=True, slots=True)
class RedisCache:
    """Cache on a Redis server, with the keys of Triton's Redis cache.

    Triton's timeouts are unlimited by default. Here they are short, so that a slow cache does not delay requests. An
    entry expires `ttl_s` seconds after it was stored; 0: never.
    """

    host: str = _value("host", _TEXT)
    port: int = _value("port", integer(1, 65_535))
    user: str = _value("user", _TEXT, "")
    password: str = _value("password", _TEXT, "", repr=False)
    db: int = _value("db", integer(0, 2**31 - 1), 0)
    connect_timeout_ms: int = _value("connect_timeout", _MILLISECONDS, 250)
    socket_timeout_ms: int = _value("socket_timeout", _MILLISECONDS, 100)
    pool_size: int = _value("pool_size", integer(1, 64), 4)
    wait_timeout_ms: int = _value("wait_timeout", _MILLISECONDS, 100)
    ttl_s: int = _value("ttl", integer(0, 2**31 - 1), 86_400)
    uses_tls: bool = _value("tls_enabled", Kind("boolean", parse_boolean), False)
    cert: str = _value("cert", _TEXT, "")
    key: str = _value("key", _TEXT, "")
    cacert: str = _value("cacert", _TEXT, "")


_CACHES = {
    name: {item.metadata["key"]: item for item in fields(config)}
    for name, config in (("local", LocalCache), ("redis", RedisCache))
}

_CREDENTIALS = {"user": "TRITONCACHE_REDIS_USERNAME", "password": "TRITONCACHE_REDIS_PASSWORD"}
"""Triton's environment variables for credentials, which should not be on a command line."""


@record(frozen=True, slots=True)
class CacheSettings:
    """Values of one `--cache-config` for the cache called `cache`. They may contain a password and are not in repr."""

    cache: str
    values: tuple[tuple[str, str], ...] = field(repr=False)


def _parse_cache_settings(text: str) -> CacheSettings:
    """Parse `<cache>,<setting>=<value>` with any number of settings. Values may contain commas and equals signs."""
    name, comma, rest = text.partition(",")
    known = _CACHES.get(name)
    if known is None:
        raise ValueError(f"expected {' or '.join(_CACHES)} before the first comma{nearest(name, _CACHES)}")
    if not comma:
        raise ValueError(f"expected {name},<setting>=<value>")
    # A comma ends a value only if the name of a setting follows: passwords contain commas too.
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


def _show_cache_settings(settings: CacheSettings) -> str:
    pairs = [f"{key}={SHOWN_SECRET if key == 'password' else text}" for key, text in settings.values]
    return ",".join([settings.cache, *pairs])


@record(frozen=True, slots=True)
class CacheConfig:
    """Response cache. `byte_size` is the size of a local cache in an older spelling of Triton."""

    settings: tuple[CacheSettings, ...] = setting(
        (),
        _FLAG,
        Kind("cache,setting=value", _parse_cache_settings, is_secret=True, show=_show_cache_settings),
        "The response cache, for models with response_cache: local,size=BYTES in this process; or "
        "redis,host=NAME,port=NUMBER, and user, password, db, connect_timeout, socket_timeout, wait_timeout (ms), "
        "pool_size, ttl (s), tls_enabled, cert, key, cacert. Repeatable.",
        separator=" ",
    )
    byte_size: int = setting(
        0,
        "--response-cache-byte-size",
        integer(0, 2**50),
        "Bytes of a local response cache, as in older versions of Triton. 0: none.",
    )


def with_credentials(config: CacheConfig, environ: Mapping[str, str]) -> CacheConfig:
    """Return the configuration with the Redis credentials of the environment. Flags have priority."""
    if not any(item.cache == "redis" for item in config.settings):
        return config
    given = tuple((key, environ[name]) for key, name in _CREDENTIALS.items() if environ.get(name))
    return replace(config, settings=(CacheSettings("redis", given), *config.settings)) if given else config


def choose_cache(config: CacheConfig) -> LocalCache | RedisCache | None:
    """Return the configured cache, or None. Raises ConfigError."""
    names = sorted({item.cache for item in config.settings})
    if len(names) > 1 or (names == ["redis"] and config.byte_size):
        raise ConfigError(f"{_FLAG}: expected one cache, given redis and local")
    values: dict[str, Any] = {}
    for item in config.settings:
        for key, text in item.values:
            declared = _CACHES[item.cache][key]
            try:
                values[declared.name] = declared.metadata["kind"].parse(text)
            except ValueError as error:
                raise ConfigError(f"{_FLAG}={item.cache},{key}: {error}") from error
    if names != ["redis"]:
        size_bytes: int = values.get("size_bytes", config.byte_size)
        return LocalCache(size_bytes) if size_bytes else None
    for key in ("host", "port"):
        if key not in values:
            raise ConfigError(f"{_FLAG}=redis needs host and port, there is no {key}")
    return RedisCache(**values)
