"""Settings of the server: their declarations, and their values, read once at the start (flag > environment > TOML file
> default).

Imports only the standard library (and tomli below Python 3.11). No other folder reads os.environ. To add a setting, add
a field in `server_config`.
"""

from edge_server.config.cache_config import CacheConfig, CacheSettings, LocalCache, RedisCache, choose_cache
from edge_server.config.merge_settings import ServeArguments, parse_serve
from edge_server.config.print_config import describe
from edge_server.config.serve_help import help_text
from edge_server.config.server_config import (
    CATEGORIES,
    LOG_FORMATS,
    OPEN_CATEGORIES,
    AuthConfig,
    GrpcConfig,
    HttpConfig,
    LifecycleConfig,
    LogConfig,
    LogFormat,
    MemoryConfig,
    MetricsConfig,
    RateLimitConfig,
    RepositoryConfig,
    RestrictedGroup,
    ServerConfig,
)
from edge_server.config.setting import ConfigError, nearest
from edge_server.config.setting_sources import process_environment, set_library_defaults
from edge_server.config.trace_config import TraceConfig

__all__ = [
    "CATEGORIES",
    "LOG_FORMATS",
    "OPEN_CATEGORIES",
    "AuthConfig",
    "CacheConfig",
    "CacheSettings",
    "ConfigError",
    "GrpcConfig",
    "HttpConfig",
    "LifecycleConfig",
    "LocalCache",
    "LogConfig",
    "LogFormat",
    "MemoryConfig",
    "MetricsConfig",
    "RateLimitConfig",
    "RedisCache",
    "RepositoryConfig",
    "RestrictedGroup",
    "ServeArguments",
    "ServerConfig",
    "TraceConfig",
    "choose_cache",
    "describe",
    "help_text",
    "nearest",
    "parse_serve",
    "process_environment",
    "set_library_defaults",
]
