"""The configuration as frozen dataclasses, one slice per subsystem. A subsystem is given its slice and nothing else.

Default values stand here and nowhere else; `table` says how each field is spelled as flag, variable and TOML key, and
in which range it must lie. Every listener is on 127.0.0.1 by default, where Triton listens on all interfaces: a box on
a robot's network should be opened on purpose.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from edge_server.config.trace import TraceConfig

LOOPBACK = "127.0.0.1"
MAX_INPUT_SIZE_BYTES = 64 * 1024 * 1024

ControlMode = Literal["none", "poll", "explicit"]
RateLimitMode = Literal["off", "execution_count"]
ReloadPolicyName = Literal["overlap", "replace"]
LogFormat = Literal["default", "ISO8601", "text", "json"]
CompressionLevel = Literal["none", "low", "medium", "high"]
GrpcTransport = Literal["http2", "grpcio"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)


@dataclass(frozen=True, slots=True)
class RestrictedGroup:
    """Endpoint categories that answer only requests whose header (gRPC: metadata) `key` equals `value`.

    For gRPC the metadata name is "triton-grpc-protocol-" + `key`. `categories` are of CATEGORIES, each in one group at
    most. `value` is a secret: kept out of repr, logs and --print-config.
    """

    categories: tuple[str, ...]
    key: str
    value: str = field(repr=False)


CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
"""Triton's names of the groups of endpoints that can be restricted, for HTTP and gRPC alike."""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP/REST listener. Port 0 lets the system choose. TLS is on when both `tls_cert` and `tls_key` name files,
    and asks clients for a certificate signed by `client_ca` when that does too.

    `header_pattern`: request headers whose whole name it matches become request parameters; None forwards nothing.
    `max_input_size_bytes` bounds the JSON part, each JSON tensor, a raw body and an inflated body. `max_connections` 0:
    half of the files that the process may have open. `max_body_bytes_in_flight` bounds all bodies, and gRPC messages,
    together that are being received, and so a single one too; 0: a quarter of the memory that is available at the
    start, at least 256 MiB, and room for one input or message of the largest size if the machine has that.
    `allowed_hosts`: names under which web pages of this server may give orders, besides addresses and this machine's
    own names.
    """

    is_enabled: bool = True
    address: str = LOOPBACK
    port: int = 8000
    reuses_port: bool = False
    max_input_size_bytes: int = MAX_INPUT_SIZE_BYTES
    max_connections: int = 0
    max_body_bytes_in_flight: int = 0
    header_pattern: re.Pattern[str] | None = None
    restricted: tuple[RestrictedGroup, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    client_ca: str = ""


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The gRPC listener. Port 0 lets the system choose.

    `is_mutual_tls` implies `is_tls` and asks clients for a certificate signed by `root_cert`. The keepalive numbers are
    gRPC's channel arguments of the same name, in milliseconds; 0 for the two connection ages means unlimited.
    `transport`: this server's own HTTP/2, or grpcio's server.
    """

    is_enabled: bool = True
    address: str = LOOPBACK
    port: int = 8001
    reuses_port: bool = False
    transport: GrpcTransport = "http2"
    compression_level: CompressionLevel = "none"
    header_pattern: re.Pattern[str] | None = None
    restricted: tuple[RestrictedGroup, ...] = ()
    is_tls: bool = False
    is_mutual_tls: bool = False
    server_cert: str = ""
    server_key: str = ""
    root_cert: str = ""
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """Who may ask what, over all wires. `tokens_file` "": bearer tokens mean nothing."""

    tokens_file: str = ""


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The Prometheus endpoint. `address` "" means: the HTTP listener's address (`parse_serve` fills it in)."""

    is_enabled: bool = True
    has_cpu_metrics: bool = True
    has_gpu_metrics: bool = True
    address: str = ""
    port: int = 8002
    interval_ms: int = 2_000


