"""Reports of boxes in the retained topics of a real broker, Mosquitto: who counts, and what hostile clients can do."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import EdgeServerError
from edge_server.plugins.cameras.sinks.mqtt_connection import BrokerAddress, MqttConnection
from edge_server.plugins.fleet.reports import mqtt_boxes
from edge_server.plugins.fleet.reports.box_report import MAX_REPORT_BYTES, BoxReport, box_topic
from edge_server.plugins.fleet.reports.mqtt_boxes import MqttBoxes
from edge_server.plugins.fleet.reports.report_publisher import ReportPublisher
from edge_server.plugins.fleet.settings import FollowConfig

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[4]


def report_of(box: str, **more: Any) -> dict[str, Any]:
    follow = {
        "box": box, "groups": ["line-3"], "machines": ["x86_64"], "repository": "https://site", "problem": "",
        "checked_s": 1.0, "models": {},
    }  # fmt: skip
    return {"version": "1.0", "ready": True, "models": [], "follow": follow, **more}


class Client:
    def __init__(self, port: int, user: str = "") -> None:
        self.connection = MqttConnection(
            BrokerAddress(f"mqtt://{user}127.0.0.1:{port}"), f"client-{time.monotonic_ns()}"
        )
        self.connection.open()

    def write(self, box: str, report: Any, status: str = "online", **more: Any) -> None:
        payload = report if isinstance(report, bytes) else json.dumps({"reported_s": time.time(), **report, **more})
        topic = box_topic("", box)
        self.connection.publish([(f"{topic}/report", payload), (f"{topic}/status", status)])


@pytest.fixture
def client(broker: Any) -> Iterator[Client]:
    made = Client(broker.port)
    yield made
    made.connection.close()


@pytest.fixture
def read(broker: Any) -> Iterator[Callable[..., dict[str, BoxReport]]]:
    """Read the reports as a command does; return them by box."""

    def read(*boxes: str) -> dict[str, BoxReport]:
        reader = MqttBoxes(BrokerAddress(f"mqtt://127.0.0.1:{broker.port}"), boxes=boxes)
        try:
            return {box.name: box for box in reader.read()}
        finally:
            reader.close()

    return read


def test_a_fresh_report_of_a_box_that_is_online_counts(client: Client, read: Any) -> None:
    client.write("box-1", report_of("box-1"))
    client.write("hall 2/über#3", report_of("hall 2/über#3"))
    found = read()
    assert [(name, box.error) for name, box in found.items()] == [("box-1", ""), ("hall 2/über#3", "")]
    assert found["box-1"].follow == report_of("box-1")["follow"]


@pytest.mark.parametrize(
    ("report", "more", "error"),
    # The times count from the import of this file, which in a long run is an hour before the test.
    [
        (report_of("box-1"), {"status": "offline"}, "offline; its last report is of "),
        (report_of("box-1"), {"status": "on fire"}, "offline; its last report is of "),
        (report_of("box-1"), {"reported_s": time.time() - 3600}, " s ago"),
        (report_of("box-1"), {"reported_s": time.time() + 86_400}, " s ahead: is its clock right?"),
        (report_of("box-2"), {}, "its report is of another box, 'box-2'"),
        (b"{", {}, "its report is no JSON"),
        (b"[" * 100_000, {}, "its report is no JSON"),
        (b"[]", {}, "its report: report: expected a JSON object"),
        (report_of("box-1", ready="yes"), {}, "its report: ready: expected true or false, given 'yes'"),
        (b"x" * MAX_REPORT_BYTES, {}, "its report is no JSON"),
        (b"x" * (MAX_REPORT_BYTES + 1), {}, f"its report has {MAX_REPORT_BYTES + 1} bytes, expected at most"),
        (b"x" * (MAX_REPORT_BYTES + 3000), {}, "online without a report of at most"),
    ],
)  # fmt: skip
def test_any_other_report_is_refused_with_the_reason(
    client: Client, read: Any, report: Any, more: dict[str, Any], error: str
) -> None:
    client.write("box-1", report, **more)
    assert error in read()["box-1"].error


def test_a_box_that_is_to_report_and_does_not_is_named_and_others_are_ignored(client: Client, read: Any) -> None:
    client.write("box-1", report_of("box-1"))
    client.write("stranger", report_of("stranger"))
    assert {name: box.error for name, box in read("box-1", "box-2").items()} == {
        "box-1": "", "box-2": "no report in edge_server/fleet",
    }  # fmt: skip


def test_the_reports_of_a_thousand_boxes_are_read_and_of_no_more(
    client: Client, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine pauses for longer between two of the messages.
    monkeypatch.setattr(mqtt_boxes, "_QUIET_S", 5.0)
    filler = [{"name": f"model_{number}", "version": "1", "state": "READY"} for number in range(50)]
    for first in range(0, 1001, 100):
        payload = json.dumps({"reported_s": time.time(), **report_of("", models=filler)})
        messages = []
        for number in range(first, min(first + 100, 1001)):
            topic = box_topic("", f"box-{number:04}")
            own = payload.replace('"box": ""', f'"box": "box-{number:04}"')
            messages += [(f"{topic}/report", own), (f"{topic}/status", "online")]
        client.connection.publish(messages)
    found = read()
    assert len(found) == 1001
    refused = "more than 1000 boxes and 64 MB of reports: the rest is ignored"
    assert Counter(box.error for box in found.values()) == {"": 1000, refused: 1}
    monkeypatch.setattr(mqtt_boxes, "_MAX_TOTAL_BYTES", 10 * len(payload))
    assert sum(not box.error for box in read().values()) in (9, 10)


@pytest.mark.parametrize("topic", ["box%2D1", "box 1", "%07", "x" * 3000])
def test_a_topic_that_no_box_has_is_ignored(client: Client, read: Any, topic: str) -> None:
    client.write("box-1", report_of("box-1"))
    client.connection.publish([(f"edge_server/fleet/{topic}/status", "online")])
    assert {name: box.error for name, box in read().items()} == {
        "box-1": "", "edge_server/fleet/...": "topics that are of no box are ignored",
    }  # fmt: skip
    assert read("box-1")["box-1"].error == ""


def test_a_deleted_box_is_forgotten_while_the_reader_is_open(
    client: Client, broker: Any, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    client.write("box-1", report_of("box-1"))
    reader = MqttBoxes(BrokerAddress(f"mqtt://127.0.0.1:{broker.port}"))
    assert [box.name for box in reader.read()] == ["box-1"]
    client.write("box-2", report_of("box-2"))
    client.write("box-1", b"", status="")
    assert eventually(lambda: [box.name for box in reader.read()] == ["box-2"])
    broker.kill()
    assert eventually(lambda: not _can_read(reader))
    broker.start()
    assert [box.error for box in reader.read()] == ["no box reports: may this client read these topics?"]
    reader.close()


def _can_read(reader: MqttBoxes) -> bool:
    try:
        reader.read()
    except EdgeServerError:
        return False
    return True


def test_a_broker_that_denies_reading_says_so() -> None:
    """Mosquitto lets any client subscribe, and then sends nothing."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"\x20\x03\0\0\0")  # CONNACK of MQTT 5: success, no properties
            number = connection.recv(1000)[2:4]
            connection.sendall(b"\x90\x05" + number + b"\0\x87\x87")  # SUBACK: not authorized, twice
            connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        broker = threading.Thread(target=answer)
        broker.start()
        reader = MqttBoxes(BrokerAddress(f"mqtt://127.0.0.1:{listener.getsockname()[1]}"))
        with pytest.raises(EdgeServerError, match="does not let this client read: Not authorized"):
            reader.read()
        reader.close()
        broker.join()


