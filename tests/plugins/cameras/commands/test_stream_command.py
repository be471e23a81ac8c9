"""`edge-server stream` against a server in this process, with its statistics checked."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import grpc
import pytest

from edge_server.plugins.cameras.commands import stream_run
from tests.kit.certificates import self_signed
from tests.kit.models import BUNDLED, COFFEE
from tests.kit.server import serve_here
from tests.kit.site import Handler, Site

MODEL = "efficientnet_lite0"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve_here(BUNDLED) as server:
        yield server.grpc


@pytest.fixture
def stream(run_command: Run) -> Run:
    """`stream(address, *arguments)`: the command in this process. Its end as a process is tested further below."""

    def stream(address: str, *arguments: str, model: str = MODEL) -> subprocess.CompletedProcess[str]:
        return run_command("stream", f"--address={address}", f"--model={model}", *arguments)

    return stream


def lines_of(done: subprocess.CompletedProcess[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the lines before the summary, and the summary."""
    *lines, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert summary["kind"] == "summary"
    return lines, summary


@pytest.mark.full
def test_every_frame_of_a_video_is_answered_without_a_deadline(stream: Run, address: str, bikes: Path) -> None:
    done = stream(address, f"--source={bikes}", "--fps=0", "--json")
    assert done.returncode == 0, done.stderr
    lines, summary = lines_of(done)
    assert [line["seq"] for line in lines] == list(range(1, 251))
    assert {line["kind"] for line in lines} == {"result"}
    assert (summary["offered"], summary["answered"], summary["dropped"], summary["lost"]) == (250, 250, 0, 0)
    assert {(line["width"], line["height"]) for line in lines} == {(640, 272)}
    assert all(len(line["classes"]) == 5 for line in lines)
    best = [line["classes"][0]["label"] for line in lines]
    assert sum("bicycle" in label or "bike" in label or "cycle" in label for label in best) > 10
    assert "offered 250 = answered 250 + dropped 0 + lost 0" in done.stderr


def test_every_frame_above_the_models_throughput_is_answered_or_counted_as_dropped(stream: Run, address: str) -> None:
    done = stream(address, "--source=pattern", "--fps=300", "--frames=400", "--json", "--streams=2")
    assert done.returncode == 0, done.stderr
    lines, summary = lines_of(done)
    assert summary["offered"] == 800
    assert summary["offered"] == summary["answered"] + summary["dropped"]
    assert summary["lost"] == 0
    assert summary["dropped"] == summary["never_sent"] + sum(summary["dropped_by_server"].values()) > 0
    for name in ("camera-0", "camera-1"):
        mine = [line for line in lines if line["stream"] == name]
        answered = [line["seq"] for line in mine if line["kind"] == "result"]
        noticed = [line["seq"] for line in mine if line["kind"] == "dropped"]
        assert answered == sorted(answered)
        assert not set(answered) & set(noticed)
        assert len(answered) == summary["streams"][name]["answered"]
        assert len(noticed) <= sum(summary["streams"][name]["dropped_by_server"].values())
        # The newest is kept: the last frame of all is never dropped.
        assert answered[-1] == 400


@pytest.mark.parametrize("encoding", ["bgr8", "rgb8", "mono8", "jpeg", "png"])
def test_every_encoding_sends_the_same_frames(stream: Run, address: str, tmp_path: Path, encoding: str) -> None:
    (tmp_path / "coffee.jpg").write_bytes(COFFEE.read_bytes())
    done = stream(address, f"--source={tmp_path}", "--fps=0", "--json", f"--encoding={encoding}", "--top-k=3")
    lines, summary = lines_of(done)
    if encoding == "mono8":
        assert (done.returncode, len(lines)) == (0, 1), done.stderr
    else:
        assert lines[0]["classes"][0]["label"] == "espresso"
    assert len(lines[0]["classes"]) == 3
    assert summary["answered"] == 1


