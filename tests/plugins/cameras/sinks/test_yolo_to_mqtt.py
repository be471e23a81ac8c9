"""The page yolo-to-mqtt.md, as written, with a demo camera and a broker of the test in place of the reader's."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.yolo_exports import NAMES, ULTRALYTICS, detect, export
from tests.kit.server import COMMAND, clean_environment, serve

PAGE = Path(__file__).parents[4] / "docs" / "yolo-to-mqtt.md"

pytestmark = pytest.mark.full


def blocks() -> Iterator[str]:
    yield from re.findall(r"<!-- run by \S+ -->\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_brings_boxes_and_labels_to_the_broker(
    broker, listen, eventually, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install, add, sources, start, look = blocks()
    assert "'.[cpu,sources,mqtt]'" in install  # The tests come with the packages.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yolo11n.onnx").write_bytes(export(detect(), ULTRALYTICS).SerializeToString())
    done = subprocess.run(
        ["bash", "-c", add.replace("edge-server", str(COMMAND), 1)], env=clean_environment(), capture_output=True,
        text=True, timeout=100, check=True,
    )  # fmt: skip
    assert "kind    yolo detect, 3 classes" in done.stdout
    (tmp_path / "cameras.toml").write_text(
        sources.replace("rtsp://user:password@192.168.1.20/stream1", "demo").replace(
            "user:password@192.168.1.30", f"127.0.0.1:{broker.port}"
        )
    )
    _, _, repository, *flags = shlex.split(start)
    with serve(Path(repository.partition("=")[2]), *flags):
        listener = listen()
        topic = shlex.split(look)[-1].removesuffix("#")
        assert topic == "edge_server/door/"
        assert eventually(lambda: f"{topic}result" in listener.topics and f"{topic}count/person" in listener.topics)
        found = json.loads(listener.topics[f"{topic}result"])["detections"]
        assert [item["label"] for item in found] == [NAMES[0], NAMES[2]]
        assert all(item["box"][0] < item["box"][2] and item["score"] > 0.5 for item in found)
        assert listener.topics[f"{topic}status"] == "online"
        late = listen()
        assert eventually(lambda: f"{topic}result" in late.retained)
        configs = [text for name, text in listener.topics.items() if name.startswith("homeassistant/binary_sensor/")]
        assert any(json.loads(text).get("state_topic") == f"{topic}count/person" for text in configs)
    for topic in re.findall(r"^\| `(edge_server/\S+)`", PAGE.read_text(), re.MULTILINE):
        assert topic in listener.topics
