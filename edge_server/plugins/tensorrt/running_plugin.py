"""The plugin `tensorrt` in a running server: finds and builds TensorRT engines, and provides the routes, metrics and
status about them."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends import load_backend
from edge_server.backends.cuda import cuda_driver
from edge_server.backends.option_parsers import yes_or_no
from edge_server.config import ServerConfig
from edge_server.config.server_config import settings_of_backend
from edge_server.errors import BackendMissing, LoadError
from edge_server.frontends.http.routes import Route
from edge_server.plugin import RunningPlugin, ServingCore, StatusPart
from edge_server.plugins.tensorrt.builds.http_routes import engine_routes, engines_json
from edge_server.plugins.tensorrt.engine_source import EngineSource
from edge_server.plugins.tensorrt.settings import VERSION_COMPATIBLE, EngineConfig
from edge_server.telemetry.metrics_page import Family

if TYPE_CHECKING:
    from edge_server.plugins.tensorrt.builds.build_queue import EngineBuildQueue
    from edge_server.plugins.tensorrt.engine_order import EngineFile, EngineOrder
    from edge_server.serving.execution.served_version import ServedVersion

log = logging.getLogger(__name__)

_MIN_FLOOR_MB = 128


class EngineBuilds(RunningPlugin, EngineSource):
    """The plugin in a server. Where no engines can be built it has no queue, and its routes say why."""

    def __init__(self, config: ServerConfig, libraries: Sequence[str]) -> None:
        self._settings = settings = config.table(EngineConfig)
        self._library = supported_library(libraries) if settings.is_enabled else ""
        if self._library:
            self.onnx_backends = (self._library,)
        # A plan is inspected before its backend gets the settings.
        for name in libraries:
            # The load of a model says that a library is missing, or that the value is no switch.
            with contextlib.suppress(LoadError):
                if yes_or_no("", settings_of_backend(config.backends, name), VERSION_COMPATIBLE, False):
                    backend = load_backend(name)
                    from edge_server.plugins.tensorrt.backend import TensorRTBackend

                    assert isinstance(backend, TensorRTBackend)
                    backend.allow_host_code()
        if settings.cache_dir:
            # OpenVINO compiles models for GPUs and NPUs: they are kept beside the engines.
            folder = Path(settings.cache_dir).parent / "openvino"
            self.backend_settings = {"openvino": {"MODEL_CACHE_DIR": str(folder)}}
        self._queue: EngineBuildQueue | None = None

    def build(self, core: ServingCore) -> None:
        """Make the build queue, unless engines cannot be stored, which is logged."""
        self._access = core.access
        if not self._library:
            return
        # Imported here: most machines have no GPU.
        from edge_server.plugins.tensorrt.builds.build_process import Bounds
        from edge_server.plugins.tensorrt.builds.build_queue import EngineBuildQueue
        from edge_server.plugins.tensorrt.builds.builder import ServingCallbacks
        from edge_server.plugins.tensorrt.builds.engine_cache import EngineCache, EngineCacheFault
        from edge_server.plugins.tensorrt.builds.engine_key import read_gpu_identity

        settings, table = self._settings, core.service.table
        cache = EngineCache(Path(settings.cache_dir), settings.cache_limit_mb << 20)
        try:
            cache.open()
        except EngineCacheFault as error:
            log.warning("%s; --engine-cache-dir names another folder. ONNX models are served by other runtimes", error)
            return

        def serving(name: str, version: int) -> ServedVersion | None:
            return next((item for item in core.service.router.ready_versions(name) if item.version == version), None)

        floor_mb = max(core.config.memory.floor_mb, _MIN_FLOOR_MB)
        self._queue = EngineBuildQueue(
            cache,
            read_gpu_identity(core.machine_root),
            Bounds(settings.build_timeout_s, settings.build_memory_mb << 20, floor_mb << 20),
            ServingCallbacks(
                serving=serving,
                is_settled=lambda name: table.wait_settled([name], 0),
                renew=table.renew,
                may_build=core.heavy_work_refusal,
                publish=core.events.publish,
                lost_gpus=core.lost_gpus,
            ),
        )

    def find_engine(self, order: EngineOrder) -> EngineFile | None:
        return None if self._queue is None else self._queue.find(order)

    def models_settled(self) -> None:
        if self._queue is not None:
            self._queue.start()

    def begin_stop(self) -> None:
        if self._queue is not None:
            self._queue.end()

    def stop(self, timeout_s: float) -> None:
        if self._queue is not None:
            self._queue.close()

    def families(self) -> Iterable[Family]:
        return () if self._queue is None else self._queue.families()

    def routes(self) -> Sequence[Route]:
        return engine_routes(self._queue, self._access)

    def status(self) -> Sequence[StatusPart]:
        from edge_server.plugins.tensorrt.builds.build_report import engine_rows

        return engine_rows(engines_json(self._queue))

    def reports(self) -> Mapping[str, object]:
        return {"engines": engines_json(self._queue)}


def supported_library(libraries: Sequence[str]) -> str:
    """Return the first library with which engines can be built and run here, "" if there is none."""
    installed = [name for name in libraries if importlib.util.find_spec(name) is not None]
    if not installed:
        return ""
    missing = cuda_driver.unavailable_reason()
    if missing:
        log.debug("%s is installed, but %s", installed[0], missing)
        return ""
    for name in installed:
        try:
            backend = load_backend(name)
        except BackendMissing as error:
            log.warning("no engines are built with %s: %s", name, error.message)
            continue
        if not getattr(backend, "has_builder", False):
            continue
        try:
            cuda_driver.devices()
        except cuda_driver.CudaFault as error:
            log.warning("no engines are built: the GPU does not answer: %s", error)
            return ""
        return name
    return ""
