"""Replay of recordings through a frame service: each image gets a result, and the output is a valid recording."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.errors import EdgeServerError, InvalidRequest, NotFound
from edge_server.plugins.ros.messages.ros2_types import MessageTypes
from edge_server.plugins.ros.recordings.recording import ImageRecording
from edge_server.plugins.ros.recordings.recording_writer import RecordingWriter
from edge_server.plugins.ros.recordings.replay import RecordingReplay, ReplayParameters
from edge_server.protocol.frame_messages import Returns
from tests.plugins.ros.replays import COMMAND, NEEDS_LIBRARIES, START_NS, STEP_NS, replayed

RESULTS = "/edge_server/camera/image_raw/detections"
DETECTIONS = "vision_msgs/msg/Detection2DArray"

pytestmark = NEEDS_LIBRARIES


def store() -> Any:
    from rosbags.typesys import Stores, get_typestore

    return get_typestore(Stores.ROS2_HUMBLE)


def image(types: Any, number: int) -> Any:
    """Return sensor_msgs/Image number N: 8 x 6, a padded row, every byte N."""
    stamp = types["builtin_interfaces/msg/Time"](sec=number, nanosec=7)
    return types["sensor_msgs/msg/Image"](
        header=types["std_msgs/msg/Header"](stamp=stamp, frame_id="left"),
        height=6, width=8, encoding="rgb8", is_bigendian=0, step=28, data=np.full(28 * 6, number % 256, np.uint8),
    )  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    """`recorded(count, "mcap" | "sqlite3", topics)` is the folder of a rosbag2 recording, written by rosbags."""

    def write(count: int = 20, plugin: str = "mcap", topics: tuple[str, ...] = ("/camera/image_raw",)) -> Path:
        from rosbags.rosbag2 import StoragePlugin, Writer

        types = store()
        path = tmp_path / f"drive_{plugin}"
        with Writer(path, version=9, storage_plugin=StoragePlugin[plugin.upper()]) as writer:
            imu = writer.add_connection("/clock", "builtin_interfaces/msg/Time", typestore=types)
            opened = [writer.add_connection(name, "sensor_msgs/msg/Image", typestore=types) for name in topics]
            for number in range(1, count + 1):
                at = START_NS + number * STEP_NS
                clock = types.types["builtin_interfaces/msg/Time"](sec=number, nanosec=0)
                writer.write(imu, at, types.serialize_cdr(clock, "builtin_interfaces/msg/Time"))
                for connection in opened:
                    data = types.serialize_cdr(image(types.types, number), "sensor_msgs/msg/Image")
                    writer.write(connection, at, data)
        return path

    return write


def read_with_rosbags(path: Path) -> list[tuple[str, int, Any]]:
    """Return (topic, time, message) by the definitions that the recording itself carries."""
    from rosbags.highlevel import AnyReader

    with AnyReader([path]) as reader:
        return [
            (connection.topic, at, reader.deserialize(raw, connection.msgtype))
            for connection, at, raw in reader.messages()
        ]


def read_with_mcap(path: Path) -> list[tuple[str, str, int, Any]]:
    """Return (topic, schema, time, message) by the mcap project's own reader and ROS 2 decoder."""
    from mcap.reader import make_reader
    from mcap_ros2.decoder import DecoderFactory

    with open(path, "rb") as file:
        found = make_reader(file, decoder_factories=[DecoderFactory()]).iter_decoded_messages()
        return [(channel.topic, schema.name, message.log_time, value) for schema, channel, message, value in found]


def check_boxes(messages: list[tuple[int, Any]], count: int) -> None:
    assert [message.header.stamp.sec for _, message in messages] == list(range(1, count + 1))
    for at, message in messages:
        number = message.header.stamp.sec
        assert at == START_NS + number * STEP_NS
        assert (message.header.stamp.nanosec, message.header.frame_id) == (7, "left")
        (box,) = message.detections
        assert (box.bbox.center.position.x, box.bbox.center.position.y) == (number % 256 + 10, 25)
        assert (box.bbox.size_x, box.bbox.size_y) == (20, 30)
        assert (box.results[0].hypothesis.class_id, box.results[0].hypothesis.score) == ("cup", 0.75)


