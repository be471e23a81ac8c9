"""Run of the server process: opens the ports, loads the first models, waits for a signal, lets the open requests
finish, and stops.

`composition_root.build` makes the serving core. `ServerProcess.run` opens the front ends, reaches the first desired
state, prints the served models, waits for a signal, drains, and closes everything in reverse order. Only these two
modules know every part of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.config import ServerConfig
from edge_server.config.latency_metrics import is_on
from edge_server.core.exit_code import ExitCode
from edge_server.core.status_reports import InstanceReport
from edge_server.errors import EdgeServerError
from edge_server.forked_signals import reset_in_forked_children
from edge_server.frontends.access_control import (
    find_unprotected_categories,
    open_without_token,
    required_picture_access,
)
from edge_server.frontends.certificate_expiry import read_expiry
from edge_server.frontends.connection_limit import ConnectionLimit, raise_file_limit
from edge_server.frontends.grpc.call import MAX_MESSAGE_BYTES
from edge_server.frontends.memory_budget import MemoryBudget, budget_bytes
from edge_server.frontends.reading_thread_count import reading_thread_count
from edge_server.memory.available_memory import limit_warning
from edge_server.memory.malloc_settings import keep_big_blocks
from edge_server.plugin import Plugin
from edge_server.process.composition_root import ServerParts, build, first_desired_state
from edge_server.process.systemd_supervision import EndRequest, HungRunCheck, ProcessEnvironment, Supervision, summary
from edge_server.repository.trust.verify_version import trust_policy
from edge_server.telemetry.host_usage import HostSampler
from edge_server.telemetry.log import RELOADED as LOG_NAMES
from edge_server.telemetry.log import LogSettings
from edge_server.telemetry.metric_sources import (
    cache_families,
    certificate_families,
    cuda_memory_families,
    custom_families,
    disk_families,
)
from edge_server.telemetry.metrics_page import Metrics
from edge_server.telemetry.systemd_notify import Check
from edge_server.version import __version__

if TYPE_CHECKING:
    from edge_server.frontends.grpc.server import GrpcFrontend

log = logging.getLogger(__name__)

_CLOSING_S = 15.0
"""Longest time to close models and front ends after the drain; reported to systemd."""

_TRACES_S = 3.0
"""Longest time to write the last traces or to send them to a collector."""

_SWITCH_S = 0.0005
"""Switch interval of the interpreter: the time that a computing Python thread, e.g. a model, keeps the interpreter lock
while other threads wait. With Python's default of 5 ms, a small request beside such a model took 11 ms, now 1.2 ms."""

_LISTED_MODELS = 8
"""So many models have a line each at the start; of more, those that run alike share one."""

_ENGINE_WAIT_S = 60.0
"""Longest time for which gRPC refuses connections only because loads build engines, which can take many minutes."""

_FRONT_END_GRACE_S = 2.0
"""Longest time for a front end to write the last responses after the drain."""


def serve(
    config: ServerConfig,
    log_settings: LogSettings,
    environment: ProcessEnvironment | None = None,
    plugins: Sequence[Plugin] = (),
) -> int:
    """Serve until a signal or an internal request ends the server; return the exit code. Raises EdgeServerError if it
    cannot start as configured."""
    keep_big_blocks()
    raise_file_limit()
    sys.setswitchinterval(_SWITCH_S)
    end = EndRequest()
    on_no_fallback = partial(end.submit, ExitCode.GPU_LOST) if config.lifecycle.exits_on_gpu_loss else None
    core = build(config, log_settings, plugins, on_no_fallback)
    process = ServerProcess(config, core, environment or ProcessEnvironment(), log_settings, end)

    # Modules and settings stay until the end: full collections, which stop all threads, need not visit them.
    gc.freeze()
    gc.enable()

    async def run() -> int:
        process.add_signal_handlers()
        return await process.run(process.print_served_models)

    return asyncio.run(run())


