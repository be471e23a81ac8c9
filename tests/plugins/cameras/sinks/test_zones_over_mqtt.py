"""Zones of a camera in the installed server: from the sources file to the result in a file and the topics of a real
broker, with the bundled face detector and the demo picture; and the complete file of docs/cameras.md."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MODELS = ROOT / "model_repository"

CAMERAS = """
[[sources]]
name = "door"
url = "demo"
model = "face_detection_yunet"
fps = 20

[[sources.zones]]
name = "yard"
classes = ["face"]

[[sources.zones]]
name = "corner"
points = [[0, 0], [0.02, 0], [0, 0.02]]

[[sources.lines]]
name = "gate"
points = [[0.0, 0.02], [0.02, 0.0]]

[[sinks]]
name = "log"
url = "{log}"

[[sinks]]
name = "home"
url = "mqtt://127.0.0.1:{port}"
topic = "edge"
"""


@pytest.mark.full
def test_a_zone_of_the_sources_file_counts_in_results_and_topics(
    broker, listen, start_server, eventually, tmp_path: Path
) -> None:
    log = tmp_path / "results.jsonl"
    file = tmp_path / "cameras.toml"
    file.write_text(CAMERAS.format(log=log, port=broker.port))
    listener = listen()
    http = start_server(
        MODELS, "--load-model=face_detection_yunet", "--model-control-mode=explicit", f"--sources-file={file}",
        environment=dict(os.environ),
    )  # fmt: skip

    def ask(path: str):
        with urllib.request.urlopen(f"http://{http}{path}") as answer:
            return json.loads(answer.read())

    def wait_for(topic: str, text: str) -> None:
        # The broker passes the topics of a result on one after the other.
        assert eventually(lambda: listener.topics.get(topic) == text), (topic, listener.topics)

    wait_for("edge/door/zone/yard/count", "1")
    wait_for("edge/door/zone/yard/count/face", "1")
    wait_for("edge/door/zone/corner/count", "0")
    wait_for("edge/door/line/gate/in", "0")
    assert eventually(lambda: "edge/door/event" in listener.topics)
    results = [json.loads(line) for line in log.read_text().splitlines()]
    last = [one for one in results if one["kind"] == "result"][-1]
    assert last["zones"]["yard"] == {"counts": {"face": 1}, "entered": 1}
    assert last["zones"]["corner"] == {"counts": {}, "entered": 0}
    assert last["lines"] == {"gate": {"in": 0, "out": 0}}
    (face,) = last["detections"]
    assert face["zones"] == [{"zone": "yard", "seconds": face["zones"][0]["seconds"], "loitering": False}]
    assert face["track_id"] == 1
    entities = [json.loads(text) for topic, text in listener.topics.items() if topic.endswith("/config")]
    (occupancy,) = [one for one in entities if one["state_topic"] == "edge/door/zone/yard/count/face"]
    assert (occupancy["name"], occupancy["device_class"]) == ("yard face", "occupancy")
    (crossings,) = [one for one in entities if one["state_topic"] == "edge/door/line/gate/in"]
    assert (crossings["name"], crossings["state_class"]) == ("gate in", "total_increasing")
    assert len({one["unique_id"] for one in entities}) == len(entities)
    assert json.loads(listener.topics["edge/door/event"])["zone"] == "yard"
    entered = {"source": "door", "zone": "yard", "label": "face", "track_id": 1}
    seen = [one for one in ask("/edge/v1/events?follow=false") if one["kind"] == "zone.entered"]
    assert entered.items() <= seen[0].items()

    # Other zones: those that stay keep their counts, and the camera is not opened again.
    opened = ask("/edge/v1/streams")["streams"][0]["open_s"]
    file.write_text(file.read_text().replace('"corner"', '"nook"').replace('"gate"', '"door"'))
    wait_for("edge/door/zone/nook/count", "0")
    wait_for("edge/door/line/door/out", "0")
    gone = [topic for topic in list(listener.topics) if "corner" in topic or "gate" in topic]
    assert len(gone) == 6
    for topic in gone:
        wait_for(topic, "")
    assert listener.topics["edge/door/zone/yard/count"] == "1"
    assert ask("/edge/v1/streams")["streams"][0]["open_s"] > opened
    results = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one for one in results if one["kind"] == "result"][-1]["zones"]["yard"]["entered"] == 1


@pytest.mark.full
def test_the_file_of_the_page_counts_takes_pictures_and_publishes(
    broker, listen, start_server, eventually, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/cameras.md").read_text()
    (text,) = re.findall(r"^<!-- file cameras.toml -->\n```toml\n(.*?)```$", page, re.MULTILINE | re.DOTALL)
    own_broker = f"mqtt://127.0.0.1:{broker.port}"
    monkeypatch.chdir(tmp_path)
    Path("cameras.toml").write_text(text.replace("\n# ", "\n").replace("mqtt://127.0.0.1", own_broker))
    assert own_broker in Path("cameras.toml").read_text()
    listener = listen()
    start_server(
        MODELS, "--load-model=face_detection_yunet", "--model-control-mode=explicit", "--sources-file=cameras.toml",
        environment=dict(os.environ),
    )  # fmt: skip
    # The face stands in the zone, moves over the line, and loiters.
    for topic in ("count/face", "zone/yard/count/face", "zone/yard/loitering", "line/gate/out"):
        assert eventually(lambda topic=topic: listener.topics.get(f"edge_server/door/{topic}", "0") != "0"), topic
    assert eventually(lambda: listener.payloads.get("edge_server/door/picture", b"").startswith(b"\xff\xd8"))
    assert eventually(lambda: list(Path("pictures").glob("*_door_face_1.jpg")))
    kinds = {json.loads(line)["kind"] for line in Path("results.jsonl").read_text().splitlines()}
    assert kinds == {"source", "result", "zone.entered", "zone.loitering", "line.crossed"}
