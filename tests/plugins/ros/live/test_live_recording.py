"""`edge-server ros replay` of pictures that a live ROS 2 node recorded, and its detections as live ROS 2 reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.soak,
    pytest.mark.timeout(180),
    pytest.mark.skipif("EDGE_TEST_RCLPY" not in os.environ, reason="needs rclpy: tests/plugins/ros/fetch_rclpy.sh"),
]
rosbag2 = pytest.importorskip("rosbags.rosbag2", reason="needs rosbags: pip install '.[ros]'")
highlevel = pytest.importorskip("rosbags.highlevel", reason="needs rosbags: pip install '.[ros]'")
typesys = pytest.importorskip("rosbags.typesys", reason="needs rosbags: pip install '.[ros]'")
pytest.importorskip("mcap", reason="needs mcap: pip install mcap")

RECORDER = Path(__file__).parent / "rclpy_recorder.py"
COUNT = 10


@pytest.mark.parametrize("distribution", ["jazzy", pytest.param("kilted", marks=pytest.mark.long)])
def test_a_recording_of_a_live_node_is_replayed_and_its_detections_are_read_by_ros2(
    scripted: Callable[..., Any], live: Any, tmp_path: Path, distribution: str
) -> None:
    python = live.python_of(distribution)
    pictures, found = tmp_path / "pictures", tmp_path / "found"
    pictures.mkdir()
    found.mkdir()
    camera = live.start_camera(distribution, {"answers": {}, "count": 0, "width": 64, "height": 48})
    try:
        subprocess.run(
            [python, str(RECORDER), "record", "/camera/image_raw", str(COUNT), str(pictures)],
            env=live.environment, check=True, timeout=90,
        )  # fmt: skip
    finally:
        camera.kill()
        camera.communicate()

    store = typesys.get_typestore(typesys.Stores.LATEST)
    plugin = rosbag2.StoragePlugin.MCAP
    with rosbag2.Writer(tmp_path / "drive", version=9, storage_plugin=plugin) as writer:
        connection = writer.add_connection("/camera/image_raw", "sensor_msgs/msg/Image", typestore=store)
        sent = []
        for path in sorted(pictures.iterdir()):
            image = store.deserialize_cdr(path.read_bytes(), "sensor_msgs/msg/Image")
            sent.append((image.header.stamp.sec * 10**9 + image.header.stamp.nanosec, int(image.data[0])))
            writer.write(connection, sent[-1][0], path.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "edge_server", "ros", "replay", str(tmp_path / "drive"), "--model=finder",
         f"--address={scripted().address}", f"--output={tmp_path / 'out.mcap'}"],
        check=True, timeout=90, stdout=subprocess.DEVNULL,
    )  # fmt: skip

    with highlevel.AnyReader([tmp_path / "out.mcap"]) as reader:
        for number, (_, _, raw) in enumerate(reader.messages()):
            (found / f"{number:04}.cdr").write_bytes(raw)
    read = subprocess.run(
        [python, str(RECORDER), "read", str(found)],
        env=live.environment, check=True, timeout=90, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert json.loads(read.stdout) == [[stamp, [["cup", 0.75, left + 10.0, 25.0, 20.0, 30.0]]] for stamp, left in sent]
