"""Detections in space from a bridge: topics, threads, log lines, and no cost without them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.bridge import Bridge
from edge_server.plugins.ros.bridge_parameters import BridgeParameters
from edge_server.plugins.ros.depth.spatial_detections import SpatialDetections
from edge_server.plugins.ros.messages.message_conversion import MessageKind
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.protocol.frame_messages import Detection, FrameHeader, FrameResult

TOPICS = {
    "image_topic": "/camera/color/image_raw", "detections3d_topic": "/found3d", "depth_topic": "/camera/aligned/image"
}  # fmt: skip


class RecordingTransport:
    """Transport without ROS: a test calls the callbacks and reads what is published."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[[Any], None]] = {}
        self.opened: list[tuple[str, MessageKind, Qos]] = []
        self.published: list[tuple[str, Any]] = []

    def subscribe(self, topic: str, kind: MessageKind, qos: Qos, callback: Callable[[Any], None]) -> None:
        self.opened.append((topic, kind, qos))
        self.callbacks[topic] = callback

    def advertise(self, topic: str, kind: MessageKind, qos: Qos) -> None:
        self.opened.append((topic, kind, qos))

    def publish(self, topic: str, message: Any) -> None:
        self.published.append((topic, message))

    def explain_silence(self, topic: str) -> str:
        return "nobody publishes it"

    def spin(self, timeout_s: float) -> bool:
        return False

    def close(self) -> None:
        pass


def header(sec: int = 1) -> SimpleNamespace:
    return SimpleNamespace(stamp=SimpleNamespace(sec=sec, nanosec=0), frame_id="camera_optical")


def depth(sec: int = 1, encoding: str = "16UC1", width: int = 64) -> SimpleNamespace:
    data = np.full((48, width), 1500, np.uint16).tobytes()
    return SimpleNamespace(
        header=header(sec), height=48, width=width, encoding=encoding, step=2 * width, is_bigendian=0, data=data
    )


def camera_info(focal_length: float = 50.0) -> SimpleNamespace:
    return SimpleNamespace(
        header=header(), width=64, height=48, distortion_model="plumb_bob", d=[], binning_x=0, binning_y=0,
        k=[focal_length, 0.0, 31.5, 0.0, focal_length, 23.5, 0.0, 0.0, 1.0], r=[], p=[0.0] * 12,
        roi=SimpleNamespace(x_offset=0, y_offset=0, width=0, height=0),
    )  # fmt: skip


def result(sec: int = 1) -> FrameResult:
    return FrameResult(
        FrameHeader(sec, 0, "camera_optical"),
        height=48,
        width=64,
        detections=(Detection(32, 14, 52, 34, 0.5, 3, "cup"),),
    )


@pytest.fixture
def transport() -> RecordingTransport:
    return RecordingTransport()


def opened(transport: RecordingTransport, **changes: Any) -> SpatialDetections:
    given = {
        "image_topic": TOPICS["image_topic"], "detections_topic": TOPICS["detections3d_topic"],
        "depth_topic": TOPICS["depth_topic"], "tolerance_ms": 50, **changes,
    }  # fmt: skip
    made = SpatialDetections(transport, **given)
    made.open_topics(Qos("SENSOR_DATA", 5), Qos("DEFAULT", 10))
    return made


def test_each_result_with_depth_and_calibration_is_published(transport: RecordingTransport) -> None:
    spatial = opened(transport)
    assert transport.opened == [
        ("/found3d", MessageKind.DETECTIONS_3D, Qos("DEFAULT", 10)),
        ("/camera/aligned/image", MessageKind.IMAGE, Qos("SENSOR_DATA", 5)),
        ("/camera/color/camera_info", MessageKind.CAMERA_INFO, Qos("SENSOR_DATA", 1)),
    ]
    transport.callbacks["/camera/color/camera_info"](camera_info())
    transport.callbacks["/camera/aligned/image"](depth(1))
    spatial.add_result(result(1))
    spatial.add_result(result(2))
    transport.callbacks["/camera/aligned/image"](depth(2))
    assert [(topic, message.header.sec) for topic, message in transport.published] == [("/found3d", 1), ("/found3d", 2)]
    (found,) = transport.published[0][1].detections
    assert (found.x, found.y, found.z) == pytest.approx((10 / 50 * 1.5, 0.0, 1.5))
    spatial.report()


