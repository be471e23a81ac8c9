"""Declarations of the core's settings: one frozen dataclass for each subsystem, one field for each setting.

A field is the only declaration of its setting. Its environment variable, TOML key and lines in --help,
--print-config and the reference follow from it. Each subsystem gets only its own dataclass.

All listeners use 127.0.0.1 by default, where Triton listens on all interfaces: the operator must decide to open a robot
to its network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

from edge_server.config.cache_config import CacheConfig
from edge_server.config.latency_metrics import LatencyMetric, parse_latency_metric
from edge_server.config.setting import (
    BOOLEAN,
    COUNT,
    OPTIONAL_PATH,
    OPTIONAL_TEXT,
    PATH,
    PORT,
    SHOWN_SECRET,
    TEXT,
    Kind,
    Setting,
    SettingTable,
    choice,
    declared_setting,
    integer,
    nearest,
    number,
    parse_boolean,
    setting,
)
from edge_server.config.trace_config import TraceConfig
from edge_server.record import record

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

ControlMode = Literal["poll", "none", "explicit"]
RateLimitMode = Literal["off", "execution_count"]
ReloadPolicyName = Literal["overlap", "replace"]
LogFormat = Literal["default", "ISO8601", "text", "json"]
CompressionLevel = Literal["none", "low", "medium", "high"]
GrpcTransport = Literal["http2", "grpcio"]
GrpcListen = Literal["when-loaded", "at-start"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)

OPEN_CATEGORIES = ("metrics", "reflection", "openapi")
"""Groups that need a token only if a line of the tokens file names them: the metrics page, gRPC reflection, and
/openapi.json. Prometheus and tools for gRPC have none by default."""

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
    "view",
    *OPEN_CATEGORIES,
)
"""Groups of HTTP and gRPC endpoints that can be restricted. The names are Triton's, except `view`: camera pictures,
which only HTTP shows, and OPEN_CATEGORIES."""


@record(frozen=True, slots=True)
class RestrictedGroup:
    """Endpoint categories that answer only requests whose header `key` has this `value`.

    In gRPC the metadata name is "triton-grpc-protocol-" + `key`. Each category of CATEGORIES is in one group at most.
    `value` is a secret: it is not in repr, logs or --print-config.
    """

    categories: tuple[str, ...]
    key: str
    value: str = field(repr=False)


def _parse_restricted(text: str) -> RestrictedGroup:
    if not text.isprintable():
        # Includes bytes of the environment that are not UTF-8: no header could equal them, so every request would fail.
        raise ValueError("expected printable characters")
    names, colon, pair = text.partition(":")
    key, equals, value = pair.partition("=")
    categories = tuple(name.strip() for name in names.split(","))
    if not (colon and equals and key and value and all(categories)):
        raise ValueError("expected <category>,...:<key>=<value>")
    for name in categories:
        if name not in CATEGORIES:
            raise ValueError(f"unknown category '{name}'{nearest(name, CATEGORIES)} (of {', '.join(CATEGORIES)})")
    return RestrictedGroup(categories, key, value)


def _show_restricted(group: RestrictedGroup) -> str:
    return f"{','.join(group.categories)}:{group.key}={SHOWN_SECRET}"


def _parse_header_pattern(text: str) -> re.Pattern[str] | None:
    # RE2, Triton's engine, takes a leading (?-i) for "case matters". Python's does not.
    if not text:
        return None
    flags = re.IGNORECASE
    if text.startswith("(?-i)"):
        text, flags = text.removeprefix("(?-i)"), re.RegexFlag(0)
    try:
        return re.compile(text, flags)
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from error


def _show_header_pattern(pattern: re.Pattern[str]) -> str:
    return pattern.pattern if pattern.flags & re.IGNORECASE else f"(?-i){pattern.pattern}"


DEFAULT_BATCH_SIZE = "default-max-batch-size"
"""Key of the backends' settings: Triton's, max_batch_size of models whose configuration and file leave it open."""

_MAX_BATCH_SIZE = 2**31 - 1
"""Greatest max_batch_size: an int32 in Triton's ModelConfig."""


