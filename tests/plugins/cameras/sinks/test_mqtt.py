"""MQTT against a real broker, Mosquitto: topics, Home Assistant's discovery, refusals, a broker that disappears."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import subprocess
from base64 import b64encode

import cv2
import numpy as np
import pytest

from edge_server.core.back_off import BackOff
from edge_server.errors import Unsupported
from edge_server.plugins.cameras.questions.question import QuestionAnswer, QuestionEntry
from edge_server.plugins.cameras.sinks import mqtt, mqtt_connection, sink_runner
from edge_server.plugins.cameras.sinks.sink_interface import REMOVED, SinkMessage
from edge_server.plugins.cameras.sinks.sink_runner import SinkRunner
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry
from edge_server.protocol.frame_messages import ClassScore, FrameHeader, FrameResult
from edge_server.version import __version__

PATIENCE_S = 60.0
ID = mqtt.MqttBroker(SinkEntry("home", "mqtt://host", topic="edge_server"), lambda: None)._id
"""Prefix of the ids of a sink with the topic edge_server on this host."""


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(sink_runner, "BACK_OFF", BackOff(0.01, 0.1))
    monkeypatch.setattr(mqtt_connection, "TIMEOUT_S", 3.0)
    made = []

    def make(url: str, **fields) -> SinkRunner:
        entry = SinkEntry(**{"name": "home", "url": url, "interval_s": 0.0, "topic": "edge_server", **fields})
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
    assert eventually(lambda: "edge_server/status" in listener.topics)
    assert listener.topics["edge_server/status"] == "online"
    assert listener.topics["edge_server/front_door/count/sports_ball"] == "1"
    assert listener.topics["edge_server/front_door/status"] == "online"
    assert listener.topics["edge_server/front_door/count/person"] == "2"
    assert len(json.loads(listener.topics["edge_server/front_door/result"])["detections"]) == 3
    runner.put(message("front door", "person"))
    assert eventually(lambda: listener.topics["edge_server/front_door/count/sports_ball"] == "0")
    assert listener.topics["edge_server/front_door/count/person"] == "1"
    runner.put(SinkMessage("front door", state="FAILED", reason="gone"))
    assert eventually(lambda: listener.topics["edge_server/front_door/status"] == "offline")
    # A later subscriber gets the same.
    later = listen()
    assert eventually(lambda: later.topics == listener.topics)
    assert len(json.loads(later.topics["edge_server/front_door/result"])["detections"]) == 1


@pytest.mark.full
def test_other_classes_of_an_earlier_run_are_deleted_once_classes_are_chosen(
    broker, listen, start, message, eventually
):
    before = start(address(broker))
    before.put(state("door", "RUNNING", "person", "sports ball", "zebra"))
    before.put(message("door", "person", "zebra"))
    before.close(PATIENCE_S)
    runner = start(address(broker), classes=("person", "sports ball"))
    runner.put(state("door", "RUNNING", "person", "sports ball", "zebra"))
    runner.put(message("door", "person", "person", "zebra"))
    listener = listen()
    kept = {f"edge_server/door/count/{label}" for label in ("person", "sports_ball")}
    kept |= {f"homeassistant/binary_sensor/{ID}_door_{label}/config" for label in ("person", "sports_ball")}

    def found() -> set[str]:
        later = listen()
        assert eventually(lambda: "edge_server/status" in later.topics)
        return {topic for topic in later.topics if "count" in topic or topic.endswith("config")}

    assert eventually(lambda: found() == kept)
    assert eventually(lambda: listener.topics.get("edge_server/door/count/person") == "2")
    found_labels = [one["label"] for one in json.loads(listener.topics["edge_server/door/result"])["detections"]]
    assert found_labels == ["person", "person"]


@pytest.mark.full
def test_home_assistant_gets_each_entity_once_and_its_removal(broker, listen, start, message, eventually):
    listener = listen()
    runner = start(address(broker))
    topic = f"homeassistant/binary_sensor/{ID}_door_person/config"
    runner.put(message("door", "person"))
    assert eventually(lambda: "edge_server/status" in listener.topics)
    entity = json.loads(listener.topics[topic])
    assert entity["state_topic"] == "edge_server/door/count/person"
    assert {one["topic"] for one in entity["availability"]} == {"edge_server/status", "edge_server/door/status"}
    assert entity["unique_id"] == f"{ID}_door_person"
    assert entity["device_class"] == "occupancy"
    assert entity["expire_after"] == 180
    assert entity["origin"] == {"name": "edge-server", "sw_version": __version__}
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
    host = ID.removeprefix("edge_server_")
    entity = json.loads(listener.topics[f"ha/sensor/robots_7_{host}_door_class/config"])
    assert entity["state_topic"] == "robots/7/door/class"


def answer(text: str, question: str) -> SinkMessage:
    found = QuestionAnswer("door", question, "vlm", "face", 7, ("yard",), text, 1.0, 4.25, FrameHeader(5, 6, "", 9), "")
    return SinkMessage("door", answer=found)


def sensors(listener) -> list[str]:
    """Return the topics of Home Assistant's descriptions of answers, in the order of their arrival."""
    return [topic for topic in listener.topics if topic.startswith(f"homeassistant/sensor/{ID}_door_question_")]


