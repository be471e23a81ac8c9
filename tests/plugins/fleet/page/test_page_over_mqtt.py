"""The command `edge-server fleet page --mqtt` with a real broker, Mosquitto."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.cameras.sinks.mqtt_connection import BrokerAddress, MqttConnection
from edge_server.plugins.fleet.reports.box_report import box_topic
from tests.plugins.fleet.page.stand_in_boxes import StandIn, followed
from tests.plugins.fleet.page.test_box_record import report_of

COMMAND = Path(sys.executable).parent / "edge-server"

pytestmark = pytest.mark.full


def test_boxes_that_report_to_a_broker_are_shown_also_when_they_or_the_broker_are_gone(
    broker: Any, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    address = f"mqtt://127.0.0.1:{broker.port}"
    boxes = [StandIn("box-1"), StandIn("box-2")]
    boxes[1].models["detector"] = followed("detector", 3, state="failed", reason="too slow", installed=2)
    client = MqttConnection(BrokerAddress(address), "boxes")
    client.open()

    def publish(box: StandIn, status: str) -> None:
        report = {key: value for key, value in report_of(box).items() if key != "plugins"}
        topic, payload = box_topic("", box.name), json.dumps({"reported_s": time.time(), **report})
        client.publish([(f"{topic}/report", payload), (f"{topic}/status", status)])

    for box in boxes:
        publish(box, "online")
    command = [str(COMMAND), "fleet", "page", f"--mqtt={address}", "--page-port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]

    def fleet() -> Any:
        with urllib.request.urlopen(f"{url}edge/v1/fleet", timeout=10) as reply:
            return json.load(reply)

    def states() -> dict[str, str]:
        return {box["name"]: box["state"] for box in fleet()["boxes"]}

    try:
        assert eventually(lambda: states() == {"box-1": "ok", "box-2": "failed"})
        assert [release["failed"] for release in fleet()["releases"]] == [[["box-2", "too slow"]]]
        publish(boxes[0], "offline")
        assert eventually(lambda: states() == {"box-1": "silent", "box-2": "failed"})
        (silent,) = [box for box in fleet()["boxes"] if box["name"] == "box-1"]
        assert silent["problems"][0].startswith("offline; its last report is of ")
        assert silent["page"] == ""
        client.close()
        broker.kill()
        assert eventually(lambda: "what is shown below was reported before" in fleet()["problem"])
        assert states() == {"box-1": "silent", "box-2": "failed"}
    finally:
        process.terminate()
        process.stdout.close()
        assert process.wait(30) == 0
