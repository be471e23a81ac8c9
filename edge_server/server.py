"""The composition root: build, start, drain, stop. The only file that sees every part of the server.

The life of the process, from top to bottom: `build` makes the serving core; `Server.run` opens the front ends, works
off the first wish, says what is served, waits for a signal, drains, and closes everything in the reverse order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server import __version__
from edge_server.backends import cuda_device
from edge_server.backends.cuda_device import CudaDevices
from edge_server.config import RateLimitConfig, RepositoryConfig, ServerConfig
from edge_server.core.exit_code import ExitCode
from edge_server.core.lifecycle import ModelWish, ReloadPolicy
from edge_server.core.model import ModelSpec
from edge_server.core.priority import priority_class
from edge_server.engines.chance import look
from edge_server.errors import EdgeServerError
from edge_server.frontends.frames.door import SERVICE as FRAME_SERVICE
from edge_server.frontends.frames.door import FrameDoor
from edge_server.frontends.frames.gate import FrameGate, NoGate
from edge_server.memory.allocator import keep_big_blocks, trim
from edge_server.memory.cuda_memory import CudaMemoryRegistry
from edge_server.memory.pressure import MemoryFloor
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.repository.pins import Pins
from edge_server.repository.remote.mirror import Mirrors
from edge_server.repository.resolve import ResolveOptions
from edge_server.repository.scan import Scanner
from edge_server.repository.source import RepositorySource
from edge_server.repository.trust.verify import trust_policy
from edge_server.repository.watch import Watcher
from edge_server.service import InferenceService
from edge_server.serving.cache.cache import ResponseCache
from edge_server.serving.cache.choice import make_cache
from edge_server.serving.gate import OPEN_GATE
from edge_server.serving.gpus import Gpus
from edge_server.serving.limiter import RateLimiter
from edge_server.serving.limits import Limits
from edge_server.serving.manager import Manager
from edge_server.serving.timer import Timer
from edge_server.supervision import EndRequest, HungRuns, Supervision, Surroundings, summary
from edge_server.telemetry.cache import cache_families
from edge_server.telemetry.cuda_memory import cuda_memory_families
from edge_server.telemetry.custom import custom_families
from edge_server.telemetry.events import MODEL_FAILED, MODEL_READY, MODEL_UNLOADED, EventBus
from edge_server.telemetry.host import HostSampler
from edge_server.telemetry.loads import LoadCounts
from edge_server.telemetry.log import RELOADED as LOG_NAMES
from edge_server.telemetry.log import LogSettings
from edge_server.telemetry.metrics import Metrics
from edge_server.telemetry.service_manager import Check
from edge_server.telemetry.trace import Traces

if TYPE_CHECKING:
    from edge_server.engines.works import EngineWorks
    from edge_server.governor.governor import Governor

log = logging.getLogger(__name__)

_GOVERNOR_PATIENCE_S = 15.0
"""How long the governor's loop, which turns twice a second and more, may not come round and still count as alive."""

_CLOSING_S = 15.0
"""How long closing models and front ends may take after the drain; told to a service manager."""

_FREES_MEMORY = frozenset({MODEL_READY, MODEL_FAILED, MODEL_UNLOADED})
"""Events after which much of what the allocator keeps is free: loading takes several times a model's size."""

_TRACES_S = 3.0
"""How long writing the last traces may take, and telling a collector of them."""

_FRONT_END_GRACE_S = 2.0
"""How long a front end may take to write the last answers once nothing is in flight any more."""


@dataclass(frozen=True, slots=True)
class Core:
    """The serving core without front ends: what `serve` puts on the wire and `check` uses in place."""

    service: InferenceService
    manager: Manager
    source: RepositorySource
    timer: Timer
    events: EventBus
    loads: LoadCounts
    mirrors: Mirrors
    governor: Governor | None = None
    cache: ResponseCache | None = None
    engines: EngineWorks | None = None
    lose_gpu: Callable[[str | None, str], None] = lambda uuid, reason: None
    """Takes in that NVML has lost a GPU, by its UUID, with the reason."""

    def close(self, timeout_s: float) -> bool:
        """Refuse, drain for at most `timeout_s`, close every model. False when requests had to be failed."""
        self.service.stop_taking()
        if self.governor is not None:
            self.governor.room.end()
        if self.engines is not None:
            self.engines.end()
        is_clean = self.manager.close(timeout_s)
        if self.engines is not None:
            self.engines.close()
        if self.cache is not None:
            self.cache.close()
        self.timer.close()
        if self.governor is not None:
            self.governor.close()
        self.mirrors.close()
        self.source.close()
        return is_clean