@pytest.mark.full
def test_the_answer_to_a_question_is_an_event_and_a_sensor_of_home_assistant(
    broker, listen, start, message, eventually
):
    listener = listen()
    runner = start(address(broker))
    questions = (QuestionEntry("visitor", "vlm", "Who?"), QuestionEntry("parcel", "vlm", "What?"))
    runner.put(dataclasses.replace(state("door", "RUNNING", "face"), questions=questions))
    topic = "edge_server/door/question/visitor"
    assert eventually(lambda: "edge_server/status" in listener.topics)
    assert topic not in listener.topics
    description, other = sensors(listener)
    runner.put(answer("A man with a parcel.", "visitor"))
    assert eventually(lambda: topic in listener.topics)
    assert json.loads(listener.topics[topic]) == {
        "kind": "question.answered", "source": "door", "question": "visitor", "model": "vlm", "label": "face",
        "track_id": 7, "zone": "yard", "text": "A man with a parcel.", "seconds": 4.25, "seq": 9,
        "stamp": {"sec": 5, "nanosec": 6}, "clock": "",
    }  # fmt: skip
    assert listener.topics["edge_server/door/event"] == listener.topics[topic]
    entity = json.loads(listener.topics[description])
    assert (entity["name"], entity["state_topic"], entity["json_attributes_topic"]) == ("visitor", topic, topic)
    assert "expire_after" not in entity
    assert entity["device"]["name"] == "door"
    # A later subscriber gets it; a result, also with the minute's repetition, brings it no second time.
    later = listen()
    assert eventually(lambda: topic in later.retained)
    before = listener.count
    runner.put(message("door", "face"))
    assert eventually(lambda: listener.topics.get("edge_server/door/count/face") == "1")
    assert eventually(lambda: listener.count == before + 2)  # the result and the count
    runner.put(dataclasses.replace(state("door", "RUNNING", "face"), questions=questions[1:]))
    assert eventually(lambda: listener.topics[topic] == listener.topics[description] == "")
    # It was asked before the question was removed.
    runner.put(answer("late", "visitor"))
    runner.put(answer("A parcel.", "parcel"))
    assert eventually(lambda: "edge_server/door/question/parcel" in listener.topics)
    assert listener.topics[topic] == ""
    assert json.loads(listener.topics[other])["name"] == "parcel"


@pytest.mark.full
def test_answers_of_an_earlier_run_stay_and_those_to_questions_that_are_gone_are_deleted(
    broker, listen, start, message, eventually
):
    kept, gone = "edge_server/door/question/kept", "edge_server/door/question/gone"
    questions = (QuestionEntry("kept", "vlm", "Who?"), QuestionEntry("gone", "vlm", "What?"))
    listen()
    before = start(address(broker))
    before.put(dataclasses.replace(state("door", "RUNNING", "face"), questions=questions))
    before.put(answer("A man.", "kept"))
    before.put(answer("A parcel.", "gone"))
    before.close(PATIENCE_S)
    assert before.report().delivered == 3
    runner = start(address(broker))
    # Another camera comes first: the answers of the door wait until its questions are known.
    runner.put(state("gate", "RUNNING", "face"))
    listener = listen()
    assert eventually(lambda: listener.topics.get("edge_server/gate/status") == "online")
    assert {kept, gone} <= listener.topics.keys()
    runner.put(dataclasses.replace(state("door", "RUNNING", "face"), questions=questions[:1]))
    assert eventually(lambda: listener.topics[gone] == "")
    assert [json.loads(text)["name"] for topic in sensors(listener) if (text := listener.topics[topic])] == ["kept"]
    assert json.loads(listener.topics[kept])["text"] == "A man."


