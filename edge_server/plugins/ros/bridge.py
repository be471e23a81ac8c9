"""Bridge between ROS and a server: sends the frames of a camera topic, and publishes the results as topics.

It needs no ROS library: a `Transport` connects it to ROS. The transport's thread sends frames directly
to the stream, which drops the oldest one when the server is busy; another thread publishes the results. The bridge
continues when topics are silent, publishers come and go, or the server restarts. Model and camera topic can be changed
while it runs.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edge_server.client import Counters, FrameStream, StreamError
from edge_server.errors import EdgeServerError, ErrorCode, InvalidRequest, NotReady, Unsupported
from edge_server.plugins.ros.bridge_counts import BridgeCounts, drops_between, report_line, sum_counts
from edge_server.plugins.ros.connection_log import ConnectionLog, describe_server
from edge_server.plugins.ros.diagnostics import Diagnostics
from edge_server.plugins.ros.messages.message_conversion import (
    LabelInfoMessage,
    MessageKind,
    OutgoingMessage,
    VisionInfoMessage,
    annotated_message,
    classification_message,
    detections_message,
    make_frame,
    map_message,
    mask_message,
    stamp_now,
)
from edge_server.plugins.ros.transports.packet_drops import PacketDrops
from edge_server.plugins.ros.transports.transport import Qos, ServiceTransport, Transport
from edge_server.protocol.frame_messages import Delivery, Frame, FrameResult, Returns, StreamOpened

if TYPE_CHECKING:
    from edge_server.plugins.ros.depth.spatial_detections import SpatialDetections

SPIN_S = 0.2
"""Longest time between two calls of `Bridge.tick`."""

_COUNT_INTERVAL_S = 1.0
_COUNTS_OF_A_REPORT = 5
_DRAIN_S = 5.0
_MAX_LABELS = 65_535
_MISSING_MODEL_WAIT_S = 2.0
_MAX_SENT_TIMES = 1024
_DEPTH_QUEUE_SIZE = 5
_MAX_AGE_US = 2**32 - 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BridgeParameters:
    """Parameters of a bridge. The names are those of Isaac ROS's inference nodes where such exist.

    A topic that is "" is not published. `detections_topic` carries vision_msgs/Detection2DArray,
    `classification_topic` vision_msgs/Classification with the best `top_k`, `annotated_topic` sensor_msgs/
    CompressedImage, `mask_topic` sensor_msgs/Image of class numbers, `map_topic` sensor_msgs/Image of depth or anomaly.
    `detections3d_topic` carries vision_msgs/Detection3DArray. It needs `depth_topic`, whose stamps differ from those of
    the frames by `depth_tolerance_ms` at most, and the calibration of `camera_info_topic`, "" for the one beside
    `image_topic`. `image_is_rectified`: the images have no distortion, and the name of their topic does not say so.
    `vision_info_topic` and `label_info_topic` carry vision_msgs/VisionInfo and LabelInfo, transient local, for each
    model that serves; `diagnostics_topic` carries diagnostic_msgs/DiagnosticArray once a second. These three are left
    out, with a warning, where their messages are not installed. `image_is_compressed` subscribes to CompressedImage.
    `class_id_is_number` writes class numbers instead of labels, like Isaac ROS. `stamp_tells_age` computes the
    age of a frame from its stamp, for cameras that use the clock of this machine.
    """

    model_name: str
    model_version: int = 0
    image_topic: str = "/image"
    image_is_compressed: bool = False
    detections_topic: str = ""
    classification_topic: str = ""
    annotated_topic: str = ""
    mask_topic: str = ""
    map_topic: str = ""
    detections3d_topic: str = ""
    depth_topic: str = ""
    camera_info_topic: str = ""
    depth_tolerance_ms: int = 50
    image_is_rectified: bool = False
    vision_info_topic: str = ""
    label_info_topic: str = ""
    diagnostics_topic: str = ""
    input_qos: str = "SENSOR_DATA"
    output_qos: str = "DEFAULT"
    input_queue_size: int = 1
    output_queue_size: int = 10
    stream_id: str = ""
    top_k: int = 5
    jpeg_quality: int = 0
    class_id_is_number: bool = False
    stamp_tells_age: bool = False
    delivery: Delivery = field(default_factory=Delivery)

    def __post_init__(self) -> None:
        if not any(self._result_topics):
            raise InvalidRequest(
                "a bridge publishes at least one topic: give --detections-topic, --classification-topic, "
                "--annotated-topic, --mask-topic, --map-topic or --detections3d-topic"
            )
        if bool(self.detections3d_topic) is not bool(self.depth_topic):
            raise InvalidRequest("detections in space need both topics: give --detections3d-topic and --depth-topic")
        if not 0 <= self.depth_tolerance_ms <= 10_000:
            raise InvalidRequest(f"--depth-tolerance-ms: expected 0 to 10000, given {self.depth_tolerance_ms}")
        inputs = (self.image_topic, self.depth_topic, self.camera_info_topic)
        infos = (topic for topic, _, _ in self.info_topics)
        names = [name.strip("/") for name in (*inputs, *self._result_topics, *infos) if name]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidRequest(f"topic '/{twice[0]}' is named twice: images and each kind of message need one each")

    @property
    def _result_topics(self) -> tuple[str, ...]:
        return (
            self.detections_topic, self.classification_topic, self.annotated_topic, self.mask_topic, self.map_topic,
            self.detections3d_topic,
        )  # fmt: skip

    @property
    def info_topics(self) -> tuple[tuple[str, MessageKind, Qos], ...]:
        """Topics about the bridge itself; a name may be ""."""
        latched = Qos("DEFAULT", 1, is_transient_local=True)
        return (
            (self.vision_info_topic, MessageKind.VISION_INFO, latched),
            (self.label_info_topic, MessageKind.LABEL_INFO, latched),
            (self.diagnostics_topic, MessageKind.DIAGNOSTICS, Qos("DEFAULT", 10)),
        )

    def open_stream(
        self,
        address: str,
        *,
        on_opened: Callable[[StreamOpened], None],
        on_broken: Callable[[StreamError], None] | None = None,
        is_trial: bool = False,
    ) -> FrameStream:
        """Return the stream to a server's gRPC port. It connects when its results are read.

        A trial does not connect again, and has a stream id of its own, so that it leaves the bridge's stream alone.
        """
        stream_id = self.stream_id or f"ros:{self.image_topic}:{self.model_name}"
        return FrameStream(
            address,
            self.model_name,
            version=self.model_version,
            stream_id=f"{stream_id}:trial" if is_trial else stream_id,
            reconnects=not is_trial,
            returns=Returns(
                top_k=self.top_k if self.classification_topic else 0,
                has_detections=bool(self.detections_topic or self.detections3d_topic),
                has_mask=bool(self.mask_topic),
                has_map=bool(self.map_topic),
                has_annotated_jpeg=bool(self.annotated_topic),
                jpeg_quality=self.jpeg_quality,
            ),
            delivery=self.delivery,
            client=f"ros bridge of {self.image_topic}",
            on_broken=on_broken,
            on_opened=on_opened,
        )


class Bridge:
    """Connects one transport to the frame stream of a server at `address`.

    `run` blocks; any thread or signal handler may call `stop`. A program with a loop of its own calls `open`, then
    `tick` each SPIN_S, then `close`, all on the thread that runs the transport's callbacks. With `keeps_frame`,
    `last_frame` is the newest frame, for trials of other models.
    """

    def __init__(
        self,
        parameters: BridgeParameters,
        transport: Transport,
        address: str,
        *,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        self.parameters = parameters
        self.address = address
        self.keeps_frame = False
        self.last_frame: Frame | None = None
        self._transport = transport
        self._diagnostics = diagnostics
        self._connection_log = ConnectionLog(parameters.image_topic)
        self._stream = self._open_stream(parameters)
        # The stream whose results are read, and its counters at the last count. After a switch it is read to its end.
        self._read_stream, self._read_counters = self._stream, Counters()
        self._reader = threading.Thread(target=self._publish_results, name="ros-results", daemon=True)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._counts = BridgeCounts()
        self._counted_at = 0.0
        self._recent: deque[BridgeCounts] = deque(maxlen=_COUNTS_OF_A_REPORT)
        self._counts_to_report = _COUNTS_OF_A_REPORT
        self._silence = ""
        self._sent_times: OrderedDict[int, float] = OrderedDict()
        self._seq = 0
        self._largest_frame = 0
        self._packet_drops = PacketDrops()
        self._missing_model = ""
        self._opened: StreamOpened | None = None
        self._connection_error = ""
        self._info_kinds: set[MessageKind] = set()
        self._info_version = 0
        self._switches: queue.SimpleQueue[tuple[BridgeParameters, Future[None]]] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._spatial_detections: SpatialDetections | None = None

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    def run(self) -> None:
        """Run until `stop`, or until the transport or the stream ends; then close both.

        Raises the error that ended it, if any.
        """
        try:
            self.open()
            while not self._stopping.is_set() and self._transport.spin(SPIN_S):
                self.tick()
        finally:
            self.close()
        if self._failure is not None:
            raise self._failure

    def open(self) -> None:
        """Open the topics and the stream."""
        self._open_topics()
        self._counted_at = time.monotonic()
        if self._diagnostics is not None:
            self._diagnostics.start()
        self._reader.start()

    def tick(self) -> None:
        """Do what is due: switch, count, report. Raises the error that ended the stream, if any."""
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(queue.Empty):
            parameters, done = self._switches.get_nowait()
            if done.set_running_or_notify_cancel():
                try:
                    self._switch(parameters)
                except EdgeServerError as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)
        now = time.monotonic()
        if now - self._counted_at >= _COUNT_INTERVAL_S:
            self._count(now)

    def close(self) -> None:
        """Close the stream and the transport."""
        self._stopping.set()
        self._stream.close()
        self._read_stream.close()
        if self._reader.ident is not None:
            self._reader.join()
        if self._diagnostics is not None:
            self._diagnostics.close()
        self._transport.close()

    def switch(self, parameters: BridgeParameters, timeout_s: float) -> None:
        """Have `tick` send later frames to the model of `parameters`, from their image topic; the other topics stay.

        For another thread than that of `tick`. Frames in flight are still answered, for up to _DRAIN_S; the rest of
        them is counted as lost. Raises EdgeServerError, and nothing has changed then.
        """
        done: Future[None] = Future()
        self._switches.put((parameters, done))
        try:
            done.result(timeout_s)
        except FutureTimeoutError:
            if done.cancel():
                raise NotReady("the bridge is ending, or its thread is busy") from None
            done.result()

    def _switch(self, parameters: BridgeParameters) -> None:
        before = self.parameters
        if parameters.image_topic != before.image_topic:
            self._subscribe(parameters)
        self._connection_log = ConnectionLog(parameters.image_topic)
        stream = self._open_stream(parameters)
        with self._lock:
            old, self._stream, self.parameters = self._stream, stream, parameters
            self.last_frame = None
        if parameters.image_topic != before.image_topic:
            assert isinstance(self._transport, ServiceTransport), "only a service switches"
            self._transport.unsubscribe(before.image_topic)
        old.finish()
        closing = threading.Timer(_DRAIN_S, old.close)
        closing.daemon = True
        closing.start()

    def _open_stream(self, parameters: BridgeParameters) -> FrameStream:
        return parameters.open_stream(self.address, on_opened=self._note_opened, on_broken=self._note_broken)

    def _open_topics(self) -> None:
        given = self.parameters
        qos = Qos(given.output_qos, given.output_queue_size)
        outputs = (
            (given.detections_topic, MessageKind.DETECTIONS),
            (given.classification_topic, MessageKind.CLASSIFICATION),
            (given.annotated_topic, MessageKind.COMPRESSED_IMAGE),
            (given.mask_topic, MessageKind.IMAGE),
            (given.map_topic, MessageKind.IMAGE),
        )
        for topic, kind in outputs:
            if topic:
                self._transport.advertise(topic, kind, qos)
        if given.detections3d_topic:
            from edge_server.plugins.ros.depth.spatial_detections import SpatialDetections

            self._spatial_detections = SpatialDetections(
                self._transport,
                image_topic=given.image_topic,
                detections_topic=given.detections3d_topic,
                depth_topic=given.depth_topic,
                camera_info_topic=given.camera_info_topic,
                tolerance_ms=given.depth_tolerance_ms,
                is_rectified=given.image_is_rectified,
                has_numbers=given.class_id_is_number,
            )
            self._spatial_detections.open_topics(Qos(given.input_qos, _DEPTH_QUEUE_SIZE), qos)
        for topic, kind, qos in given.info_topics:
            if topic:
                try:
                    self._transport.advertise(topic, kind, qos)
                    self._info_kinds.add(kind)
                except Unsupported as error:
                    log.warning("%s is left out: %s", topic, error)
        self._subscribe(given)

    def _subscribe(self, given: BridgeParameters) -> None:
        kind = MessageKind.COMPRESSED_IMAGE if given.image_is_compressed else MessageKind.IMAGE
        topic = given.image_topic
        qos = Qos(given.input_qos, given.input_queue_size)
        self._transport.subscribe(topic, kind, qos, lambda message: self._receive(topic, message))

    def _receive(self, topic: str, message: Any) -> None:
        """Send one message to the stream. A message that is not an image is counted; the bridge continues."""
        with self._lock:
            if topic != self.parameters.image_topic:
                return
            self._seq += 1
            seq = self._seq
        try:
            frame = make_frame(message, seq=seq)
        except InvalidRequest as error:
            with self._lock:
                self._counts.refused += 1
                self._counts.last_error = error.message
            return
        if self.parameters.stamp_tells_age:
            frame.age_us = frame_age_us(frame)
        with self._lock:
            self._counts.received += 1
            self._largest_frame = max(self._largest_frame, len(frame.data))
            self._sent_times[seq] = time.monotonic()
            while len(self._sent_times) > _MAX_SENT_TIMES:
                self._sent_times.popitem(last=False)
            if self.keeps_frame:
                self.last_frame = frame
            stream = self._stream
        try:
            stream.send(frame)
        except ValueError:
            # Some transports call back on threads of their own: while the bridge closes, after the stream is closed.
            if not self._stopping.is_set():
                raise

    def _publish_results(self) -> None:
        try:
            while not self._stopping.is_set():
                stream = self._read_stream
                try:
                    for result in stream.results():
                        self._publish_result(result)
                except StreamError as error:
                    if stream is self._stream:
                        self._wait_for_model(error)
                else:
                    if stream is self._stream:
                        return
                with self._lock:
                    if stream is not self._stream:
                        self._counts.drops += drops_between(self._read_counters, stream.counters())
                        self._read_stream, self._read_counters = self._stream, Counters()
        except Exception as error:  # noqa: BLE001 - raised by `tick` on its thread
            if not self._stopping.is_set():
                self._failure = error
                self._stopping.set()

    def _wait_for_model(self, error: StreamError) -> None:
        """Wait a little for a model that is missing at the start of a robot, or between two deployments. Raises any
        other error."""
        if error.code is not ErrorCode.NOT_FOUND:
            raise error
        self._connection_error = error.message
        if error.message != self._missing_model:
            self._missing_model = error.message
            log.warning("%s; asking again every %g s", error, _MISSING_MODEL_WAIT_S)
        self._stopping.wait(_MISSING_MODEL_WAIT_S)

    def _note_opened(self, opened: StreamOpened) -> None:
        self._connection_log.log_opened(opened)
        self._connection_error = ""
        before, self._opened = self._opened, opened
        if before is None or _model_of(before) != _model_of(opened):
            self._publish_model_info(opened)

    def _note_broken(self, error: StreamError) -> None:
        self._connection_log.log_broken(error)
        self._connection_error = error.message

    def _publish_model_info(self, opened: StreamOpened) -> None:
        given = self.parameters
        self._info_version += 1
        labels = opened.labels[:_MAX_LABELS]
        place = given.label_info_topic if MessageKind.LABEL_INFO in self._info_kinds else ""
        info = VisionInfoMessage(stamp_now(), describe_server(opened), place, self._info_version)
        self._publish_info(given.label_info_topic, LabelInfoMessage(stamp_now(), labels))
        self._publish_info(given.vision_info_topic, info)

    def _publish_info(self, topic: str, message: OutgoingMessage) -> None:
        if message.kind in self._info_kinds:
            self._transport.publish(topic, message)

    def _publish_result(self, result: FrameResult) -> None:
        self._count_result(result)
        # Messages of ROS cannot say that a result is late.
        if result.error_code or result.is_late:
            return
        given, numbers = self.parameters, self.parameters.class_id_is_number
        if given.detections_topic:
            self._transport.publish(given.detections_topic, detections_message(result, has_numbers=numbers))
        if given.classification_topic:
            self._transport.publish(given.classification_topic, classification_message(result, has_numbers=numbers))
        annotated, mask = annotated_message(result), mask_message(result, is_requested=bool(given.mask_topic))
        if given.annotated_topic and annotated is not None:
            self._transport.publish(given.annotated_topic, annotated)
        if given.mask_topic and mask is not None:
            self._transport.publish(given.mask_topic, mask)
        if given.map_topic and (dense := map_message(result)) is not None:
            self._transport.publish(given.map_topic, dense)
        if self._spatial_detections is not None:
            self._spatial_detections.add_result(result)

    def _count_result(self, result: FrameResult) -> None:
        now = time.monotonic()
        with self._lock:
            if result.error_code:
                self._counts.failed += 1
                self._counts.last_error = f"{result.error_code}: {result.error}"
                return
            self._missing_model = ""
            if result.is_late:
                self._counts.late += 1
                return
            self._counts.answered += 1
            sent_at = self._sent_times.pop(result.header.seq, None)
            if sent_at is not None:
                self._counts.latencies_s.append(now - sent_at)

    def _count(self, now: float) -> None:
        """End the counts of this second; publish diagnostics, and log a line when it is due."""
        with self._lock:
            counts, self._counts = self._counts, BridgeCounts()
            counters, before = self._read_stream.counters(), self._read_counters
            self._read_counters = counters
        counts.seconds, self._counted_at = now - self._counted_at, now
        counts.drops += drops_between(before, counters)
        self._recent.append(counts)
        recent = sum_counts(self._recent)
        self._counts_to_report -= 1
        if self._counts_to_report == 0:
            self._counts_to_report = _COUNTS_OF_A_REPORT
            self._report(recent)
        if self._diagnostics is not None and MessageKind.DIAGNOSTICS in self._info_kinds:
            server = self._diagnostics.server_status(self._opened, self._connection_error)
            frames = self._diagnostics.frames_status(self.parameters.image_topic, recent, self._silence)
            self._publish_info(self.parameters.diagnostics_topic, self._diagnostics.make_message(frames, server))

    def _report(self, counts: BridgeCounts) -> None:
        topic = self.parameters.image_topic
        line = report_line(topic, counts)
        self._silence = "" if counts.received or counts.answered else self._transport.explain_silence(topic)
        log.info("%s", f"{line}: {self._silence}" if self._silence else line)
        if counts.last_error:
            failed = counts.failed + counts.refused
            log.warning("%s: %d frame(s) failed, the last: %s", topic, failed, counts.last_error)
        if lost := self._packet_drops.explain(self._largest_frame):
            log.warning("%s: %s", topic, lost)
        if self._spatial_detections is not None:
            self._spatial_detections.report()


def _model_of(opened: StreamOpened) -> tuple[str, int, tuple[str, ...]]:
    return opened.model, opened.version, opened.labels


def frame_age_us(frame: Frame) -> int:
    """Return the age of a frame's stamp by the clock of this machine; 0 for a stamp in the future."""
    elapsed_ns = time.time_ns() - (frame.header.sec * 1_000_000_000 + frame.header.nanosec)
    return max(0, min(elapsed_ns // 1000, _MAX_AGE_US))