def build(config: ServerConfig, log_settings: LogSettings) -> Core:
    """Make the serving core. Nothing is loaded yet. Raises EdgeServerError for a repository that cannot be read."""
    repository = config.repository
    mirrors = Mirrors(
        repository.paths, repository.cache_dir, repository.poll_s, follows=repository.control_mode != "none"
    )
    scanner = Scanner(
        mirrors.roots,
        repository.model_config_name,
        allows_external_links=repository.allows_external_links,
    )
    scanner.check_roots()
    chance = look(config.engines)
    options = ResolveOptions(
        auto_complete=not repository.is_auto_complete_disabled,
        checks=(_check_vision, priority_class),
        trust=trust_policy(repository.requires_checksums, repository.public_key),
    )
    if chance is not None:
        options = replace(options, gpu_count=chance.gpu_count, onnx_order=chance.onnx_order)
    devices = cuda_device.find()
    gpus = Gpus(devices, dict(config.memory.gpu_load_limits))
    options = replace(options, gpu_count=options.gpu_count or (devices.count if devices else 0), lost_gpus=gpus.lost)
    pins = Pins(Path(repository.state_dir) if repository.state_dir else None)
    source = RepositorySource(scanner, options, pins=pins)
    timer = Timer()
    events = EventBus()
    cache = make_cache(config.cache)
    governor = _governor(config)
    memory = MemoryFloor(config.memory.floor_mb << 20, config.memory.pressure_limit_percent)
    manager = Manager(
        timer,
        _with_model_cache(config),
        load_threads=repository.load_thread_count,
        announce=events.publish,
        limits=_limits(config),
        gate=OPEN_GATE if governor is None else governor.gate,
        ask_room=memory.refusal if governor is None else governor.room.after(memory.refusal),
        limiter=_limiter(config.rate_limit),
        cache=cache,
    )
    service = InferenceService(
        manager,
        source,
        _shared_memory(config.memory.allows_client_shm, devices),
        log_settings,
        server_id=config.lifecycle.server_id,
        server_version=__version__,
        is_explicit=repository.control_mode == "explicit",
        is_strict=config.lifecycle.is_readiness_strict,
        events=events,
        traces=Traces(config.trace),
    )
    manager.let_models_call(service)
    manager.use_gpus(gpus)
    engines = None if chance is None else _engines(config, manager, events, governor)
    service.engines = engines
    events.subscribe(lambda event: trim() if event.kind in _FREES_MEMORY else None)
    events.subscribe(service.variants.receive)
    loads = LoadCounts(manager.versions)
    events.subscribe(loads.receive)
    lose_gpu = _lose_gpu(manager, devices)
    return Core(service, manager, source, timer, events, loads, mirrors, governor, cache, engines, lose_gpu)


def _shared_memory(is_allowed: bool, devices: CudaDevices | None) -> SharedMemoryRegistry:
    if devices is None:
        reason = cuda_device.missing() or "the NVIDIA driver does not answer"
        return SharedMemoryRegistry(is_allowed, CudaMemoryRegistry(is_allowed, reason, cuda_device.CudaDevices))
    return SharedMemoryRegistry(is_allowed, CudaMemoryRegistry(is_allowed, "", lambda: devices))


def _with_model_cache(config: ServerConfig) -> dict[str, Mapping[str, str]]:
    """Return the backends' settings, OpenVINO's with the folder where it keeps what it compiled for GPUs and NPUs."""
    settings = dict(config.backends)
    if config.engines.cache_dir:
        folder = {"MODEL_CACHE_DIR": str(Path(config.engines.cache_dir).parent / "openvino")}
        settings["openvino"] = {**folder, **settings.get("openvino", {})}
    return settings


def _lose_gpu(manager: Manager, devices: CudaDevices | None) -> Callable[[str | None, str], None]:
    """Return what takes in that NVML has lost the GPU of an identity, and why; it is one of another process's, or not
    known by that identity here, when nothing happens."""
    numbers = {} if devices is None else devices.numbers()

    def lose(uuid: str | None, reason: str) -> None:
        # A GPU that was lost before it told who it is can only be meant when there is no other.
        number = numbers.get(uuid) if uuid is not None else (0 if len(numbers) == 1 else None)
        if number is not None:
            manager.lose_gpu(number, reason)

    return lose


