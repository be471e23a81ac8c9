"""Publisher of vision_msgs/Detection3DArray: joins results with the depth and camera_info topics of their camera."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.depth.camera_model import (
    CameraModel,
    is_rectified_topic,
    read_camera_info,
)
from edge_server.plugins.ros.depth.depth_pairing import DepthPairing, PairedResult
from edge_server.plugins.ros.depth.object_positions import detections3d_message, read_depth_image
from edge_server.plugins.ros.messages.message_conversion import MessageKind
from edge_server.plugins.ros.transports.transport import Qos, Transport, topic_beside
from edge_server.protocol.frame_messages import FrameResult

_REPEAT_S = 60.0

log = logging.getLogger(__name__)


class SpatialDetections:
    """Detections with positions, published for each result that has a depth image and a calibration.

    `camera_info_topic` "" is the one beside the image topic. `is_rectified`: the images have no distortion, and the
    name of their topic does not say so. Callbacks of the transport and `add_result` may run on different threads.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        image_topic: str,
        detections_topic: str,
        depth_topic: str,
        camera_info_topic: str = "",
        tolerance_ms: int,
        is_rectified: bool = False,
        has_numbers: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._detections_topic = detections_topic
        self._depth_topic = depth_topic
        self._camera_info_topic = camera_info_topic or topic_beside(image_topic, "camera_info")
        self._tolerance_ms = tolerance_ms
        self._is_rectified = is_rectified or is_rectified_topic(image_topic)
        self._has_numbers = has_numbers
        self._clock = clock
        self._lock = threading.Lock()
        self._pairing = DepthPairing(tolerance_ms, clock)
        self._camera: CameraModel | None = None
        self._heard: set[str] = set()
        self._problems: dict[str, str] = {}
        self._logged_s: dict[str, float] = {}

    def open_topics(self, depth_qos: Qos, detections_qos: Qos) -> None:
        """Advertise the detections, and subscribe to depth and camera_info.

        camera_info is read with best effort, which publishers of every reliability answer.
        """
        self._transport.advertise(self._detections_topic, MessageKind.DETECTIONS_3D, detections_qos)
        self._transport.subscribe(self._depth_topic, MessageKind.IMAGE, depth_qos, self._receive_depth)
        self._transport.subscribe(
            self._camera_info_topic, MessageKind.CAMERA_INFO, Qos("SENSOR_DATA", 1), self._receive_camera_info
        )

    def _receive_depth(self, message: Any) -> None:
        with self._lock:
            self._heard.add(self._depth_topic)
            try:
                image = read_depth_image(message)
            except InvalidRequest as error:
                self._problems[self._depth_topic] = error.message
                return
            self._publish(self._pairing.add_depth(image))

    def _receive_camera_info(self, message: Any) -> None:
        with self._lock:
            self._heard.add(self._camera_info_topic)
            try:
                self._camera = read_camera_info(message, is_rectified=self._is_rectified)
            except InvalidRequest as error:
                self._camera = None
                self._problems[self._camera_info_topic] = error.message

    def add_result(self, result: FrameResult) -> None:
        """Publish a result, at once or when its depth image has come."""
        with self._lock:
            self._publish(self._pairing.add_result(result))

    def _publish(self, decided: list[PairedResult]) -> None:
        # Under the lock, so that messages of two threads keep their order.
        for result, depth, offset_ms in decided:
            if depth is None:
                nearest = "none" if offset_ms is None else f"the nearest {offset_ms:+.0f} ms"
                self._problems.setdefault(
                    self._depth_topic,
                    f"expected a depth image within {self._tolerance_ms} ms of a frame's stamp, given {nearest}",
                )
            elif self._camera is None:
                self._problems.setdefault(self._camera_info_topic, "expected a sensor_msgs/CameraInfo, given none")
            else:
                try:
                    message = detections3d_message(result, depth, self._camera, has_numbers=self._has_numbers)
                except InvalidRequest as error:
                    self._problems[self._depth_topic] = error.message
                else:
                    self._transport.publish(self._detections_topic, message)

    def report(self) -> None:
        """Log why results since the last report had no position, at most once a minute for each topic.

        Call it on the thread of the transport's `spin`.
        """
        with self._lock:
            problems, self._problems = self._problems, {}
            heard, self._heard = self._heard, set()
        now = self._clock()
        for topic, problem in problems.items():
            if now - self._logged_s.get(topic, -_REPEAT_S) >= _REPEAT_S:
                self._logged_s[topic] = now
                reason = "" if topic in heard else self._transport.explain_silence(topic)
                log.warning("%s: no 3D detections: %s%s", topic, problem, f" ({reason})" if reason else "")