def publisher_of(port: int, make_report: Callable[[], dict[str, Any]]) -> ReportPublisher:
    config = FollowConfig(mqtt=f"mqtt://127.0.0.1:{port}", box="box-1")
    return ReportPublisher(config, "box-1", make_report)


def test_a_publisher_reports_each_change_and_says_at_its_end_that_it_is_offline(
    broker: Any, listen: Any, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    report = report_of("box-1")
    publisher = publisher_of(broker.port, lambda: report)
    publisher.start()
    listener = listen()
    assert eventually(lambda: listener.topics.get("edge_server/fleet/box-1/status") == "online")
    assert json.loads(listener.topics["edge_server/fleet/box-1/report"])["ready"] is True
    report = report_of("box-1", ready=False)
    publisher.wake()
    assert eventually(lambda: '"ready": false' in listener.topics["edge_server/fleet/box-1/report"])
    publisher.stop()
    assert eventually(lambda: listener.topics["edge_server/fleet/box-1/status"] == "offline")


def test_a_publisher_whose_broker_comes_late_and_restarts_reports_anew(
    broker: Any, listen: Any, eventually: Callable[[Callable[[], bool]], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from edge_server.core.back_off import BackOff
    from edge_server.plugins.fleet.reports import report_publisher

    monkeypatch.setattr(report_publisher, "_BACK_OFF", BackOff(0.01, 0.1))
    broker.kill()
    publisher = publisher_of(broker.port, lambda: report_of("box-1"))
    publisher.start()
    assert eventually(lambda: "Connection refused" in publisher.problem)
    for _ in range(2):
        broker.start()
        listener = listen()
        assert eventually(lambda: listener.topics.get("edge_server/fleet/box-1/status") == "online")  # noqa: B023
        assert eventually(lambda: publisher.problem == "")
        broker.kill()
        assert eventually(lambda: publisher.problem != "")
    publisher.stop()


def documented(language: str) -> str:
    """Return the block of a language in the section about reports."""
    text = (ROOT / "docs/fleet.md").read_text().partition("## Reports over MQTT")[2]
    return dict(re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))[language]


def test_with_the_documented_rules_a_box_cannot_report_for_another(broker: Any, tmp_path: Path, read: Any) -> None:
    def password_line(user: str) -> str:
        salt = os.urandom(12)
        digest = hashlib.pbkdf2_hmac("sha512", b"secret", salt, 101)
        return f"{user}:$7$101${b64encode(salt).decode()}${b64encode(digest).decode()}\n"

    for name, text in (
        ("passwords", "".join(map(password_line, ("box-1", "box-2", "publisher")))),
        ("acl", documented("")),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    broker.kill()
    broker.start("allow_anonymous false", f"password_file {tmp_path}/passwords", f"acl_file {tmp_path}/acl")
    box = Client(broker.port, "box-1:secret@")
    box.write("box-1", report_of("box-1"))
    box.write("box-2", report_of("box-2"))
    box.connection.close()
    reader = MqttBoxes(BrokerAddress(f"mqtt://publisher:secret@127.0.0.1:{broker.port}"), boxes=("box-1", "box-2"))
    assert {found.name: found.error for found in reader.read()} == {
        "box-1": "", "box-2": "no report in edge_server/fleet",
    }  # fmt: skip
    reader.close()


def test_the_documented_settings_are_valid(tmp_path: Path) -> None:
    (tmp_path / "box.toml").write_text(documented("toml"))
    command = [sys.executable, "-m", "edge_server", "serve", f"--config={tmp_path}/box.toml", "--print-config"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "mqtts://broker.example.com" in found.stdout, found.stderr
    assert "PASSWORD" not in found.stdout