def _default_load_thread_count() -> int:
    return min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class RepositoryConfig:
    """Where models come from and when.

    `load_models` are loaded at the start in explicit mode ("*" alone: all). `model_config_name` N makes a model's
    `configs/N.pbtxt`, where there is one, stand in for its config.pbtxt. `reload_policy`, overlap or replace,
    is that of models which state none. `max_resident_models` 0: as many as there are; `idle_unload_s` 0: never.
    `load_on_demand_timeout_s`: how long a request waits for a model that left memory. `state_dir` "" keeps pins in
    memory only.
    `poll_s` bounds how late a change is seen that nothing told of. `allows_external_links`: a model may be a link to
    outside of the repositories, or hold one. `allows_code_upload`: load requests of other machines may carry code.
    `requires_checksums`: nothing is served that a SHA256SUMS does not list; `public_key` names the file of the key
    that must have signed it, "" asks for no signature. `cache_dir` is where copies of remote repositories are kept;
    `first_sync_s` bounds how long the start waits for the first copy.
    """

    paths: tuple[str, ...] = ()
    control_mode: ControlMode = "poll"
    poll_s: float = 15.0
    load_models: tuple[str, ...] = ()
    model_config_name: str = ""
    is_auto_complete_disabled: bool = False
    load_thread_count: int = field(default_factory=_default_load_thread_count)
    load_retry_count: int = 0
    reload_policy: ReloadPolicyName = "overlap"
    max_resident_models: int = 0
    idle_unload_s: float = 0.0
    load_on_demand_timeout_s: float = 60.0
    state_dir: str = ""
    requires_checksums: bool = False
    public_key: str = ""
    cache_dir: str = ""
    first_sync_s: float = 60.0
    allows_external_links: bool = False
    allows_code_upload: bool = False


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """`allows_client_shm`: clients may name shared-memory regions of this machine for the server to map.

    `gpu_load_limits`: numbers of GPUs, each with the part of its memory beyond whose use nothing is loaded onto it.

    A load waits while it would leave less than `floor_mb` MiB of memory, or while tasks waited for memory more than
    `pressure_limit_percent` of the last ten seconds. 0, both off, is the default: a machine with compressed swap serves
    well beyond what the kernel calls available, and a guess must not keep a model from loading that would fit.
    """

    allows_client_shm: bool = False
    gpu_load_limits: tuple[tuple[int, float], ...] = ()
    floor_mb: int = 0
    pressure_limit_percent: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What one `--cache-config` says of the cache called `cache`. Kept out of repr: a password may be among it."""

    cache: str
    values: tuple[tuple[str, str], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The response cache, see `cache`. `byte_size` is the size of a local cache in Triton's old way; 0: none."""

    settings: tuple[CacheSettings, ...] = ()
    byte_size: int = 0


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`verbose_level` above 0 shows debug lines of the server, above 1 those of its libraries too.

    `format`: Triton's "default" and "ISO8601", or "text" and "json". `file` "" is standard error.
    `journal_stream` is JOURNAL_STREAM as systemd set it ("device:inode"): standard error may be the journal's.
    """

    verbose_level: int = 0
    shows_info: bool = True
    shows_warning: bool = True
    shows_error: bool = True
    format: LogFormat = "default"
    file: str = ""
    journal_stream: str = ""


@dataclass(frozen=True, slots=True)
class LifecycleConfig:
    """Start, readiness and stop of the whole server.

    `is_readiness_strict`: ready only when every known model serves; None: those that never served do not count in mode
    poll. `exits_on_error` is off where Triton's is on: on
    a box in the field one broken model should not take the others down. `exits_on_gpu_loss`: end the process when a
    model has lost its GPU and nothing else can serve it. `drain_delay_s`: how long everything is
    still answered after the order to stop, while the server says that it is not ready. `exit_timeout_s` bounds the
    drain after that.
    A run that takes longer than `hang_timeout_s` fails its version, and the server is not ready then; 0: any time.
    One that takes longer than `watchdog_run_limit_s` keeps a service manager's watchdog from being fed; 0: any time.
    """

    server_id: str = "triton"
    is_readiness_strict: bool | None = None
    exits_on_error: bool = False
    exits_on_gpu_loss: bool = False
    drain_delay_s: float = 0.0
    exit_timeout_s: float = 30.0
    hang_timeout_s: float = 0.0
    watchdog_run_limit_s: float = 300.0


@dataclass(frozen=True, slots=True)
class FramesConfig:
    """The frame streams, which come over the gRPC listener.

    `max_streams` are open at once; a frame of more than `max_frame_bytes`, as sent or in shared memory, is refused.
    """

    max_streams: int = 256
    max_frame_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RateLimitConfig:
    """Triton's rate limiter. `resources` are name, count and device (None: each device, and global resources)."""

    mode: RateLimitMode = "off"
    resources: tuple[tuple[str, int, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class GovernorConfig:
    """How the server stays inside the box's heat and power.

    `power_budget_watts` 0: the limit that the box itself enforces, if it tells one. `temperature_limit_c` 0: a few
    degrees below the trip point read from the box. `control_floor_percent` of full work is kept for control requests
    whatever the state. `load_wait_s` bounds how long a load waits for a hot box to cool. `sysfs_root` is where sensors
    are looked for: "/" but for tests and recorded boxes. `grants_clock_cap`: the governor may lower the clocks' upper
    limit, where the system lets it.
    """

    is_enabled: bool = True
    power_budget_watts: float = 0.0
    temperature_limit_c: float = 0.0
    control_floor_percent: float = 20.0
    interval_ms: int = 500
    load_wait_s: float = 60.0
    sysfs_root: str = "/"
    grants_clock_cap: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """TensorRT engines built on this box. `cache_dir` is filled in by `parse_serve`.

    A build is ended after `build_timeout_s`, and when its process takes more than `build_memory_mb` MiB; 0: any.
    Engines that were not used for longest are deleted beyond `cache_limit_mb` MiB; 0: none is.
    """

    is_enabled: bool = True
    cache_dir: str = ""
    build_timeout_s: float = 3600.0
    build_memory_mb: int = 0
    cache_limit_mb: int = 8192


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything the server was told. `backends[name][key]` are backend settings; name "" holds those for all."""

    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()
    auth: AuthConfig = AuthConfig()
    frames: FramesConfig = FramesConfig()
    metrics: MetricsConfig = MetricsConfig()
    repository: RepositoryConfig = field(default_factory=RepositoryConfig)
    memory: MemoryConfig = MemoryConfig()
    cache: CacheConfig = CacheConfig()
    engines: EngineConfig = EngineConfig()
    rate_limit: RateLimitConfig = RateLimitConfig()
    governor: GovernorConfig = GovernorConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = field(default_factory=TraceConfig)
    lifecycle: LifecycleConfig = LifecycleConfig()
    backends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
