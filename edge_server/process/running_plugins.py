"""Handling of the plugins in a running server: builds, starts and stops them in order, and goes on without one that
fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from edge_server.config import ConfigError, ServerConfig
from edge_server.core.model_spec import ModelSpec
from edge_server.core.version_lifecycle import FolderReader, OutputCheck, Recogniser, SampleRun
from edge_server.errors import EdgeServerError
from edge_server.frontends.http.inference_route import BodyDecoder
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route
from edge_server.plugin import LoadCheck, Plugin, RunningPlugin, ServingCore, StatusRow
from edge_server.serving.execution.admission_control import ADMIT_ALL, AdmissionControl
from edge_server.telemetry.metrics_page import Family

if TYPE_CHECKING:
    from edge_server.frontends.grpc.rpc_table import StreamService
    from edge_server.telemetry.trace_record import TraceExport

log = logging.getLogger(__name__)

T = TypeVar("T")


class RunningPlugins:
    """The plugins of a server in the order in which they are built and started. They are stopped in reverse.

    `failures`: name of each plugin that failed unexpectedly -> the error. It is asked for nothing more, but stopped.
    """

    def __init__(self, plugins: Sequence[Plugin], config: ServerConfig) -> None:
        """Prepare them. Raises ConfigError, EdgeServerError."""
        self.failures: dict[str, str] = {}
        self._plugins = plugins
        self._required = {plugin.name for plugin in plugins if plugin.is_required}
        self._running: dict[str, RunningPlugin] = {}
        for plugin in plugins:
            running = self._call(plugin.name, partial(plugin.prepare, config))
            if running is not None:
                self._running[plugin.name] = running

    @property
    def may_serve(self) -> bool:
        """Whether all plugins are there without which a server is not ready."""
        return not self._required & self.failures.keys()

    # -- before the service is made

    def admission(self) -> AdmissionControl:
        return self._only("admission control", lambda plugin: plugin.admission) or ADMIT_ALL

    def machine_root(self) -> Path:
        return self._only("the folder of the machine", lambda plugin: plugin.machine_root) or Path("/")

    def onnx_backends(self) -> tuple[str, ...]:
        return tuple(name for _, plugin in self._active() for name in plugin.onnx_backends)

    def backend_settings(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        for _, plugin in self._active():
            yield from plugin.backend_settings.items()

    def model_checks(self) -> tuple[Callable[[ModelSpec], object], ...]:
        return tuple(check for _, plugin in self._active() for check in plugin.model_checks)

    def output_checks(self) -> tuple[Callable[[ModelSpec], OutputCheck | None], ...]:
        return tuple(check for _, plugin in self._active() for check in plugin.output_checks)

    def folder_readers(self) -> tuple[FolderReader, ...]:
        return tuple(read for _, plugin in self._active() for read in plugin.folder_readers)

    def recognisers(self) -> tuple[Recogniser, ...]:
        active = {name for name, _ in self._active()}
        return tuple(recognise for plugin in self._plugins if plugin.name in active for recognise in plugin.recognisers)

    def make_load_check(self, check_memory: LoadCheck) -> LoadCheck:
        for name, plugin in self._active():
            check_memory = self._call(name, partial(plugin.make_load_check, check_memory)) or check_memory
        return check_memory

    def make_trace_export(self) -> Callable[[], TraceExport] | None:
        return self._only("an export of traces", lambda plugin: plugin.make_trace_export)

    def local_folders(self) -> dict[str, Path]:
        return {address: folder for _, plugin in self._active() for address, folder in plugin.local_folders.items()}

    def body_decoders(self) -> dict[str, BodyDecoder]:
        return {start: decode for _, plugin in self._active() for start, decode in plugin.body_decoders.items()}

    # -- the moments of a server

    def build(self, core: ServingCore) -> None:
        """Raises ConfigError, EdgeServerError, as do `start` and `before_first_scan`."""
        self._service = core.service
        self._call_each(lambda plugin: plugin.build(core))

    def start(self) -> None:
        self._call_each(lambda plugin: plugin.start())

    def before_first_scan(self) -> None:
        self._call_each(lambda plugin: plugin.before_first_scan())

    def models_known(self) -> None:
        self._call_each(lambda plugin: plugin.models_known())

    def models_settled(self) -> None:
        self._call_each(lambda plugin: plugin.models_settled())

    def begin_stop(self) -> None:
        self._call_each(lambda plugin: plugin.begin_stop())

    def stop(self, timeout_s: float) -> None:
        for name, plugin in reversed(self._running.items()):
            try:
                self._call(name, partial(plugin.stop, timeout_s))
            except EdgeServerError as error:
                log.error("closing the plugin '%s': %s", name, error)

    # -- for `edge-server check`

    def examine(self, spec: ModelSpec, run: SampleRun | None) -> list[str]:
        """Return the warnings of all plugins about a loaded model."""
        found = (self._call(name, partial(plugin.examine, spec, run)) for name, plugin in self._active())
        return [warning for warnings in found for warning in warnings or ()]

    def refusals(self) -> list[str]:
        """Return the errors that plugins find in files which the server reads after its start."""
        return [text for name, plugin in self._active() for text in self._call(name, plugin.refusals) or ()]

    # -- while it serves

    def find(self, name: str) -> RunningPlugin | None:
        """Return a plugin for its own backends; None if it is not there or has failed."""
        return None if name in self.failures else self._running.get(name)

    def heavy_work_refusal(self) -> str:
        """Return the first reason why no heavy work may begin now, "" if it may."""
        answers = (self._call(name, plugin.heavy_work_refusal) for name, plugin in self._active())
        return next(filter(None, answers), "")

    def families(self) -> Iterator[Family]:
        for name, plugin in self._active():
            yield from self._call(name, lambda: list(plugin.families())) or ()  # noqa: B023 - called at once

    def gauges(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, plugin in self._active():
            values.update(self._call(name, plugin.gauges) or {})
        return values

    def control_need(self) -> float:
        return sum(self._call(name, plugin.control_need) or 0.0 for name, plugin in self._active())

    def routes(self) -> list[Route]:
        """Return the routes of HTTP. Raises ConfigError, EdgeServerError."""
        summary = "Plugins: which failed, and their lines of edge-server status"
        own = Route("GET", "/edge/v1/plugins", "statistics", summary, self._respond, uses_aiohttp=True)
        return [own, *(route for name, plugin in self._active() for route in self._call(name, plugin.routes) or ())]

    def refusal_body(self, head: RequestHead, error: EdgeServerError) -> bytes | None:
        answers = (self._call(name, partial(plugin.refusal_body, head, error)) for name, plugin in self._active())
        return next(filter(None, answers), None)

    def rpcs(self) -> list[StreamService]:
        """Return the services of gRPC. Raises ConfigError, EdgeServerError."""
        return [service for name, plugin in self._active() for service in self._call(name, plugin.rpcs) or ()]

    def addresses(self) -> list[str]:
        return [address for name, plugin in self._active() for address in self._call(name, plugin.addresses) or ()]

    async def _respond(self, request: HttpRequest) -> HttpResponse:
        return json_response({"plugins": await request.run_on_worker(self._status)})

    def _status(self) -> list[dict[str, object]]:
        # Problems of the server itself are told in the same form.
        problems = {"log": self._service.log_settings.problem(), "traces": self._service.traces.problem()}
        own = [StatusRow(title, "warning", text)._asdict() for title, text in problems.items() if text]
        found: list[dict[str, object]] = [{"name": "server", "error": "", "rows": own, "reports": {}}] if own else []
        for name, plugin in self._active():
            rows, reports = self._call(name, plugin.status) or (), self._call(name, plugin.reports) or {}
            if name not in self.failures:
                found.append({"name": name, "error": "", "rows": [row._asdict() for row in rows], "reports": reports})
        failed = self.failures.items()
        return found + [{"name": name, "error": error, "rows": [], "reports": {}} for name, error in failed]

    def panels(self) -> dict[str, Path]:
        return {name: plugin.panel for name, plugin in self._active() if plugin.panel is not None}

    def health_headers(self) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        for name, plugin in self._active():
            headers.update(self._call(name, plugin.health_headers) or {})
        return headers

    def problem(self) -> str:
        """Return the first reason why the service manager should restart the process, "" if there is none."""
        answers = (self._call(name, plugin.problem) for name, plugin in self._active())
        return next(filter(None, answers), "")

    def _active(self) -> list[tuple[str, RunningPlugin]]:
        return [(name, plugin) for name, plugin in self._running.items() if name not in self.failures]

    def _call_each(self, call: Callable[[RunningPlugin], None]) -> None:
        for name, plugin in self._active():
            self._call(name, partial(call, plugin))

    def _only(self, contribution: str, member: Callable[[RunningPlugin], T | None]) -> T | None:
        found = {name: value for name, plugin in self._active() if (value := member(plugin)) is not None}
        if len(found) > 1:
            raise ConfigError(f"the plugins {' and '.join(found)} each bring {contribution}: one is possible")
        return next(iter(found.values()), None)

    def _call(self, name: str, call: Callable[[], T]) -> T | None:
        """Call a function of a plugin. Return its result, or None after an unexpected error."""
        try:
            return call()
        except (ConfigError, EdgeServerError):
            raise
        except Exception as error:
            # The boundary to plugins: the rest of the server goes on.
            log.exception("the plugin '%s' failed, and the server goes on without it", name)
            self.failures[name] = f"{type(error).__name__}: {error}"
            return None