def _parse_backend_setting(text: str) -> tuple[str, str, str]:
    """Parse `backend,key=value`, or `key=value` for all backends. Values may contain commas and equals signs."""
    left, equals, value = text.partition("=")
    backend, comma, key = left.partition(",")
    if not comma:
        backend, key = "", left
    if not equals or not key or not value or (comma and not backend):
        raise ValueError("expected <backend>,<key>=<value>")
    if key.strip() == DEFAULT_BATCH_SIZE:
        try:
            integer(0, _MAX_BATCH_SIZE).parse(value)
        except ValueError as error:
            raise ValueError(f"{DEFAULT_BATCH_SIZE}: {error}") from None
    return backend.strip(), key.strip(), value


def _parse_rate_resource(text: str) -> tuple[str, int, int | None]:
    name, _, rest = text.partition(":")
    count, colon, device = rest.partition(":")
    numbers = [count, device] if colon else [count]
    if not name or not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers):
        raise ValueError("expected <name>:<count>[:<device>]")
    return name, int(count), int(device) if colon else None


def _parse_gpu_limit(text: str) -> tuple[int, float]:
    device, colon, fraction = text.partition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,3}", device) or not re.fullmatch(r"[01](\.[0-9]{0,9})?", fraction):
        raise ValueError("expected <device>:<fraction>, the fraction from 0 to 1")
    if float(fraction) > 1:
        raise ValueError(f"the fraction of GPU {device} must be from 0 to 1, got {fraction}")
    return int(device), float(fraction)


def _parse_verbosity(text: str) -> int:
    if text.lower() in ("true", "false"):
        return int(text.lower() == "true")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("expected an integer of 0 or more, true or false")
    return int(text)


def _parse_optional_boolean(text: str) -> bool | None:
    return parse_boolean(text) if text else None


def _default_load_thread_count() -> int:
    return min(4, os.cpu_count() or 1)


_SITE = r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
_APP = r"(?!https?:)[a-z][a-z0-9+.-]*://(\*|[A-Za-z0-9._-]+(:[0-9]{1,5})?)"
"""Origin of an extension or an app. Browsers change only the names of http and https to lower case."""


def _parse_origin(text: str) -> str:
    if text != "*" and not re.fullmatch(f"{_SITE}|{_APP}", text):
        raise ValueError(
            "expected * or an origin as browsers send it, in lower case: https://dashboard.example:3000, "
            "chrome-extension://<id>, app://<name> or, for all of such a scheme, vscode-webview://*"
        )
    return text


_ORIGIN = Kind("origin", _parse_origin)
_RESTRICTED = Kind("category,...:key=value", _parse_restricted, is_secret=True, show=_show_restricted)
_HEADER_PATTERN = Kind("regex", _parse_header_pattern, show=_show_header_pattern)


