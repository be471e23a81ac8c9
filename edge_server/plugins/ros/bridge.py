"""Bridge between ROS and a server: sends the frames of a camera topic, and publishes the results as topics.

It needs no ROS library: a `Transport` connects it to ROS. The transport's thread sends frames directly
to the stream, which drops the oldest one when the server is busy; another thread publishes the results. The bridge
continues when topics are silent, publishers come and go, or the server restarts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from edge_server.client import Counters, FrameStream, StreamError
from edge_server.errors import ErrorCode, InvalidRequest
from edge_server.plugins.ros.connection_log import ConnectionLog
from edge_server.plugins.ros.messages.message_conversion import (
    MessageKind,
    annotated_message,
    classification_message,
    detections_message,
    make_frame,
    map_message,
    mask_message,
)
from edge_server.plugins.ros.transports.transport import Qos, Transport
from edge_server.protocol.frame_messages import Delivery, Frame, FrameResult, Returns

if TYPE_CHECKING:
    from edge_server.plugins.ros.depth.spatial_detections import SpatialDetections

REPORT_INTERVAL_S = 5.0
_SPIN_S = 0.2
_MISSING_MODEL_WAIT_S = 2.0
_MAX_SENT_TIMES = 1024
_DEPTH_QUEUE_SIZE = 5
_MAX_AGE_US = 2**32 - 1

log = logging.getLogger(__name__)


class FrameSink(Protocol):
    """The part of `edge_server.client.FrameStream` that the bridge uses."""

    def send(self, frame: Frame, /) -> None: ...

    def results(self) -> Iterator[FrameResult]: ...

    def counters(self) -> Counters: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BridgeParameters:
    """Parameters of a bridge. The names are those of Isaac ROS's inference nodes where such exist.

    A topic that is "" is not published. `detections_topic` carries vision_msgs/Detection2DArray,
    `classification_topic` vision_msgs/Classification with the best `top_k`, `annotated_topic` sensor_msgs/
    CompressedImage, `mask_topic` sensor_msgs/Image of class numbers, `map_topic` sensor_msgs/Image of depth or anomaly.
    `detections3d_topic` carries vision_msgs/Detection3DArray. It needs `depth_topic`, whose stamps differ from those of
    the frames by `depth_tolerance_ms` at most, and the calibration of `camera_info_topic`, "" for the one beside
    `image_topic`. `image_is_rectified`: the images have no distortion, and the name of their topic does not say so.
    `image_is_compressed` subscribes to CompressedImage. `class_id_is_number` writes class numbers instead of labels,
    like Isaac ROS. `stamp_tells_age` computes a frame's age from its stamp, for cameras that use the clock of this
    machine.
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
        names = [name.strip("/") for name in (*inputs, *self._result_topics) if name]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidRequest(f"topic '/{twice[0]}' is named twice: images and each kind of result need one each")

    @property
    def _result_topics(self) -> tuple[str, ...]:
        return (
            self.detections_topic, self.classification_topic, self.annotated_topic, self.mask_topic, self.map_topic,
            self.detections3d_topic,
        )  # fmt: skip

    def open_stream(self, address: str) -> FrameStream:
        """Return the stream to a server's gRPC port. It connects when its results are read."""
        connection_log = ConnectionLog(self.image_topic)
        return FrameStream(
            address,
            self.model_name,
            version=self.model_version,
            stream_id=self.stream_id or f"ros:{self.image_topic}:{self.model_name}",
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
            on_broken=connection_log.log_broken,
            on_opened=connection_log.log_opened,
        )


@dataclass(slots=True)
class BridgeCounts:
    """Counts since the last report."""

    received: int = 0
    answered: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0
    last_error: str = ""
    latencies_s: list[float] = field(default_factory=list)