def pictured(seen: SinkMessage, value: int, shape=(1000, 2000, 3)) -> SinkMessage:
    return dataclasses.replace(seen, picture=lambda: np.full(shape, value, np.uint8))


@pytest.mark.full
def test_with_pictures_the_frame_of_the_last_result_with_objects_is_an_image_of_home_assistant(
    broker, listen, start, message, eventually
):
    listener = listen()
    runner = start(address(broker), pictures=True, on_change=False)
    runner.put(pictured(message("door", "person"), 100))
    topic, description = "edge_server/door/picture", f"homeassistant/image/{ID}_door_picture/config"
    assert eventually(lambda: topic in listener.topics)
    shown = cv2.imdecode(np.frombuffer(listener.payloads[topic], np.uint8), cv2.IMREAD_COLOR)
    assert shown.shape == (640, 1280, 3)
    assert abs(int(shown[600, 1200, 0]) - 100) <= 2
    entity = json.loads(listener.topics[description])
    assert (entity["image_topic"], entity["content_type"]) == (topic, "image/jpeg")
    assert "state_topic" not in entity
    assert entity["device"]["name"] == "door"
    first = listener.payloads[topic]
    runner.put(pictured(message("door", seq=2), 200))  # nothing is there
    runner.put(message("door", "person", seq=3))  # its pixels are gone
    assert eventually(lambda: '"seq": 3' in listener.topics["edge_server/door/result"])
    runner.put(pictured(message("door", "person", seq=4), 200))
    assert eventually(lambda: listener.payloads[topic] != first)
    later = listen()
    assert eventually(lambda: later.payloads.get(topic) == listener.payloads[topic])
    assert topic in later.retained
    runner.put(SinkMessage("door", state=REMOVED))
    assert eventually(lambda: (listener.payloads[topic], listener.topics[description]) == (b"", ""))


@pytest.mark.full
def test_without_pictures_those_of_an_earlier_run_are_deleted_and_none_is_sent(
    broker, listen, start, message, eventually
):
    listener = listen()
    before = start(address(broker), pictures=True)
    before.put(pictured(message("door", "person"), 100))
    before.close(PATIENCE_S)
    assert eventually(lambda: "edge_server/door/picture" in listener.topics)
    runner = start(address(broker))
    runner.put(pictured(message("door", "person"), 100))
    topics = "edge_server/door/picture", f"homeassistant/image/{ID}_door_picture/config"
    assert eventually(lambda: [listener.topics.get(topic) for topic in topics] == ["", ""])


@pytest.mark.full
def test_a_frame_that_gives_no_picture_is_reported_and_its_result_arrives(broker, listen, start, message, eventually):
    listener = listen()
    runner = start(address(broker), pictures=True)
    runner.put(pictured(message("door", "person"), 1, (1, 70_000, 3)))
    assert eventually(lambda: "picture of source 'door': annotated JPEG: expected sides" in runner.report().reason)
    assert listener.topics["edge_server/door/count/person"] == "1"


@pytest.mark.full
def test_discovery_can_be_switched_off(broker, listen, start, message, eventually):
    listener = listen()
    runner = start(address(broker), discovery="")
    runner.put(message("door", "person"))
    assert eventually(lambda: "edge_server/door/count/person" in listener.topics)
    assert not [topic for topic in listener.topics if topic.startswith("homeassistant")]