def test_every_frame_of_an_mcap_gets_its_result_at_its_time(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    source = recorded(50)
    output = tmp_path / "out.mcap"
    done = replayed(scripted().address, source / "drive_mcap.mcap", output)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "50 frame(s) in" in done.stdout
    assert "50 answered" in done.stdout
    assert "50 message(s) on /edge_server/camera/image_raw/detections" in done.stdout
    by_rosbags = read_with_rosbags(output)
    assert {topic for topic, _, _ in by_rosbags} == {RESULTS}
    check_boxes([(at, message) for _, at, message in by_rosbags], 50)
    pytest.importorskip("mcap_ros2")
    by_mcap = read_with_mcap(output)
    assert {(topic, schema) for topic, schema, _, _ in by_mcap} == {(RESULTS, DETECTIONS)}
    check_boxes([(at, message) for _, _, at, message in by_mcap], 50)


@pytest.mark.parametrize("plugin", ["mcap", "sqlite3"])
def test_a_rosbag2_folder_is_read_and_written(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path, plugin: str
) -> None:
    output = tmp_path / "results"
    done = replayed(scripted().address, recorded(5, plugin), output)
    assert done.returncode == 0, done.stderr
    assert (output / "metadata.yaml").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"drive_{plugin}", "results"]
    check_boxes([(at, message) for _, at, message in read_with_rosbags(output)], 5)


