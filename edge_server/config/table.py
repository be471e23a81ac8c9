"""The table of settings: each one's name, flag, kind and help. Its variable and TOML key follow from these two names.

Flags that Triton has bear Triton's names and meanings; those of its flags that only cause a warning are in
`triton_flags`. The rows are here and in modules named for what they are about: `endpoints`, `engines`, `envelope`.
"""

from __future__ import annotations

from edge_server.config.cache import CACHE_SETTINGS
from edge_server.config.endpoints import AUTH, FRAMES, GRPC, HTTP, METRICS
from edge_server.config.engines import ENGINES
from edge_server.config.envelope import ENVELOPE
from edge_server.config.kinds import (
    BACKEND_SETTING,
    BOOLEAN,
    GPU_LIMIT,
    OPTIONAL_BOOLEAN,
    OPTIONAL_PATH,
    OPTIONAL_TEXT,
    PATH,
    TEXT,
    TRACE_SETTING,
    VERBOSITY,
    choice,
    integer,
    number,
)
from edge_server.config.setting import Setting
from edge_server.config.slices import LOG_FORMATS

_REPOSITORY = (
    Setting(
        "repository.paths",
        "--model-repository",
        PATH,
        "Folder of models, or the address of one: s3://bucket/prefix, s3://[https://]host:port/bucket/prefix, "
        "gs://bucket/prefix, as://account/container/prefix, file:///folder. Repeatable.",
        separator=":",
        aliases=("--model-store",),
    ),
    Setting(
        "repository.control_mode",
        "--model-control-mode",
        choice("poll", "none", "explicit"),
        "poll: follow changes of the repository as they happen. none: load all models at the start. explicit: load on "
        "request.",
    ),
    Setting(
        "repository.poll_s",
        "--repository-poll-secs",
        number(0.05, 86_400),
        "Seconds after which poll mode looks at the whole repository when nothing told of a change. What does tell, "
        "such as inotify, counts at once.",
    ),
    Setting(
        "repository.allows_external_links",
        "--allow-external-links",
        BOOLEAN,
        "Serve models that are, or hold, symbolic links to outside of the repositories.",
    ),
    Setting(
        "repository.allows_code_upload",
        "--allow-code-upload",
        BOOLEAN,
        "Take code from other machines with load requests: files and configurations of Python and C models, and "
        "parameters that name paths. From this machine they are always taken.",
    ),
    Setting(
        "repository.load_models",
        "--load-model",
        TEXT,
        "Model to load at the start in explicit mode; '*' alone loads all. Repeatable.",
        separator=",",
    ),
    Setting(
        "repository.model_config_name",
        "--model-config-name",
        OPTIONAL_TEXT,
        "Use configs/<name>.pbtxt of a model, where there is one, in place of its config.pbtxt.",
    ),
    Setting(
        "repository.is_auto_complete_disabled",
        "--disable-auto-complete-config",
        BOOLEAN,
        "Do not fill in missing parts of a model's configuration from its file.",
        aliases=("--strict-model-config",),
    ),
    Setting(
        "repository.load_thread_count",
        "--model-load-thread-count",
        integer(1, 256),
        "How many models load at the same time.",
    ),
    Setting(
        "repository.load_retry_count",
        "--model-load-retry-count",
        integer(0, 1000),
        "How often a failed load is tried again at once. Causes that may pass are tried again later in any case.",
    ),
    Setting(
        "repository.reload_policy",
        "--reload-policy",
        choice("overlap", "replace"),
        "overlap: load a new version beside the old. replace: unload the old first. A model's own parameter wins.",
    ),
    Setting(
        "repository.max_resident_models",
        "--max-resident-models",
        integer(0, 1_000_000),
        "How many models are in memory at most; the least recently used leaves, and loads again on request. 0: all.",
    ),
    Setting(
        "repository.idle_unload_s",
        "--idle-unload-secs",
        number(0, 31_536_000),
        "Seconds without a request after which a model leaves memory until the next one. 0: never.",
    ),
    Setting(
        "repository.load_on_demand_timeout_s",
        "--load-on-demand-timeout-secs",
        number(0.1, 86_400),
        "Seconds that a request waits for its model to be loaded again.",
    ),
    Setting(
        "repository.state_dir",
        "--state-dir",
        OPTIONAL_PATH,
        "Folder for what must survive a restart: which models are pinned to which version. Empty: nothing does.",
    ),
    Setting(
        "repository.requires_checksums",
        "--require-checksums",
        BOOLEAN,
        "Serve only versions whose directory, and models whose own files, a SHA256SUMS there lists one by one. A "
        "SHA256SUMS that is there is always verified.",
    ),
    Setting(
        "repository.public_key",
        "--signature-public-key",
        OPTIONAL_PATH,
        "File of an Ed25519 public key (PEM, 32 bytes, or base64): serve only what `edge-server sign` signed with the "
        "private one. Implies --require-checksums.",
    ),
    Setting(
        "repository.cache_dir",
        "--repository-cache-dir",
        OPTIONAL_PATH,
        "Folder for the copies of remote repositories. Empty: $CACHE_DIRECTORY, else /var/cache/edge_server where it "
        "can be written, else $XDG_CACHE_HOME/edge_server or ~/.cache/edge_server.",
    ),
    Setting(
        "repository.first_sync_s",
        "--repository-first-sync-secs",
        number(0, 86_400),
        "Seconds that the start waits for the first copy of a remote repository.",
    ),
    Setting(
        "backends.",
        "--backend-config",
        BACKEND_SETTING,
        "Setting of one backend, or of all when no backend is named. Repeatable.",
        separator=" ",
    ),
)

