"""Shared memory between a replay and a server: used where the server allows it, and never needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_server
from edge_server.plugins.ros.recordings import shared_pictures
from edge_server.plugins.ros.recordings.recording import RecordedFrame
from edge_server.plugins.ros.recordings.replay import (
    MAX_IN_FLIGHT,
    RecordingReplay,
    ReplayParameters,
    ReplaySummary,
)
from edge_server.plugins.ros.recordings.shared_pictures import SharedPictures
from edge_server.protocol import messages
from edge_server.protocol.frame_messages import Frame, FrameHeader, RegionSlice

FOLDER = Path("/dev/shm")
MODEL = "face_detection_yunet"
SIZE = 640 * 480 * 3

pytestmark = pytest.mark.full


def picture(seq: int, size: int = SIZE) -> Frame:
    return Frame(FrameHeader(seq=seq), 480, 640, "bgr8", 640 * 3, data=bytes([seq % 256]) * size)


class Written:
    """Messages of a replay, in place of a file."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def write(self, topic: str, message: Any, recorded_ns: int) -> None:
        self.messages.append(message)


@pytest.fixture(scope="module")
def server() -> Iterator[edge_server.Server]:
    models = Path(__file__).parents[3] / "model_repository"
    settings = {"allow_client_shm": True, "model_control_mode": "explicit", "load_model": [MODEL]}
    with edge_server.Server(models, grpc_port=0, **settings) as running:
        yield running


def address_of(server: edge_server.Server) -> str:
    return f"127.0.0.1:{server.grpc_port}"


def regions_of(server: edge_server.Server) -> list[str]:
    """Return the names of the registered regions."""
    response = messages.message_class("inference.SystemSharedMemoryStatusResponse")
    return list(response.FromString(server.call("SystemSharedMemoryStatus", b"")).regions)


def replay(address: str, pictures: list[Frame]) -> tuple[ReplaySummary, list[Any]]:
    """Return the counts and the messages of a replay at full speed."""
    written = Written()
    frames = (RecordedFrame("/camera", frame.header.seq, frame) for frame in pictures)
    parameters = ReplayParameters(MODEL, address=address)
    return RecordingReplay(parameters, ["/camera"], written).run(frames), written.messages  # type: ignore[arg-type]


def test_images_are_in_a_region_of_the_server_until_their_results(server: edge_server.Server) -> None:
    shared = SharedPictures(address_of(server), 2)
    first, second, third = (shared.place(picture(seq)) for seq in (1, 2, 3))
    assert (first.data, second.data) == (b"", b"")
    assert isinstance(first.region, RegionSlice)
    assert isinstance(second.region, RegionSlice)
    assert {first.region.offset, second.region.offset} == {0, SIZE}
    assert (third.region, third.data) == (None, picture(3).data), "there is no slot for it"
    assert shared.place(picture(1)).region == first.region, "the same frame, sent again"
    assert not list(FOLDER.glob(f"{first.region.name}*")), "it ends with both processes"
    assert shared.free(1)
    assert not shared.free(1)
    assert shared.place(picture(4)).region == RegionSlice(first.region.name, first.region.offset, SIZE)
    assert shared.place(picture(5, SIZE + 1)).region is None
    assert regions_of(server) == [first.region.name]
    shared.close()
    assert shared.place(picture(6)).region is None
    assert regions_of(server) == []


def test_small_and_packed_images_are_sent_as_usual(server: edge_server.Server) -> None:
    shared = SharedPictures(address_of(server), 2)
    small = picture(1, shared_pictures.MIN_IMAGE_BYTES - 1)
    packed = Frame(FrameHeader(seq=2), format="jpeg", data=bytes(SIZE))
    assert (shared.place(small), shared.place(packed)) == (small, packed)
    assert regions_of(server) == []


def test_a_server_that_refuses_gets_images_as_usual(scripted: Callable[..., Any]) -> None:
    shared = SharedPictures(scripted().address, 2)
    frame = picture(1)
    assert shared.place(frame) is frame
    assert not list(FOLDER.glob(f"ros_replay_*_{os.getpid()}_*"))


