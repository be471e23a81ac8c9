"""Recorded drives as robots leave them: several cameras and files, compressed chunks, ends that are missing."""

from __future__ import annotations

import importlib.util
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.messages.ros2_types import MessageTypes
from edge_server.plugins.ros.recordings.recording import ImageRecording
from tests.plugins.ros.replays import COMMAND, NEEDS_LIBRARIES, START_NS, STEP_NS, replayed

IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"

pytestmark = NEEDS_LIBRARIES


def store() -> Any:
    from rosbags.typesys import Stores, get_typestore

    return get_typestore(Stores.ROS2_JAZZY)


def image(number: int, encoding: str = "rgb8") -> bytes:
    """Return sensor_msgs/Image number N in CDR, 8 x 6, every byte N."""
    types = store()
    stamp = types.types["builtin_interfaces/msg/Time"](sec=number, nanosec=7)
    message = types.types[IMAGE](
        header=types.types["std_msgs/msg/Header"](stamp=stamp, frame_id="left"),
        height=6, width=8, encoding=encoding, is_bigendian=0, step=24, data=np.full(144, number % 256, np.uint8),
    )  # fmt: skip
    return bytes(types.serialize_cdr(message, IMAGE))


def compressed_image(number: int, description: str = "jpeg") -> bytes:
    types = store()
    stamp = types.types["builtin_interfaces/msg/Time"](sec=number, nanosec=7)
    header = types.types["std_msgs/msg/Header"](stamp=stamp, frame_id="left")
    message = types.types[COMPRESSED](header=header, format=description, data=np.full(9, number % 256, np.uint8))
    return bytes(types.serialize_cdr(message, COMPRESSED))


Message = tuple[str, str, int, bytes]
"""Topic, type, time after START_NS and data."""


def write_mcap(path: Path, messages: Sequence[Message], **options: Any) -> Path:
    """Write a file as ROS 2's recorder does, by the MCAP project's own writer."""
    from mcap.writer import CompressionType, Writer

    options = {"chunk_size": 1000, "compression": CompressionType.ZSTD, **options}
    with path.open("wb") as file:
        writer = Writer(file, **options)
        writer.start(profile="ros2", library="test")
        channels: dict[str, int] = {}
        for topic, type_name, after_ns, data in messages:
            if topic not in channels:
                text = store().generate_msgdef(type_name, ros_version=2)[0].encode()
                schema = writer.register_schema(type_name, "ros2msg", text)
                channels[topic] = writer.register_channel(topic, "cdr", schema)
            at = START_NS + after_ns
            writer.add_message(channels[topic], at, data, at)
        writer.finish()
    return path


def drive(count: int, topics: Sequence[str] = ("/front/image_raw",)) -> list[Message]:
    return [
        (topic, IMAGE, number * STEP_NS + offset, image(number))
        for number in range(1, count + 1)
        for offset, topic in enumerate(topics)
    ]


def frames_of(path: Path, topics: Sequence[str] = ("/front/image_raw",)) -> tuple[list[Any], list[str]]:
    """Return the frames of a recording and what is damaged."""
    with ImageRecording(path, MessageTypes()) as recording:
        return list(recording.frames(topics)), list(recording.damage)


def numbers(frames: Sequence[Any]) -> list[int]:
    return [one.frame.header.sec for one in frames]


def results_of(path: Path) -> list[tuple[str, int, Any]]:
    """Return topic, time and message in the order of the file."""
    from mcap.stream_reader import StreamReader
    from mcap_ros2.decoder import DecoderFactory

    found, schemas, channels, factory = [], {}, {}, DecoderFactory()
    with path.open("rb") as file:
        for record in StreamReader(file).records:
            kind = type(record).__name__
            if kind == "Schema":
                schemas[record.id] = record
            elif kind == "Channel":
                channels[record.id] = record
            elif kind == "Message":
                channel = channels[record.channel_id]
                decode = factory.decoder_for(channel.message_encoding, schemas[channel.schema_id])
                found.append((channel.topic, record.log_time, decode(record.data)))
    return found


CAMERAS = ("/front/image_raw", "/left/image_raw", "/right/image_raw", "/rear/image_raw")