_OTHERS = (
    Setting(
        "memory.allows_client_shm",
        "--allow-client-shm",
        BOOLEAN,
        "Let clients name shared memory of this machine for the server to read and write.",
    ),
    Setting(
        "memory.gpu_load_limits",
        "--model-load-gpu-limit",
        GPU_LIMIT,
        "Part of a GPU's memory, 0 to 1, beyond whose use no model is loaded onto it: device:fraction. Repeatable.",
        separator=";",
    ),
    Setting(
        "memory.floor_mb",
        "--memory-floor-mb",
        integer(0, 2**30),
        "MiB of available memory that loading a model must leave; it waits until they are there. 0: any.",
    ),
    Setting(
        "memory.pressure_limit_percent",
        "--memory-pressure-limit",
        number(0, 100),
        "Per cent of the last 10 s that tasks may have waited for memory when a model is loaded. 0: not looked at.",
    ),
    Setting(
        "cache.settings",
        "--cache-config",
        CACHE_SETTINGS,
        "The response cache, for models with response_cache: local,size=BYTES in this process; or "
        "redis,host=NAME,port=NUMBER, and user, password, db, connect_timeout, socket_timeout, wait_timeout (ms), "
        "pool_size, ttl (s), tls_enabled, cert, key, cacert. Repeatable.",
        separator=" ",
    ),
    Setting(
        "cache.byte_size",
        "--response-cache-byte-size",
        integer(0, 2**50),
        "Bytes of a local response cache, as older versions of Triton say it. 0: none.",
    ),
    Setting(
        "log.verbose_level",
        "--log-verbose",
        VERBOSITY,
        "1: log debug lines of the server. 2 and more: those of its libraries too.",
    ),
    Setting("log.shows_info", "--log-info", BOOLEAN, "Log what goes as planned."),
    Setting("log.shows_warning", "--log-warning", BOOLEAN, "Log warnings."),
    Setting("log.shows_error", "--log-error", BOOLEAN, "Log errors."),
    Setting(
        "log.format",
        "--log-format",
        choice(*LOG_FORMATS),
        "Triton's default or ISO8601, plain text, or one JSON object per line.",
    ),
    Setting("log.file", "--log-file", OPTIONAL_PATH, "File to append to; empty: standard error."),
    Setting(
        "trace.config",
        "--trace-config",
        TRACE_SETTING,
        "What is traced, and where it goes: level=TIMESTAMPS or TENSORS, rate=1000, count=-1, mode=triton or "
        "opentelemetry; triton,file=PATH and triton,log-frequency=N; opentelemetry,url=URL, resource=KEY=VALUE, "
        "bsp_max_queue_size, bsp_schedule_delay, bsp_max_export_batch_size. Repeatable.",
        separator=" ",
    ),
    Setting("lifecycle.server_id", "--id", TEXT, "Name of this server in its metadata."),
    Setting(
        "lifecycle.is_readiness_strict",
        "--strict-readiness",
        OPTIONAL_BOOLEAN,
        "Be ready only while every known model is: true counts all of them, false none. When it is not given, models "
        "that never served since they were added do not count in mode poll, and all do in the other modes. A model of "
        "which any version serves counts as ready. Never ready before the models found at the start are loaded, or "
        "failed to load.",
    ),
    Setting(
        "lifecycle.exits_on_error",
        "--exit-on-error",
        BOOLEAN,
        "Do not start when a model fails to load. (Triton's default is true.)",
    ),
    Setting(
        "lifecycle.exits_on_gpu_loss",
        "--exit-on-gpu-loss",
        BOOLEAN,
        "End with exit code 79 when a GPU is lost to the process and a model on it cannot be served elsewhere: for a "
        "service manager that starts a new process, which may find the GPU again.",
    ),
    Setting(
        "lifecycle.drain_delay_s",
        "--drain-delay-secs",
        number(0, 3600),
        "Seconds for which a server told to stop still answers everything while it says that it is not ready. A load "
        "balancer then sends requests elsewhere before they are refused.",
    ),
    Setting(
        "lifecycle.exit_timeout_s",
        "--exit-timeout-secs",
        number(0, 86_400),
        "Seconds that running requests have to end when the server stops.",
    ),
    Setting(
        "lifecycle.hang_timeout_s",
        "--hang-timeout-secs",
        number(0, 86_400),
        "Seconds after which a run that does not end fails its version and the server's readiness. 0: never.",
    ),
    Setting(
        "lifecycle.watchdog_run_limit_s",
        "--watchdog-run-limit-secs",
        number(0, 86_400),
        "Seconds after which a run that does not end keeps the watchdog of the service manager that started the "
        "server, if there is one, from being fed: it starts a new one then. 0: never.",
    ),
)

SETTINGS: tuple[Setting, ...] = (*_REPOSITORY, *HTTP, *GRPC, *AUTH, *FRAMES, *METRICS, *ENVELOPE, *ENGINES, *_OTHERS)