@record(frozen=True, slots=True)
class RepositoryConfig:
    """Model repositories, and when their models are loaded.

    `measurements_dir`: folder of what was measured of model files on this machine, "" for none.
    """

    paths: tuple[str, ...] = setting(
        (),
        "--model-repository",
        PATH,
        "Folder of models, or its address: s3://bucket/prefix, s3://[https://]host:port/bucket/prefix, "
        "gs://bucket/prefix, as://account/container/prefix, file:///folder, oci://host/repository:tag. Repeatable.",
        separator=":",
        aliases=("--model-store",),
    )
    is_demo: bool = setting(
        False,
        "--demo",
        BOOLEAN,
        "Serve the bundled models too: an image classifier and a face detector. Prints a first request.",
    )
    control_mode: ControlMode = setting(
        "poll",
        "--model-control-mode",
        choice(*get_args(ControlMode)),
        "poll: follow changes of the repository as they happen. none: load all models at the start. explicit: load on "
        "request.",
    )
    poll_s: float = setting(
        15.0,
        "--repository-poll-secs",
        number(0.05, 86_400),
        "In poll mode, seconds between two scans of the whole repository. Changes that the system reports, such as by "
        "inotify, are followed at once.",
    )
    allows_external_links: bool = setting(
        False,
        "--allow-external-links",
        BOOLEAN,
        "Serve models that are or contain symbolic links to files outside the repositories.",
    )
    allows_code_upload: bool = setting(
        False,
        "--allow-code-upload",
        BOOLEAN,
        "Accept code in load requests from other machines: files and configurations of models other than ONNX, "
        "OpenVINO, TensorFlow Lite, GGUF, XGBoost and LightGBM, and parameters that name paths. Requests from this "
        "machine may always carry code.",
    )
    load_models: tuple[str, ...] = setting(
        (),
        "--load-model",
        TEXT,
        "Model to load at the start in explicit mode; '*' alone loads all. Repeatable.",
        separator=",",
    )
    model_config_name: str = setting(
        "",
        "--model-config-name",
        OPTIONAL_TEXT,
        "Use a model's configs/<name>.pbtxt, if it has one, instead of its config.pbtxt.",
    )
    is_auto_complete_disabled: bool = setting(
        False,
        "--disable-auto-complete-config",
        BOOLEAN,
        "Do not complete a model's configuration from its model file.",
        aliases=("--strict-model-config",),
    )
    load_thread_count: int = setting(
        _default_load_thread_count,
        "--model-load-thread-count",
        integer(1, 256),
        "Models that load at the same time. By default as many as there are processor cores, at most 4.",
    )
    load_retry_count: int = setting(
        0,
        "--model-load-retry-count",
        integer(0, 1000),
        "Immediate retries of a failed load. Loads that failed for a temporary reason are always retried later.",
    )
    reload_policy: ReloadPolicyName = setting(
        "overlap",
        "--reload-policy",
        choice(*get_args(ReloadPolicyName)),
        "overlap: load a new version beside the old. replace: unload the old first. The model's own parameter has "
        "priority.",
    )
    max_resident_models: int = setting(
        0,
        "--max-resident-models",
        integer(0, 1_000_000),
        "Most models in memory. Beyond it the least recently used model is unloaded, and loaded again on request. 0: "
        "no limit.",
    )
    idle_unload_s: float = setting(
        0.0,
        "--idle-unload-secs",
        number(0, 31_536_000),
        "Seconds without a request after which a model is unloaded until the next request. 0: never.",
    )
    load_on_demand_timeout_s: float = setting(
        60.0,
        "--load-on-demand-timeout-secs",
        number(0.1, 86_400),
        "Seconds that a request waits for its unloaded model to be loaded again.",
    )
    state_dir: str = setting(
        "",
        "--state-dir",
        OPTIONAL_PATH,
        "Folder for state that survives a restart: which models are pinned to which version, and how fast each runtime "
        "runs an ONNX model, by which its next load chooses one. Empty: pins are kept in memory, and times in the "
        "folder of --repository-cache-dir.",
    )
    requires_checksums: bool = setting(
        False,
        "--require-checksums",
        BOOLEAN,
        "Serve only versions and models whose files are all listed in a SHA256SUMS in their directory. An existing "
        "SHA256SUMS is always verified.",
    )
    public_key: str = setting(
        "",
        "--signature-public-key",
        OPTIONAL_PATH,
        "File of an Ed25519 public key (PEM, 32 bytes, or base64): serve only models that `edge-server sign` signed "
        "with its private key. Implies --require-checksums.",
    )
    cache_dir: str = setting(
        "",
        "--repository-cache-dir",
        OPTIONAL_PATH,
        "Folder for the copies of remote repositories. Empty: $CACHE_DIRECTORY, else /var/cache/edge_server if it is "
        "writable, else $XDG_CACHE_HOME/edge_server or ~/.cache/edge_server.",
    )
    first_sync_s: float = setting(
        60.0,
        "--repository-first-sync-secs",
        number(0, 86_400),
        "Seconds that the start waits for the first copy of a remote repository.",
    )
    measurements_dir: str = ""