def test_the_metadata_has_what_ros2_bag_reads(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    """The keys and kinds that rosbag2's metadata_io.cpp of Humble and yaml.hpp of Jazzy convert, or else throw."""
    yaml = pytest.importorskip("ruamel.yaml").YAML(typ="safe")
    done = replayed(scripted().address, recorded(5), tmp_path / "labels")
    assert done.returncode == 0, done.stderr
    found = yaml.load((tmp_path / "labels/metadata.yaml").read_text())["rosbag2_bagfile_information"]
    # From version 9 on the profiles are no text any more, which Humble wants.
    assert (found["version"], found["storage_identifier"], found["ros_distro"]) == (8, "mcap", "rosbags")
    assert (found["compression_format"], found["compression_mode"]) == ("", "")
    assert found["relative_file_paths"] == ["labels.mcap"]
    assert found["starting_time"]["nanoseconds_since_epoch"] == START_NS + STEP_NS
    assert found["duration"]["nanoseconds"] == 4 * STEP_NS
    assert (found["message_count"], found["files"][0]["message_count"]) == (5, 5)
    (topic,) = found["topics_with_message_count"]
    assert topic["message_count"] == 5
    metadata = topic["topic_metadata"]
    assert (metadata["name"], metadata["type"], metadata["serialization_format"]) == (RESULTS, DETECTIONS, "cdr")
    assert metadata["type_description_hash"].startswith("RIHS01_")
    infinite = {"sec": 9223372036, "nsec": 854775807}
    profile = {
        "history": 1, "depth": 10, "reliability": 1, "durability": 2, "deadline": infinite, "lifespan": infinite,
        "liveliness": 1, "liveliness_lease_duration": infinite, "avoid_ros_namespace_conventions": False,
    }  # fmt: skip
    assert yaml.load(metadata["offered_qos_profiles"]) == [profile]
    from mcap.reader import make_reader

    with (tmp_path / "labels/labels.mcap").open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    (channel,) = summary.channels.values()
    assert yaml.load(channel.metadata["offered_qos_profiles"]) == [profile]


def test_a_ros_1_bag_is_read(scripted: Callable[..., Any], tmp_path: Path) -> None:
    from rosbags.rosbag1 import Writer
    from rosbags.typesys import Stores, get_typestore

    types = get_typestore(Stores.ROS1_NOETIC)
    with Writer(tmp_path / "old.bag") as writer:
        connection = writer.add_connection("/camera/image_raw", "sensor_msgs/msg/Image", typestore=types)
        for number in range(1, 4):
            message = image({**types.types, "std_msgs/msg/Header": with_seq(types)}, number)
            data = types.serialize_ros1(message, "sensor_msgs/msg/Image")
            writer.write(connection, START_NS + number * STEP_NS, data)
    done = replayed(scripted().address, tmp_path / "old.bag", tmp_path / "new.mcap")
    assert done.returncode == 0, done.stderr
    check_boxes([(at, message) for _, at, message in read_with_rosbags(tmp_path / "new.mcap")], 3)


def with_seq(types: Any) -> Callable[..., Any]:
    return lambda **fields: types.types["std_msgs/msg/Header"](seq=99, **fields)


def test_dropped_frames_are_sent_again(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    done = replayed(scripted(drops_each=4).address, recorded(30), tmp_path / "out.mcap")
    assert done.returncode == 0, done.stderr
    assert "30 answered, 7 sent again" in done.stdout
    messages = sorted(read_with_rosbags(tmp_path / "out.mcap"), key=lambda item: item[1])
    check_boxes([(at, message) for _, at, message in messages], 30)


def test_a_restart_of_the_server_loses_no_frame(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    server = scripted()

    def restart() -> None:
        server.is_mute = True
        server.stop()
        server.is_mute = False
        server.start()

    original, restarted = server._answer, threading.Event()

    def answer(request: Any, frame: Any) -> Any:
        if frame.header.seq == 25 and not restarted.is_set():
            restarted.set()
            threading.Thread(target=restart).start()
        return original(request, frame)

    server._answer = answer
    done = replayed(server.address, recorded(60), tmp_path / "out.mcap")
    assert done.returncode == 0, done.stderr
    assert restarted.is_set()
    assert "60 answered" in done.stdout
    messages = sorted(read_with_rosbags(tmp_path / "out.mcap"), key=lambda item: item[1])
    check_boxes([(at, message) for _, at, message in messages], 60)


def test_at_the_recorded_rate_every_frame_is_answered_or_counted_as_dropped(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    server = scripted(drops_each=3)
    done = replayed(server.address, recorded(12), tmp_path / "out.mcap", "--rate=2")
    assert done.returncode == 0, done.stderr
    told = {what: int(count) for count, what in re.findall(r"(\d+) (answered|dropped \(\w+\))", done.stdout)}
    came = [frame.header.seq for frame in server.frames]
    # Newer frames may overtake others on the way to the server; nothing overtakes the last, which it drops.
    assert came == sorted(set(came))
    assert came[-1] == 12
    refused = sum(seq % 3 == 0 for seq in came)
    expected = {"answered": len(came) - refused, "dropped (governor)": refused, "dropped (unanswered)": 12 - len(came)}
    assert told == {what: count for what, count in expected.items() if count}
    assert len(read_with_rosbags(tmp_path / "out.mcap")) == told.get("answered", 0)


def test_every_requested_result_has_its_topic(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    flags = [f"--return={name}" for name in ("detections", "classes", "mask", "map", "annotated")]
    done = replayed(
        scripted().address, recorded(2), tmp_path / "out.mcap", *flags, "--namespace=/left/", "--class-numbers"
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = {}
    for topic, _, message in read_with_rosbags(tmp_path / "out.mcap"):
        found.setdefault(topic, []).append(message)
    names = ["annotated/compressed", "classification", "detections", "map", "mask"]
    prefix = "/left/camera/image_raw"
    assert sorted(found) == [f"{prefix}/{name}" for name in names]
    assert (found[f"{prefix}/map"][0].encoding, found[f"{prefix}/map"][0].step) == ("32FC1", 8)
    assert [one.class_id for one in found[f"{prefix}/classification"][0].results] == ["1", "2"]
    assert found[f"{prefix}/detections"][0].detections[0].results[0].hypothesis.class_id == "3"
    mask = found[f"{prefix}/mask"][0]
    assert (mask.encoding, mask.step, mask.data.tolist()) == ("mono8", 2, [0, 1, 2, 3])
    assert bytes(found[f"{prefix}/annotated/compressed"][0].data) == b"\xff\xd8\xff\xd9"


def test_errors_of_the_model_are_reported_and_set_the_exit_code(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    server = scripted(error=("INVALID_ARG", "model 'finder': no rgb8 today"))
    done = replayed(server.address, recorded(5), tmp_path / "out.mcap")
    assert done.returncode == 1
    assert "5 failed" in done.stdout
    assert "INVALID_ARG: model 'finder': no rgb8 today" in done.stderr


def test_a_full_disk_ends_the_replay_with_one_line_and_leaves_no_file(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    recording = recorded(5)
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", str(COMMAND), "ros", "replay", str(recording),
         "--model=finder", f"--address={scripted().address}", f"--output={tmp_path / 'out.mcap'}"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "out.mcap' cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["drive_mcap"]


def test_an_absent_server_ends_the_replay_and_leaves_no_file(recorded: Callable[..., Path], tmp_path: Path) -> None:
    done = replayed("127.0.0.1:1", recorded(5), tmp_path / "out.mcap", "--patience=0.5")
    assert done.returncode == 2
    assert "127.0.0.1:1" in done.stderr
    assert done.stderr.count("trying again for 0.5 s") == 1
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["drive_mcap"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.mcap", None, "there is no recording"),
        ("empty.mcap", b"", "cannot be read"),
        ("cut.mcap", b"\x89MCAP0\r\n\x01\x00\x00", "cannot be read"),
        ("text.bag", b"not a bag", "cannot be read"),
        ("text.db3", b"not a database", "cannot be read"),
        ("film.mp4", b"1234", "cannot be read"),
    ],
)
def test_a_file_that_is_no_recording_is_reported_in_one_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = replayed("127.0.0.1:1", tmp_path / name, tmp_path / "out.mcap")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "out.mcap").exists()


def test_a_folder_without_a_recording_is_reported_with_what_is_missing(tmp_path: Path) -> None:
    done = replayed("127.0.0.1:1", tmp_path, tmp_path / "out.mcap")
    assert done.returncode == 2
    expected = f"folder '{tmp_path}' has no recording: expected files .mcap or .db3, or a metadata.yaml"
    assert done.stderr == f"edge-server ros: {expected}\n"


def test_an_existing_file_is_not_overwritten(recorded: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out.mcap").write_bytes(b"precious")
    done = replayed("127.0.0.1:1", recorded(1), tmp_path / "out.mcap")
    assert done.returncode == 2
    assert "out.mcap' exists already and is not overwritten: remove it, or name another --output" in done.stderr
    assert (tmp_path / "out.mcap").read_bytes() == b"precious"


def test_all_topics_of_images_are_chosen_and_named_ones_are_found(recorded: Callable[..., Path]) -> None:
    with ImageRecording(recorded(2, topics=("/left", "/right")), MessageTypes()) as recording:
        assert recording.choose_topics() == ({"/left": 2, "/right": 2}, {})
        assert recording.choose_topics(["right"]) == ({"/right": 2}, {})
        with pytest.raises(NotFound, match="no images on topic '/clock'; topics with images: /left, /right"):
            recording.choose_topics(["/clock"])


def test_frames_are_numbered_views_with_padding_and_timestamp(recorded: Callable[..., Path]) -> None:
    with ImageRecording(recorded(3), MessageTypes()) as recording:
        frames = list(recording.frames(["/camera/image_raw"]))
    assert [item.frame and item.frame.header.seq for item in frames] == [1, 2, 3]
    assert [item.recorded_ns for item in frames] == [START_NS + number * STEP_NS for number in (1, 2, 3)]
    frame = frames[1].frame
    assert frame is not None
    assert (frame.height, frame.width, frame.step, frame.encoding) == (6, 8, 28, "rgb8")
    assert isinstance(frame.data, memoryview)
    assert bytes(frame.data) == b"\x02" * 168


def test_an_error_while_reading_a_recording_is_raised(
    scripted: Callable[..., Any], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    types = MessageTypes()
    parameters = ReplayParameters("finder", address=scripted().address, returns=Returns(has_detections=True))

    def broken(frames: Any) -> Any:
        yield next(frames)
        raise InvalidRequest("the disk is gone")

    with ImageRecording(recorded(5), types) as recording:
        frames = recording.frames(["/camera/image_raw"])
        with (
            pytest.raises(EdgeServerError, match="the disk is gone"),
            RecordingWriter(tmp_path / "o.mcap", types) as writer,
        ):
            RecordingReplay(parameters, ["/camera/image_raw"], writer).run(broken(frames))
    assert not (tmp_path / "o.mcap").exists()
    assert writer.finished_path in (None, tmp_path / "o_partial.mcap")