def test_all_cameras_are_labelled_in_one_run_with_the_times_of_their_frames(
    scripted: Callable[..., Any], tmp_path: Path
) -> None:
    write_mcap(tmp_path / "drive.mcap", drive(40, CAMERAS))
    done = replayed(scripted(drops_each=7).address, tmp_path / "drive.mcap", tmp_path / "labels.mcap")
    assert done.returncode == 0, done.stderr
    assert "160 frame(s)" in done.stdout
    results = results_of(tmp_path / "labels.mcap")
    expected = [(f"/edge_server{topic}/detections", at + START_NS) for topic, _, at, _ in drive(40, CAMERAS)]
    assert [(topic, at) for topic, at, _ in results] == expected, "not in the order of time"
    for _, at, message in results:
        assert (message.header.stamp.sec, message.header.frame_id) == ((at - START_NS) // STEP_NS, "left")


def test_a_camera_of_a_few_frames_does_not_end_or_stop_the_others(scripted: Callable[..., Any], tmp_path: Path) -> None:
    messages = [*drive(70), ("/rear/image_raw", IMAGE, STEP_NS + 5, image(1))]
    write_mcap(tmp_path / "drive.mcap", sorted(messages, key=lambda one: one[2]))
    done = replayed(scripted(drops_each=1).address, tmp_path / "drive.mcap", tmp_path / "labels.mcap")
    assert done.returncode == 0, done.stderr
    # The script drops each number once, also if both cameras have it.
    assert "71 answered, 70 sent again" in done.stdout
    times = [at for _, at, _ in results_of(tmp_path / "labels.mcap")]
    assert times == sorted(times)


def test_a_camera_that_sends_nothing_for_long_does_not_count_as_a_lost_server(
    scripted: Callable[..., Any], tmp_path: Path
) -> None:
    server = scripted()
    original, restarted = server._answer, threading.Event()

    def restart() -> None:
        server.stop()
        server.start()

    def answer(request: Any, frame: Any) -> Any:
        if not restarted.is_set():
            time.sleep(0.13)
        # Longer than the patience after the only frame of the other camera, and before all frames are read.
        if frame.header.seq == 35 and not restarted.is_set():
            restarted.set()
            threading.Thread(target=restart).start()
        return original(request, frame)

    server._answer = answer
    messages = [("/rear/image_raw", IMAGE, 1, image(1)), *drive(110)]
    write_mcap(tmp_path / "drive.mcap", messages)
    done = replayed(server.address, tmp_path / "drive.mcap", tmp_path / "labels.mcap", "--patience=4")
    assert done.returncode == 0, done.stderr
    assert restarted.is_set()
    assert "111 answered" in done.stdout


def test_several_streams_of_a_camera_keep_the_order_of_its_frames(scripted: Callable[..., Any], tmp_path: Path) -> None:
    write_mcap(tmp_path / "drive.mcap", drive(90))
    server = scripted(drops_each=5)
    done = replayed(server.address, tmp_path / "drive.mcap", tmp_path / "labels.mcap", "--streams=3", "--stream-id=me")
    assert done.returncode == 0, done.stderr
    assert {request.stream_id for request in server.requests} == {f"me/front/image_raw:{number}" for number in range(3)}
    labelled = [message.header.stamp.sec for _, _, message in results_of(tmp_path / "labels.mcap")]
    assert labelled == list(range(1, 91))


def write_large_drive(path: Path, count: int) -> int:
    """Write a drive of HD pictures, most of whose bytes are holes in the file; return its size."""
    types = store()
    (text, _) = types.generate_msgdef(IMAGE, ros_version=2)
    stamp = types.types["builtin_interfaces/msg/Time"](sec=1, nanosec=7)
    size = 1920 * 1080 * 3
    message = types.types[IMAGE](
        header=types.types["std_msgs/msg/Header"](stamp=stamp, frame_id="left"),
        height=1080, width=1920, encoding="rgb8", is_bigendian=0, step=5760, data=np.zeros(size, np.uint8),
    )  # fmt: skip
    begin = bytes(types.serialize_cdr(message, IMAGE))[:-size]

    def block(text: str) -> bytes:
        return struct.pack("<I", len(text.encode())) + text.encode()

    def record(kind: int, content: bytes) -> bytes:
        return struct.pack("<BQ", kind, len(content)) + content

    with path.open("wb") as file:
        file.write(HEAD)
        file.write(record(3, struct.pack("<H", 1) + block(IMAGE) + block("ros2msg") + block(text)))
        file.write(
            record(4, struct.pack("<HH", 1, 1) + block("/front/image_raw") + block("cdr") + struct.pack("<I", 0))
        )
        for number in range(count):
            at = START_NS + number * STEP_NS
            head = struct.pack("<BQ", 5, 22 + len(begin) + size) + struct.pack("<HIQQ", 1, number, at, at) + begin
            sizes = struct.pack("<QQQI", at, at, len(head) + size, 0) + struct.pack("<I", 0)
            sizes += struct.pack("<Q", len(head) + size)
            file.write(struct.pack("<BQ", 6, len(sizes) + len(head) + size) + sizes + head)
            file.seek(size, os.SEEK_CUR)
        file.write(record(0x0F, struct.pack("<I", 0)))
    return path.stat().st_size


PEAK_OF_COMMAND = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Prints a command's peak of memory in KiB. A small program starts it, as Linux counts the memory of the program that
starts another one for both."""


@pytest.mark.soak
def test_the_memory_of_a_run_is_bounded_however_long_the_drive_is(
    scripted: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = scripted()
    original = server._answer

    def answer(request: Any, frame: Any) -> Any:
        server.frames.clear()
        return original(request, frame)

    server._answer = answer
    peaks = []
    for count in (60, 340):
        size = write_large_drive(tmp_path / f"drive{count}.mcap", count)
        done = subprocess.run(
            [sys.executable, "-c", PEAK_OF_COMMAND, str(COMMAND), "ros", "replay", str(tmp_path / f"drive{count}.mcap"),
             "--model=finder", f"--address={server.address}", f"--output={tmp_path / f'labels{count}.mcap'}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert len(results_of(tmp_path / f"labels{count}.mcap")) == count
        peaks.append(int(done.stdout) / 1024)
        with capsys.disabled():
            print(f"\na drive of {size / 2**20:.0f} MiB: {peaks[-1]:.0f} MiB of memory at most")
    # The images between reading and writing (MAX_BYTES, 256 MiB, or fewer if the server is fast), and the program.
    assert max(peaks) < 512


def test_files_that_were_split_by_size_are_one_drive_without_metadata(tmp_path: Path) -> None:
    messages = drive(60)
    (tmp_path / "drive").mkdir()
    for part in range(3):
        write_mcap(tmp_path / "drive" / f"drive_{part}.mcap", messages[part * 20 : part * 20 + 20])
    frames, damage = frames_of(tmp_path / "drive")
    assert (numbers(frames), damage) == (list(range(1, 61)), [])


def options_of_writers() -> list[Any]:
    if importlib.util.find_spec("mcap") is None:
        return []
    from mcap.writer import CompressionType, IndexType

    return [
        pytest.param({"compression": kind}, id=f"compression {kind.name}") for kind in CompressionType
    ] + [
        pytest.param({"use_chunking": False}, id="without chunks"),
        pytest.param({"index_types": IndexType.NONE}, id="without any index"),
        pytest.param({"index_types": IndexType.NONE, "repeat_channels": False, "repeat_schemas": False,
                      "use_statistics": False, "use_summary_offsets": False}, id="without a summary"),
        pytest.param({"enable_crcs": False}, id="without checksums"),
    ]  # fmt: skip


@pytest.mark.parametrize("options", options_of_writers())
def test_each_way_to_write_mcap_is_read_and_counted(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_mcap(tmp_path / "drive.mcap", drive(30, ("/front/image_raw", "/left/image_raw")), **options)
    frames, damage = frames_of(path)
    assert (numbers(frames), damage) == (list(range(1, 31)), [])
    with ImageRecording(path, MessageTypes()) as recording:
        assert recording.image_topics() == {"/front/image_raw": 30, "/left/image_raw": 30}


def test_a_folder_of_files_that_were_compressed_as_a_whole_is_read(tmp_path: Path) -> None:
    from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

    writer = Writer(tmp_path / "drive", version=9, storage_plugin=StoragePlugin.MCAP)
    writer.set_compression(CompressionMode.FILE, CompressionFormat.ZSTD)
    with writer:
        connection = writer.add_connection("/front/image_raw", IMAGE, typestore=store())
        for _, _, after_ns, data in drive(5):
            writer.write(connection, START_NS + after_ns, data)
    assert [path.suffix for path in (tmp_path / "drive").iterdir() if path.suffix != ".yaml"] == [".zstd"]
    assert numbers(frames_of(tmp_path / "drive")[0]) == [1, 2, 3, 4, 5]


def test_messages_out_of_order_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    messages = drive(50)
    mixed = [messages[number * 17 % 50] for number in range(50)]
    frames, _ = frames_of(write_mcap(tmp_path / "drive.mcap", mixed))
    assert numbers(frames) == list(range(1, 51))


def test_messages_that_were_compressed_each_by_itself_are_read(tmp_path: Path) -> None:
    zstd = pytest.importorskip("backports.zstd")
    messages = [(topic, kind, at, zstd.compress(data)) for topic, kind, at, data in drive(5)]
    frames, _ = frames_of(write_mcap(tmp_path / "drive.mcap", messages))
    assert numbers(frames) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("options", options_of_writers())
def test_a_file_that_was_cut_anywhere_gives_all_frames_before_the_cut(tmp_path: Path, options: dict[str, Any]) -> None:
    topics = ("/front/image_raw", "/left/image_raw")
    whole = write_mcap(tmp_path / "whole.mcap", drive(12, topics), **options).read_bytes()
    expected = [(topic, START_NS + after_ns) for topic, _, after_ns, _ in drive(12, topics)]
    before = 0
    for size in range(len(whole) // 20, len(whole), max(len(whole) // 60, 1)):
        (tmp_path / "cut.mcap").write_bytes(whole[:size])
        frames, damage = frames_of(tmp_path / "cut.mcap", topics)
        assert [(one.topic, one.recorded_ns) for one in frames] == expected[: len(frames)]
        assert len(frames) >= before, f"{size} bytes hold {before} frames or more"
        # After the end of the data only the index follows.
        assert len(frames) == 24 or "cut.mcap has no end" in damage[0]
        before = len(frames)
    assert before == 24


def test_a_cut_within_the_index_of_a_chunk_loses_none_of_its_cameras(tmp_path: Path) -> None:
    topics = ("/front/image_raw", "/left/image_raw")
    whole = write_mcap(tmp_path / "whole.mcap", drive(4, topics), chunk_size=100_000).read_bytes()
    # The last chunk is followed by two of these records: opcode, length, channel, four entries of 16 bytes.
    first = whole.index(struct.pack("<BQHI", 7, 70, 1, 64))
    for size in (first, first + 79, first + 100):
        (tmp_path / "cut.mcap").write_bytes(whole[:size])
        assert len(frames_of(tmp_path / "cut.mcap", topics[1:])[0]) == 4


def test_a_cut_drive_is_labelled_as_far_as_it_goes(scripted: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    messages = drive(40)
    write_mcap(tmp_path / "drive" / "drive_0.mcap", messages[:20])
    last = write_mcap(tmp_path / "drive" / "drive_1.mcap", messages[20:])
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 3] + bytes(5000))
    done = replayed(scripted().address, tmp_path / "drive", tmp_path / "labels.mcap")
    assert done.returncode == 0, done.stderr
    assert "drive_1.mcap has no end" in done.stderr
    count = len(results_of(tmp_path / "labels.mcap"))
    assert 20 < count < 40
    assert f"{count} answered" in done.stdout


def test_an_empty_file_at_the_end_of_a_drive_is_only_said(tmp_path: Path, scripted: Callable[..., Any]) -> None:
    (tmp_path / "drive").mkdir()
    write_mcap(tmp_path / "drive" / "drive_0.mcap", drive(5))
    (tmp_path / "drive" / "drive_1.mcap").touch()
    done = replayed(scripted().address, tmp_path / "drive", tmp_path / "labels.mcap")
    assert (done.returncode, len(results_of(tmp_path / "labels.mcap"))) == (0, 5)
    assert "drive_1.mcap' cannot be read: it is empty" in done.stderr
    (tmp_path / "drive" / "drive_2.mcap").write_bytes(bytes(1000))
    done = replayed(scripted().address, tmp_path / "drive", tmp_path / "again.mcap")
    assert (done.returncode, len(results_of(tmp_path / "again.mcap"))) == (1, 5)
    assert "drive_2.mcap' cannot be read: it does not begin as an MCAP file" in done.stderr


def test_a_drive_of_more_files_than_a_process_may_open_is_read(tmp_path: Path) -> None:
    import resource

    (tmp_path / "drive").mkdir()
    for number, message in enumerate(drive(80)):
        write_mcap(tmp_path / "drive" / f"drive_{number}.mcap", [message])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        frames, _ = frames_of(tmp_path / "drive")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert numbers(frames) == list(range(1, 81))


def test_a_damaged_chunk_in_the_middle_is_skipped_and_sets_the_exit_code(
    scripted: Callable[..., Any], tmp_path: Path
) -> None:
    path = write_mcap(tmp_path / "drive.mcap", drive(40))
    data = bytearray(path.read_bytes())
    middle = len(data) // 3
    data[middle : middle + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    done = replayed(scripted().address, path, tmp_path / "labels.mcap")
    assert done.returncode == 1
    assert done.stderr.count("drive.mcap: the chunk at byte") == 1
    assert 30 < len(results_of(tmp_path / "labels.mcap")) < 40


def test_a_message_that_is_no_image_fails_alone(scripted: Callable[..., Any], tmp_path: Path) -> None:
    messages = drive(5)
    messages[1] = (*messages[1][:3], b"\0\1\0\0" + b"\xff" * 40)
    messages[3] = (*messages[3][:3], b"")
    write_mcap(tmp_path / "drive.mcap", messages)
    done = replayed(scripted().address, tmp_path / "drive.mcap", tmp_path / "labels.mcap")
    assert done.returncode == 1
    assert "5 frame(s)" in done.stdout
    assert "3 answered, 2 failed" in done.stdout
    assert "/front/image_raw, message 2: " in done.stderr
    assert "Traceback" not in done.stderr
    assert [message.header.stamp.sec for _, _, message in results_of(tmp_path / "labels.mcap")] == [1, 3, 5]


def test_depth_and_compressed_copies_are_left_out_unless_they_are_named(
    scripted: Callable[..., Any], tmp_path: Path
) -> None:
    messages = [
        ("/front/image_raw", IMAGE, 1, image(1)),
        ("/front/image_raw/compressed", COMPRESSED, 2, compressed_image(1)),
        ("/front/depth", IMAGE, 3, image(1, "16UC1")),
        ("/front/depth/compressedDepth", COMPRESSED, 4, compressed_image(1, "16UC1; compressedDepth png")),
        ("/table/compressed", COMPRESSED, 5, compressed_image(1)),
    ]
    write_mcap(tmp_path / "drive.mcap", messages)
    done = replayed(scripted().address, tmp_path / "drive.mcap", tmp_path / "labels.mcap")
    assert done.returncode == 0, done.stderr
    assert {topic for topic, _, _ in results_of(tmp_path / "labels.mcap")} == {
        "/edge_server/front/image_raw/detections", "/edge_server/table/compressed/detections",
    }  # fmt: skip
    assert "/front/depth is left out (depth, 16UC1)" in done.stderr
    assert "/front/image_raw/compressed is left out (the pictures of /front/image_raw)" in done.stderr
    named = replayed(
        scripted().address, tmp_path / "drive.mcap", tmp_path / "named.mcap",
        "--topic=/front/image_raw/compressed", "--topic=front/depth",
    )  # fmt: skip
    assert named.returncode == 0, named.stderr
    assert "2 answered" in named.stdout


def chunk(records: bytes, *, size: int | None = None, compression: bytes = b"", checksum: int = 0) -> bytes:
    """Return a chunk record."""
    body = struct.pack("<QQQI", START_NS, START_NS, len(records) if size is None else size, checksum)
    body += struct.pack("<I", len(compression)) + compression + struct.pack("<Q", len(records)) + records
    return struct.pack("<BQ", 6, len(body)) + body


HEAD = b"\x89MCAP0\r\n" + struct.pack("<BQ", 1, 12) + struct.pack("<I", 4) + b"ros2" + struct.pack("<I", 0)


def test_a_bomb_of_zstd_is_skipped_within_bounded_memory(tmp_path: Path) -> None:
    zstd = pytest.importorskip("backports.zstd")
    bomb = zstd.compress(bytes(1 << 30))
    for name, record in {
        "small": chunk(bomb, size=100, compression=b"zstd"),
        "large": chunk(bomb, size=1 << 40, compression=b"zstd"),
    }.items():
        path = tmp_path / f"{name}.mcap"
        path.write_bytes(HEAD + record)
        done = subprocess.run(
            ["bash", "-c", 'ulimit -v 3000000; exec "$@"', "bash", str(COMMAND), "ros", "replay", str(path),
             "--model=finder", "--address=127.0.0.1:1", f"--output={tmp_path / 'labels.mcap'}"],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert "has no topic of sensor_msgs Image" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_recording_of_other_messages_says_what_it_has(tmp_path: Path) -> None:
    from mcap.writer import Writer

    with (tmp_path / "drive.mcap").open("wb") as file:
        writer = Writer(file)
        writer.start()
        schema = writer.register_schema("foxglove.CompressedImage", "protobuf", b"")
        channel = writer.register_channel("/front", "protobuf", schema)
        writer.add_message(channel, START_NS, b"\x0a", START_NS)
        writer.finish()
    done = replayed("127.0.0.1:1", tmp_path / "drive.mcap", tmp_path / "labels.mcap")
    assert done.returncode == 2
    assert "it has /front (foxglove.CompressedImage, protobuf)" in done.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEAD.replace(b"ros2", b"ros1"), "expected the MCAP profile 'ros2', given 'ros1'"),
        (HEAD[:20], "its header is damaged"),
        (b"\x89MCAP0\r\n" + b"\xff" * 30, "its header is damaged"),
        (b"\x89PNG", "it does not begin as an MCAP file"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "drive.mcap").write_bytes(data)
    with pytest.raises(InvalidRequest, match=message):
        frames_of(tmp_path / "drive.mcap")


def test_an_index_that_begins_in_the_footer_is_ignored(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "drive.mcap", drive(3))
    data = path.read_bytes()
    path.write_bytes(data[:-28] + struct.pack("<Q", len(data) - 4) + data[-20:])
    frames, damage = frames_of(path)
    assert (numbers(frames), damage) == ([1, 2, 3], [])


def test_sizes_and_offsets_of_an_index_that_lie_are_found_by_a_scan(tmp_path: Path) -> None:
    path = write_mcap(tmp_path / "drive.mcap", drive(12))
    data = bytearray(path.read_bytes())
    at = len(data) - 8
    while (at := data.rfind(b"\x08", 0, at)) > 0:
        if struct.unpack_from("<Q", data, at + 1)[0] < 200 and at + 33 < len(data):
            data[at + 25 : at + 33] = b"\xff" * 8  # the offset of a chunk
            break
    path.write_bytes(data)
    frames, damage = frames_of(path)
    assert (numbers(frames), damage) == (list(range(1, 13)), [])


def test_a_chunk_with_a_wrong_checksum_is_skipped(tmp_path: Path) -> None:
    record = struct.pack("<BQ", 5, 22) + struct.pack("<HIQQ", 1, 0, START_NS, START_NS)
    path = tmp_path / "drive.mcap"
    path.write_bytes(HEAD + chunk(record, checksum=zlib.crc32(record) ^ 1) + struct.pack("<BQI", 0x0F, 4, 0))
    assert frames_of(path) == ([], [f"drive.mcap: the chunk at byte {len(HEAD) + 9} is skipped: its checksum differs"])


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_a_whole_recording_of_what_was_labelled(
    scripted: Callable[..., Any], tmp_path: Path, signal_number: int
) -> None:
    server = scripted()
    original = server._answer

    def answer(request: Any, frame: Any) -> Any:
        if frame.header.seq == 30:
            server.is_mute = True
            os.kill(process.pid, signal_number)
        return original(request, frame)

    server._answer = answer
    recording = write_mcap(tmp_path / "drive.mcap", drive(60))
    process = subprocess.Popen(
        [str(COMMAND), "ros", "replay", str(recording), "--model=finder", f"--address={server.address}",
         f"--output={tmp_path / 'labels.mcap'}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "of 60 frame(s); results until then: " in told
    assert "Traceback" not in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drive.mcap", "labels_partial.mcap"]
    labelled = [message.header.stamp.sec for _, _, message in results_of(tmp_path / "labels_partial.mcap")]
    assert labelled == list(range(1, len(labelled) + 1))
    assert 20 < len(labelled) <= 30
    again = replayed(server.address, recording, tmp_path / "labels.mcap")
    assert again.returncode == 2
    assert "labels_partial.mcap' exists already: it is the result of an interrupted run" in again.stderr
