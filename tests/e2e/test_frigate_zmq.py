"""Frigate's detector of type zmq against the installed server, with the messages of Frigate's own plug-in."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from edge_server.client import Frame, FrameHeader, FrameStream
from tests.e2e.conftest import COMMAND

pytestmark = pytest.mark.full

zmq = pytest.importorskip("zmq", reason="needs pyzmq, of the extra frigate")

ROOT = Path(__file__).parents[2]
FACES, CROWD = "face_detection_yunet", "crowd"
SIDE = 64

CROWD_MODEL = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.1)
        corners = np.arange(30, dtype=np.float32)
        boxes = np.stack([corners, corners, corners + 10, corners + 20], axis=1) / 64
        scores = np.linspace(0.9, 0.32, 30, dtype=np.float32)[:, None] * [[0, 1]]
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("boxes", boxes), pb_utils.Tensor("scores", scores.astype(np.float32))]
            )
            for _ in requests
        ]
"""
"""30 boxes of class 1 whatever the frame shows, after a tenth of a second."""

CROWD_CONFIG = f"""
backend: "python"
input {{ name: "image" data_type: TYPE_UINT8 dims: [{SIDE}, {SIDE}, 3] }}
output {{ name: "boxes" data_type: TYPE_FP32 dims: [30, 4] }}
output {{ name: "scores" data_type: TYPE_FP32 dims: [30, 2] }}
parameters {{ key: "image_fit" value {{ string_value: "stretch" }} }}
parameters {{ key: "detection_head" value {{ string_value: "ssd" }} }}
parameters {{ key: "detection_box_format" value {{ string_value: "xyxy" }} }}
parameters {{ key: "detection_iou_threshold" value {{ string_value: "1" }} }}
"""


@pytest.fixture(scope="module")
def server(serve: Any, module_repository: Any, bundled_repository: Path) -> Iterator[Any]:
    models = module_repository.path
    shutil.copytree(bundled_repository / FACES, models / FACES)
    with (models / FACES / "config.pbtxt").open("a") as file:
        file.write('parameters { key: "deepstack" value { string_value: "true" } }\n')
    (models / CROWD / "1").mkdir(parents=True)
    (models / CROWD / "1/model.py").write_text(CROWD_MODEL)
    (models / CROWD / "config.pbtxt").write_text(CROWD_CONFIG)
    with tempfile.TemporaryDirectory() as folder:  # the name of a socket may not be long
        address = f"ipc://{folder}/zmq_detector"
        with serve(models, f"--frigate-zmq={address}") as server:
            server.frigate = address
            yield server


@pytest.fixture
def connect(server: Any) -> Iterator[Callable[[], Any]]:
    """`connect()`: a socket as Frigate's plug-in opens it, but with a longer time limit."""
    context, sockets = zmq.Context(), []

    def make() -> Any:
        socket = context.socket(zmq.REQ)
        sockets.append(socket)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(server.frigate)
        return socket

    yield make
    for socket in sockets:
        socket.close()
    context.term()


def ask(socket: Any, *message: bytes) -> list[bytes]:
    socket.send_multipart(message)
    return socket.recv_multipart()  # type: ignore[no-any-return]


def ask_for_model(socket: Any, file: str) -> dict[str, bool]:
    (answer,) = ask(socket, json.dumps({"model_request": True, "model_name": file}).encode())
    return json.loads(answer)  # type: ignore[no-any-return]


def frame_message(frame: np.ndarray) -> list[bytes]:
    header = {"shape": list(frame.shape), "dtype": frame.dtype.name, "model_type": "ssd"}
    return [json.dumps(header).encode(), frame.tobytes()]


def rows_of(answer: list[bytes]) -> np.ndarray:
    header, data = answer
    assert json.loads(header) == {"shape": [20, 6], "dtype": "float32"}
    return np.frombuffer(data, np.float32).reshape(20, 6)


@pytest.fixture(scope="module")
def portrait() -> np.ndarray:
    """As Frigate sends it: [1, height, width, 3] in RGB."""
    picture = cv2.resize(cv2.imread(str(ROOT / "edge_server/plugins/vision/demo.jpg")), (320, 320))
    return np.ascontiguousarray(picture[None, ..., ::-1])


BLACK = np.zeros((1, SIDE, SIDE, 3), np.uint8)


@pytest.mark.parametrize("file", [f"{FACES}.onnx", "whatever-320.tflite"])
def test_frigate_gets_the_boxes_of_a_frame_stream(
    server: Any, connect: Callable[[], Any], portrait: np.ndarray, file: str
) -> None:
    socket = connect()
    assert ask_for_model(socket, file) == {"model_available": True, "model_loaded": True}
    rows = rows_of(ask(socket, *frame_message(portrait)))
    frame = Frame(FrameHeader(), encoding="rgb8", data=portrait.tobytes(), width=320, height=320, step=960)
    with FrameStream(server.grpc, FACES) as stream:
        (result,) = stream.results([frame])
    (face,) = result.detections
    sides = np.array([face.y_min, face.x_min, face.y_max, face.x_max]) / 320
    np.testing.assert_allclose(rows[0], [face.class_index, face.score, *sides], rtol=1e-5)
    assert not rows[1:].any()