class Bridge:
    """Connects one transport to one stream. `run` blocks; any thread or signal handler may call `stop`."""

    def __init__(self, parameters: BridgeParameters, transport: Transport, stream: FrameSink) -> None:
        self.parameters = parameters
        self._transport = transport
        self._stream = stream
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._counts = BridgeCounts()
        self._sent_times: OrderedDict[int, float] = OrderedDict()
        self._seq = 0
        self._missing_model = ""
        self._last_counters = Counters()
        self._failure: Exception | None = None
        self._spatial_detections: SpatialDetections | None = None

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    def run(self) -> None:
        """Run until `stop`, or until the transport or the stream ends; then close both.

        Raises the error that ended it, if any.
        """
        reader = threading.Thread(target=self._publish_results, name="ros-results", daemon=True)
        try:
            self._open_topics()
            reader.start()
            reported_at = time.monotonic()
            while not self._stopping.is_set() and self._transport.spin(_SPIN_S):
                now = time.monotonic()
                if now - reported_at >= REPORT_INTERVAL_S:
                    self._report(now - reported_at)
                    reported_at = now
        finally:
            self._stopping.set()
            self._stream.close()
            if reader.ident is not None:
                reader.join()
            self._transport.close()
        if self._failure is not None:
            raise self._failure

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
        kind = MessageKind.COMPRESSED_IMAGE if given.image_is_compressed else MessageKind.IMAGE
        self._transport.subscribe(given.image_topic, kind, Qos(given.input_qos, given.input_queue_size), self._receive)

    def _receive(self, message: Any) -> None:
        """Send one message to the stream. A message that is not an image is counted; the bridge continues."""
        with self._lock:
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
            self._sent_times[seq] = time.monotonic()
            while len(self._sent_times) > _MAX_SENT_TIMES:
                self._sent_times.popitem(last=False)
        try:
            self._stream.send(frame)
        except ValueError:
            # Some transports call back while the bridge closes, after the stream is closed.
            if not self._stopping.is_set():
                raise

    def _publish_results(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    for result in self._stream.results():
                        self._publish_result(result)
                    return
                except StreamError as error:
                    if error.code is not ErrorCode.NOT_FOUND:
                        raise
                    # The model is missing at the start of a robot, or between two deployments: wait for it.
                    if error.message != self._missing_model:
                        self._missing_model = error.message
                        log.warning("%s; asking again every %g s", error, _MISSING_MODEL_WAIT_S)
                    self._stopping.wait(_MISSING_MODEL_WAIT_S)
        except Exception as error:  # noqa: BLE001 - raised by `run` on its thread
            if not self._stopping.is_set():
                self._failure = error
                self._stopping.set()

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

    def _report(self, seconds: float) -> None:
        topic = self.parameters.image_topic
        counters = self._stream.counters()
        with self._lock:
            counts, self._counts = self._counts, BridgeCounts()
            before, self._last_counters = self._last_counters, counters
        line = report_line(topic, counts, drops_between(before, counters), seconds)
        silence = "" if counts.received or counts.answered else self._transport.explain_silence(topic)
        log.info("%s", f"{line}: {silence}" if silence else line)
        if counts.last_error:
            failed = counts.failed + counts.refused
            log.warning("%s: %d frame(s) failed, the last: %s", topic, failed, counts.last_error)
        if self._spatial_detections is not None:
            self._spatial_detections.report()


def drops_between(before: Counters, now: Counters) -> dict[str, int]:
    """Return the numbers of frames without a result between two counts, by reason."""
    drops = {
        reason.name.lower().replace("_", " "): count - before.dropped.get(reason, 0)
        for reason, count in now.dropped.items()
    }
    drops["overtaken before sending"] = now.dropped_here - before.dropped_here
    drops["lost with a connection"] = now.lost - before.lost
    return {reason: count for reason, count in drops.items() if count > 0}


def report_line(topic: str, counts: BridgeCounts, drops: Mapping[str, int], seconds: float) -> str:
    """Return a log line: input and output rates, drops by reason, time from message to result."""
    if not counts.received and not counts.answered:
        return f"{topic}: no images in the last {seconds:.0f} s"
    words = [f"{topic}: in {counts.received / seconds:.1f}/s, out {counts.answered / seconds:.1f}/s"]
    if drops:
        words.append("dropped " + ", ".join(f"{count} {reason}" for reason, count in drops.items()))
    if counts.late:
        words.append(f"{counts.late} too late to publish")
    if counts.latencies_s:
        ordered = sorted(counts.latencies_s)
        p50, p99 = (ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000 for share in (0.5, 0.99))
        words.append(f"latency p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    return "; ".join(words)


def frame_age_us(frame: Frame) -> int:
    """Return the age of a frame's stamp by the clock of this machine; 0 for a stamp in the future."""
    elapsed_ns = time.time_ns() - (frame.header.sec * 1_000_000_000 + frame.header.nanosec)
    return max(0, min(elapsed_ns // 1000, _MAX_AGE_US))