def test_a_folder_is_sent_file_by_file(stream: Run, address: str, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(COFFEE.read_bytes())
    (tmp_path / "3.png").write_bytes(b"no picture")
    done = stream(address, f"--source={tmp_path}", "--fps=0", "--json")
    lines, summary = lines_of(done)
    assert [line["seq"] for line in lines] == [1, 2, 3, 4]
    assert lines[3]["error"]["code"] == "INVALID_ARG"
    assert (done.returncode, summary["answered"], summary["failed"]) == (1, 4, 1)
    assert "1 frames were answered with errors, the last: INVALID_ARG" in done.stderr


@pytest.mark.full
def test_an_annotated_video_has_a_frame_for_every_result(
    stream: Run, address: str, bikes: Path, tmp_path: Path
) -> None:
    path = tmp_path / "annotated.mp4"
    done = stream(address, f"--source={bikes}", "--fps=100", "--json", f"--output={path}")
    assert done.returncode == 0, done.stderr
    lines, summary = lines_of(done)
    capture, pictures = cv2.VideoCapture(str(path)), 0
    while capture.read()[0]:
        pictures += 1
    size = (capture.get(cv2.CAP_PROP_FRAME_WIDTH), capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    capture.release()
    assert pictures == summary["answered"] == sum(line["kind"] == "result" for line in lines)
    assert summary["offered"] == 250
    assert size == (640, 272)
    again = stream(address, f"--source={bikes}", f"--output={path}")
    assert (again.returncode, "exists already, and nothing is overwritten" in again.stderr) == (2, True)


def test_annotated_images_of_several_cameras_are_written_to_separate_folders(
    stream: Run, address: str, tmp_path: Path
) -> None:
    done = stream(
        address, "--source=pattern", "--size=320x240", "--fps=0", "--frames=5", "--streams=2",
        f"--output={tmp_path / 'seen'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    for number in range(2):
        files = sorted((tmp_path / f"seen-{number}").iterdir())
        assert [path.name for path in files] == [f"{seq:08}.jpg" for seq in range(1, 6)]
        assert cv2.imread(str(files[0])).shape == (240, 320, 3)


def test_tensors_are_returned_on_request(stream: Run, address: str) -> None:
    done = stream(address, "--source=pattern", "--frames=1", "--fps=0", "--json", "--returns=tensors")
    lines, _ = lines_of(done)
    tensor = lines[0]["tensors"][0]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("probabilities", "FP32", [1, 1000])
    assert sum(tensor["data"]) == pytest.approx(1, abs=1e-3)
    assert "classes" not in lines[0]


def test_without_a_terminal_the_command_prints_regular_lines_and_a_summary(
    stream: Run, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_run, "_PLAIN_S", 0.4)
    done = stream(address, "--source=pattern", "--seconds=1", "--fps=20")
    assert done.returncode == 0, done.stdout
    plain = [line for line in done.stdout.splitlines() if re.match(r"\s*\d+\.\d s  camera  in ", line)]
    assert len(plain) >= 1
    assert "\x1b" not in done.stdout
    found = re.search(r"offered (\d+) = answered (\d+) \+ dropped (\d+) \+ lost (\d+)$", done.stdout, re.MULTILINE)
    assert found is not None
    offered, answered, dropped, lost = map(int, found.groups())
    assert (offered, lost) == (answered + dropped, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--source=/nowhere.mp4"], 2, "/nowhere.mp4: expected rtsp://, http://, a video file"),
        (["--source=demo", "--transport=udp"], 2, "--transport=udp is for sources rtsp://"),
        (["--source=https://127.0.0.1:1/x", "--ca=/nowhere.pem"], 2, "ca: /nowhere.pem: No such file"),
        (["--source=pattern", "--depth=100"], 1, "depth"),
        (["--source=pattern", "--returns=detections"], 1, "cannot answer with detections"),
        (["--source=pattern", "--returns=nonsense"], 2, "got 'nonsense'"),
        (["--source=pattern", "--fps=-1"], 2, "expected a number from 0 to 1000"),
        (["--source=pattern", "--output=/nowhere/at/all.mp4"], 2, "there is no folder /nowhere/at"),
        (["--source=pattern", "--tls-root=/nowhere.pem"], 2, "/nowhere.pem: cannot be read"),
    ],
)
def test_an_impossible_stream_is_reported_and_sets_the_exit_code(
    stream: Run, address: str, arguments: list[str], code: int, message: str
) -> None:
    done = stream(address, *arguments)
    assert (done.returncode, message in done.stderr + done.stdout) == (code, True), done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_an_unknown_model_or_an_absent_server_ends_the_command_at_once(stream: Run, address: str) -> None:
    unknown = stream(address, "--source=pattern", model="nonsense")
    assert (unknown.returncode, "NOT_FOUND" in unknown.stdout) == (1, True)
    near = stream(address, "--source=pattern", model=MODEL + "k")
    assert f"'{MODEL}k' is not found, did you mean '{MODEL}'?" in near.stdout
    nobody = stream("127.0.0.1:1", "--source=pattern")
    assert nobody.returncode == 1
    assert "no answer from 127.0.0.1:1: connection refused: nothing listens there" in nobody.stdout


@pytest.fixture(scope="module")
def other_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Ports where a client without TLS opens no stream: of gRPC with TLS, and of HTTP/1."""
    cert, key = self_signed(tmp_path_factory.mktemp("tls"))
    with_tls = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    tls_port = with_tls.add_secure_port("127.0.0.1:0", credentials)
    with_tls.start()
    with Site(Handler) as http:
        yield {"tls": tls_port, "http": http.server_port}
    with_tls.stop(None).wait()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tls", "the server closed the connection: does it use TLS (--tls)"),
        ("http", "what listens at this address does not speak gRPC"),
    ],
)
def test_a_port_where_no_stream_opens_is_reported_with_the_option_to_change(
    stream: Run, other_ports: dict[str, int], kind: str, message: str
) -> None:
    address = f"127.0.0.1:{other_ports[kind]}"
    done = stream(address, "--source=pattern")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"camera: no answer from {address}: {message}")
