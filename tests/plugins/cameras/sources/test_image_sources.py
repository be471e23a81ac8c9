"""Image sources of `edge-server stream`, their encoding to frames, and the schedule of frames."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from edge_server.plugins.cameras.sources.frame_encoding import encode_frame
from edge_server.plugins.cameras.sources.frame_schedule import FrameSchedule
from edge_server.plugins.cameras.sources.generated import Pattern
from edge_server.plugins.cameras.sources.source_choice import open_source
from edge_server.plugins.cameras.sources.source_interface import Source, SourceError, SourcePicture
from edge_server.protocol.frame_messages import FrameHeader

HEADER = FrameHeader(1, 2, "cam", 3)


def read_all(source: Source) -> list[SourcePicture]:
    shots = []
    while (shot := source.read()) is not None:
        shots.append(shot)
    source.close()
    return shots


def pixels_of(shot: SourcePicture | None) -> np.ndarray:
    assert shot is not None
    assert shot.pixels is not None
    return shot.pixels


def test_a_real_video_is_read_to_its_end(bikes: Path) -> None:
    source = open_source(str(bikes))
    assert (source.length, source.fps, source.title) == (250, 25, "bikes.mp4 640x272")
    shots = read_all(source)
    assert len(shots) == 250
    assert pixels_of(shots[-1]).shape == (272, 640, 3)


def test_a_file_that_is_no_video_is_refused_without_output_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "noise.mp4"
    path.write_bytes(random.Random(1).randbytes(5000))
    code = f"from edge_server.plugins.cameras.sources.source_choice import open_source; open_source({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert last.endswith(f"{path}: expected a video, given a file that OpenCV cannot open as one")
    assert "[ERROR" not in done.stderr
    assert "moov" not in done.stderr


def test_a_folder_gives_its_image_files_in_numeric_order(tmp_path: Path) -> None:
    for name in ("frame10.jpg", "frame9.JPG", "frame1.png", "frame02.jpeg", "notes.txt"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "more.jpg").mkdir()
    source = open_source(str(tmp_path))
    assert source.length == 4
    shots = read_all(source)
    assert [shot.name for shot in shots] == ["frame1.png", "frame02.jpeg", "frame9.JPG", "frame10.jpg"]
    assert [shot.format for shot in shots] == ["png", "jpeg", "jpeg", "jpeg"]
    assert shots[0].file == b"frame1.png"


def test_the_pattern_moves_and_depends_only_on_the_frame_number() -> None:
    one, other = Pattern((320, 240)), Pattern((320, 240))
    pictures = [pixels_of(one.read()) for _ in range(20)]
    assert all(picture.flags.c_contiguous and picture.flags.writeable for picture in pictures)
    assert all(np.array_equal(picture, other.draw(number)) for number, picture in enumerate(pictures))


def test_the_pattern_shows_its_frame_number() -> None:
    pattern = Pattern((640, 480))
    signs = {pattern.draw(number)[-36:, :100].tobytes() for number in range(1000)}
    assert len(signs) == 1000
    sign = pattern.draw(1)[-36:, :24, 0] == 255
    # The one: a stem of three columns' dots, seven dots of four pixels high.
    assert sign[4:32, 12:16].all()


@pytest.mark.parametrize("size", [(1, 1), (2, 7), (8, 8), (64, 3), (1920, 1080)])
def test_the_pattern_has_any_size(size: tuple[int, int]) -> None:
    source = open_source("pattern", size=size)
    assert pixels_of(source.read()).shape == (size[1], size[0], 3)


def test_the_pattern_needs_no_opencv() -> None:
    code = (
        "import sys; sys.modules['cv2'] = None\n"
        "from edge_server.plugins.cameras.sources.source_choice import open_source\n"
        "from edge_server.plugins.cameras.sources.frame_encoding import encode_frame\n"
        "from edge_server.protocol.frame_messages import FrameHeader\n"
        "shot = open_source('pattern').read()\n"
        "print(len(encode_frame(shot, 'mono8', FrameHeader()).data))\n"
        "print(len(encode_frame(shot, 'rgb8', FrameHeader()).data))\n"
        "open_source('/etc/hostname')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["307200", "921600"]
    assert "pip install '.[vision]'" in done.stderr


def test_the_demo_shows_a_face_in_every_frame() -> None:
    source = open_source("demo")
    pictures = [pixels_of(source.read()) for _ in range(130)]
    weights = Path(__file__).parents[4] / "model_repository/face_detection_yunet/1/model.onnx"
    detector = cv2.FaceDetectorYN.create(str(weights), "", (384, 288), 0.6)
    for picture in pictures[::16]:
        _, faces = detector.detect(picture)
        assert faces is not None
        assert len(faces) == 1


def test_a_size_is_accepted_only_for_sources_without_one() -> None:
    with pytest.raises(SourceError, match="--size is for 'pattern' and cameras"):
        open_source("/nowhere/film.mp4", size=(10, 10))


@pytest.mark.parametrize("source", ["demo", "pattern", "rtsps://h/x", "http://h/x", "/nowhere/film.mp4"])
def test_a_transport_is_accepted_only_for_rtsp(source: str) -> None:
    with pytest.raises(SourceError, match="--transport=udp is for sources rtsp://"):
        open_source(source, transport="udp")


@pytest.mark.parametrize("source", ["demo", "rtsp://h/x", "http://h/x"])
def test_a_certificate_is_accepted_only_for_tls(source: str) -> None:
    with pytest.raises(SourceError, match="--ca is for sources rtsps:// and https://"):
        open_source(source, ca="camera.pem")


PICTURE = np.random.default_rng(5).integers(0, 256, (6, 10, 3), np.uint8)


def test_a_raw_frame_is_a_view_of_the_image() -> None:
    frame = encode_frame(SourcePicture(PICTURE), "bgr8", HEADER)
    assert (frame.header, frame.height, frame.width, frame.encoding, frame.step) == (HEADER, 6, 10, "bgr8", 30)
    assert np.shares_memory(np.frombuffer(frame.data, np.uint8), PICTURE)
    assert bytes(frame.data) == PICTURE.tobytes()
    assert encode_frame(SourcePicture(PICTURE), "", HEADER) == frame


def test_other_encodings_agree_with_opencv() -> None:
    rgb = encode_frame(SourcePicture(PICTURE), "rgb8", HEADER)
    assert bytes(rgb.data) == cv2.cvtColor(PICTURE, cv2.COLOR_BGR2RGB).tobytes()
    gray = encode_frame(SourcePicture(PICTURE), "mono8", HEADER)
    assert (gray.encoding, gray.step, gray.height, gray.width) == ("mono8", 10, 6, 10)
    expected = cv2.cvtColor(PICTURE, cv2.COLOR_BGR2GRAY)
    assert np.abs(np.frombuffer(gray.data, np.uint8).reshape(6, 10).astype(int) - expected).max() <= 1


def test_frames_are_encoded_to_decodable_files() -> None:
    png = encode_frame(SourcePicture(PICTURE), "png", HEADER)
    assert (png.format, png.encoding, png.height) == ("png", "", 0)
    assert np.array_equal(cv2.imdecode(np.frombuffer(png.data, np.uint8), cv2.IMREAD_COLOR), PICTURE)
    jpeg = encode_frame(SourcePicture(PICTURE), "jpeg", HEADER)
    assert jpeg.format == "jpeg"
    assert cv2.imdecode(np.frombuffer(jpeg.data, np.uint8), cv2.IMREAD_COLOR).shape == PICTURE.shape


def test_a_file_is_sent_unchanged_unless_another_encoding_is_requested() -> None:
    data = bytes(cv2.imencode(".png", PICTURE)[1])
    shot = SourcePicture(file=data, format="png", name="a.png")
    assert encode_frame(shot, "", HEADER).data is data
    assert encode_frame(shot, "png", HEADER).data is data
    assert bytes(encode_frame(shot, "bgr8", HEADER).data) == PICTURE.tobytes()
    with pytest.raises(SourceError, match=r"a\.png: OpenCV cannot decode it"):
        encode_frame(SourcePicture(file=b"nonsense", format="png", name="a.png"), "bgr8", HEADER)
    with pytest.raises(SourceError, match=r"a\.png: OpenCV cannot decode it"):
        encode_frame(SourcePicture(file=b"", format="png", name="a.png"), "bgr8", HEADER)


def test_frames_are_due_by_an_absolute_schedule() -> None:
    generator, pace, now, due = random.Random(11), FrameSchedule(30), 1000.0, []
    for _ in range(3000):
        now += pace.wait_s(now)
        due.append(now)
        now += generator.random() * 0.02
    assert pace.slips == 0
    assert max(abs(at - 1000 - number / 30) for number, at in enumerate(due)) < 1e-6


def test_a_late_source_does_not_catch_up_in_a_burst() -> None:
    pace, now = FrameSchedule(10), 0.0
    assert pace.wait_s(now) == 0
    now = 5.0
    assert pace.wait_s(now) == 0
    assert pace.slips == 1
    assert pace.wait_s(now) == pytest.approx(0.1)


def test_without_a_rate_every_frame_is_due_at_once() -> None:
    pace = FrameSchedule(0)
    assert [pace.wait_s(now) for now in (0.0, 0.0, 7.0)] == [0, 0, 0]
    assert pace.slips == 0