@record(frozen=True, slots=True)
class HttpConfig:
    """HTTP listener. TLS is on if both `tls_cert` and `tls_key` are set."""

    is_enabled: bool = setting(True, "--allow-http", BOOLEAN, "Offer HTTP.")
    address: str = setting(
        LOOPBACK, "--http-address", TEXT, "Address that HTTP listens on; 0.0.0.0 opens it to the network."
    )
    port: int = setting(8000, "--http-port", PORT, "Port of HTTP; 0: the system chooses.")
    reuses_port: bool = setting(False, "--reuse-http-port", BOOLEAN, "Let other processes listen on the HTTP port too.")
    max_input_size_bytes: int = setting(
        64 * 1024 * 1024,
        "--http-max-input-size",
        integer(1, 2**40),
        "Largest HTTP input in bytes, also after decompression. Applies to the JSON part, to each JSON tensor and to a "
        "raw body.",
    )
    max_body_bytes_in_flight: int = setting(
        0,
        "--http-max-body-bytes-in-flight",
        integer(0, 2**50),
        "Most bytes of all HTTP bodies and gRPC messages that are being received. Beyond it the largest, oldest "
        "uploads are refused. 0: a quarter of the memory that is available at the start, at least 256 MiB, and room "
        "for one gRPC message of any size if the machine has that.",
    )
    max_connections: int = setting(
        0,
        "--http-max-connections",
        integer(0, 2**20),
        "Most open HTTP connections. Beyond it the longest idle one is closed for a new one; if none is idle, the new "
        "one is answered 503. 0: half of the files that the process may open, at most 4096. In any case a quarter of "
        "the files, 16 to 256, is kept for the server itself.",
    )
    header_pattern: re.Pattern[str] | None = setting(
        None,
        "--http-header-forward-pattern",
        _HEADER_PATTERN,
        "Request headers whose whole name matches, in any case, become request parameters.",
    )
    restricted: tuple[RestrictedGroup, ...] = setting(
        (),
        "--http-restricted-api",
        _RESTRICTED,
        "Answer these endpoint categories only to requests with header key=value. Repeatable.",
        separator=" ",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "--http-allowed-host",
        TEXT,
        "Host name under which clients reach this server through a proxy that keeps their Host. On a loopback address, "
        "HTTP and metrics answer only for IP addresses, localhost, this machine's names, and this name. Web pages may "
        "control the server only under these names. Repeatable.",
        separator=",",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "--http-allowed-origin",
        _ORIGIN,
        "Origin whose web pages may run inference and read responses (CORS), such as https://dashboard.example, "
        "chrome-extension://<id> or vscode-webview://*; * allows inference to any. Such pages may not change the "
        "server. Repeatable.",
        separator=" ",
    )
    is_view_open: bool = setting(
        False,
        "--view-open",
        BOOLEAN,
        "Show camera pictures to other machines without a key. By default other machines need a key or a token for the "
        "category view.",
    )
    tls_cert: str = setting("", "--http-tls-cert", OPTIONAL_PATH, "PEM file of the HTTPS certificate chain.")
    tls_key: str = setting("", "--http-tls-key", OPTIONAL_PATH, "PEM file of the HTTPS private key.")
    client_ca: str = setting(
        "",
        "--https-client-ca",
        OPTIONAL_PATH,
        "PEM file of the authorities that sign client certificates. With it, HTTPS requires a certificate of every "
        "client.",
    )


