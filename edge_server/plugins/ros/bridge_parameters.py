"""Parameters of a bridge for one camera: the model, the topics, and how frames go to the server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from edge_server.client import FrameStream, StreamError
from edge_server.errors import InvalidRequest
from edge_server.protocol.frame_messages import Delivery, Returns, StreamOpened


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
    model that serves. These two are left out, with a warning, where their messages are not installed.
    `image_is_compressed` subscribes to CompressedImage.
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
        check_named_once(self.topics)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> BridgeParameters:
        """Return the parameters whose fields, or those of their Delivery, have a value in `values`; other values are
        ignored."""

        def own(kind: type[BridgeParameters | Delivery]) -> dict[str, Any]:
            names = {item.name for item in fields(kind)}
            return {name: value for name, value in values.items() if name in names}

        return cls(**own(cls), delivery=Delivery(**own(Delivery)))

    @property
    def topics(self) -> tuple[str, ...]:
        """All topics; a name may be ""."""
        inputs = (self.image_topic, self.depth_topic, self.camera_info_topic)
        return (*inputs, *self._result_topics, self.vision_info_topic, self.label_info_topic)

    @property
    def _result_topics(self) -> tuple[str, ...]:
        return (
            self.detections_topic, self.classification_topic, self.annotated_topic, self.mask_topic, self.map_topic,
            self.detections3d_topic,
        )  # fmt: skip

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


def check_named_once(topics: Collection[str]) -> None:
    """Raise InvalidRequest if a topic is among `topics` twice; "" is none."""
    names = [name.strip("/") for name in topics if name]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"topic '/{twice[0]}' is named twice: images and each kind of message need one each")