def _check_vision(spec: ModelSpec) -> None:
    """Raise BadModelConfig when what a model declares of pictures and of what is seen in them does not suit it."""
    if spec.parameters:
        # Not imported for models that declare nothing: a server without pictures does without.
        from edge_server.vision.perception import perception_plan
        from edge_server.vision.plan import image_plan

        image_plan(spec)
        perception_plan(spec)


def copy_first(config: RepositoryConfig, mirrors: Mirrors) -> None:
    """Begin to copy remote repositories and wait for what the first wish needs of them. Raises ServingFault."""
    mirrors.start(config.first_sync_s, is_polled=config.control_mode == "poll")


def _engines(config: ServerConfig, manager: Manager, events: EventBus, governor: Governor | None) -> EngineWorks | None:
    from edge_server.engines.compose import make_works

    def may_build() -> str:
        """Return why no engine is built now, "" when one may be."""
        decision = None if governor is None else governor.decision()
        if decision is None or decision.may_load:
            return ""
        return f"the box is {decision.level.name}: {decision.detail}"

    return make_works(
        config.engines,
        manager,
        events.publish,
        may_build,
        floor_mb=config.memory.floor_mb,
        root=Path(config.governor.sysfs_root),
    )


def _governor(config: ServerConfig) -> Governor | None:
    if not config.governor.is_enabled:
        return None
    from edge_server.governor.governor import Governor

    state_dir = config.repository.state_dir
    memory = Path(state_dir) / "clock_cap.json" if state_dir else None
    return Governor(config.governor, memory, has_gpu_metrics=config.metrics.has_gpu_metrics)


def _limiter(config: RateLimitConfig) -> RateLimiter | None:
    if config.mode == "off":
        return None
    return RateLimiter({(name, device): count for name, count, device in config.resources})


def _limits(config: ServerConfig) -> Limits:
    repository = config.repository
    return Limits(
        load_retry_count=repository.load_retry_count,
        reload_policy=ReloadPolicy(repository.reload_policy),
        max_resident_models=repository.max_resident_models,
        idle_unload_s=repository.idle_unload_s,
        on_demand_timeout_s=repository.load_on_demand_timeout_s,
        hang_timeout_s=config.lifecycle.hang_timeout_s,
    )


def first_wish(config: RepositoryConfig, source: RepositorySource) -> dict[str, ModelWish]:
    """Return what is to be served at the start: everything, or in explicit mode what `--load-model` names.

    Raises ServingFault when a repository cannot be read.
    """
    wishes, warnings = source.wishes()
    for warning in warnings:
        log.warning("%s", warning)
    if config.control_mode != "explicit" or "*" in config.load_models:
        return wishes
    absent = {
        name: ModelWish(name, reason=f"failed to load '{name}', failed to poll from model repository")
        for name in config.load_models
        if name not in wishes
    }
    chosen = set(config.load_models)
    waiting = list(chosen)
    while waiting:
        # An ensemble brings what it is made of.
        wish = wishes.get(waiting.pop())
        members = {name for name, _ in wish.members} - chosen if wish is not None else set()
        chosen |= members
        waiting += members
    return {name: wish for name, wish in wishes.items() if name in chosen} | absent


def serve(config: ServerConfig, log_settings: LogSettings, surroundings: Surroundings | None = None) -> int:
    """Serve until told to stop; return the exit code. Raises EdgeServerError when it cannot start as asked."""
    keep_big_blocks()
    core = build(config, log_settings)
    return asyncio.run(Server(config, core, surroundings or Surroundings(), log_settings).run())


