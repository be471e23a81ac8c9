"""Changes of a bridge's model and camera topic while it runs, with a transport in memory and a real stream."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from edge_server.client import StreamError
from edge_server.errors import InvalidRequest, Unsupported
from edge_server.plugins.ros import bridge as bridge_module
from edge_server.plugins.ros import camera_bridge, model_service
from edge_server.plugins.ros.bridge import Bridge
from edge_server.plugins.ros.bridge_parameters import BridgeParameters
from edge_server.plugins.ros.diagnostics import Diagnostics
from edge_server.plugins.ros.messages.message_conversion import DiagnosticLevel, MessageKind
from edge_server.plugins.ros.transports.transport import ServiceTransport
from edge_server.protocol.frame_messages import Delivery
from tests.plugins.ros.conftest import wait_until


class MemoryTransport:
    """Hands messages of `send` to the subscriptions on the thread of `spin`. `found` are the first bytes of the
    answered pictures, in order."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[[Any], None]] = {}
        self.waiting: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.found: list[int] = []
        self.infos: list[str] = []
        self.services: dict[str, Callable[[Any], Mapping[str, object]]] = {}
        self.has_interfaces = True

    def send(self, topic: str, number: int) -> None:
        stamp = SimpleNamespace(sec=1, nanosec=0)
        header = SimpleNamespace(stamp=stamp, frame_id="camera")
        self.waiting.put((topic, SimpleNamespace(header=header, format="jpeg", data=bytes([number]))))

    def subscribe(self, topic: str, kind: MessageKind, qos: Any, callback: Callable[[Any], None]) -> None:
        self.callbacks[topic] = callback

    def unsubscribe(self, topic: str) -> None:
        del self.callbacks[topic]

    def serve(self, service: str, type_name: str, callback: Callable[[Any], Mapping[str, object]]) -> None:
        if not self.has_interfaces:
            raise Unsupported("no edge_server_interfaces")
        self.services[service] = callback

    def advertise(self, topic: str, kind: MessageKind, qos: Any) -> None:
        pass

    def publish(self, topic: str, message: Any) -> None:
        if message.kind is MessageKind.DETECTIONS:
            box = message.detections[0]
            self.found.append(round(box.center_x - box.size_x / 2))
        else:
            self.infos.append(message.method)

    def spin(self, timeout_s: float) -> bool:
        try:
            topic, message = self.waiting.get(timeout=0.01)
        except queue.Empty:
            return True
        if topic in self.callbacks:
            self.callbacks[topic](message)
        return True

    def explain_silence(self, topic: str) -> str:
        return ""

    def close(self) -> None:
        pass


class Running:
    """A bridge that runs on a thread of its own."""

    def __init__(self, address: str, *more_cameras: BridgeParameters, **parameters: Any) -> None:
        self.transport = MemoryTransport()
        assert isinstance(self.transport, ServiceTransport)
        given = BridgeParameters(
            "finder", image_topic="/image", image_is_compressed=True, detections_topic="/found",
            vision_info_topic="/info", delivery=Delivery(depth=250), **parameters,
        )  # fmt: skip
        self.bridge = Bridge([given, *more_cameras], self.transport, address)
        self.service = model_service.ModelService()
        self.service.serve(self.transport)
        self.service.attach(self.bridge)
        self.thread = threading.Thread(target=self.bridge.run)
        self.thread.start()

    def set_model(self, model_name: str = "", model_version: int = 0, image_topic: str = "") -> Mapping[str, object]:
        request = SimpleNamespace(model_name=model_name, model_version=model_version, image_topic=image_topic)
        return self.transport.services["~/set_model"](request)

    def wait_for(self, count: int) -> None:
        while len(self.transport.found) < count:
            assert self.thread.is_alive()

    def stop(self) -> None:
        self.bridge.stop()
        self.thread.join()


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(address: str, *more_cameras: BridgeParameters, **parameters: Any) -> Running:
        started.append(Running(address, *more_cameras, **parameters))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_no_frame_is_lost_or_answered_twice_by_a_change_of_the_model(
    scripted: Callable[..., Any], run: Callable[..., Running]
) -> None:
    server = scripted()
    running = run(server.address)
    for number in range(200):
        running.transport.send("/image", number)
        if number == 20:
            running.wait_for(1)
            assert running.set_model("better") == {
                "success": True, "message": "/image goes to better version 1 on script",
            }  # fmt: skip
    running.wait_for(200)
    assert running.transport.found == list(range(200))
    streams = [(one.model, one.stream_id) for one in server.requests]
    assert streams == [
        ("finder", "ros:/image:finder"), ("better", "ros:/image:better:trial"), ("better", "ros:/image:better"),
    ]  # fmt: skip
    assert running.transport.infos == ["finder version 1 on script", "better version 1 on script"]