@record(frozen=True, slots=True)
class GrpcConfig:
    """gRPC listener. The keepalive settings are gRPC's channel arguments of the same names."""

    is_enabled: bool = setting(True, "--allow-grpc", BOOLEAN, "Offer gRPC.")
    address: str = setting(
        LOOPBACK, "--grpc-address", TEXT, "Address that gRPC listens on; 0.0.0.0 opens it to the network."
    )
    port: int = setting(8001, "--grpc-port", PORT, "Port of gRPC; 0: the system chooses.")
    reuses_port: bool = setting(False, "--reuse-grpc-port", BOOLEAN, "Let other processes listen on the gRPC port too.")
    listen: GrpcListen = setting(
        "when-loaded",
        "--grpc-listen",
        choice(*get_args(GrpcListen)),
        "When gRPC accepts connections. when-loaded: when every model of the start is loaded or has failed, so that "
        "clients use another server until then. at-start: at once; models that still load answer UNAVAILABLE. The "
        "address is taken at the start in both cases.",
    )
    transport: GrpcTransport = setting(
        "http2",
        "--grpc-transport",
        choice(*get_args(GrpcTransport)),
        "http2: the server's own HTTP/2. grpcio: the server of the library grpcio.",
    )
    compression_level: CompressionLevel = setting(
        "none",
        "--grpc-infer-response-compression-level",
        choice(*get_args(CompressionLevel)),
        "Compression of inference responses.",
    )
    header_pattern: re.Pattern[str] | None = setting(
        None,
        "--grpc-header-forward-pattern",
        _HEADER_PATTERN,
        "Request metadata whose whole name matches, in any case, become request parameters.",
    )
    restricted: tuple[RestrictedGroup, ...] = setting(
        (),
        "--grpc-restricted-protocol",
        _RESTRICTED,
        "Answer these endpoint categories only to requests with metadata triton-grpc-protocol-<key>=<value>. "
        "Repeatable.",
        separator=" ",
    )
    is_tls: bool = setting(False, "--grpc-use-ssl", BOOLEAN, "Encrypt gRPC; needs certificate and key.")
    is_mutual_tls: bool = setting(
        False,
        "--grpc-use-ssl-mutual",
        BOOLEAN,
        "Encrypt gRPC and ask clients for a certificate; needs the root certificate too.",
    )
    server_cert: str = setting("", "--grpc-server-cert", OPTIONAL_PATH, "PEM file of the gRPC certificate chain.")
    server_key: str = setting("", "--grpc-server-key", OPTIONAL_PATH, "PEM file of the gRPC private key.")
    root_cert: str = setting(
        "", "--grpc-root-cert", OPTIONAL_PATH, "PEM file of the authorities that sign client certificates."
    )
    keepalive_time_ms: int = setting(
        7_200_000, "--grpc-keepalive-time", COUNT, "Milliseconds without traffic after which the server pings a client."
    )
    keepalive_timeout_ms: int = setting(
        20_000,
        "--grpc-keepalive-timeout",
        COUNT,
        "Milliseconds to wait for the answer to a ping before the connection is closed.",
    )
    keepalive_permit_without_calls: bool = setting(
        False, "--grpc-keepalive-permit-without-calls", BOOLEAN, "Allow pings while no call is running."
    )
    http2_max_pings_without_data: int = setting(
        2, "--grpc-http2-max-pings-without-data", COUNT, "Pings that may be sent without data between them."
    )
    http2_min_recv_ping_interval_without_data_ms: int = setting(
        300_000,
        "--grpc-http2-min-recv-ping-interval-without-data",
        COUNT,
        "Shortest time in milliseconds between two pings of a client without data between them.",
    )
    http2_max_ping_strikes: int = setting(
        2, "--grpc-http2-max-ping-strikes", COUNT, "Bad pings of a client before its connection is closed; 0: no limit."
    )
    max_connection_age_ms: int = setting(
        0, "--grpc-max-connection-age", COUNT, "Milliseconds after which a connection is ended; 0: never."
    )
    max_connection_age_grace_ms: int = setting(
        0,
        "--grpc-max-connection-age-grace",
        COUNT,
        "Milliseconds that running calls get to end when their connection reaches its age; 0: no limit.",
    )


@record(frozen=True, slots=True)
class AuthConfig:
    """Access to HTTP and gRPC by bearer tokens. Without `tokens_file`, tokens are ignored."""

    tokens_file: str = setting(
        "",
        "--auth-tokens-file",
        OPTIONAL_PATH,
        "File of bearer tokens for HTTP and gRPC. Each line has a name, the SHA-256 of the token, and the endpoint "
        "categories that it opens (* for all). Closes model-repository, shared-memory, logging and trace, and the "
        "categories that a line names, to requests without a token; * closes all but health, metrics, reflection and "
        "openapi. A line 'protect <categories>' closes more. Read again at SIGHUP, which opens nothing.",
    )


@record(frozen=True, slots=True)
class MetricsConfig:
    """Prometheus endpoint. `parse_serve` sets an empty `address` to the address of HTTP."""

    is_enabled: bool = setting(True, "--allow-metrics", BOOLEAN, "Offer Prometheus metrics.")
    has_cpu_metrics: bool = setting(True, "--allow-cpu-metrics", BOOLEAN, "Include processor load and memory.")
    has_gpu_metrics: bool = setting(True, "--allow-gpu-metrics", BOOLEAN, "Include GPU load, memory and power.")
    address: str = setting("", "--metrics-address", OPTIONAL_TEXT, "Address of metrics; empty: the HTTP address.")
    port: int = setting(8002, "--metrics-port", PORT, "Port of metrics; 0: the system chooses.")
    interval_ms: int = setting(
        2_000, "--metrics-interval-ms", integer(1, 3_600_000), "Milliseconds between two readings of processor and GPU."
    )
    latencies: tuple[LatencyMetric, ...] = setting(
        (),
        "--metrics-config",
        Kind("name=value", parse_latency_metric, show="=".join),
        "Families of the models' latencies: counter_latencies=false, histogram_latencies=true, summary_latencies=true, "
        "summary_quantiles=0.5:0.05,0.99:0.001. Repeatable.",
        separator=" ",
    )


