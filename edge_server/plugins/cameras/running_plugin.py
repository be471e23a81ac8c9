"""The plugin `cameras` in a running server: starts frame streams, and the cameras that the server opens
itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.config import ConfigError, ServerConfig
from edge_server.errors import NotFound
from edge_server.frontends.http.routes import Route
from edge_server.plugin import RunningPlugin, ServingCore, StatusPart
from edge_server.plugins.cameras.endpoints.frame_service import SERVICE, FrameService
from edge_server.plugins.cameras.settings import FramesConfig, SourcesConfig
from edge_server.telemetry.metrics_page import Family

if TYPE_CHECKING:
    from edge_server.core.model_spec import ModelSpec
    from edge_server.core.version_lifecycle import SampleRun
    from edge_server.frontends.grpc.rpc_table import StreamService
    from edge_server.plugins.cameras.server_cameras import ServerCameras


class Cameras(RunningPlugin):
    """Imports and starts only what the configuration asks for; the rest with the first camera."""

    panel = Path(__file__).with_name("panel.js")

    def __init__(self, config: ServerConfig) -> None:
        self._frames_config = config.table(FramesConfig)
        self._sources_config = config.table(SourcesConfig)
        self._server_cameras: ServerCameras | None = None

    def build(self, core: ServingCore) -> None:
        self._core = core
        self._frames = FrameService(core.service, core.admission, self._frames_config)

    def refusals(self) -> Sequence[str]:
        """Return the mistake in the sources file, which must not keep the models of a server from serving."""
        if not self._sources_config.is_used:
            return ()
        from edge_server.plugins.cameras.server_cameras import read_cameras
        from edge_server.plugins.cameras.zones.zone_store import ZoneStore

        config = self._sources_config
        try:
            read_cameras(config, ZoneStore(config.file, self._core.config.repository.state_dir).changes)
        except ConfigError as error:
            return (str(error),)
        return ()

    def examine(self, spec: ModelSpec, run: SampleRun | None) -> Sequence[str]:
        """Return the reasons why questions about pictures cannot be asked to this model."""
        if not self._sources_config.is_used:
            return ()
        from edge_server.plugins.cameras.questions.model_request import model_problem
        from edge_server.plugins.cameras.source_and_sink_settings import read_entries

        config = self._sources_config
        try:
            sources, _ = read_entries(config.file, config.sources, config.sinks)
        except ConfigError:
            return ()  # `refusals` says it
        asking = [
            f"question '{question.name}' of source '{source.name}'"
            for source in sources.values()
            for question in source.questions
            if question.model == spec.name
        ]
        problem = model_problem(spec) if asking else ""
        return [f"{title} cannot be asked: {problem}" for title in asking] if problem else ()

    def models_known(self) -> None:
        if not self._sources_config.is_used:
            return
        from edge_server.plugins.cameras.server_cameras import ServerCameras

        self._server_cameras = ServerCameras(
            self._sources_config,
            self._frames.stream_registry(),
            self._core.events,
            self._core.service,
            self._core.config.repository.state_dir,
        )
        self._server_cameras.start()

    def begin_stop(self) -> None:
        """End the streams with their last results, instead of a refusal for each frame."""
        if self._server_cameras is not None:
            self._server_cameras.stop_sources()
        self._frames.stop()

    def stop(self, timeout_s: float) -> None:
        if self._server_cameras is not None:
            self._server_cameras.close()

    def rpcs(self) -> Sequence[StreamService]:
        from edge_server.frontends.grpc.rpc_table import StreamService

        return (StreamService(SERVICE, {"Stream": self._frames.open}),)

    def routes(self) -> Sequence[Route]:
        from edge_server.plugins.cameras.endpoints.routes import (
            deepstack_routes,
            report_routes,
            source_routes,
            view_routes,
        )

        return (
            *deepstack_routes(self._core.service),
            *report_routes(self._stream_reports, self._camera_report),
            *source_routes(self._core.access, self._require_cameras),
            *view_routes(self._core.access, self._frames.view),
        )

    def families(self) -> list[Family]:
        own = [] if self._server_cameras is None else self._server_cameras.families()
        return [*self._frames.families(), *own]

    def status(self) -> Sequence[StatusPart]:
        from edge_server.plugins.cameras.reports import camera_rows, stream_rows

        return (*stream_rows(self._stream_reports()), *camera_rows(self._camera_report()))

    def reports(self) -> Mapping[str, object]:
        return {"streams": self._stream_reports(), "cameras": self._camera_report()}

    def _require_cameras(self) -> ServerCameras:
        if self._server_cameras is None:
            raise NotFound("the server opens no cameras itself; --sources-file names them")
        return self._server_cameras

    def _stream_reports(self) -> Sequence[Mapping[str, object]]:
        from edge_server.plugins.cameras.reports import streams_as_json

        return streams_as_json(self._frames.reports())

    def _camera_report(self) -> Mapping[str, object]:
        from edge_server.plugins.cameras.reports import NO_CAMERAS, CamerasReport, cameras_as_json

        if not self._sources_config.is_used:
            return NO_CAMERAS
        own = self._server_cameras
        return cameras_as_json(CamerasReport() if own is None else own.report())
