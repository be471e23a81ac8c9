"""Creation of all parts of a server from its configuration (repository, model lifecycle, service, cache, plugins), and
their connections. Opens no port."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends import ONNX_ORDER
from edge_server.backends.cuda import cuda_devices
from edge_server.backends.cuda.cuda_devices import CudaDevices
from edge_server.config import RateLimitConfig, RepositoryConfig, ServerConfig, choose_cache
from edge_server.config.latency_metrics import is_on, quantiles
from edge_server.core.priority_class import priority_class
from edge_server.core.version_lifecycle import DesiredModel, ReloadPolicy
from edge_server.errors import InvalidRequest
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.memory.available_memory import MemoryFloor
from edge_server.memory.cuda_shared_memory import CudaMemoryRegistry
from edge_server.memory.malloc_settings import trim
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.own_plugins import plugin_objects
from edge_server.plugin import Plugin, ServingCore
from edge_server.process.running_plugins import RunningPlugins
from edge_server.record import record
from edge_server.repository.choice.first_opening import FirstOpenings
from edge_server.repository.choice.opening_journal import OpeningJournal
from edge_server.repository.choice.runtime_times import RuntimeTimes
from edge_server.repository.desired_state import RepositorySource
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.disk.served_version_digests import ContentDigests
from edge_server.repository.resolve_version import ResolveOptions
from edge_server.repository.trust.verify_version import trust_policy
from edge_server.repository.version_pins import VersionPins
from edge_server.service import InferenceService, Readiness
from edge_server.serving.execution.gpu_state import Gpus
from edge_server.serving.execution.latencies import LatencyOptions
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.lifecycle.lifecycle_parts import make_lifecycle
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.model_table import ModelTable
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import MODEL_FAILED, MODEL_READY, MODEL_UNLOADED, Event, EventBus
from edge_server.telemetry.log import LogSettings
from edge_server.telemetry.metric_sources import LoadCounts
from edge_server.telemetry.tracing import Traces
from edge_server.version import __version__

if TYPE_CHECKING:
    from edge_server.serving.cache.response_cache import ResponseCache

log = logging.getLogger(__name__)

_FREES_MEMORY = frozenset({MODEL_READY, MODEL_FAILED, MODEL_UNLOADED})
"""Events after which the allocator returns free memory to the system: a load needs several times a model's size."""


@record(frozen=True, slots=True)
class ServerParts:
    """The parts of a server without front ends, for `serve` and `check`."""

    service: InferenceService
    source: RepositorySource
    timer: Timer
    events: EventBus
    loads: LoadCounts
    digests: ContentDigests
    plugins: RunningPlugins
    access: AccessCheck
    ports: dict[str, int]
    """Open ports by name: http, grpc, metrics."""
    journal: OpeningJournal
    cache: ResponseCache | None = None

    def close(self, timeout_s: float) -> bool:
        """Refuse new requests, drain for at most `timeout_s`, and close every model. Return False if requests had to
        fail."""
        self.journal.close()
        self.plugins.begin_stop()
        self.service.stop_accepting()
        is_clean = self.service.close(timeout_s)
        if self.cache is not None:
            self.cache.close()
        self.timer.close()
        self.plugins.stop(timeout_s)
        self.digests.close()
        self.source.close()
        return is_clean