@record(frozen=True, slots=True)
class RateLimitConfig:
    """Triton's rate limiter. A resource is (name, count, device); device None: each device, and global resources."""

    mode: RateLimitMode = setting(
        "off",
        "--rate-limit",
        choice(*get_args(RateLimitMode)),
        "execution_count: an instance runs only while the resources of its group's rate_limiter are free.",
    )
    resources: tuple[tuple[str, int, int | None], ...] = setting(
        (),
        "--rate-limit-resource",
        Kind("name:count[:device]", _parse_rate_resource),
        "Count of a resource, on one device or on each; repeatable. "
        "Without it: as many as the most demanding instance needs.",
        separator=";",
    )


@record(frozen=True, slots=True)
class MemoryConfig:
    """Shared memory of clients, and memory that loads must leave free.

    `floor_mb` and `pressure_limit_percent` are off by default. A machine with compressed swap serves well beyond the
    available memory that the kernel reports, and an estimate must not refuse a model that would fit.
    """

    allows_client_shm: bool = setting(
        False,
        "--allow-client-shm",
        BOOLEAN,
        "Let clients name shared memory of this machine for the server to read and write.",
    )
    gpu_load_limits: tuple[tuple[int, float], ...] = setting(
        (),
        "--model-load-gpu-limit",
        Kind("device:fraction", _parse_gpu_limit),
        "Fraction of a GPU's memory, 0 to 1, beyond which no model is loaded onto it: device:fraction. Repeatable.",
        separator=";",
    )
    floor_mb: int = setting(
        0,
        "--memory-floor-mb",
        integer(0, 2**30),
        "MiB of available memory that loading a model must leave; the load waits for them. 0: no limit.",
    )
    pressure_limit_percent: float = setting(
        0.0,
        "--memory-pressure-limit",
        number(0, 100),
        "Per cent of the last 10 s that tasks may have waited for memory when a model is loaded; the load waits until "
        "it is less. 0: no limit.",
    )


@record(frozen=True, slots=True)
class LogConfig:
    """Log. `journal_stream` is systemd's JOURNAL_STREAM ("device:inode"): standard error may be the journal's."""

    verbose_level: int = setting(
        0,
        "--log-verbose",
        Kind("integer", _parse_verbosity, (int, bool), may_stand_alone=True),
        "1: log debug lines of the server. 2 and more: debug lines of its libraries too.",
    )
    shows_info: bool = setting(True, "--log-info", BOOLEAN, "Log normal events.")
    shows_warning: bool = setting(True, "--log-warning", BOOLEAN, "Log warnings.")
    shows_error: bool = setting(True, "--log-error", BOOLEAN, "Log errors.")
    format: LogFormat = setting(
        "default",
        "--log-format",
        choice(*LOG_FORMATS),
        "Triton's default or ISO8601, plain text, or one JSON object per line. A traceback follows its record in lines "
        "that begin with '  | '; json has it inside the object.",
    )
    file: str = setting("", "--log-file", OPTIONAL_PATH, "File to append to; empty: standard error.")
    journal_stream: str = ""


@record(frozen=True, slots=True)
class LifecycleConfig:
    """Start, readiness and stop of the server.

    `exits_on_error` is off, where Triton's is on: in the field, one broken model should not stop the others.
    """

    server_id: str = setting("triton", "--id", TEXT, "Name of this server in its metadata.")
    is_readiness_strict: bool | None = setting(
        None,
        "--strict-readiness",
        Kind("boolean", _parse_optional_boolean, (bool, str), may_stand_alone=True),
        "true: the server is ready only while every known model is ready. false: models do not count. Not given: all "
        "models count, but in poll mode not those that have never served since they were added. A model counts as "
        "ready if any version serves. The server is never ready before each model found at the start is loaded or has "
        "failed to load.",
    )
    exits_on_error: bool = setting(
        False, "--exit-on-error", BOOLEAN, "Do not start when a model fails to load. (Triton's default is true.)"
    )
    exits_on_gpu_loss: bool = setting(
        False,
        "--exit-on-gpu-loss",
        BOOLEAN,
        "Exit with code 79 when the process has lost a GPU and a model on it cannot be served elsewhere. A service "
        "manager can then start a new process, which may find the GPU again.",
    )
    drain_delay_s: float = setting(
        0.0,
        "--drain-delay-secs",
        number(0, 3600),
        "Seconds for which a stopping server still answers everything but reports that it is not ready. A load "
        "balancer then sends requests elsewhere before they are refused.",
    )
    exit_timeout_s: float = setting(
        30.0,
        "--exit-timeout-secs",
        number(0, 86_400),
        "Most seconds to wait for running requests when the server stops.",
    )
    hang_timeout_s: float = setting(
        0.0,
        "--hang-timeout-secs",
        number(0, 86_400),
        "Seconds after which a running execution fails its model version and the server's readiness. A language "
        "model's process is killed instead, and started again. 0: never.",
    )
    watchdog_run_limit_s: float = setting(
        300.0,
        "--watchdog-run-limit-secs",
        number(0, 86_400),
        "Seconds after which a running execution stops the notifications to the service manager's watchdog, if there "
        "is one. The service manager then restarts the server. 0: never.",
    )