def test_frigate_gets_the_best_twenty_of_the_model_that_its_file_names(connect: Callable[[], Any]) -> None:
    socket = connect()
    ask_for_model(socket, f"{CROWD}.onnx")
    rows = rows_of(ask(socket, *frame_message(BLACK)))
    np.testing.assert_allclose(rows[:, 1], np.linspace(0.9, 0.32, 30)[:20], rtol=1e-6)
    np.testing.assert_allclose(rows[5], [1, 0.8, 5 / SIDE, 5 / SIDE, 25 / SIDE, 15 / SIDE], rtol=1e-6)


def test_a_client_without_a_model_gets_the_recorder_model(connect: Callable[[], Any], portrait: np.ndarray) -> None:
    assert rows_of(ask(connect(), *frame_message(portrait)))[0, 1] > 0.9


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (frame_message(BLACK.astype(np.float32)), "expected frames of type uint8 and shape [1, height, width, 3]"),
        (frame_message(BLACK.transpose(0, 3, 1, 2)), "given uint8 [1, 3, 64, 64]"),
        ([b'{"shape": [1, 64, 64, 3], "dtype": "uint8"}', b"x"], "expected 12288 bytes"),
        ([b'{"shape": [1, 64, 64, 3], "dtype": "uint8"}'], "expected 12288 bytes"),
        ([b'{"shape": [1, -64, -64, 3], "dtype": "uint8"}', bytes(12288)], "given uint8 [1, -64, -64, 3]"),
        ([b'{"shape": [1, 99999999999, 99999999999, 3], "dtype": "uint8"}', b""], "given 0"),
        ([b'{"shape": "many"}', b""], "given None many"),
        ([b"[" * 4096, b""], "expected a JSON object of at most 4,096 bytes"),
        ([b"7"], "expected a JSON object of at most 4,096 bytes"),
        ([b"{}", b"", b""], "expected a JSON object of at most 4,096 bytes"),
    ],
)
def test_an_invalid_frame_gets_the_reason_and_the_next_frame_its_rows(
    connect: Callable[[], Any], portrait: np.ndarray, message: list[bytes], words: str
) -> None:
    socket = connect()
    (answer,) = ask(socket, *message)
    assert words in json.loads(answer)["error"]
    assert rows_of(ask(socket, *frame_message(portrait)))[0, 1] > 0.9


def test_a_model_that_frigate_sends_is_refused(server: Any, connect: Callable[[], Any]) -> None:
    (answer,) = ask(connect(), b'{"model_data": true, "model_name": "x.onnx"}', bytes(1000))
    assert json.loads(answer) == {"model_saved": False, "model_loaded": False}
    assert server.get("/v2/models/x")[0] != 200


def test_frames_beyond_the_limit_are_refused_at_once_and_all_others_answered(connect: Callable[[], Any]) -> None:
    sockets = [connect() for _ in range(24)]
    for socket in sockets:
        ask_for_model(socket, f"{CROWD}.onnx")
    for socket in sockets:
        socket.send_multipart(frame_message(BLACK))
    answers = [socket.recv_multipart() for socket in sockets]
    refused = [answer for answer in answers if len(answer) == 1]
    assert refused
    assert all("16 frames of Frigate are running" in json.loads(answer)["error"] for (answer,) in refused)
    assert all(rows_of(answer)[19].any() for answer in answers if len(answer) == 2)


def test_a_client_that_disconnects_does_not_disturb_others(connect: Callable[[], Any], portrait: np.ndarray) -> None:
    for _ in range(5):
        socket = connect()
        ask_for_model(socket, f"{CROWD}.onnx")
        socket.send_multipart(frame_message(BLACK))
        socket.close()
    assert rows_of(ask(connect(), *frame_message(portrait)))[0, 1] > 0.9


def test_a_message_part_above_the_limit_ends_only_its_connection(
    connect: Callable[[], Any], portrait: np.ndarray
) -> None:
    hostile = connect()
    hostile.setsockopt(zmq.RCVTIMEO, 1000)
    hostile.send_multipart([b'{"model_data": true}', bytes((16 << 20) + 1)])
    assert rows_of(ask(connect(), *frame_message(portrait)))[0, 1] > 0.9
    with pytest.raises(zmq.Again):
        hostile.recv_multipart()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--frigate-zmq=tcp://nowhere"], "expected ipc:///PATH or tcp://HOST:PORT"),
        (["--frigate-zmq=ipc:///nowhere/at/all"], "cannot listen: No such file"),
        (
            ["--frigate-zmq=tcp://127.0.0.1:0", "--http-restricted-api=inference:key=value"],
            "inference needs a key here",
        ),
    ],
)
def test_an_address_that_cannot_be_served_ends_the_start_with_the_reason(
    tmp_path: Path, options: list[str], message: str
) -> None:
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    done = subprocess.run(
        [str(COMMAND), "serve", f"--model-repository={tmp_path}", *ports, *options],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert message in done.stderr