def build(
    config: ServerConfig,
    log_settings: LogSettings,
    plugins: Sequence[Plugin] = (),
    on_no_fallback: Callable[[str], None] | None = None,
) -> ServerParts:
    """Build the server without its front ends. No model is loaded yet.

    `on_no_fallback` is called when a model that lost its GPU cannot be loaded elsewhere. Raises EdgeServerError for a
    repository that cannot be read, and ConfigError of a plugin.
    """
    running = RunningPlugins(plugins, config)
    repository = config.repository
    scanner = _scanner(repository, running)
    devices = cuda_devices.find()
    gpus = Gpus(devices, dict(config.memory.gpu_load_limits))
    state_dir = Path(repository.state_dir) if repository.state_dir else None
    measurements_dir = Path(repository.measurements_dir) if repository.measurements_dir else None
    runtime_times = RuntimeTimes(measurements_dir) if measurements_dir else None
    journal = OpeningJournal(measurements_dir)
    options = _resolve_options(config, devices.count if devices else 0, gpus, running, runtime_times)
    pins = VersionPins(state_dir)
    source = RepositorySource(scanner, options, pins=pins)
    timer = Timer()
    events = EventBus()
    cache = _cache(config)
    admission = running.admission()
    memory = MemoryFloor(config.memory.floor_mb << 20, config.memory.pressure_limit_percent)
    models = make_lifecycle(
        timer,
        _backend_settings(config, running),
        load_threads=repository.load_thread_count,
        publish=events.publish,
        settings=_lifecycle_settings(config),
        admission_control=admission,
        check_memory=running.make_load_check(memory.refusal),
        limiter=_rate_limiter(config.rate_limit),
        cache=cache,
        gpus=gpus,
        on_no_fallback=on_no_fallback or (lambda reason: None),
        opening=journal.opening,
    )
    digests = ContentDigests(scanner.find, state_dir)
    scanner.has_changed_content = digests.has_changed
    service = InferenceService(
        models,
        source,
        _shared_memory(config.memory.allows_client_shm, devices),
        log_settings,
        server_id=config.lifecycle.server_id,
        server_version=__version__,
        is_explicit=repository.control_mode == "explicit",
        readiness=_readiness(config),
        events=events,
        traces=Traces(config.trace, running.make_trace_export()),
        digest_of=digests.get,
        may_serve=lambda: running.may_serve,
        plugin=running.find,
        # Every client may list the models: no key and no token restricts anything.
        suggests_models=not (config.auth.tokens_file or config.http.restricted or config.grpc.restricted),
    )
    events.subscribe(lambda event: _compute_digest(digests, event))
    events.subscribe(lambda event: trim() if event.kind in _FREES_MEMORY else None)
    events.subscribe(service.variants.receive)
    loads = LoadCounts(service.router.versions, service.router.index)
    events.subscribe(loads.receive)
    access = AccessCheck(config.http)
    ports: dict[str, int] = {}
    running.build(
        ServingCore(
            service,
            config,
            events,
            admission=admission,
            mark_gpu_lost=_gpu_loss_handler(service.table, devices),
            lost_gpus=gpus.lost_gpus,
            heavy_work_refusal=running.heavy_work_refusal,
            machine_root=running.machine_root(),
            access=access,
            ports=ports,
            panels=running.panels,
            runtime_times=runtime_times,
            gauges=running.gauges,
            control_need=running.control_need,
        )
    )
    return ServerParts(service, source, timer, events, loads, digests, running, access, ports, journal, cache)


def _compute_digest(digests: ContentDigests, event: Event) -> None:
    name, version = event.fields.get("model"), event.fields.get("version")
    if event.kind == MODEL_READY and isinstance(name, str) and isinstance(version, int):
        digests.compute(name, version)


def _scanner(config: RepositoryConfig, plugins: RunningPlugins) -> Scanner:
    """Return the scanner of the repositories' folders. Raises InvalidRequest for an address that no plugin copies, and
    ServingFault for a folder that cannot be read."""
    folders = plugins.local_folders()
    for path in config.paths:
        if "://" in path and path not in folders:
            # Only the scheme, because the rest may hold credentials.
            scheme = path.partition("://")[0]
            copied = [f"{name}://" for plugin in plugin_objects() for name in plugin.address_schemes]
            expected = ", or one of ".join(filter(None, ("a folder", ", ".join(copied))))
            raise InvalidRequest(f"model repository at {scheme}://: expected {expected}")
    roots = [folders.get(path, Path(path)) for path in config.paths]
    scanner = Scanner(roots, config.model_config_name, allows_external_links=config.allows_external_links)
    scanner.check_roots()
    return scanner


def _resolve_options(
    config: ServerConfig, gpu_count: int, gpus: Gpus, plugins: RunningPlugins, runtime_times: RuntimeTimes | None
) -> ResolveOptions:
    repository = config.repository
    return ResolveOptions(
        auto_complete=not repository.is_auto_complete_disabled,
        gpu_count=gpu_count,
        checks=(priority_class, *plugins.model_checks()),
        output_checks=plugins.output_checks(),
        folder_readers=plugins.folder_readers(),
        recognisers=plugins.recognisers(),
        trust=trust_policy(repository.requires_checksums, repository.public_key),
        backend_settings=config.backends,
        onnx_order=(*plugins.onnx_backends(), *ONNX_ORDER),
        runtime_times=runtime_times,
        first_openings=None if runtime_times is None else FirstOpenings(runtime_times, config.backends),
        lost_gpus=gpus.lost_gpus,
    )


