"""Registry of all open frame streams: opens, lists, counts and ends them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from edge_server.errors import (
    AlreadyExists,
    Draining,
    EdgeServerError,
    InvalidRequest,
    NotFound,
    Superseded,
    Throttled,
)
from edge_server.plugins.cameras.reports import FrameStreamReport
from edge_server.plugins.cameras.settings import FramesConfig
from edge_server.plugins.cameras.streams.camera_stream import CameraStream
from edge_server.plugins.cameras.streams.frame_counters import ModelTotals, families
from edge_server.plugins.cameras.streams.frame_mailbox import FrameTally
from edge_server.plugins.cameras.streams.frame_pipeline import FramePipeline
from edge_server.plugins.cameras.streams.model_workers import ModelWorkers
from edge_server.plugins.cameras.streams.stream_settings import StreamSettings, make_stream_settings
from edge_server.plugins.cameras.streams.stream_view import StreamView
from edge_server.protocol.frame_messages import Frame, StreamOpened, StreamRequest
from edge_server.serving.execution.admission_control import AdmissionControl
from edge_server.telemetry.metrics_page import Family
from edge_server.version import __version__

if TYPE_CHECKING:
    from edge_server.service import InferenceService

_LOG = logging.getLogger(__name__)

MAX_REMEMBERED = 1024
"""Maximum number of stream ids with kept counters; the ids disconnected for longest are forgotten first."""


MAX_VIEWERS = 10
"""Maximum number of viewers of all streams together."""

_LOGGED_LIMITS = ("depth", "max_age_ms", "deadline_ms", "max_fps", "weight", "priority")
"""Numbers of a delivery policy that the log states; 0 is none."""


class StreamRegistry:
    """Opens, counts, lists and ends frame streams.

    One lock guards all mailboxes, counters and turns: a server has tens of cameras, not thousands. It is held for
    microseconds, never across a runtime call or I/O.
    """

    def __init__(self, service: InferenceService, admission: AdmissionControl, config: FramesConfig) -> None:
        self._service = service
        self._admission = admission
        self._config = config
        self._lock = threading.Lock()
        self._workers: dict[tuple[str, int | None], ModelWorkers] = {}
        self._open: dict[str, CameraStream] = {}
        self._ending: set[CameraStream] = set()
        """Ended streams that have frames with a worker."""
        self._tallies: OrderedDict[str, FrameTally] = OrderedDict()
        self._totals: dict[str, ModelTotals] = {}
        self._viewer_count = 0
        self._is_stopping = False
        self._reserved_ids: frozenset[str] = frozenset()

    def reserve(self, stream_ids: frozenset[str]) -> None:
        """Keep these ids, and no others, for streams of the server's own sources."""
        self._reserved_ids = stream_ids

    def model_names(self) -> set[str]:
        """Return the names of the server's models, in any state."""
        return {entry.name for entry in self._service.repository_index()}

    def open(self, request: StreamRequest, *, is_source: bool = False) -> CameraStream:
        """Open a stream. It ends an open stream of the same id and continues its counters.

        Raises the errors of `make_stream_settings`, Throttled when there are too many streams, Draining once the server
        stops, and AlreadyExists for a client that gives the id of a source.
        """
        settings = make_stream_settings(request, self._service)
        if settings.stream_id in self._reserved_ids and not is_source:
            raise AlreadyExists(
                f"the stream id '{settings.stream_id}' is that of a camera that the server opens; expected another one"
            )
        workers = self._workers_of(settings)
        plan = workers.pipeline.output_plan()
        version = workers.pipeline.serving_version()
        workers.adapt()
        with self._lock:
            self._check_room(settings)
            stream = self._place(settings, workers)
            counts = self._tallies[settings.stream_id].counts()
            server = f"edge-server {__version__}"
            stream.perception = plan.perception
            stream.first_message = StreamOpened(
                settings.stream_id, settings.model, version, plan.runtime, plan.labels, counts, server
            )
        limits = {name: getattr(settings.delivery, name) for name in _LOGGED_LIMITS}
        _LOG.info(
            "frame stream '%s' of '%s' for model '%s' is open: %s", settings.stream_id, settings.client, settings.model,
            ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit),
        )  # fmt: skip
        return stream

    def fault_of(self, frame: Frame) -> EdgeServerError | None:
        """Return the error for a frame that every model refuses, or None."""
        size = frame.region.byte_size if frame.region is not None else len(frame.data)
        if size <= self._config.max_frame_bytes:
            return None
        return InvalidRequest(f"expected frames of at most {self._config.max_frame_bytes} bytes, given {size}")

    def stop(self) -> None:
        """Take no new streams and end the open ones. Running frames are answered; waiting ones count as CLOSED."""
        with self._lock:
            self._is_stopping = True
            streams = list(self._open.values())
        for stream in streams:
            stream.stop()

    @contextlib.contextmanager
    def view(self, stream_id: str) -> Iterator[StreamView]:
        """Yield the view of an open stream to one viewer. Raises NotFound, and Throttled for too many viewers."""
        with self._lock:
            stream = self._open.get(stream_id)
            if stream is None:
                raise NotFound(f"no frame stream '{stream_id[:80]}' is open")
            if self._viewer_count >= MAX_VIEWERS:
                raise Throttled(f"{MAX_VIEWERS} viewers look at frame streams already", retry_after_s=10.0)
            view = stream.view = stream.view or StreamView()
            view.viewer_count += 1
            self._viewer_count += 1
        try:
            yield view
        finally:
            with self._lock:
                view.viewer_count -= 1
                self._viewer_count -= 1
                if not view.viewer_count:
                    view.release()

    def reports(self) -> list[FrameStreamReport]:
        """Return reports of the open streams, sorted by id."""
        with self._lock:
            streams = [stream for _, stream in sorted(self._open.items())]
        return [stream.report() for stream in streams]

    def families(self) -> Iterable[Family]:
        """Return the metric families of all streams, including ended ones."""
        with self._lock:
            return families(self._totals)

    def _workers_of(self, settings: StreamSettings) -> ModelWorkers:
        key = (settings.model, settings.version)
        with self._lock:
            workers = self._workers.get(key)
            if workers is None:
                pipeline = FramePipeline(self._service, self._admission, *key)
                workers = self._workers[key] = ModelWorkers(
                    self._lock, pipeline, self._admission, settings.model, self._config.priority_weight
                )
            return workers

    def _check_room(self, settings: StreamSettings) -> None:
        if self._is_stopping:
            raise Draining("the server is stopping and takes no new frame streams")
        others = len(self._open) - (settings.stream_id in self._open)
        if others >= self._config.max_streams:
            raise Throttled(f"{others} frame streams are open, which is as many as are served at once")

    def _place(self, settings: StreamSettings, workers: ModelWorkers) -> CameraStream:
        older = self._open.get(settings.stream_id)
        if older is not None:
            older.end_locked(
                Superseded(
                    f"another client took over the stream '{settings.stream_id}': each client needs an id of its own"
                )
            )
        tally = self._tallies.setdefault(settings.stream_id, FrameTally())
        self._tallies.move_to_end(settings.stream_id)
        totals = self._totals.setdefault(settings.model, ModelTotals())
        # Since the lookup these workers may have ended with their last stream, and others may have replaced them.
        workers = self._workers.setdefault((settings.model, settings.version), workers)
        leave = partial(self._leave, workers)
        stream = CameraStream(
            self._lock, settings, tally, totals, wake=workers.wake, leave=leave, on_last_release=self._release_successor
        )
        # A frame of the previous stream must not join the sequence of this one, which has the same id.
        stream.hold(workers.is_sequence and self._is_preceded(settings))
        self._open[settings.stream_id] = stream
        totals.open_streams += 1
        try:
            workers.enter(stream)
        except RuntimeError as error:
            stream.end_locked()
            raise Throttled(f"the system grants no thread for the frames of model '{settings.model}'") from error
        self._forget_oldest()
        return stream

    def _leave(self, workers: ModelWorkers, stream: CameraStream) -> None:
        settings = stream.settings
        del self._open[settings.stream_id]
        if stream.view is not None:
            stream.view.end()
        self._end_sequence(stream)
        if stream.taken_count:
            self._ending.add(stream)
        self._tallies.move_to_end(settings.stream_id)
        self._totals[settings.model].open_streams -= 1
        workers.leave(stream)
        if workers.is_empty:
            del self._workers[(settings.model, settings.version)]

    def _release_successor(self, stream: CameraStream) -> None:
        """Release the successor of an ended stream, now that no frame of the ended one can reach the model."""
        self._ending.discard(stream)
        # The last frame may have begun or restarted the sequence.
        self._end_sequence(stream)
        successor = self._open.get(stream.settings.stream_id)
        if successor is not None and not self._is_preceded(successor.settings):
            successor.hold(False)

    def _is_preceded(self, settings: StreamSettings) -> bool:
        stream = (settings.stream_id, settings.model)
        return any((one.settings.stream_id, one.settings.model) == stream for one in self._ending)

    def _end_sequence(self, stream: CameraStream) -> None:
        if stream.correlation_id is not None:
            self._service.end_sequence(stream.settings.model, stream.settings.version, stream.correlation_id)

    def _forget_oldest(self) -> None:
        surplus = len(self._tallies) - MAX_REMEMBERED
        if surplus > 0:
            for stream_id in [known for known in self._tallies if known not in self._open][:surplus]:
                del self._tallies[stream_id]
