"""MQTT against a real broker, Mosquitto: topics, Home Assistant's discovery, refusals, a broker that disappears."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from base64 import b64encode
from collections.abc import Iterator

import pytest

from edge_server.config import SinkEntry
from edge_server.core.back_off import BackOff
from edge_server.core.frame_stream_types import ClassScore, FrameHeader, FrameResult
from edge_server.errors import Unsupported
from edge_server.sinks import mqtt, sink_runner
from edge_server.sinks.sink_interface import REMOVED, SinkMessage
from edge_server.sinks.sink_runner import SinkRunner

PATIENCE_S = 20.0


class Listener:
    """A client that keeps the last message of each topic, as Home Assistant sees them."""

    def __init__(self, port: int) -> None:
        from paho.mqtt import client

        self.topics: dict[str, str] = {}
        self.retained: set[str] = set()
        self.count = 0
        self._client = client.Client(client.CallbackAPIVersion.VERSION2)
        self._client.on_connect = lambda *_: self._client.subscribe("#", qos=1)
        self._client.on_message = self._on_message
        self._client.on_subscribe = lambda *_: ready.set()
        ready = threading.Event()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert ready.wait(PATIENCE_S)

    def _on_message(self, client, data, message) -> None:
        self.topics[message.topic] = message.payload.decode()
        self.count += 1
        if message.retain:
            self.retained.add(message.topic)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture
def listen(broker, eventually) -> Iterator:
    made = []

    def make() -> Listener:
        def connect() -> bool:
            try:
                made.append(Listener(broker.port))
            except ConnectionError:
                return False
            return True

        assert eventually(connect)
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert [thread.name for thread in threading.enumerate() if "paho" in thread.name] == []


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(sink_runner, "BACK_OFF", BackOff(0.01, 0.1))
    monkeypatch.setattr(mqtt, "TIMEOUT_S", 3.0)
    made = []

    def make(url: str, **fields) -> SinkRunner:
        entry = SinkEntry(**{"name": "home", "url": url, "interval_s": 0.0, **fields})
        made.append(SinkRunner(entry, lambda runner: None))
        return made[-1]

    yield make
    for runner in made:
        runner.close(PATIENCE_S)
        report = runner.report()
        assert report.received == report.delivered + report.suppressed + report.dropped


def address(broker, user: str = "") -> str:
    return f"mqtt://{user}127.0.0.1:{broker.port}"


@pytest.mark.full
def test_counts_results_and_the_state_of_the_camera_have_topics(broker, listen, start, message, eventually):
    listener = listen()
    runner = start(address(broker))
    runner.put(message("front door", "person", "person", "sports ball"))
    assert eventually(lambda: "edge_server/front_door/count/sports_ball" in listener.topics)
    assert listener.topics["edge_server/status"] == "online"
    assert listener.topics["edge_server/front_door/status"] == "online"
    assert listener.topics["edge_server/front_door/count/person"] == "2"
    assert len(json.loads(listener.topics["edge_server/front_door/result"])["detections"]) == 3
    runner.put(message("front door", "person"))
    assert eventually(lambda: listener.topics["edge_server/front_door/count/sports_ball"] == "0")
    assert listener.topics["edge_server/front_door/count/person"] == "1"
    runner.put(SinkMessage("front door", state="FAILED", reason="gone"))
    assert eventually(lambda: listener.topics["edge_server/front_door/status"] == "offline")
    # Who comes later is told the same, besides the result, which is not kept.
    later = listen()
    assert eventually(lambda: "edge_server/front_door/count/person" in later.retained)
    assert "edge_server/front_door/result" not in later.topics


@pytest.mark.full
def test_home_assistant_is_told_of_each_entity_once_and_of_its_removal(broker, listen, start, message, eventually):
    listener = listen()
    runner = start(address(broker))
    topic = "homeassistant/binary_sensor/edge_server_door_person/config"
    runner.put(message("door", "person"))
    assert eventually(lambda: topic in listener.topics)
    entity = json.loads(listener.topics[topic])
    assert entity["state_topic"] == "edge_server/door/count/person"
    assert {one["topic"] for one in entity["availability"]} == {"edge_server/status", "edge_server/door/status"}
    assert entity["unique_id"] == "edge_server_door_person"
    assert entity["device"]["name"] == "door"
    before = listener.count
    runner.put(message("door", "person", "person"))
    assert eventually(lambda: listener.topics["edge_server/door/count/person"] == "2")
    assert eventually(lambda: listener.count == before + 2)  # the result and the count
    runner.put(SinkMessage("door", state=REMOVED))
    assert eventually(lambda: listener.topics[topic] == "")
    assert listen().topics.keys() <= {"edge_server/status"}


@pytest.mark.full
def test_a_classifier_has_its_class_as_a_sensor(broker, listen, start, eventually):
    listener = listen()
    runner = start(address(broker), topic="robots/7", discovery="ha")
    classes = (ClassScore(0, 0.2, "cat"), ClassScore(1, 0.7, "dog"))
    runner.put(SinkMessage("door", FrameResult(FrameHeader(), classes=classes)))
    assert eventually(lambda: listener.topics.get("robots/7/door/class") == "dog")
    entity = json.loads(listener.topics["ha/sensor/edge_server_door_class/config"])
    assert entity["state_topic"] == "robots/7/door/class"


@pytest.mark.full
def test_discovery_can_be_switched_off(broker, listen, start, message, eventually):
    listener = listen()
    runner = start(address(broker), discovery="")
    runner.put(message("door", "person"))
    assert eventually(lambda: "edge_server/door/count/person" in listener.topics)
    assert not [topic for topic in listener.topics if topic.startswith("homeassistant")]


@pytest.mark.full
def test_the_end_of_the_sink_is_told_and_its_loss_is_the_brokers_last_will(broker, listen, start, message, eventually):
    listener = listen()
    runner = start(address(broker))
    runner.put(message("door", "person"))
    assert eventually(lambda: listener.topics.get("edge_server/status") == "online")
    runner.close(PATIENCE_S)
    assert eventually(lambda: listener.topics["edge_server/status"] == "offline")


@pytest.mark.full
def test_a_broker_that_is_killed_costs_messages_and_is_told_everything_when_it_is_back(
    broker, listen, start, message, eventually
):
    runner = start(address(broker), on_change=False)
    runner.put(message("door", "person"))
    assert eventually(lambda: runner.report().delivered == 1)
    broker.kill()

    def put_until_failed() -> bool:
        runner.put(message("door", "person"))
        return runner.report().state == "FAILED"

    assert eventually(put_until_failed)
    assert f"mqtt://127.0.0.1:{broker.port}: " in runner.report().reason
    broker.start()
    listener = listen()

    def put_until_heard() -> bool:
        runner.put(message("door", "person"))
        return "homeassistant/binary_sensor/edge_server_door_person/config" in listener.topics

    assert eventually(put_until_heard)
    assert eventually(lambda: runner.report().state == "RUNNING")
    assert runner.report().dropped > 0


@pytest.mark.full
def test_a_broker_that_refuses_the_password_is_named_without_it(broker, start, message, eventually, tmp_path):
    broker.kill()
    salt = os.urandom(12)
    digest = hashlib.pbkdf2_hmac("sha512", b"right", salt, 101)
    line = f"me:$7$101${b64encode(salt).decode()}${b64encode(digest).decode()}\n"
    (tmp_path / "passwords").write_text(line)
    (tmp_path / "passwords").chmod(0o600)
    broker.start("allow_anonymous false", f"password_file {tmp_path / 'passwords'}")
    wrong = start(address(broker, "me:geheim@"))
    wrong.put(message())
    assert eventually(lambda: "Not authorized" in wrong.report().reason or (not wrong.put(message()) and False))
    assert "geheim" not in str(wrong.report())
    right = start(address(broker, "me:right@"))

    def put() -> bool:
        right.put(message("door", "cat"))
        return right.report().delivered > 0

    assert eventually(put)


@pytest.mark.full
def test_a_broker_that_accepts_and_says_nothing_does_not_hold_up_anything(
    start, message, eventually, free_ports, monkeypatch
):
    import socket

    pytest.importorskip("paho.mqtt.client")
    monkeypatch.setattr(mqtt, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        runner = start(f"mqtt://127.0.0.1:{listener.getsockname()[1]}")
        runner.put(message())
        assert eventually(lambda: "no answer within 0.3 s" in runner.report().reason)


def test_without_the_package_the_reason_says_what_to_install(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(mqtt.importlib, "import_module", absent)
    with pytest.raises(Unsupported, match=r"pip install 'edge-server\[mqtt\]'"):
        mqtt.MqttBroker("mqtt://host", "t", "").open()
