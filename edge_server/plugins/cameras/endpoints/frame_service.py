"""The gRPC service FrameService: opens a camera stream for each call, and reports on the streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from edge_server.errors import NotFound
from edge_server.plugins.cameras.settings import FramesConfig
from edge_server.serving.execution.admission_control import AdmissionControl

if TYPE_CHECKING:
    from edge_server.frontends.grpc.call import RpcCall
    from edge_server.plugins.cameras.endpoints.stream_call import FrameCall
    from edge_server.plugins.cameras.reports import FrameStreamReport
    from edge_server.plugins.cameras.streams.stream_registry import StreamRegistry
    from edge_server.plugins.cameras.streams.stream_view import StreamView
    from edge_server.service import InferenceService
    from edge_server.telemetry.metrics_page import Family

SERVICE = "edge.frames.v1.FrameService"


class FrameService:
    """Creates the stream registry for the first camera: a server without cameras saves its memory. Thread-safe."""

    def __init__(self, service: InferenceService, admission: AdmissionControl, config: FramesConfig) -> None:
        self._service = service
        self._admission = admission
        self._config = config
        self._lock = threading.Lock()
        self._streams: StreamRegistry | None = None
        self._is_stopped = False

    def open(self, call: RpcCall) -> FrameCall:
        """Return the handler of a FrameService/Stream call."""
        from edge_server.plugins.cameras.endpoints.stream_call import FrameCall

        return FrameCall(self.stream_registry, call)

    def reports(self) -> Sequence[FrameStreamReport]:
        """Return a report of each open stream."""
        return [] if self._streams is None else self._streams.reports()

    def view(self, stream_id: str) -> AbstractContextManager[StreamView]:
        """See StreamRegistry.view. Raises NotFound before the first camera connects."""
        if self._streams is None:
            raise NotFound("no frame stream is open")
        return self._streams.view(stream_id)

    def families(self) -> list[Family]:
        """Return the metrics of the streams; none before the first camera connects."""
        return [] if self._streams is None else list(self._streams.families())

    def stop(self) -> None:
        """End each stream after its last results, and refuse new streams."""
        with self._lock:
            self._is_stopped = True
            streams = self._streams
        if streams is not None:
            streams.stop()

    def stream_registry(self) -> StreamRegistry:
        """Return the registry; the first call creates it."""
        from edge_server.plugins.cameras.streams.stream_registry import StreamRegistry

        with self._lock:
            if self._streams is None:
                self._streams = StreamRegistry(self._service, self._admission, self._config)
                if self._is_stopped:
                    self._streams.stop()
            return self._streams
