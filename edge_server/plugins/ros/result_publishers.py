"""Publishers of one camera's results, and of the model and the labels that they come from."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from edge_server.errors import Unsupported
from edge_server.plugins.ros.bridge_log import describe_server
from edge_server.plugins.ros.bridge_parameters import BridgeParameters
from edge_server.plugins.ros.messages.message_conversion import (
    LabelInfoMessage,
    MessageKind,
    OutgoingMessage,
    VisionInfoMessage,
    result_messages,
    stamp_now,
)
from edge_server.plugins.ros.transports.transport import Qos, Transport
from edge_server.protocol.frame_messages import FrameResult, StreamOpened

if TYPE_CHECKING:
    from edge_server.plugins.ros.depth.spatial_detections import SpatialDetections

_MAX_LABELS = 65_535
_DEPTH_QUEUE_SIZE = 5
_RESULT_KINDS = {
    "detections": MessageKind.DETECTIONS, "classification": MessageKind.CLASSIFICATION,
    "annotated": MessageKind.COMPRESSED_IMAGE, "mask": MessageKind.IMAGE, "map": MessageKind.IMAGE,
}  # fmt: skip
_LATCHED = Qos("DEFAULT", 1, is_transient_local=True)

log = logging.getLogger(__name__)


class ResultTopics:
    """Publishes on the topics of `parameters`. Call `open` first; the other methods are for any thread."""

    def __init__(self, parameters: BridgeParameters, transport: Transport) -> None:
        self._parameters = parameters
        self._transport = transport
        self._spatial_detections: SpatialDetections | None = None
        self._result_topics: dict[str, str] = {}
        """Name of a kind of result -> its topic, for those that are published."""
        self._model_topics: dict[MessageKind, str] = {}
        self._info_version = 0

    def open(self) -> None:
        """Advertise the topics, and subscribe to depth where positions are asked for. Topics about the model are left
        out, with a warning, where their messages are not installed."""
        given = self._parameters
        qos = Qos(given.output_qos, given.output_queue_size)
        for name, kind in _RESULT_KINDS.items():
            if topic := getattr(given, f"{name}_topic"):
                self._transport.advertise(topic, kind, qos)
                self._result_topics[name] = topic
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
        for topic, kind in (
            (given.vision_info_topic, MessageKind.VISION_INFO),
            (given.label_info_topic, MessageKind.LABEL_INFO),
        ):
            if topic and advertise_if_installed(self._transport, topic, kind, _LATCHED):
                self._model_topics[kind] = topic

    def publish(self, result: FrameResult) -> None:
        """Publish a result that has no error and is in time."""
        has_numbers = self._parameters.class_id_is_number
        messages = result_messages(result, self._result_topics, has_numbers=has_numbers, has_mask=True)
        for name, message in messages.items():
            self._transport.publish(self._result_topics[name], message)
        if self._spatial_detections is not None:
            self._spatial_detections.add_result(result)

    def publish_model(self, opened: StreamOpened) -> None:
        """Publish which model serves, and its labels."""
        self._info_version += 1
        labels_topic = self._model_topics.get(MessageKind.LABEL_INFO, "")
        self._publish_info(LabelInfoMessage(stamp_now(), opened.labels[:_MAX_LABELS]))
        self._publish_info(VisionInfoMessage(stamp_now(), describe_server(opened), labels_topic, self._info_version))

    def report(self) -> None:
        """Log why results had no position. Call it on the thread of the transport's `spin`."""
        if self._spatial_detections is not None:
            self._spatial_detections.report()

    def _publish_info(self, message: OutgoingMessage) -> None:
        if topic := self._model_topics.get(message.kind):
            self._transport.publish(topic, message)


def advertise_if_installed(transport: Transport, topic: str, kind: MessageKind, qos: Qos) -> bool:
    """Advertise a topic. Log a warning and return False where its message is not installed."""
    try:
        transport.advertise(topic, kind, qos)
    except Unsupported as error:
        log.warning("%s is left out: %s", topic, error)
        return False
    return True