def _table(title: str, config: type[T]) -> T:
    """Return the field of a table of settings. `title` is its heading in --help."""
    made: Any = field(default_factory=config, metadata={"title": title})
    return made  # type: ignore[no-any-return]


@record(frozen=True, slots=True)
class ServerConfig:
    """All settings: one table of the TOML file for each field, in the order of --help.

    `backends[name][key]` are the settings of backends; those of name "" apply to all.
    """

    repository: RepositoryConfig = _table("Models", RepositoryConfig)
    backends: Mapping[str, Mapping[str, str]] = setting(
        dict,
        "--backend-config",
        Kind("backend,key=value", _parse_backend_setting),
        "Setting of one backend, or of all if no backend is named. Repeatable. default-max-batch-size is Triton's: the "
        "max_batch_size of models that can batch and do not state it; 0 does not batch them.",
        separator=" ",
        title="Backends",
    )
    http: HttpConfig = _table("HTTP", HttpConfig)
    grpc: GrpcConfig = _table("gRPC", GrpcConfig)
    auth: AuthConfig = _table("Access", AuthConfig)
    metrics: MetricsConfig = _table("Metrics", MetricsConfig)
    rate_limit: RateLimitConfig = _table("Rate limiter", RateLimitConfig)
    memory: MemoryConfig = _table("Shared memory", MemoryConfig)
    cache: CacheConfig = _table("Response cache", CacheConfig)
    log: LogConfig = _table("Log", LogConfig)
    trace: TraceConfig = _table("Trace", TraceConfig)
    lifecycle: LifecycleConfig = _table("Server", LifecycleConfig)
    plugin_tables: Mapping[str, object] = field(default_factory=dict)
    """The tables of plugins, by their names. See `table`."""

    def table(self, settings: type[T]) -> T:
        """Return the table of a plugin, given its class; the defaults if it is not there."""
        given = [table for table in self.plugin_tables.values() if isinstance(table, settings)]
        return given[0] if given else settings()


def settings_of_backend(backends: Mapping[str, Mapping[str, str]], name: str) -> dict[str, str]:
    """Return the settings of one backend, and below them those for all."""
    return {**backends.get("", {}), **backends.get(name, {})}


class SettingOwner(Protocol):
    """What brings settings of its own: a plugin."""

    tables: Sequence[SettingTable]

    def check(self, config: ServerConfig) -> Sequence[str]:
        """Return warnings. Raises ConfigError."""


class DeclaredSettings:
    """All settings that may be given: those of the core, and those of plugins' tables."""

    def __init__(self, plugins: Sequence[SettingOwner] = ()) -> None:
        plugin_tables = [table for plugin in plugins for table in plugin.tables]
        self.plugin_tables = {table.name: table.settings for table in plugin_tables}
        self.settings = (*_core_settings(), *(item for table in plugin_tables for item in table.declared()))
        self.titles = {item.name: item.metadata["title"] for item in fields(ServerConfig) if item.metadata}
        """Table -> heading."""
        self.titles |= {table.name: table.title for table in plugin_tables}
        self.by_name = {item.name: item for item in self.settings}
        self.by_variable = {item.variable: item for item in self.settings}
        self.by_flag = {flag: item for item in self.settings for flag in (item.flag, *item.aliases)}


def _core_settings() -> Iterator[Setting]:
    for table in fields(ServerConfig):
        if is_dataclass(table.default_factory):
            yield from SettingTable(table.name, "", table.default_factory).declared()
        elif "setting" in table.metadata:
            yield declared_setting(f"{table.name}.", table)