@pytest.mark.full
def test_a_sink_that_is_cut_off_goes_offline_by_its_last_will(broker, listen, start, message, eventually, monkeypatch):
    listener = listen()
    runner = start(address(broker))
    runner.put(message("door", "person"))
    assert eventually(lambda: listener.topics.get("edge_server/status") == "online")
    monkeypatch.setattr(sink_runner, "BACK_OFF", BackOff(60.0, 60.0))
    runner._sink._connection._client.socket().shutdown(socket.SHUT_RDWR)
    assert eventually(lambda: listener.topics["edge_server/status"] == "offline")


@pytest.mark.full
def test_a_refused_password_is_reported_without_the_password(broker, start, message, eventually, tmp_path):
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


def state(source: str = "door", what: str = "RUNNING", *labels: str) -> SinkMessage:
    return SinkMessage(source, state=what, labels=labels)


@pytest.mark.full
def test_at_the_start_every_label_is_published_with_zero(broker, listen, start, message, eventually):
    before = start(address(broker), topic="t")
    before.put(state("door", "RUNNING", "person", "ghost"))
    before.put(message("door", "person", "ghost"))
    before.put(message("gone", "person"))
    assert eventually(lambda: before.report().delivered == 3)
    # It ends without a message, as after a power cut.
    before._sink._connection._client.loop_stop()
    before._sink._connection._client = None
    runner = start(address(broker), topic="t")
    runner.put(state("door", "RUNNING", "person", "sports ball"))
    listener = listen()
    wanted = {
        "t/door/status": "online",
        "t/door/count/person": "0",
        "t/door/count/sports_ball": "0",
        "t/door/count/ghost": "0",
        "t/gone/status": "offline",
        "t/gone/count/person": "0",
    }
    assert eventually(lambda: wanted.items() <= listener.topics.items())
    names = [json.loads(text)["name"] for topic, text in listener.topics.items() if topic.endswith("/config")]
    assert {"person", "sports ball"} <= set(names)


@pytest.mark.full
def test_a_clean_stop_publishes_offline_for_every_camera(broker, listen, start, message, eventually):
    runner = start(address(broker), topic="t")
    for name in ("door", "gate"):
        runner.put(state(name, "RUNNING", "person"))
    assert eventually(lambda: runner.report().delivered == 2)
    runner.close(PATIENCE_S)
    listener = listen()
    wanted = {"t/status": "offline", "t/door/status": "offline", "t/gate/status": "offline"}
    assert eventually(lambda: wanted.items() <= listener.topics.items())


@pytest.mark.full
@pytest.mark.parametrize("how", ["stop", "kill", "freeze"])
def test_a_lost_broker_is_noticed_while_idle_and_gets_everything_when_it_is_back(
    broker, listen, start, message, eventually, monkeypatch, how
):
    monkeypatch.setattr(mqtt_connection, "KEEPALIVE_S", 1)
    monkeypatch.setattr(mqtt_connection, "TIMEOUT_S", 0.5)
    runner = start(address(broker), topic="t")
    runner.put(state("door", "RUNNING", "person", "cat"))
    runner.put(message("door", "person"))
    runner.put(state("gate", "FAILED"))
    assert eventually(lambda: runner.report().delivered == 3)
    {"stop": broker.stop, "kill": broker.kill, "freeze": broker.freeze}[how]()
    assert eventually(lambda: runner.report().state == "FAILED")
    assert runner.report().reason.startswith(f"mqtt://127.0.0.1:{broker.port}: ")
    if how == "freeze":
        broker.thaw()
    else:
        broker.start()
    assert eventually(lambda: runner.report().state == "RUNNING")
    assert runner.report().delivered == 3
    listener = listen()
    wanted = {
        "t/status": "online",
        "t/door/status": "online",
        "t/door/count/person": "1",
        "t/door/count/cat": "0",
        "t/gate/status": "offline",
    }
    assert eventually(lambda: wanted.items() <= listener.topics.items())
    assert len([topic for topic in listener.topics if topic.endswith("/config")]) == 2