def test_a_model_that_cannot_answer_leaves_the_one_that_serves(
    scripted: Callable[..., Any], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = scripted()
    server.missing_models, server.failing_models, server.mute_models = {"ghost"}, {"broken"}, {"mute"}
    running = run(server.address)
    running.transport.send("/image", 0)
    running.wait_for(1)
    for model, reason in [
        ("ghost", "unknown model 'ghost'"),
        ("broken", "model 'broken' failed for a picture of /image: INTERNAL: it fails"),
        ("mute", f"model 'mute' on {server.address} did not answer within 0.5 s"),
    ]:
        monkeypatch.setattr(model_service, "TRIAL_S", 0.5 if model == "mute" else 60.0)
        answer = running.set_model(model)
        assert not answer["success"]
        assert reason in str(answer["message"])
    assert running.bridge.cameras[0].parameters.model_name == "finder"
    running.transport.send("/image", 1)
    running.wait_for(2)
    assert [one.model for one in server.requests] == ["finder", "ghost", "broken", "mute"]


def test_frames_of_a_model_that_hangs_are_counted_as_lost(
    scripted: Callable[..., Any],
    run: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(camera_bridge, "_DRAIN_S", 0.2)
    monkeypatch.setattr(bridge_module, "_COUNT_INTERVAL_S", 0.1)
    caplog.set_level("INFO")
    server = scripted()
    server.mute_models = {"finder"}
    running = run(server.address)
    running.transport.send("/image", 0)
    while not server.frames:
        assert running.thread.is_alive()
    assert running.set_model("better")["success"]
    for number in itertools.count(1):
        running.transport.send("/image", number % 256)
        if running.transport.found and "dropped 1 lost with a connection" in caplog.text:
            break
        running.thread.join(0.01)


def test_the_camera_topic_changes_with_its_subscription(
    scripted: Callable[..., Any], run: Callable[..., Running]
) -> None:
    server = scripted()
    running = run(server.address)
    running.transport.send("/image", 0)
    running.wait_for(1)
    assert "'/found' is named twice" in str(running.set_model(image_topic="/found")["message"])
    assert running.set_model(image_topic="/other")["success"]
    assert list(running.transport.callbacks) == ["/other"]
    running.transport.send("/image", 1)
    running.transport.send("/other", 2)
    running.wait_for(2)
    assert running.transport.found == [0, 2]
    assert server.requests[-1].stream_id == "ros:/other:finder"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "expected model_name or image_topic, both are empty"),
        ({"model_name": "better", "model_version": -1}, "model_version: expected 0 to"),
        ({"image_topic": "/other"}, "image_topic: /depth gives the depth of /image alone"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(
    scripted: Callable[..., Any], run: Callable[..., Running], fields: dict[str, Any], reason: str
) -> None:
    running = run(scripted().address, detections3d_topic="/found3d", depth_topic="/depth")
    answer = running.set_model(**fields)
    assert not answer["success"]
    assert reason in str(answer["message"])


def test_one_request_at_a_time_changes_the_model(
    scripted: Callable[..., Any], run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_service, "TRIAL_S", 1.0)
    server = scripted()
    server.mute_models = {"mute"}
    running = run(server.address)
    running.transport.send("/image", 0)
    running.wait_for(1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(running.set_model, "mute")
        while len(server.requests) < 2:
            assert not first.done()
        assert running.set_model("better")["message"] == "another request changes the model now"
        assert not first.result()["success"]


def test_of_a_bridge_with_two_cameras_both_get_the_new_model_and_none_another_topic(
    scripted: Callable[..., Any], run: Callable[..., Running]
) -> None:
    server = scripted()
    server.failing_models = {"broken"}
    running = run(server.address, BridgeParameters("finder", image_topic="/rear", detections_topic="/behind"))
    running.transport.send("/image", 1)
    running.wait_for(1)
    assert running.set_model("broken")["success"] is False
    assert running.set_model(image_topic="/left")["message"] == "image_topic: expected '' for a bridge of 2 cameras"
    assert [camera.parameters.model_name for camera in running.bridge.cameras] == ["finder", "finder"]
    assert running.set_model("better") == {
        "success": True, "message": "/image, /rear goes to better version 1 on script",
    }  # fmt: skip
    assert [camera.parameters.model_name for camera in running.bridge.cameras] == ["better", "better"]
    running.transport.send("/image", 2)
    running.transport.send("/rear", 3)
    running.wait_for(3)
    assert sorted(running.transport.found) == [1, 2, 3]
    streams = {request.stream_id for request in server.requests if request.model == "better"}
    assert {"ros:/image:better", "ros:/rear:better"} <= streams


def test_a_change_of_the_model_brings_a_failed_camera_back(
    scripted: Callable[..., Any], run: Callable[..., Running]
) -> None:
    server = scripted()
    server.refusal, server.refused_ids = grpc.StatusCode.ABORTED, {"ros:/rear:finder"}
    running = run(server.address, BridgeParameters("finder", image_topic="/rear", detections_topic="/behind"))
    front, rear = running.bridge.cameras
    wait_until(lambda: rear.failure is not None, "the refusal")
    assert running.thread.is_alive()
    running.transport.send("/image", 1)
    running.wait_for(1)
    assert running.set_model("better")["success"]
    running.transport.send("/rear", 2)
    running.wait_for(2)
    assert running.transport.found == [1, 2]
    assert (front.failure, rear.failure) == (None, None)


def test_the_diagnostics_have_the_error_of_a_failed_camera(scripted: Callable[..., Any]) -> None:
    server, failures = scripted(), queue.SimpleQueue[Exception]()
    server.refusal = grpc.StatusCode.ABORTED
    parameters = BridgeParameters("finder", image_topic="/rear", detections_topic="/behind")
    camera = camera_bridge.CameraBridge(parameters, MemoryTransport(), server.address, failures.put)
    camera.open()
    failure = failures.get(timeout=60)
    camera.count(1.0)
    _, status = camera.statuses(Diagnostics("/diagnostics", "eyes", server.address))
    camera.close()
    assert camera.failure is failure
    assert (status.level, status.message) == (DiagnosticLevel.ERROR, str(failure))


def test_a_bridge_of_which_all_cameras_have_failed_ends(scripted: Callable[..., Any]) -> None:
    server = scripted()
    server.refusal = grpc.StatusCode.INVALID_ARGUMENT
    cameras = [
        BridgeParameters("finder", image_topic=f"/{name}", detections_topic=f"/{name}/found") for name in ("a", "b")
    ]
    with pytest.raises(StreamError, match="INVALID_ARGUMENT: refused"):
        Bridge(cameras, MemoryTransport(), server.address).run()
    assert {request.stream_id for request in server.requests} == {"ros:/a:finder", "ros:/b:finder"}


def test_two_cameras_with_one_topic_in_common_are_refused() -> None:
    cameras = [BridgeParameters("finder", image_topic=name, detections_topic="/found") for name in ("/left", "/right")]
    with pytest.raises(InvalidRequest, match="'/found' is named twice"):
        Bridge(cameras, MemoryTransport(), "127.0.0.1:1")


def test_a_request_while_no_bridge_is_attached_is_refused(
    scripted: Callable[..., Any], run: Callable[..., Running]
) -> None:
    running = run(scripted().address)
    running.service.attach(None)
    assert running.set_model("better") == {"success": False, "message": "the node is not active"}


def test_without_the_package_of_the_service_the_bridge_runs_without_it() -> None:
    transport = MemoryTransport()
    transport.has_interfaces = False
    bridge = Bridge([BridgeParameters("finder", detections_topic="/found")], transport, "127.0.0.1:1")
    service = model_service.ModelService()
    service.serve(transport)
    service.attach(bridge)
    assert transport.services == {}
    assert not bridge.cameras[0].keeps_frame
