"""MQTT as Home Assistant sees it: its own core and MQTT integration, connected to a real broker."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.core.back_off import BackOff
from edge_server.plugins.cameras.questions.question import QuestionAnswer, QuestionEntry
from edge_server.plugins.cameras.sinks import mqtt, mqtt_connection, sink_runner
from edge_server.plugins.cameras.sinks.sink_interface import REMOVED, SinkMessage
from edge_server.plugins.cameras.sinks.sink_runner import SinkRunner
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry
from edge_server.plugins.cameras.zones.zone_settings import LineEntry, ZoneEntry
from edge_server.protocol.frame_messages import (
    ClassScore,
    FrameHeader,
    FrameResult,
    LineCounts,
    ZoneCounts,
    ZoneReport,
)

PATIENCE_S = 60.0
PROGRAM = Path(__file__).with_name("home_assistant.py")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        "EDGE_TEST_HOME_ASSISTANT" not in os.environ,
        reason="needs Home Assistant: tests/plugins/cameras/sinks/fetch_home_assistant.sh",
    ),
]


class HomeAssistant:
    """Home Assistant's core as a process of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir()
        self._process = subprocess.Popen(
            [os.environ["EDGE_TEST_HOME_ASSISTANT"], str(PROGRAM), str(folder), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def states(self) -> dict[str, str]:
        """Return entity id -> state."""
        return {entity: found["state"] for entity, found in self._ask()["states"].items()}

    def entity(self, name: str) -> dict[str, str]:
        return self._ask()["states"][name]

    def warnings(self) -> list[str]:
        return self._ask()["warnings"]

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == 0


@pytest.fixture
def home(broker, tmp_path: Path, eventually) -> Iterator[HomeAssistant]:
    made = HomeAssistant(tmp_path / "home", broker.port)
    assert made.states() == {}
    yield made
    made.close()


@pytest.fixture
def start(broker, monkeypatch) -> Iterator[Any]:
    monkeypatch.setattr(sink_runner, "BACK_OFF", BackOff(0.01, 0.1))
    made = []

    def make(topic: str = "t") -> SinkRunner:
        entry = SinkEntry("home", f"mqtt://127.0.0.1:{broker.port}", interval_s=0.0, topic=topic)
        made.append(SinkRunner(entry, lambda runner: None))
        return made[-1]

    yield make
    for runner in made:
        runner.close(PATIENCE_S)


def state(source: str, what: str, *labels: str, has_classes: bool = False) -> SinkMessage:
    return SinkMessage(source, state=what, labels=labels, has_classes=has_classes)


def test_a_camera_is_a_device_whose_entities_follow_results_and_state(
    home: HomeAssistant, start, message, eventually
) -> None:
    runner = start()
    runner.put(state("door", "RUNNING", "person", "sports ball"))
    assert eventually(
        lambda: home.states() == {"binary_sensor.door_person": "off", "binary_sensor.door_sports_ball": "off"}
    )
    runner.put(message("door", "person"))
    assert eventually(lambda: home.states()["binary_sensor.door_person"] == "on")
    person = home.entity("binary_sensor.door_person")
    assert (person["device_class"], person["device"]) == ("occupancy", "door")
    runner.put(state("gate", "RUNNING", has_classes=True))
    # It has no value before the first result.
    assert eventually(lambda: home.states().get("sensor.gate_class") == "unavailable")
    result = FrameResult(FrameHeader(), classes=(ClassScore(0, 0.2, "cat"), ClassScore(1, 0.7, "dog")))
    runner.put(SinkMessage("gate", result))
    assert eventually(lambda: home.states()["sensor.gate_class"] == "dog")

    runner.put(state("door", "FAILED"))
    gone = {"binary_sensor.door_person": "unavailable", "binary_sensor.door_sports_ball": "unavailable"}
    assert eventually(lambda: home.states() == {**gone, "sensor.gate_class": "dog"})
    runner.put(message("door"))
    assert eventually(lambda: home.states()["binary_sensor.door_person"] == "off")
    runner.put(state("door", REMOVED))
    assert eventually(lambda: home.states() == {"sensor.gate_class": "dog"})
    runner.close(PATIENCE_S)
    assert eventually(lambda: home.states() == {"sensor.gate_class": "unavailable"})
    assert home.warnings() == []


def test_zones_and_lines_of_a_camera_are_entities_of_its_device(
    home: HomeAssistant, start, message, eventually
) -> None:
    runner = start()
    zones = (ZoneEntry("yard", classes=("person",), loitering_s=5.0), ZoneEntry("lawn"))
    lines = (LineEntry("gate", ((0.0, 0.0), (1.0, 1.0))),)
    runner.put(dataclasses.replace(state("door", "RUNNING"), zones=zones, lines=lines))
    off = {"binary_sensor.door_yard": "off", "binary_sensor.door_yard_person": "off"}
    off |= {"binary_sensor.door_yard_loitering": "off", "binary_sensor.door_lawn": "off"}
    off |= {"sensor.door_gate_in": "0", "sensor.door_gate_out": "0"}
    assert eventually(lambda: home.states() == off)
    counts = (ZoneCounts("yard", {"person": 2}, 2, {"person": 1}), ZoneCounts("lawn", {"dog": 1}, 1))
    result = FrameResult(FrameHeader(), zones=ZoneReport(counts, (LineCounts("gate", 3, 1),)))
    runner.put(SinkMessage("door", result))
    on = {entity: {"off": "on", "0": "3"}[found] for entity, found in off.items()}
    on |= {"sensor.door_gate_out": "1", "binary_sensor.door_lawn_dog": "on"}
    assert eventually(lambda: home.states() == on)
    assert home.entity("sensor.door_gate_in")["device"] == "door"
    runner.put(dataclasses.replace(state("door", "RUNNING"), zones=zones[:1]))
    assert eventually(lambda: set(home.states()) == {entity for entity in off if "yard" in entity})
    assert home.warnings() == []


def test_the_answer_to_a_question_is_a_sensor_with_the_whole_text(home: HomeAssistant, start, eventually) -> None:
    runner = start()
    questions = (QuestionEntry("who", "vlm", "Who?"),)
    running = dataclasses.replace(state("door", "RUNNING"), questions=questions)
    runner.put(running)
    assert eventually(lambda: home.states() == {"sensor.door_who": "unknown"})
    answer = QuestionAnswer("door", "who", "vlm", "face", 7, (), "A man.\n{{ 1 }}", 1.0, 4.25, FrameHeader(), "")
    runner.put(SinkMessage("door", answer=answer))
    assert eventually(lambda: home.states() == {"sensor.door_who": "A man.\n{{ 1 }}"})
    assert home.entity("sensor.door_who")["device"] == "door"
    for text in ("ä" * 255, "ä" * 256, "many words " * 1000):
        runner.put(SinkMessage("door", answer=answer._replace(text=text)))
        shown = text if len(text) == 255 else f"{text[:254]}…"
        assert eventually(lambda shown=shown: home.states() == {"sensor.door_who": shown})
        assert home.entity("sensor.door_who")["text"] == text
    # It is the last answer still after a restart, and gone with its question.
    runner.close(PATIENCE_S)
    assert eventually(lambda: home.states() == {"sensor.door_who": "unavailable"})
    again = start()
    again.put(running)
    assert eventually(lambda: home.states() == {"sensor.door_who": shown})
    again.put(state("door", "RUNNING"))
    assert eventually(lambda: home.states() == {})
    assert home.warnings() == []


def test_equally_named_cameras_of_two_servers_are_two_devices(home: HomeAssistant, start, message, eventually) -> None:
    for topic in ("left", "right"):
        start(topic).put(state("door", "RUNNING", "person"))
    assert eventually(lambda: len(home.states()) == 2)
    ids = {home.entity(entity)["unique_id"] for entity in home.states()}
    assert len(ids) == 2


def test_counts_without_results_expire(home: HomeAssistant, start, message, eventually, monkeypatch) -> None:
    monkeypatch.setattr(mqtt, "EXPIRES_AFTER_S", 2)
    monkeypatch.setattr(mqtt.MqttBroker, "refresh_s", 0.2)
    runner = start()
    runner.put(message("door", "person"))
    assert eventually(lambda: home.states() == {"binary_sensor.door_person": "on"})
    # The camera is online, and its model answers nothing any more.
    assert eventually(lambda: home.states() == {"binary_sensor.door_person": "unavailable"})
    assert runner.report().state == "RUNNING"
    # A result equal to the last one counts as changed now.
    runner.put(message("door", "person"))
    assert eventually(lambda: home.states() == {"binary_sensor.door_person": "on"})


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_after_a_restart_without_data_the_broker_gets_all_states_again(
    home: HomeAssistant, start, message, eventually, broker, monkeypatch, how
) -> None:
    monkeypatch.setattr(mqtt_connection, "KEEPALIVE_S", 1)
    monkeypatch.setattr(mqtt_connection, "TIMEOUT_S", 1.0)
    runner = start()
    runner.put(state("door", "RUNNING", "person", "cat"))
    runner.put(message("door", "person"))
    seen = {"binary_sensor.door_person": "on", "binary_sensor.door_cat": "off"}
    assert eventually(lambda: home.states() == seen)
    if how == "freeze":
        broker.freeze()
    else:
        broker.kill()
    assert eventually(lambda: runner.report().state == "FAILED")
    # It changes while the broker is away.
    runner.put(message("door", "cat"))
    # A frozen broker may also have to be started again.
    broker.kill()
    broker.start()
    changed = {"binary_sensor.door_person": "off", "binary_sensor.door_cat": "on"}
    assert eventually(lambda: home.states() == changed)


def test_detections_of_an_earlier_run_are_cleared(home: HomeAssistant, start, message, eventually) -> None:
    before = start()
    before.put(message("door", "person", "ghost"))
    assert eventually(lambda: home.states() == {"binary_sensor.door_person": "on", "binary_sensor.door_ghost": "on"})
    # It ends as after a power cut; the broker has not noticed yet.
    before._sink._connection._client.loop_stop()
    before._sink._connection._client = None
    runner = start()
    runner.put(state("door", "RUNNING", "person"))
    assert eventually(lambda: home.states() == {"binary_sensor.door_person": "off", "binary_sensor.door_ghost": "off"})