class Server:
    """One run of the server on one event loop."""

    def __init__(self, config: ServerConfig, core: Core, surroundings: Surroundings, log_settings: LogSettings) -> None:
        self._config = config
        self._core = core
        self._supervision = Supervision(config, surroundings, self._checks(), lambda: summary(core.manager.index()))
        self._supervision.add_reload(LOG_NAMES, lambda new: log_settings.take(new.log))
        self._supervision.add_reload(("repository.public_key", "repository.requires_checksums"), self._renew_trust)
        gate: FrameGate = NoGate() if core.governor is None else core.governor.gate
        self._frames = FrameDoor(core.service, gate, config.frames)
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.end = EndRequest(self._wake)
        if config.lifecycle.exits_on_gpu_loss:
            core.manager.on_stranded = lambda reason: self.end.give(ExitCode.GPU_LOST, reason)
        self._addresses: list[str] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []

    async def run(self) -> int:
        """Open, load, serve, drain, close. Returns the exit code; raises EdgeServerError when a port is taken."""
        self._loop = asyncio.get_running_loop()
        self._listen_to_signals()
        self._start_governor()
        self._supervision.begin()
        try:
            await self._open_front_ends()
            if not await self._load():
                return ExitCode.FAILED
            await self._stop.wait()
            is_clean = await self._drain()
            return self.end.code or (ExitCode.OK if is_clean else ExitCode.FAILED)
        finally:
            await self._close()

    def _start_governor(self) -> None:
        governor, core = self._core.governor, self._core
        if governor is None:
            return
        from edge_server.governor.sampler import ServerSide

        governor.start(
            ServerSide(
                statistics=lambda: core.service.statistics(None, None),
                refused_frames=self._frames.refused_counts,
                pairs=core.service.variants.pairs,
                use_variants=core.service.variants.choose,
                look_again=core.manager.look_again,
                announce=core.events.publish,
                lose_gpu=lambda gpu: core.lose_gpu(gpu.uuid, f"NVML: {next(iter(gpu.missing.values()), 'it is lost')}"),
            )
        )

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        # Who starts a server in a terminal expects it to end with the terminal.
        if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
            loop.add_signal_handler(signal.SIGHUP, self._supervision.reload)

    def _checks(self) -> list[Check]:
        """Return what the watchdog of a service manager asks, besides the loop itself."""
        lifecycle, governor = self._config.lifecycle, self._core.governor
        limits = [limit for limit in (lifecycle.hang_timeout_s, lifecycle.watchdog_run_limit_s) if limit > 0]
        checks: list[Check] = [HungRuns(self._core.manager.living, min(limits, default=0.0), time.monotonic_ns)]
        if governor is not None:
            checks.append(lambda: _problem_of_governor(governor.idle_s()))
        return checks

    def _renew_trust(self, config: ServerConfig) -> None:
        self._core.source.use_trust(trust_policy(config.repository.requires_checksums, config.repository.public_key))

    def _wake(self) -> None:
        """Have the loop end the server, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            # The second signal means now: no drain, no clean-up.
            os._exit(128 + number)
        log.info("signal %d: taking nothing new, finishing what is in flight", number)
        self._stop.set()

    async def _open_front_ends(self) -> None:
        if self._config.http.is_enabled:
            await self._open_http()
        if self._config.grpc.is_enabled:
            await self._open_grpc()
        if self._config.metrics.is_enabled:
            await self._open_metrics()

    async def _open_http(self) -> None:
        from edge_server.frontends.http.frontend import HttpFrontend

        front = HttpFrontend(
            self._core.service,
            self._config.http,
            streams=self._frames.reports,
            governor=self._core.governor,
            engines=self._core.engines,
        )
        port = await front.start()
        self._supervision.add_reload(
            ("http.tls_cert", "http.tls_key"), lambda new: front.renew_tls(new.http.tls_cert, new.http.tls_key)
        )
        self._closers.append(lambda: front.stop(_FRONT_END_GRACE_S))
        scheme = "https" if self._config.http.tls_cert else "http"
        self._addresses.append(f"HTTP {scheme}://{_host(self._config.http.address)}:{port}")

    async def _open_grpc(self) -> None:
        from edge_server.frontends.grpc.handlers import StreamService
        from edge_server.frontends.grpc.server import GrpcFrontend

        frames = StreamService(FRAME_SERVICE, {"Stream": self._frames.answers})
        front = GrpcFrontend(self._core.service, self._config.grpc, [frames])
        port = front.start()
        self._closers.append(lambda: asyncio.to_thread(front.stop, _FRONT_END_GRACE_S))
        self._addresses.append(f"gRPC {_host(self._config.grpc.address)}:{port}")

    async def _open_metrics(self) -> None:
        from edge_server.frontends.http.metrics import MetricsFrontend

        service = self._core.service
        metrics = Metrics(
            statistics=lambda: service.statistics(None, None),
            reports=service.instance_reports,
            tags=service.metric_tags,
            host=HostSampler(self._config.metrics.interval_ms / 1000) if self._config.metrics.has_cpu_metrics else None,
        )
        metrics.add_source(self._core.loads.families)
        metrics.add_source(self._frames.families)
        metrics.add_source(custom_families(service.model_families))
        cuda = self._core.service.shared_memory.cuda
        if cuda.is_usable:
            metrics.add_source(cuda_memory_families(lambda: (cuda.copies.read_bytes, cuda.copies.written_bytes)))
        if self._core.cache is not None:
            metrics.add_source(cache_families(self._core.cache.statistics))
        if self._core.governor is not None:
            metrics.add_source(self._core.governor.families)
        if self._core.engines is not None:
            metrics.add_source(self._core.engines.families)
        front = MetricsFrontend(metrics.render, self._config.metrics.address, self._config.metrics.port)
        port = await front.start()
        self._closers.append(lambda: front.stop(_FRONT_END_GRACE_S))
        self._addresses.append(f"metrics http://{_host(self._config.metrics.address)}:{port}/metrics")

    async def _load(self) -> bool:
        """Work off the first wish, unless told to stop meanwhile. False when that must end the process."""
        core = self._core
        if not await self._until_stopped(lambda: copy_first(self._config.repository, core.mirrors)):
            return True
        await self._state_first_wish()
        if not await self._until_stopped(core.manager.wait_settled):
            return True
        core.service.started()
        if core.engines is not None:
            core.engines.start()
        self._say_what_is_served()
        if self._config.lifecycle.exits_on_error and core.manager.has_failures():
            return False
        self._supervision.started()
        return True

    async def _state_first_wish(self) -> None:
        """Say what is to be served at the start; in mode poll, follow the repositories from then on."""
        repository, core = self._config.repository, self._core
        if repository.control_mode != "poll":
            core.service.wish_for_all(first_wish(repository, core.source))
            return
        watcher = Watcher(core.source, core.service.wish_for_all, repository.poll_s)
        self._closers.append(lambda: asyncio.to_thread(watcher.close))
        core.service.wish_for_all(await asyncio.to_thread(watcher.first))
        watcher.start()
        self._supervision.add_reload((), lambda _: watcher.look_soon())

    async def _until_stopped(self, work: Callable[[], object]) -> bool:
        """Wait for work on a thread; False when the order to stop came first. Raises what the work raises."""
        working = asyncio.ensure_future(asyncio.to_thread(work))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stop.is_set():
            return False
        await working
        return True

    def _say_what_is_served(self) -> None:
        service = self._core.service
        lines = []
        for report in service.instance_reports():
            lines.append(
                f"  {report.name} version {report.version}: {report.runtime} on {report.device}, {report.precision}, "
                f"{report.instance_count} instance(s), loaded in {report.load_s * 1000:.0f} ms"
            )
        lines += [
            f"  {entry.name} {'version ' + entry.version if entry.version else ''} is NOT served: {entry.reason}"
            for entry in service.repository_index()
            if entry.state == "UNAVAILABLE" and not entry.reason.startswith("unloaded")
        ]
        head = f"edge-server {__version__} is ready: {'; '.join(self._addresses)}"
        if self._config.http.address in ("127.0.0.1", "localhost", "::1"):
            head += " (this machine only; --http-address=0.0.0.0 --grpc-address=0.0.0.0 open it to others)"
        print("\n".join([head, *(lines or ["  no model is loaded"])]), flush=True)

    async def _drain(self) -> bool:
        timeout_s = self._config.lifecycle.exit_timeout_s
        self._supervision.stopping(timeout_s + _CLOSING_S)
        in_flight = self._core.manager.in_flight()
        log.info("draining %d request(s), for at most %g s", in_flight, timeout_s)
        # Before the core refuses work: streams end with their last results, not with a refusal for each frame.
        self._frames.stop()
        is_clean = await asyncio.to_thread(self._core.close, timeout_s)
        if not is_clean:
            log.error("requests were still in flight after %g s and were failed", timeout_s)
        return is_clean

    async def _close(self) -> None:
        """Close what was opened, newest first; one that fails to close does not keep the others open."""
        if not self._stop.is_set():
            await asyncio.to_thread(self._core.close, 0.0)
        for close in reversed(self._closers):
            try:
                await close()
            except EdgeServerError as error:
                log.error("closing: %s", error)
        await asyncio.to_thread(self._core.service.traces.close, _TRACES_S)
        await self._supervision.end()
        if self._stop.is_set():
            log.info("stopped")


def _problem_of_governor(idle_s: float) -> str:
    return "" if idle_s < _GOVERNOR_PATIENCE_S else f"the governor's loop has not come round for {idle_s:.0f} s"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