def test_what_is_missing_or_wrong_is_logged_once_a_minute_for_each_topic(
    transport: RecordingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    spatial = opened(transport, clock=lambda: now)
    add_depth, add_info = (transport.callbacks[topic] for topic in (TOPICS["depth_topic"], "/camera/color/camera_info"))

    def logged(*, at: float, **given: Any) -> list[str]:
        nonlocal now
        caplog.clear()
        if "depth" in given:
            add_depth(given["depth"])
        if "info" in given:
            add_info(given["info"])
        now = at - 1.0
        spatial.add_result(result(given.get("sec", 1)))
        now = at
        spatial.add_result(result(given.get("sec", 1)))
        spatial.report()
        return caplog.messages

    start = "/camera/aligned/image: no 3D detections: expected"
    info = "/camera/color/camera_info: no 3D detections: expected"
    nothing = f"{start} a depth image within 50 ms of a frame's stamp, given none (nobody publishes it)"
    assert logged(at=1.0) == [nothing]
    assert logged(at=60.0) == []
    assert logged(at=120.0) == [nothing]
    colour = logged(at=200.0, depth=depth(encoding="rgb8"))
    assert colour == [f"{start} depth as 16UC1 (millimetres) or 32FC1 (metres), given 'rgb8'"]
    missing = logged(at=300.0, depth=depth())
    assert missing == [f"{info} a sensor_msgs/CameraInfo, given none (nobody publishes it)"]
    unset = logged(at=400.0, depth=depth(), info=camera_info(0.0))
    assert unset == [f"{info} a calibrated camera, given focal lengths 0 and 0 in K"]
    late = logged(at=500.0, depth=depth(), info=camera_info(), sec=0)
    assert late == [f"{start} a depth image within 50 ms of a frame's stamp, given the nearest +1000 ms"]
    other = logged(at=600.0, depth=depth(sec=2, width=100), sec=2)
    assert other == [f"{start} one field of view, given 64x48 of the image and 100x48 of its depth image"]
    assert transport.published == []
    assert logged(at=700.0, depth=depth(3), sec=3) == []
    assert len(transport.published) == 2


def test_a_rectified_image_has_the_matrix_p(transport: RecordingTransport) -> None:
    for changes in ({"image_topic": "/left/image_rect_color"}, {"image_topic": "/remapped", "is_rectified": True}):
        spatial = opened(transport, camera_info_topic="/info", **changes)
        info = camera_info()
        info.p = [25.0, 0.0, 31.5, 0.0, 0.0, 25.0, 23.5, 0.0, 0.0, 0.0, 1.0, 0.0]
        transport.callbacks["/info"](info)
        transport.callbacks["/camera/aligned/image"](depth())
        spatial.add_result(result())
        (found,) = transport.published.pop()[1].detections
        assert found.x == pytest.approx(10 / 25 * 1.5)


def test_a_bridge_publishes_both_kinds_of_detections(
    transport: RecordingTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    def results() -> Iterator[FrameResult]:
        transport.callbacks["/camera/color/camera_info"](camera_info())
        transport.callbacks["/camera/aligned/image"](depth())
        yield result()
        end.set()

    stream = SimpleNamespace(results=results, close=lambda: None)
    transport.spin = lambda _: not end.wait(20)  # type: ignore[method-assign]
    monkeypatch.setattr(BridgeParameters, "open_stream", lambda *_, **__: stream)
    Bridge([BridgeParameters("m", **TOPICS, detections_topic="/found")], transport, "box:8001").run()
    assert [topic for topic, _ in transport.published] == ["/found", "/found3d"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth_topic": ""}, "give --detections3d-topic and --depth-topic"),
        ({"detections3d_topic": "", "detections_topic": "/found"}, "give --detections3d-topic and --depth-topic"),
        ({"depth_topic": "camera/color/image_raw"}, "is named twice"),
        ({"depth_tolerance_ms": -1}, "--depth-tolerance-ms: expected 0 to 10000, given -1"),
    ],
)
def test_topics_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        BridgeParameters("m", **{**TOPICS, **changes})


def test_without_positions_nothing_of_depth_is_imported_or_subscribed() -> None:
    code = """
import sys
from types import SimpleNamespace
from edge_server.plugins.ros.bridge import Bridge
from edge_server.plugins.ros.bridge_parameters import BridgeParameters
opened = []
transport = SimpleNamespace(
    advertise=lambda *topic: opened.append(topic[0]), subscribe=lambda *topic: opened.append(topic[0]),
    close=lambda: None, spin=lambda _: False,
)
stream = SimpleNamespace(results=lambda: iter(()), close=lambda: None)
BridgeParameters.open_stream = lambda *_, **__: stream
Bridge([BridgeParameters("m", detections_topic="/found")], transport, "box:8001").run()
assert opened == ["/found", "/image"], opened
assert not [name for name in sys.modules if name.startswith("edge_server.plugins.ros.depth")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