def test_a_region_that_is_registered_after_the_end_is_removed(
    server: edge_server.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedPictures(address_of(server), 2)
    register = shared._endpoint.register_region

    def close_meanwhile(_: object, name: str, key: str, byte_size: int) -> bool:
        shared.close()
        return register(name, key, byte_size)

    monkeypatch.setattr(type(shared._endpoint), "register_region", close_meanwhile)
    frame = picture(1)
    assert shared.place(frame) is frame
    assert regions_of(server) == []


REPLAY_WITH_SIGNAL = """
import os, signal, sys
from edge_server.plugins.ros import command_replay
from edge_server.plugins.ros.recordings.shared_pictures import SharedPictures

place = SharedPictures.place

def place_and_get_signal(shared, frame):
    assert place(shared, frame).region is not None
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))

SharedPictures.place = place_and_get_signal
command_replay.run(sys.argv[2:])
"""


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A recording of one raw image that is large enough for shared memory."""
    pytest.importorskip("rosbags")
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_HUMBLE)
    make = store.types
    header = make["std_msgs/msg/Header"](make["builtin_interfaces/msg/Time"](1, 0), "left")
    image = make["sensor_msgs/msg/Image"](header, 480, 640, "bgr8", 0, 640 * 3, np.zeros(SIZE, np.uint8))
    with Writer(tmp_path / "drive", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        topic = writer.add_connection("/camera/image_raw", "sensor_msgs/msg/Image", typestore=store)
        writer.write(topic, 1, store.serialize_cdr(image, "sensor_msgs/msg/Image"))
    return tmp_path / "drive"


def test_the_region_of_a_killed_replay_is_removed_by_the_next_one(server: edge_server.Server, drive: Path) -> None:
    def start(signal_name: str) -> subprocess.Popen[bytes]:
        flags = [drive, f"--model={MODEL}", f"--address={address_of(server)}", f"--output={drive}_{signal_name}"]
        return subprocess.Popen([sys.executable, "-c", REPLAY_WITH_SIGNAL, signal_name, *flags])

    with start("SIGSTOP") as stopped:
        try:
            assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
            killed = start("SIGKILL")
            assert killed.wait(60) == -signal.SIGKILL
            by_process = {name.split("_")[-3]: name for name in regions_of(server)}
            assert by_process.keys() == {str(stopped.pid), str(killed.pid)}
            left = FOLDER / by_process[str(killed.pid)]
            left.touch()  # as if it was killed before the server had mapped the region
            replay(address_of(server), [picture(1)])
            assert regions_of(server) == [by_process[str(stopped.pid)]]
            assert not left.exists()
        finally:
            stopped.kill()
    replay(address_of(server), [picture(1)])
    assert regions_of(server) == []


def test_images_of_which_none_fits_are_sent_as_usual(
    server: edge_server.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_pictures, "MAX_BYTES", SIZE - 1)
    frame = picture(1)
    assert SharedPictures(address_of(server), 2).place(frame) is frame


def test_frames_are_sent_again_to_a_server_that_does_not_know_the_region(scripted: Callable[..., Any]) -> None:
    service = scripted()
    service.forgets_regions = True
    summary, written = replay(service.address, [picture(seq) for seq in range(1, 31)])
    assert (summary.sent, summary.answered, summary.failed) == (30, 30, 0)
    assert [message.detections[0].center_x for message in written] == [seq + 10 for seq in range(1, 31)]
    shared = [frame for frame in service.frames if frame.region is not None]
    assert shared
    assert summary.repeated == len(shared)


def test_results_are_those_of_images_that_cross_the_socket(
    server: edge_server.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    person = pytest.importorskip("skimage.data").astronaut()
    placed: list[bool] = []
    place = SharedPictures.place

    def note(shared: SharedPictures, frame: Frame) -> Frame:
        found = place(shared, frame)
        placed.append(found.region is not None)
        return found

    monkeypatch.setattr(SharedPictures, "place", note)
    pictures = []
    for seq in range(1, 41):
        pixels = np.ascontiguousarray(np.roll(person, 5 * seq, axis=1))
        pictures.append(Frame(FrameHeader(seq=seq), 512, 512, "rgb8", 512 * 3, data=pixels.reshape(-1).data))
    summary, from_memory = replay(address_of(server), pictures)
    assert (summary.answered, summary.repeated) == (40, 0)
    # Later ones may find no free slot while results wait to be read.
    assert all(placed[: 2 * MAX_IN_FLIGHT + 1])
    assert regions_of(server) == []
    placed.clear()
    monkeypatch.setattr(shared_pictures, "MIN_IMAGE_BYTES", 1 << 30)
    _, from_socket = replay(address_of(server), pictures)
    assert placed == [False] * 40
    assert from_memory == from_socket
    assert len({message.detections[0].center_x for message in from_memory if message.detections}) > 20
