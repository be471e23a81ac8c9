"""Configuration of the operator: flag > environment > TOML file > default, merged once at the start.

May import only the standard library (and tomli below Python 3.11); everyone above core may import from here. The only
folder that reads os.environ, in `sources` alone. `slices` holds the values, `kinds` how text becomes one, `table` the
settings, `triton_flags` those of Triton's flags that only cause a warning, `sources` the places settings are read from,
`load` the merge, `text` the help and the printed configuration.
"""

from edge_server.config.cache import LocalCache, RedisCache, chosen_cache
from edge_server.config.kinds import ConfigError
from edge_server.config.load import ServeArguments, parse_serve
from edge_server.config.slices import (
    CATEGORIES,
    AuthConfig,
    CacheConfig,
    CacheSettings,
    EngineConfig,
    FramesConfig,
    GovernorConfig,
    GrpcConfig,
    HttpConfig,
    LifecycleConfig,
    LogConfig,
    MemoryConfig,
    MetricsConfig,
    RateLimitConfig,
    RepositoryConfig,
    RestrictedGroup,
    ServerConfig,
)
from edge_server.config.sources import process_environment
from edge_server.config.text import describe, help_text
from edge_server.config.trace import TraceConfig

__all__ = [
    "CATEGORIES",
    "AuthConfig",
    "CacheConfig",
    "CacheSettings",
    "ConfigError",
    "EngineConfig",
    "FramesConfig",
    "GovernorConfig",
    "GrpcConfig",
    "HttpConfig",
    "LifecycleConfig",
    "LocalCache",
    "LogConfig",
    "MemoryConfig",
    "MetricsConfig",
    "RateLimitConfig",
    "RedisCache",
    "RepositoryConfig",
    "RestrictedGroup",
    "ServeArguments",
    "ServerConfig",
    "TraceConfig",
    "chosen_cache",
    "describe",
    "help_text",
    "parse_serve",
    "process_environment",
]