def _readiness(config: ServerConfig) -> Readiness:
    is_strict = config.lifecycle.is_readiness_strict
    if is_strict is None:
        # A broken model copied to every server of a fleet must not make all of them "not ready" to the load balancer.
        return Readiness.KEEPS_SERVING if config.repository.control_mode == "poll" else Readiness.STRICT
    return Readiness.STRICT if is_strict else Readiness.ANY


def _shared_memory(is_allowed: bool, devices: CudaDevices | None) -> SharedMemoryRegistry:
    if devices is None:
        reason = cuda_devices.missing() or "the NVIDIA driver does not answer"
        return SharedMemoryRegistry(is_allowed, CudaMemoryRegistry(is_allowed, reason, cuda_devices.CudaDevices))
    return SharedMemoryRegistry(is_allowed, CudaMemoryRegistry(is_allowed, "", lambda: devices))


def _backend_settings(config: ServerConfig, plugins: RunningPlugins) -> dict[str, Mapping[str, str]]:
    """Return the settings of the backends: those of the configuration, and below them those of plugins."""
    settings = dict(config.backends)
    for name, table in plugins.backend_settings():
        settings[name] = {**table, **settings.get(name, {})}
    return settings


def _gpu_loss_handler(table: ModelTable, devices: CudaDevices | None) -> Callable[[str | None, str], None]:
    """Return the function that handles the loss of a GPU, given its NVML UUID and the reason.

    The function ignores a GPU that CUDA does not show to this process.
    """
    numbers = {} if devices is None else devices.numbers()

    def mark_gpu_lost(uuid: str | None, reason: str) -> None:
        # Without a UUID, the GPU is known only if there is no other.
        number = numbers.get(uuid) if uuid is not None else (0 if len(numbers) == 1 else None)
        if number is not None:
            table.mark_gpu_lost(number, reason)

    return mark_gpu_lost


def _cache(config: ServerConfig) -> ResponseCache | None:
    chosen = choose_cache(config.cache)
    if chosen is None:
        return None
    # Imported only for a server with a cache.
    from edge_server.serving.cache.response_cache import make_cache

    return make_cache(chosen)


def _rate_limiter(config: RateLimitConfig) -> RateLimiter | None:
    if config.mode == "off":
        return None
    return RateLimiter({(name, device): count for name, count, device in config.resources})


def _lifecycle_settings(config: ServerConfig) -> LifecycleSettings:
    repository = config.repository
    return LifecycleSettings(
        load_retry_count=repository.load_retry_count,
        reload_policy=ReloadPolicy(repository.reload_policy),
        max_resident_models=repository.max_resident_models,
        idle_unload_s=repository.idle_unload_s,
        on_demand_timeout_s=repository.load_on_demand_timeout_s,
        hang_timeout_s=config.lifecycle.hang_timeout_s,
        latencies=LatencyOptions(
            is_on(config.metrics.latencies, "histogram_latencies", default=False), quantiles(config.metrics.latencies)
        ),
    )


def first_desired_state(config: RepositoryConfig, source: RepositorySource) -> dict[str, DesiredModel]:
    """Return the desired state at the start: all models, or in explicit mode the models of `--load-model`.

    Raises ServingFault when a repository cannot be read.
    """
    desired, warnings = source.desired_models()
    for warning in warnings:
        log.warning("%s", warning)
    if config.control_mode != "explicit" or "*" in config.load_models:
        return desired
    absent = {
        name: DesiredModel(name, reason=f"failed to load '{name}', failed to poll from model repository")
        for name in config.load_models
        if name not in desired
    }
    chosen = set(config.load_models)
    waiting = list(chosen)
    while waiting:
        # An ensemble also loads its members.
        model = desired.get(waiting.pop())
        members = {name for name, _ in model.members} - chosen if model is not None else set()
        chosen |= members
        waiting += members
    return {name: model for name, model in desired.items() if name in chosen} | absent