class ServerProcess:
    """One run of the server on one event loop. `ports` has the open ports by name: http, grpc, metrics."""

    def __init__(
        self,
        config: ServerConfig,
        core: ServerParts,
        environment: ProcessEnvironment,
        log_settings: LogSettings,
        end: EndRequest,
    ) -> None:
        self._config = config
        self._core = core
        self._supervision = Supervision(
            config, environment, self._checks(), lambda: summary(core.service.router.index())
        )
        self._supervision.add_reload(LOG_NAMES, lambda new: log_settings.reload(new.log))
        self._supervision.add_reload(
            ("repository.public_key", "repository.requires_checksums"),
            lambda new: core.source.use_trust(
                trust_policy(new.repository.requires_checksums, new.repository.public_key)
            ),
        )
        self._tokens = core.access.tokens
        if config.auth.tokens_file:
            self._tokens.load(config.auth.tokens_file)
            self._supervision.add_reload(("auth.tokens_file",), self._reload_tokens)
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._must_stop = False
        self.end = end
        end.notify(self.stop)
        self._addresses: list[str] = []
        self.ports = core.ports
        self._tls: ssl.SSLContext | None = None
        self._certificate_expiries: dict[str, float] = {}
        largest_body = config.http.max_input_size_bytes
        budget = budget_bytes(config.http.max_body_bytes_in_flight, max(largest_body, MAX_MESSAGE_BYTES))
        self._budget = MemoryBudget(budget, largest_body)
        self._connection_limit = ConnectionLimit()
        self.metrics = self._make_metrics()
        self._grpc: GrpcFrontend | None = None
        self._grpc_waits = False
        """Whether the address of gRPC is bound, but connections are refused."""
        self._closers: list[Callable[[], Awaitable[None]]] = []

    async def run(self, on_started: Callable[[], None]) -> int:
        """Open the front ends, load, serve, drain and close. Return the exit code.

        `on_started` is called on the event loop when each model is loaded or has failed. Raises EdgeServerError when a
        port is taken.
        """
        self._loop = asyncio.get_running_loop()
        if self._must_stop:
            self._stop.set()
        try:
            self._core.plugins.start()
            self._supervision.begin()
            await self._open_front_ends()
            if not await self._load(on_started):
                return ExitCode.FAILED
            await self._stop.wait()
            is_clean = await self._drain()
            return self.end.code or (ExitCode.OK if is_clean else ExitCode.FAILED)
        finally:
            await self._close()

    def stop(self) -> None:
        """Make `run` drain, close and return. Returns at once. For any thread."""
        self._must_stop = True
        if self._loop is not None:
            # The loop is closed if the server has ended by itself.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)

    def add_signal_handlers(self) -> None:
        """Drain at SIGTERM and SIGINT, reload settings at SIGHUP. For the main thread's event loop."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        # A server started in a terminal ends with the terminal: SIGHUP keeps its default effect there.
        if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
            loop.add_signal_handler(signal.SIGHUP, self._supervision.reload)
            numbers.append(signal.SIGHUP)
        # For processes that Python models fork.
        reset_in_forked_children(numbers)

    def _checks(self) -> list[Check]:
        """Return the checks of the systemd watchdog, in addition to that of the event loop."""
        lifecycle = self._config.lifecycle
        limits = [limit for limit in (lifecycle.hang_timeout_s, lifecycle.watchdog_run_limit_s) if limit > 0]
        return [
            HungRunCheck(self._core.service.table.loaded_versions, min(limits, default=0.0), time.monotonic_ns),
            self._core.plugins.problem,
        ]

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            # A second signal ends the process at once: no drain, no clean-up.
            os._exit(128 + number)
        log.info("signal %d: stopping", number)
        self._stop.set()

    async def _open_front_ends(self) -> None:
        if self._config.http.is_enabled:
            await self._open_http()
        if self._config.grpc.is_enabled:
            await self._open_grpc()
        self._addresses += self._core.plugins.addresses()
        if self._config.metrics.is_enabled:
            await self._open_metrics()
        self._log_open_categories()
        if self._grpc_waits:
            log.info("gRPC opens port %d when each model is loaded or has failed", self.ports["grpc"])

    def _reload_tokens(self, new: ServerConfig) -> None:
        kept = ",".join(sorted(self._tokens.load(new.auth.tokens_file)))
        self._log_open_categories()
        if kept:
            log.warning(
                "no line of '%s' names them any more, but each stays closed until a restart: %s; add 'protect %s' to "
                "keep them closed then too",
                new.auth.tokens_file,
                kept.replace(",", ", "),
                kept,
            )

    def _log_open_categories(self) -> None:
        if open_categories := open_without_token(self._config, self._tokens.requires_token):
            log.info("%s", open_categories)

    async def _open_http(self) -> None:
        from edge_server.frontends.http.event_endpoints import EventEndpoints
        from edge_server.frontends.http.frontend import HttpFrontend
        from edge_server.process.http_routes import http_routes

        service = self._core.service
        front = HttpFrontend(
            service,
            self._config.http,
            access=self._core.access,
            budget=self._budget,
            limit=self._connection_limit,
            body_decoders=self._core.plugins.body_decoders(),
            thread_count=reading_thread_count(),
        )
        events = EventEndpoints(service.events)
        routes = http_routes(
            front,
            service,
            self._config.http,
            events,
            plugin_routes=self._core.plugins.routes(),
            health_headers=self._core.plugins.health_headers,
            allows_code_upload=self._config.repository.allows_code_upload,
        )
        events.open()
        port = await front.start(routes, self._core.plugins.refusal_body)
        self.ports["http"] = port
        if self._config.http.tls_cert:
            self._note_expiry("http", self._config.http.tls_cert)

            def renew_tls(new: ServerConfig) -> None:
                front.renew_tls(new.http.tls_cert, new.http.tls_key, new.http.client_ca)
                self._note_expiry("http", new.http.tls_cert)

            self._supervision.add_reload(("http.tls_cert", "http.tls_key", "http.client_ca"), renew_tls)
        self._tls = front.tls

        async def stop() -> None:
            events.close()  # else their streams would last for the whole time of grace
            await front.stop(_FRONT_END_GRACE_S)

        self._closers.append(stop)
        scheme = "https" if self._config.http.tls_cert else "http"
        self._addresses.append(f"HTTP {scheme}://{_host(self._config.http.address)}:{port}")

    def _note_expiry(self, wire: str, certificate: str) -> None:
        """Keep when the certificate that new connections get expires, for the metrics page."""
        self._certificate_expiries[wire] = read_expiry(certificate)

    async def _open_grpc(self) -> None:
        from edge_server.frontends.grpc.server import GrpcFrontend

        front = GrpcFrontend(
            self._core.service,
            self._config.grpc,
            self._core.plugins.rpcs(),
            budget=self._budget,
            allows_code_upload=self._config.repository.allows_code_upload,
            tokens=self._tokens,
            limit=self._connection_limit,
            thread_count=reading_thread_count(),
        )
        repository = self._config.repository
        loads_nothing = repository.control_mode == "explicit" and not repository.load_models
        self._grpc_waits = self._config.grpc.listen == "when-loaded" and not loads_nothing
        port = front.start(accepts=not self._grpc_waits)
        if self._config.grpc.is_tls:
            self._note_expiry("grpc", self._config.grpc.server_cert)

            def renew_tls(new: ServerConfig) -> None:
                front.renew_tls(new.grpc)
                self._note_expiry("grpc", new.grpc.server_cert)

            self._supervision.add_reload(("grpc.server_cert", "grpc.server_key", "grpc.root_cert"), renew_tls)
        self._grpc = front
        self.ports["grpc"] = port
        self._closers.append(lambda: asyncio.to_thread(front.stop, _FRONT_END_GRACE_S))
        tls = " with TLS" if self._config.grpc.is_tls else ""
        self._addresses.append(f"gRPC {_host(self._config.grpc.address)}:{port}{tls}")

    def _make_metrics(self) -> Metrics:
        service = self._core.service
        metrics = Metrics(
            statistics=lambda: service.statistics(None, None),
            reports=service.instance_reports,
            tags=service.metric_tags,
            has_latency_counters=is_on(self._config.metrics.latencies, "counter_latencies", default=True),
            host=HostSampler(self._config.metrics.interval_ms / 1000) if self._config.metrics.has_cpu_metrics else None,
        )
        for source in (self._budget.families, self._core.loads.families):
            metrics.add_source(source)
        metrics.add_source(self._tokens.families)
        metrics.add_source(certificate_families(self._certificate_expiries))
        if self._config.repository.state_dir:
            metrics.add_source(disk_families(self._config.repository.state_dir))
        metrics.add_source(custom_families(service.model_families))
        cuda = self._core.service.shared_memory.cuda
        if cuda.is_usable:
            metrics.add_source(cuda_memory_families(lambda: (cuda.copies.read_bytes, cuda.copies.written_bytes)))
        if self._core.cache is not None:
            metrics.add_source(cache_families(self._core.cache.statistics))
        metrics.add_source(lambda: list(self._core.plugins.families()))
        return metrics

    async def _open_metrics(self) -> None:
        from edge_server.frontends.http.metrics_endpoint import MetricsFrontend

        front = MetricsFrontend(
            self.metrics.render,
            self._config.metrics.address,
            self._config.metrics.port,
            self._tls,
            access=self._core.access,
            allowed_hosts=self._config.http.allowed_hosts,
            limit=self._connection_limit,
        )
        port = await front.start()
        self.ports["metrics"] = port
        self._closers.append(lambda: front.stop(_FRONT_END_GRACE_S))
        scheme = "http" if self._tls is None else "https"
        self._addresses.append(f"metrics {scheme}://{_host(self._config.metrics.address)}:{port}/metrics")

    async def _load(self, on_started: Callable[[], None]) -> bool:
        """Reach the first desired state, unless the server is stopped before that. Return False if the process must
        end."""
        core = self._core
        if not await self._run_unless_stopped(core.plugins.before_first_scan):
            return True
        await self._set_first_desired_state()
        await asyncio.to_thread(self._warn_of_memory_limit)
        await asyncio.to_thread(core.plugins.models_known)
        building = asyncio.ensure_future(self._accept_grpc_while_engines_build())
        is_settled = await self._run_unless_stopped(core.service.table.wait_settled)
        building.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await building
        if not is_settled:
            return True
        core.service.started()
        core.plugins.models_settled()
        must_end = self._config.lifecycle.exits_on_error and core.service.router.has_failures()
        if not must_end:
            self._accept_grpc()
            # Before the ready line is printed: its reader may send a signal at once.
            self._supervision.started()
        on_started()
        # A server without a model may stay so, and its first message can wait for what would take 4 MB.
        if not must_end and self._grpc is not None and core.service.router.all_ready():
            asyncio.get_running_loop().run_in_executor(None, self._grpc.prepare)
        return not must_end

    def _warn_of_memory_limit(self) -> None:
        # Before the models are loaded: afterwards it may be too late.
        served = [item for item in self._core.service.repository_index() if item.state in ("LOADING", "READY")]
        roots = [Path(path) for path in self._config.repository.paths]
        if served and (warning := limit_warning(root / item.name / item.version for root in roots for item in served)):
            log.warning("%s", warning)

    def _accept_grpc(self) -> None:
        if self._grpc_waits and self._grpc is not None:
            self._grpc_waits = False
            self._grpc.accept_connections()

    async def _accept_grpc_while_engines_build(self) -> None:
        """Let gRPC accept connections after _ENGINE_WAIT_S, as soon as only engine builds are waited for."""
        table = self._core.service.table
        end_s = time.monotonic() + _ENGINE_WAIT_S
        await asyncio.to_thread(table.wait_engine_builds)
        await asyncio.sleep(end_s - time.monotonic())
        if self._grpc_waits and not table.wait_settled(timeout_s=0):
            log.warning("gRPC accepts connections, although engines are still being built")
            self._accept_grpc()

    async def _set_first_desired_state(self) -> None:
        """Set the first desired state. In mode poll, follow the repositories from then on."""
        repository, core = self._config.repository, self._core
        if repository.control_mode != "poll":
            # Not on the event loop: a disk that hangs must not delay the handling of signals.
            core.service.set_desired_state(await asyncio.to_thread(first_desired_state, repository, core.source))
            return
        from edge_server.repository.disk.watch import Watcher

        watcher = Watcher(core.source, core.service.set_desired_state, repository.poll_s)
        self._closers.append(lambda: asyncio.to_thread(watcher.close))
        core.service.set_desired_state(await asyncio.to_thread(watcher.scan_first))
        watcher.start()
        self._supervision.add_reload((), lambda _: watcher.scan_soon())

    async def _run_unless_stopped(self, work: Callable[[], object]) -> bool:
        """Run `work` on a thread and wait for its end. Return False if the server is stopped first. Raises errors of
        `work`."""
        working = asyncio.ensure_future(asyncio.to_thread(work))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stop.is_set():
            return False
        await working
        return True

    def print_served_models(self) -> None:
        """Print the ready line: version, addresses, and each model with how it runs or why it is not served."""
        service = self._core.service
        lines = _describe_served(list(service.instance_reports()))
        lines += [
            f"  {entry.name}{' version ' + entry.version if entry.version else ''} is NOT served: {entry.reason}"
            for entry in service.repository_index()
            if entry.state == "UNAVAILABLE" and not entry.reason.startswith("unloaded")
        ]
        if not service.is_ready():
            lines.append(
                "  /v2/health/ready answers 400, so that load balancers send nothing, until every model is served "
                "(--strict-readiness=false changes that)"
            )
        lines = [self._first_line(), *(lines or ["  no model is loaded"])]
        if self._config.repository.is_demo and "http" in self.ports:
            from edge_server.process.demo_first_steps import demo_lines

            lines += demo_lines(self._config.http, self.ports["http"])
        print("\n".join(lines), flush=True)

    def _first_line(self) -> str:
        """Return the ready line, with what a user should know of who may use the server."""
        first_line = f"edge-server {__version__} is ready: {'; '.join(self._addresses)}"
        if self._config.http.address in ("127.0.0.1", "localhost", "::1"):
            first_line += " (this machine only; --http-address=0.0.0.0 --grpc-address=0.0.0.0 open it to others)"
        pictures = required_picture_access(self._config, needs_token=self._tokens.requires_token("view"))
        for note in (find_unprotected_categories(self._config), pictures):
            if note:
                first_line += f" ({note})"
        return first_line

    async def _drain(self) -> bool:
        timeout_s, delay_s = self._config.lifecycle.exit_timeout_s, self._config.lifecycle.drain_delay_s
        self._supervision.stopping(delay_s + timeout_s + _CLOSING_S)
        # A server that was never ready, or ends because of an error, skips the delay.
        if delay_s and self._core.service.has_started and self.end.code is None:
            self._core.service.begin_drain_delay()
            if self._grpc is not None:
                self._grpc.begin_drain()
            log.info("no longer ready, answering for %g s more", delay_s)
            await asyncio.sleep(delay_s)
        if self._grpc is not None:
            # Before the core refuses work, so that clients send new requests to other servers.
            began_s = time.monotonic()
            await asyncio.to_thread(self._grpc.end_drain, timeout_s)
            timeout_s = max(0.0, timeout_s - (time.monotonic() - began_s))
        self._core.service.stop_accepting()
        in_flight = self._core.service.router.in_flight()
        log.info("refusing new requests, draining %d request(s) for at most %g s", in_flight, timeout_s)
        is_clean = await asyncio.to_thread(self._core.close, timeout_s)
        if not is_clean:
            log.error("requests were still in flight after %g s and were failed", timeout_s)
        return is_clean

    async def _close(self) -> None:
        """Close all that was opened, newest first. After an error, the others are still closed."""
        if not self._stop.is_set():
            await asyncio.to_thread(self._core.close, 0.0)
        for close in reversed(self._closers):
            try:
                await close()
            except EdgeServerError as error:
                log.error("closing: %s", error)
            except Exception:
                log.exception("a part of the server could not be closed")
        await asyncio.to_thread(self._core.service.traces.close, _TRACES_S)
        await self._supervision.end()
        if self._stop.is_set():
            log.info("stopped")


def _describe_served(reports: Sequence[InstanceReport]) -> list[str]:
    """Return a line for each version with how it runs; of many versions a line for those that run alike."""
    if len(reports) <= _LISTED_MODELS:
        return [
            f"  {one.name} version {one.version}: {one.how_it_runs}, loaded in {one.load_s * 1000:.0f} ms"
            for one in reports
        ]
    alike: dict[str, list[str]] = {}
    for one in reports:
        alike.setdefault(one.how_it_runs, []).append(one.name)
    return [
        f"  {len(names)} models ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): {how}"
        for how, names in alike.items()
    ]


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