@pytest.mark.full
def test_a_broker_that_lost_its_data_gets_everything_again(broker, listen, start, message, eventually, monkeypatch):
    monkeypatch.setattr(mqtt.MqttBroker, "refresh_s", 0.2)
    runner = start(address(broker), topic="t")
    runner.put(state("door", "RUNNING", "person", "cat"))
    runner.put(message("door", "person"))
    assert eventually(lambda: runner.report().delivered == 2)
    listener = listen()
    assert eventually(lambda: listener.topics.get("t/status") == "online")
    before = {topic: text for topic, text in listener.topics.items() if not topic.endswith("/result")}
    assert len(before) == 6
    for topic in before:
        listener.clear(topic)
    # Counts are published again with a result: without results Home Assistant shows them as unavailable.
    described = {topic for topic in before if "/count/" not in topic}
    assert eventually(lambda: all(listener.topics[topic] == before[topic] for topic in described))

    def put_until_published() -> bool:
        runner.put(message("door", "person"))
        return all(listener.topics[topic] == text for topic, text in before.items())

    assert eventually(put_until_published)


@pytest.mark.full
def test_two_hosts_do_not_overwrite_each_other(broker, listen, start, message, eventually, monkeypatch):
    def identity(host: str) -> set[str]:
        monkeypatch.setattr(mqtt.socket, "gethostname", lambda: host)
        runner = start(address(broker), topic="")
        runner.put(message("door", "person"))
        listener = listen()
        topic = f"homeassistant/binary_sensor/edge_server_{host}_door_person/config"
        assert eventually(lambda: topic in listener.topics)
        entity = json.loads(listener.topics[topic])
        assert start(address(broker), topic="own/topic")._sink._id == f"own_topic_{host}"
        topics = {one["topic"] for one in entity["availability"]}
        return {entity["unique_id"], *entity["device"]["identifiers"], entity["state_topic"], *topics}

    assert not identity("box-1") & identity("box-2")


@pytest.mark.full
def test_names_that_differ_in_escaped_characters_have_different_topics(broker, listen, start, message, eventually):
    runner = start(address(broker), topic="t")
    runner.put(message("door", "кошка", "кошка", "птица"))
    listener = listen()

    def counts() -> list[str]:
        return sorted(text for topic, text in listener.topics.items() if topic.startswith("t/door/count/"))

    assert eventually(lambda: counts() == ["1", "2"])
    names = {json.loads(text)["name"] for topic, text in listener.topics.items() if topic.endswith("/config")}
    assert names == {"кошка", "птица"}


# paho leaves the socket of a failed handshake to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket")
@pytest.mark.full
def test_a_broker_with_its_own_ca_and_client_certificates(broker, listen, start, message, eventually, tmp_path):
    make_certificates(tmp_path)
    broker.kill()
    broker.start(
        "allow_anonymous true", f"cafile {tmp_path}/ca.crt", f"certfile {tmp_path}/server.crt",
        f"keyfile {tmp_path}/server.key", "require_certificate true",
    )  # fmt: skip
    url = f"mqtts://localhost:{broker.port}"
    files = {"ca": f"{tmp_path}/ca.crt", "cert": f"{tmp_path}/client.crt", "key": f"{tmp_path}/client.key"}

    def reason_of(**fields: str) -> str:
        runner = start(url, **fields)
        runner.put(message())
        assert eventually(lambda: runner.report().reason)
        return runner.report().reason

    right = start(url, **files)
    right.put(message())
    assert eventually(lambda: right.report().state == "RUNNING")
    assert "certificate verify failed" in reason_of()
    assert "the broker" in reason_of(ca=files["ca"])
    assert f"ca: {tmp_path}/none.crt" in reason_of(ca=f"{tmp_path}/none.crt")
    assert f"cert and key: {tmp_path}/ca.crt" in reason_of(ca=files["ca"], cert=files["ca"], key=files["key"])


def make_certificates(folder) -> None:
    """Make an authority, and the certificates of a broker on localhost and of a client."""

    def openssl(*arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority",
            "-keyout", "ca.key", "-out", "ca.crt")  # fmt: skip
    (folder / "names").write_text("subjectAltName=DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", "names", "-out", f"{name}.crt")  # fmt: skip


def test_without_the_package_the_error_names_what_to_install(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(mqtt_connection.importlib, "import_module", absent)
    with pytest.raises(Unsupported, match=r"pip install '\.\[mqtt\]'"):
        mqtt.MqttBroker(SinkEntry("home", "mqtt://host"), lambda: None).open()
