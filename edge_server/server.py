"""The composition root: build, start, drain, stop. The only file that sees every part of the server.

The life of the process, from top to bottom: `build` makes the serving core; `Server.run` opens the front ends, works
off the first wish, says what is served, waits for a signal, drains, and closes everything in the reverse order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from edge_server import __version__
from edge_server.config import RepositoryConfig, ServerConfig
from edge_server.core.lifecycle import ModelWish
from edge_server.errors import EdgeServerError
from edge_server.memory.allocator import keep_big_blocks, trim
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.repository.poll import Poller
from edge_server.repository.resolve import ResolveOptions
from edge_server.repository.scan import Scanner
from edge_server.repository.source import RepositorySource
from edge_server.service import InferenceService
from edge_server.serving.manager import Manager
from edge_server.serving.timer import Timer
from edge_server.telemetry.events import MODEL_UNLOADED, EventBus
from edge_server.telemetry.host import HostSampler
from edge_server.telemetry.log import LogSettings
from edge_server.telemetry.metrics import Metrics
from edge_server.vision.plan import image_plan

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CANNOT_START = 2

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

    def close(self, timeout_s: float) -> bool:
        """Refuse, drain for at most `timeout_s`, close every model. False when requests had to be failed."""
        self.service.stop_taking()
        is_clean = self.manager.close(timeout_s)
        self.timer.close()
        self.source.close()
        return is_clean


def build(config: ServerConfig, log_settings: LogSettings) -> Core:
    """Make the serving core. Nothing is loaded yet. Raises EdgeServerError for a repository that cannot be read."""
    repository = config.repository
    scanner = Scanner([Path(path) for path in repository.paths], repository.model_config_name)
    scanner.names()
    options = ResolveOptions(auto_complete=not repository.is_auto_complete_disabled, checks=(image_plan,))
    source = RepositorySource(scanner, options)
    timer = Timer()
    events = EventBus()
    manager = Manager(timer, config.backends, load_threads=repository.load_thread_count, announce=events.publish)
    service = InferenceService(
        manager,
        source,
        SharedMemoryRegistry(config.memory.allows_client_shm),
        log_settings,
        server_id=config.lifecycle.server_id,
        server_version=__version__,
        is_explicit=repository.control_mode == "explicit",
        is_strict=config.lifecycle.is_readiness_strict,
    )
    events.subscribe(lambda event: trim() if event.kind == MODEL_UNLOADED else None)
    return Core(service, manager, source, timer, events)


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
    return {name: wish for name, wish in wishes.items() if name in config.load_models} | absent


def serve(config: ServerConfig, log_settings: LogSettings) -> int:
    """Serve until told to stop; return the exit code. Raises EdgeServerError when it cannot start as asked."""
    keep_big_blocks()
    core = build(config, log_settings)
    return asyncio.run(Server(config, core).run())


class Server:
    """One run of the server on one event loop."""

    def __init__(self, config: ServerConfig, core: Core) -> None:
        self._config = config
        self._core = core
        self._stop = asyncio.Event()
        self._addresses: list[str] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []

    async def run(self) -> int:
        """Open, load, serve, drain, close. Returns the exit code; raises EdgeServerError when a port is taken."""
        self._listen_to_signals()
        try:
            await self._open_front_ends()
            if not await self._load():
                return EXIT_FAILED
            await self._stop.wait()
            return 0 if await self._drain() else EXIT_FAILED
        finally:
            await self._close()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

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

        front = HttpFrontend(self._core.service, self._config.http)
        port = await front.start()
        self._closers.append(lambda: front.stop(_FRONT_END_GRACE_S))
        scheme = "https" if self._config.http.tls_cert else "http"
        self._addresses.append(f"HTTP {scheme}://{_host(self._config.http.address)}:{port}")

    async def _open_grpc(self) -> None:
        from edge_server.frontends.grpc.server import GrpcFrontend

        front = GrpcFrontend(self._core.service, self._config.grpc)
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
        front = MetricsFrontend(metrics.render, self._config.metrics.address, self._config.metrics.port)
        port = await front.start()
        self._closers.append(lambda: front.stop(_FRONT_END_GRACE_S))
        self._addresses.append(f"metrics http://{_host(self._config.metrics.address)}:{port}/metrics")

    async def _load(self) -> bool:
        """Work off the first wish, unless told to stop meanwhile. False when that must end the process."""
        repository = self._config.repository
        core = self._core
        wishes = first_wish(repository, core.source)
        core.manager.wish_for_all(wishes.values())
        loading = asyncio.ensure_future(asyncio.to_thread(core.manager.wait_settled))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stop.is_set():
            return True
        core.service.started()
        if repository.control_mode == "poll":
            poller = Poller(
                core.source, wishes, lambda wish: core.manager.wish_for_all(wish.values()), repository.poll_s
            )
            self._closers.append(lambda: asyncio.to_thread(poller.close))
        self._say_what_is_served()
        return not (self._config.lifecycle.exits_on_error and core.manager.has_failures())

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
            if entry.state == "UNAVAILABLE" and entry.reason != "unloaded"
        ]
        head = f"edge-server {__version__} is ready: {'; '.join(self._addresses)}"
        if self._config.http.address in ("127.0.0.1", "localhost", "::1"):
            head += " (this machine only; --http-address=0.0.0.0 --grpc-address=0.0.0.0 open it to others)"
        print("\n".join([head, *(lines or ["  no model is loaded"])]), flush=True)

    async def _drain(self) -> bool:
        timeout_s = self._config.lifecycle.exit_timeout_s
        in_flight = self._core.manager.in_flight()
        log.info("draining %d request(s), for at most %g s", in_flight, timeout_s)
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
        if self._stop.is_set():
            log.info("stopped")


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
