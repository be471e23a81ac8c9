"""Recordings written by rosbags, through the installed server and real models, read back by rosbags and by mcap."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge_server.plugins.ros.messages.ros2_types import MessageTypes
from edge_server.plugins.ros.recordings.recording import ImageRecording
from tests.kit.model_folder import model_folder
from tests.kit.models import BUNDLED, COFFEE
from tests.kit.server import COMMAND, serve

pictures = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

DETECTOR, CLASSIFIER = "face_detection_yunet", "efficientnet_lite0"
FACE = (224, 116)
"""A point between the eyes of the astronaut, x and y."""
COUNT = 15
START_NS, STEP_NS = 1_700_000_000_000_000_000, 40_000_000

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("rosbags", "mcap", "mcap_ros2")),
        reason="needs rosbags, mcap and mcap-ros2-support: pip install '.[ros]' mcap mcap-ros2-support",
    ),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def server(shared_server: Callable[..., Any]) -> Iterator[Any]:
    with shared_server(BUNDLED) as running:
        yield running


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A drive past an astronaut (raw, rows padded) and a cup of coffee (JPEG)."""
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_HUMBLE)
    types: Any = store.types
    pixels = pictures.astronaut()
    rows = np.pad(pixels.reshape(512, 512 * 3), ((0, 0), (0, 20)))
    jpeg = np.frombuffer(COFFEE.read_bytes(), np.uint8)
    with Writer(tmp_path / "drive", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        raw = writer.add_connection("/front/image_raw", "sensor_msgs/msg/Image", typestore=store)
        packed = writer.add_connection("/table/compressed", "sensor_msgs/msg/CompressedImage", typestore=store)
        for number in range(1, COUNT + 1):
            at = START_NS + number * STEP_NS
            stamp = types["builtin_interfaces/msg/Time"](sec=number, nanosec=9)
            header = types["std_msgs/msg/Header"](stamp=stamp, frame_id="head")
            image = types["sensor_msgs/msg/Image"](
                header=header, height=512, width=512, encoding="rgb8", is_bigendian=0, step=512 * 3 + 20,
                data=rows.ravel(),
            )  # fmt: skip
            writer.write(raw, at, store.serialize_cdr(image, "sensor_msgs/msg/Image"))
            picture = types["sensor_msgs/msg/CompressedImage"](header=header, format="jpeg", data=jpeg)
            writer.write(packed, at, store.serialize_cdr(picture, "sensor_msgs/msg/CompressedImage"))
    return tmp_path / "drive" / "drive.mcap"


def replay(server: Any, recording: Path, output: Path, model: str, *flags: str) -> str:
    done = subprocess.run(
        [COMMAND, "ros", "replay", recording, f"--model={model}", f"--address={server.grpc}", f"--output={output}",
         *flags],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def by_rosbags(path: Path) -> list[tuple[str, int, Any]]:
    from rosbags.highlevel import AnyReader

    with AnyReader([path]) as reader:
        return [
            (connection.topic, at, reader.deserialize(raw, connection.msgtype))
            for connection, at, raw in reader.messages()
        ]


def by_mcap(path: Path) -> list[tuple[str, int, Any]]:
    from mcap.reader import make_reader
    from mcap_ros2.decoder import DecoderFactory

    with open(path, "rb") as file:
        found = make_reader(file, decoder_factories=[DecoderFactory()]).iter_decoded_messages()
        return [(channel.topic, message.log_time, value) for _, channel, message, value in found]


@pytest.mark.parametrize("read", [by_rosbags, by_mcap])
def test_replaying_a_recording_writes_a_recording_of_faces(
    server: Any, recording: Path, tmp_path: Path, read: Callable[[Path], list[tuple[str, int, Any]]]
) -> None:
    told = replay(server, recording, tmp_path / "faces.mcap", DETECTOR, "--topic=/front/image_raw")
    assert f"{COUNT} answered" in told
    messages = read(tmp_path / "faces.mcap")
    assert [topic for topic, _, _ in messages] == ["/edge_server/front/image_raw/detections"] * COUNT
    for number, (_, at, message) in enumerate(messages, 1):
        assert at == START_NS + number * STEP_NS
        assert (message.header.stamp.sec, message.header.stamp.nanosec, message.header.frame_id) == (number, 9, "head")
        (face,) = message.detections
        assert abs(face.bbox.center.position.x - FACE[0]) < face.bbox.size_x / 2 < 80
        assert abs(face.bbox.center.position.y - FACE[1]) < face.bbox.size_y / 2 < 100
        assert face.results[0].hypothesis.class_id == "face"


def test_compressed_pictures_are_classified(server: Any, recording: Path, tmp_path: Path) -> None:
    told = replay(server, recording, tmp_path / "named", CLASSIFIER, "--topic=/table/compressed", "--top-k=3")
    assert f"{COUNT} message(s) on /edge_server/table/compressed/classification" in told
    messages = by_rosbags(tmp_path / "named")
    assert len(messages) == COUNT
    for _, _, message in messages:
        assert message.results[0].class_id == "espresso"
        scores = [one.score for one in message.results]
        assert scores == sorted(scores, reverse=True)


def test_a_mosaic_in_a_png_and_a_jpeg_without_a_format_are_classified_as_the_raw_pictures(
    server: Any, tmp_path: Path
) -> None:
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    with Image.open(COFFEE) as picture:
        rgb = np.asarray(picture.convert("RGB"))[: picture.height // 2 * 2, : picture.width // 2 * 2]
    mosaic = rgb[:, :, 1].copy()
    mosaic[0::2, 0::2], mosaic[1::2, 1::2] = rgb[0::2, 0::2, 0], rgb[1::2, 1::2, 2]
    png = io.BytesIO()
    Image.fromarray(mosaic).save(png, "PNG")
    store = get_typestore(Stores.ROS2_HUMBLE)
    types: Any = store.types
    stamp = types["builtin_interfaces/msg/Time"](sec=1, nanosec=9)
    header = types["std_msgs/msg/Header"](stamp=stamp, frame_id="head")
    height, width = mosaic.shape
    images = {
        "/raw": types["sensor_msgs/msg/Image"](
            header=header, height=height, width=width, encoding="bayer_rggb8", is_bigendian=0, step=width,
            data=mosaic.ravel(),
        ),
        "/png": types["sensor_msgs/msg/CompressedImage"](
            header=header, format="bayer_rggb8; png compressed ", data=np.frombuffer(png.getvalue(), np.uint8)
        ),
        "/unnamed": types["sensor_msgs/msg/CompressedImage"](
            header=header, format="", data=np.frombuffer(COFFEE.read_bytes(), np.uint8)
        ),
        "/depth": types["sensor_msgs/msg/CompressedImage"](
            header=header, format="16UC1; png compressed ", data=np.frombuffer(png.getvalue(), np.uint8)
        ),
    }  # fmt: skip
    with Writer(tmp_path / "drive", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        for topic, image in images.items():
            kind = image.__msgtype__
            connection = writer.add_connection(topic, kind, typestore=store)
            writer.write(connection, START_NS, store.serialize_cdr(image, kind))
    with ImageRecording(tmp_path / "drive", MessageTypes()) as recording:
        assert recording.choose_topics()[1] == {"/depth": "depth, 16UC1; png compressed "}
    flags = ("--topic=/raw", "--topic=/png", "--topic=/unnamed", "--top-k=3")
    replay(server, tmp_path / "drive", tmp_path / "named.mcap", CLASSIFIER, *flags)
    found = {
        topic.split("/")[2]: [(one.class_id, one.score) for one in message.results]
        for topic, _, message in by_rosbags(tmp_path / "named.mcap")
    }
    assert found["png"] == found["raw"]
    assert {name: results[0][0] for name, results in found.items()} == dict.fromkeys(
        ("raw", "png", "unnamed"), "espresso"
    )


def test_the_blocks_of_the_document_label_a_drive_and_print_the_labels(
    server: Any, recording: Path, tmp_path: Path
) -> None:
    section = (Path(__file__).parents[2] / "docs/ros.md").read_text().partition("## A recorded drive")[2]
    pattern = r"run by tests/e2e/test_ros_replay.py -->\n```(?:sh|python)\n(.*?)```"
    command, drive, program = re.findall(pattern, section, re.DOTALL)
    words = shlex.split(command)
    assert words[0] == "edge-server"

    def label(folder: Path) -> list[str]:
        run(COMMAND, *words[1:], f"--url={server.grpc}", cwd=folder)
        return run(sys.executable, "-c", program, cwd=folder).splitlines()

    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "edge_server").symlink_to(Path(__file__).parents[2] / "edge_server")
    run(sys.executable, "-c", drive, cwd=clone)
    assert [line.split()[2] for line in label(clone)] == ["face"] * 30
    lines = label(recording.parents[1])
    faces = [line.split() for line in lines if line.startswith("/edge_server/front/image_raw/detections ")]
    assert [int(face[1]) for face in faces] == [START_NS + number * STEP_NS for number in range(1, COUNT + 1)]
    assert {face[2] for face in faces} == {"face"}
    assert len(program.splitlines()) <= 10


BATCHES = """
backend: "stub"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
output { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { count: 1 kind: KIND_CPU }
dynamic_batching { }
parameters { key: "stub_op" value { string_value: "sum" } }
parameters { key: "stub_delay_ms" value { string_value: "200" } }
parameters { key: "image_input" value { string_value: "IN" } }
"""


def test_streams_of_one_camera_fill_the_batches_of_a_model(recording: Path, tmp_path: Path) -> None:
    model_folder(tmp_path / "models/batches", BATCHES)
    with serve(tmp_path / "models") as server:
        flags = ("--topic=/front/image_raw", "--streams=4")
        told = replay(server, recording, tmp_path / "out.mcap", "batches", *flags)
        assert f"{COUNT} answered" in told
        with urllib.request.urlopen(f"http://{server.http}/v2/models/batches/stats", timeout=30) as answer:
            (found,) = json.load(answer)["model_stats"]
    assert found["inference_count"] == COUNT
    assert found["execution_count"] <= COUNT * 2 // 3
    assert [at for _, at, _ in by_rosbags(tmp_path / "out.mcap")] == sorted(
        START_NS + number * STEP_NS for number in range(1, COUNT + 1)
    )


def run(*command: Any, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
