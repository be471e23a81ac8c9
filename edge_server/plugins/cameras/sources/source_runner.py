"""Thread that runs one camera of the server: opens it, feeds its frame stream, and opens it again after a failure."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_server.config.setting import nearest, shown_url
from edge_server.core.back_off import BackOff
from edge_server.errors import SUGGESTION, NotReady, UnknownModel
from edge_server.plugins.cameras.failure_reason import failure_reason, unknown_class_hint
from edge_server.plugins.cameras.reports import SourceReport
from edge_server.plugins.cameras.source_and_sink_settings import SourceEntry
from edge_server.plugins.cameras.sources.frame_encoding import encode_frame, picture_pixels
from edge_server.plugins.cameras.sources.frame_schedule import FrameSchedule
from edge_server.plugins.cameras.sources.source_choice import open_source
from edge_server.plugins.cameras.sources.source_interface import SourceError, SourcePicture
from edge_server.plugins.cameras.streams.camera_stream import CameraStream
from edge_server.plugins.cameras.streams.stream_registry import StreamRegistry
from edge_server.plugins.cameras.zones.zone_geometry import crosses_itself
from edge_server.plugins.cameras.zones.zone_monitor import ZoneMonitor
from edge_server.protocol.frame_messages import Delivery, Frame, FrameHeader, FrameResult, StreamRequest, ZoneReport

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LOG = logging.getLogger(__name__)

DEFAULT_FPS = 30.0
"""Rate of a file, a folder or the demo that has none of its own."""

CONNECTING, WAITING, RUNNING, FAILED = "CONNECTING", "WAITING", "RUNNING", "FAILED"

BACK_OFF = BackOff(first_s=0.5, most_s=10.0)
"""Wait before a camera is opened again: 0.25 to 0.5 s, doubled with each failure in a row up to 5 to 10 s."""

MODEL_POLL_S = 0.5
"""Time between two looks whether the model is ready."""

MAX_PICTURES_KEPT = 8
"""Pictures of frames without a result that are kept for sinks and questions."""

STEADY_S = 10.0
"""After this long with pictures, the next failure counts as the first one."""


class _PixelsOnce:
    """Function that makes the pixels of a picture once, for several sinks: their threads may call it at the same time,
    and FFmpeg converts a frame on one thread at a time only."""

    def __init__(self, picture: SourcePicture) -> None:
        self._picture = picture
        self._lock = threading.Lock()
        self._pixels: npt.NDArray[np.uint8] | None = None

    def __call__(self) -> npt.NDArray[np.uint8]:
        with self._lock:
            if self._pixels is None:
                self._pixels = picture_pixels(self._picture)
            return self._pixels


class SourceRunner:
    """One camera of the server, and its thread.

    `watch` is called with each frame stream that the runner opens; it takes the results. `on_change` is called on the
    runner's thread after each change of `state` or `reason`.
    """

    def __init__(
        self,
        entry: SourceEntry,
        streams: StreamRegistry,
        watch: Callable[[CameraStream, SourceRunner], None],
        on_change: Callable[[SourceRunner], None],
        back_off: BackOff = BACK_OFF,
    ) -> None:
        self.entry = entry
        self.state, self.reason = CONNECTING, ""
        self._streams = streams
        self._watch = watch
        self._on_change = on_change
        self._back_off = back_off
        self._stop = threading.Event()
        self._stream: CameraStream | None = None
        self._clocks: tuple[tuple[int, str], ...] = ((0, "server"),)
        """(First picture, clock of the stamps from there on)."""
        self.keeps_pictures = False
        """Whether a sink of this source, or a question, takes pictures."""
        self._pictures: deque[tuple[int, SourcePicture]] = deque(maxlen=MAX_PICTURES_KEPT)
        """(Number of the picture, picture) of frames without a result yet. Both threads hold `_pictures_lock`."""
        self._pictures_lock = threading.Lock()
        self._title = ""
        self._answer_error = ""
        self._zones: ZoneMonitor | None = None
        self._zones_lock = threading.Lock()
        """Orders a change of the zones and the opening of a stream that uses them."""
        self.replace_entry(entry)
        self._failures = self._picture_count = 0
        self._offline_s = 0.0
        self._offline_since: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"source-{entry.name}"[:60], daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop reading, and end the frame stream. The thread ends when its current read does: see `join`."""
        self._stop.set()
        if self._stream is not None:
            self._stream.end()

    def may_keep_open(self, entry: SourceEntry) -> bool:
        """Return whether the entry differs from that of the runner in zones, lines and questions only, or not at
        all."""
        rules = dict[str, Any](zones=(), lines=(), questions=())
        return dataclasses.replace(entry, **rules) == dataclasses.replace(self.entry, **rules)

    def replace_entry(self, entry: SourceEntry) -> None:
        """Use the zones and lines of an entry from the next frame on. See `may_keep_open`."""
        with self._zones_lock:
            self.entry = entry
            if not entry.zones and not entry.lines:
                self._zones = None
            elif self._zones is None:
                self._zones = ZoneMonitor(entry.zones, entry.lines)
            else:
                self._zones.replace(entry.zones, entry.lines)
            if self._stream is not None:
                self._use_zones(self._stream)

    @property
    def zone_report(self) -> ZoneReport:
        """The counts of zones and lines after the newest frame."""
        return ZoneReport() if self._zones is None else self._zones.report

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread. Return False after the timeout: a read from a camera may last for seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes that the model counts, () before the model is ready."""
        perception = None if self._stream is None else self._stream.perception
        return () if perception is None or perception.detections is None else tuple(perception.detections.labels)

    @property
    def has_classes(self) -> bool:
        """Whether the model is known to name the class of a picture."""
        perception = None if self._stream is None else self._stream.perception
        return perception is not None and perception.classes is not None

    @property
    def is_tracked(self) -> bool:
        """Whether the objects are known to get numbers."""
        perception = None if self._stream is None else self._stream.perception
        if perception is None or perception.detections is None:
            return False
        return self._zones is not None or perception.track_threshold is not None

    def take_picture(self, result: FrameResult) -> Callable[[], npt.NDArray[np.uint8]] | None:
        """Return a function that makes the pixels of a result's frame, or None if its picture is not kept. Forget older
        pictures."""
        with self._pictures_lock:
            found = None
            while self._pictures and self._pictures[0][0] <= result.header.seq:
                number, picture = self._pictures.popleft()
                if number == result.header.seq:
                    found = _PixelsOnce(picture)
            return found

    def record_result(self, result: FrameResult) -> str:
        """Take note of a result, for the report. Return the clock of its stamp, "camera" or "server"."""
        self._answer_error = result.error
        return next(clock for first, clock in reversed(((0, "server"), *self._clocks)) if first <= result.header.seq)

    def report(self) -> SourceReport:
        entry, since = self.entry, self._offline_since
        reason = self.reason
        if self.state == RUNNING and self._answer_error:
            reason = f"its frames are answered with errors: {self._answer_error}"
        elif self.state == RUNNING:
            reason = self._zone_problem()
        return SourceReport(
            name=entry.name,
            url=shown_url(entry.url),
            model=entry.model,
            state=self.state,
            reason=reason,
            clock=self._clocks[-1][1],
            title=self._title,
            failures=self._failures,
            offline_s=self._offline_s + (0.0 if since is None else time.monotonic() - since),
        )

    def _use_zones(self, stream: CameraStream) -> None:
        stream.zones = self._zones
        if problem := self._zone_problem():
            _LOG.warning("source '%s': %s", self.entry.name, problem)

    def _zone_problem(self) -> str:
        """Return why zones or lines may count no objects of this model, or others than meant; "" if all is well."""
        entry, perception = self.entry, None if self._stream is None else self._stream.perception
        if self._zones is None or self._stream is None:
            return ""
        if perception is None or perception.detections is None:
            return f"its zones and lines count nothing: model '{entry.model}' detects no objects"
        named = [(f"zone '{zone.name}'", zone.classes) for zone in entry.zones]
        named += [(f"line '{line.name}'", line.classes) for line in entry.lines]
        for name, classes in named if self.labels else ():
            for label in classes:
                if label not in self.labels:
                    hint = unknown_class_hint(label, self.labels)
                    return f"{name}: model '{entry.model}' has no class '{label}'{hint}"
        for zone in entry.zones:
            if crosses_itself(zone.points):
                return f"zone '{zone.name}': its sides cross each other, is the order of its points right?"
        return ""

    # -- the thread

    def _run(self) -> None:
        in_a_row = 0
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                # First the model: a camera need not be decoded for a model that does not serve.
                stream = self._open_stream()
                if stream is None:
                    self._stop.wait(MODEL_POLL_S)
                    continue
                self._play(stream)
                continue
            except Exception as error:  # noqa: BLE001 - boundary of the thread: a camera must not stay silent for ever
                reason = failure_reason(f"source '{self.entry.name}'", error)
            if self._stop.is_set():
                break
            is_steady = self.state == RUNNING and time.monotonic() - began_s >= STEADY_S
            in_a_row = 1 if is_steady else in_a_row + 1
            self._failures += 1
            wait_s = self._back_off.delay_s(in_a_row, random.random())
            if self._offline_since is None:
                self._offline_since = time.monotonic()
            if self._set_state(FAILED, reason):
                _LOG.warning(
                    "source '%s': %s; trying again in %.1f s, then at most every %g s", self.entry.name, reason, wait_s,
                    self._back_off.most_s,
                )  # fmt: skip
            self._stop.wait(wait_s)
        if self._stream is not None:
            self._stream.end()

    def _play(self, stream: CameraStream) -> None:
        """Read the source, in a loop if it has an end, until the runner is stopped. Raises EdgeServerError."""
        entry = self.entry
        source = open_source(entry.url, fps=entry.fps, decoder=entry.decoder, transport=entry.transport, ca=entry.ca)
        try:
            self._title = source.title
            rate = entry.fps or source.fps or DEFAULT_FPS
            schedule = FrameSchedule(0.0 if source.is_live else rate)
            has_pictures = False
            while not self._stop.is_set() and not stream.is_over:
                picture = source.read()
                if picture is None:
                    if not has_pictures:
                        raise SourceError(f"{source.title}: there is no picture in it")
                    source.rewind()
                    continue
                has_pictures = True
                header = self._header(picture)
                if self._stop.wait(schedule.wait_s(time.monotonic())):
                    return
                self._on_picture()
                if self.keeps_pictures:
                    with self._pictures_lock:
                        self._pictures.append((header.seq, picture))
                stream.receive_deferred(header, partial(self._make_frame, picture, header))
        finally:
            source.close()

    def _make_frame(self, picture: SourcePicture, header: FrameHeader) -> Frame:
        frame = encode_frame(picture, "", header)
        fault = self._streams.fault_of(frame)
        if fault is not None:
            raise fault
        return frame

    def _open_stream(self) -> CameraStream | None:
        """Return the frame stream, or None while the model is not ready yet. Raises EdgeServerError."""
        if self._stream is not None and not self._stream.is_over:
            return self._stream
        entry = self.entry
        # The schedule sets the rate of a source that is not live; a second limit would drop what comes a little early.
        is_live = "://" in entry.url or entry.url.startswith("/dev/")
        request = StreamRequest(
            model=entry.model,
            version=entry.version,
            stream_id=entry.name,
            delivery=Delivery(max_fps=entry.fps if is_live else 0.0, weight=entry.weight, priority=entry.priority),
            client=f"source {shown_url(entry.url)}"[:256],
        )
        try:
            stream = self._streams.open(request, is_source=True)
        except UnknownModel as error:
            if SUGGESTION in error.message:
                raise
            raise UnknownModel(f"{error.message}{nearest(entry.model, self._streams.model_names())}") from None
        except NotReady as error:
            if error.retry_after_s is None:
                raise  # it failed to load
            if self._set_state(WAITING, f"waiting for model '{entry.model}': {error.message}"):
                _LOG.info("source '%s' waits for model '%s'", entry.name, entry.model)
            return None
        if self.state == WAITING:
            self._set_state(CONNECTING, "")
        with self._zones_lock:
            self._stream = stream
            self._use_zones(stream)
        self._watch(stream, self)
        if self._stop.is_set():
            stream.end()
        return stream

    def _header(self, picture: SourcePicture) -> FrameHeader:
        sec, nanosec = divmod(picture.stamp_ns or time.time_ns(), 1_000_000_000)
        self._picture_count += 1
        clock = "camera" if picture.stamp_ns else "server"
        if clock != self._clocks[-1][1]:
            # Replaced, never changed: another thread reads it. Results are at most a few pictures behind.
            self._clocks = (*self._clocks[-7:], (self._picture_count, clock))
        return FrameHeader(sec, nanosec, self.entry.name, self._picture_count)

    def _on_picture(self) -> None:
        if self._offline_since is not None:
            self._offline_s += time.monotonic() - self._offline_since
            self._offline_since = None
        if self.state != RUNNING:
            self._set_state(RUNNING, "")
            _LOG.info("source '%s' is running: %s", self.entry.name, self._title)

    def _set_state(self, state: str, reason: str) -> bool:
        """Set both, and call `on_change` if they are new. Return whether they are."""
        if (state, reason) == (self.state, self.reason):
            return False
        self.state, self.reason = state, reason
        self._on_change(self)
        return True
