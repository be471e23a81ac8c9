"""Text in pictures and frames: a detector whose configuration names a recogniser, without code of the user's.

The detector finds the same two lines in every picture. The recogniser reads "a" where a line is dark, "b" where it is
bright, and nothing where it is gray, so a text shows which pixels it got, and in which order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_server.cli.main import main
from edge_server.client import FrameStream, Returns
from tests.kit.eventually import eventually
from tests.kit.model_folder import parameters
from tests.kit.models import Repository, finish
from tests.kit.server import serve_here

cv2 = pytest.importorskip("cv2")

SIDE = 128
DETECTOR = parameters(image_fit="stretch", detection_head="dbnet", detection_text_model="%s")


def detector() -> onnx.ModelProto:
    """A map with the core of a line from left to right, and of one from top to bottom."""
    found = np.zeros((1, 1, SIDE, SIDE), np.float32)
    found[0, 0, 20:30, 20:80] = found[0, 0, 30:110, 100:108] = 0.9
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1, 2, 3], keepdims=1),
        helper.make_node("Mul", ["mean", "zero"], ["zeros"]),
        helper.make_node("Add", ["zeros", "map"], ["found"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])
    output = helper.make_tensor_value_info("found", TensorProto.FLOAT, ["n", 1, SIDE, SIDE])
    constants = [numpy_helper.from_array(np.float32(0), "zero"), numpy_helper.from_array(found, "map")]
    return finish(helper.make_graph(nodes, "detector", [given], [output], constants))


def recogniser(characters: str = "a\nb") -> onnx.ModelProto:
    """Scores of blank, a, b and space in each 16 columns, by their brightness."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["rows"], axes=[1, 2], keepdims=1),
        helper.make_node("AveragePool", ["rows"], ["steps"], kernel_shape=[1, 16], strides=[1, 16]),
        helper.make_node("Reshape", ["steps", "shape"], ["values"]),
        helper.make_node("Sub", ["values", "levels"], ["differences"]),
        helper.make_node("Abs", ["differences"], ["distances"]),
        helper.make_node("Sub", ["one", "distances"], ["scores"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 48, "width"])
    output = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", "steps", 4])
    constants = [
        numpy_helper.from_array(np.array([0, -1, 1], np.int64), "shape"),
        numpy_helper.from_array(np.array([0, -1, 1, 9], np.float32), "levels"),
        numpy_helper.from_array(np.float32(1), "one"),
    ]
    model = finish(helper.make_graph(nodes, "recogniser", [given], [output], constants))
    helper.set_model_props(model, {"character": characters})
    return model


@pytest.fixture(scope="module")
def server(module_repository: Repository) -> Iterator[Any]:
    add = module_repository.add
    add("lines", DETECTOR % "reader", model=detector())
    add("reader", model=recogniser())
    add("reads_with_nothing", DETECTOR % "absent", model=detector())
    add("reads_with_itself", DETECTOR % "reads_with_itself", model=detector())
    add("other_characters", model=recogniser("a\nb\nc"))
    with serve_here(module_repository.path) as server:
        yield server


def text_rows(server: Any) -> list[str]:
    plugins = {plugin["name"]: plugin["rows"] for plugin in server.ask("/edge/v1/plugins")[1]["plugins"]}
    return [f"{row['state']} {row['text']}" for row in plugins["vision"]]


@pytest.fixture(scope="module")
def picture() -> bytes:
    pixels = np.full((2 * SIDE, 2 * SIDE, 3), 128, np.uint8)
    pixels[10:90, :80], pixels[10:90, 120:180] = 0, 255
    pixels[:110, 182:], pixels[170:, 182:] = 255, 0
    return bytes(cv2.imencode(".png", pixels)[1])


def perceive(server: Any, model: str, picture: bytes) -> tuple[int, Any]:
    status, body = server.request("POST", f"/edge/v1/models/{model}/perception", picture)
    return status, json.loads(body)


def test_lines_are_read_along_their_direction(server: Any, picture: bytes) -> None:
    status, answer = perceive(server, "lines", picture)
    assert status == 200, answer
    across, down = sorted(answer["detections"], key=lambda found: found["x_min"])
    assert (across["text"], down["text"]) == ("ab", "ba")
    assert 0.8 < across["text_score"] <= 1
    assert across["rotated"]["angle"] == pytest.approx(0, abs=0.01)


def test_frames_of_a_stream_are_read(server: Any, picture: bytes) -> None:
    with FrameStream(server.grpc, "lines") as stream:
        results = list(stream.results([picture] * 2))
    assert [sorted(found.text for found in result.detections) for result in results] == [["ab", "ba"]] * len(results)
    with FrameStream(server.grpc, "lines", returns=Returns(tensors=("*",))) as stream:
        (result,) = stream.results([picture])
    assert (result.error, result.detections) == ("", ())


def test_gray_lines_have_no_text(server: Any) -> None:
    gray = bytes(cv2.imencode(".png", np.full((SIDE, SIDE), 128, np.uint8))[1])
    assert ["text" in found for found in perceive(server, "lines", gray)[1]["detections"]] == [False, False]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("reads_with_nothing", "absent"),
        ("reads_with_itself", "model 'reads_with_itself' cannot read text: expected an input FP32 [3, height, -1]"),
    ],
)
def test_a_model_that_reads_no_text_is_named(server: Any, picture: bytes, model: str, message: str) -> None:
    status, answer = perceive(server, model, picture)
    assert status in (400, 404)
    assert message in answer["error"]
    with FrameStream(server.grpc, model) as stream:
        (result,) = stream.results([picture])
    assert message in result.error


def test_a_missing_recogniser_is_named_without_a_picture_and_not_any_more_when_it_comes(
    server: Any, module_repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    missing = "its lines are not read: detection_text_model names model 'later', which is not loaded"
    unfit = (
        "its lines are not read: detection_text_model: model 'reads_with_itself' cannot read text: expected an input"
    )
    rows = text_rows(server)
    assert [row for row in rows if row.startswith(f"warning model 'reads_with_itself': {unfit}")], rows
    assert not any("'lines'" in row for row in rows)
    module_repository.add("waits", DETECTOR % "later", model=detector())
    assert eventually(lambda: f"warning model 'waits': {missing}" in text_rows(server))
    assert eventually(lambda: f"model 'waits': {missing}" in caplog.text)
    module_repository.add("later", model=recogniser())
    assert eventually(lambda: not any("'waits'" in row for row in text_rows(server)))
    assert eventually(lambda: "model 'waits': its lines are read now" in caplog.text)


def test_check_warns_of_a_missing_recogniser(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.add("lines", DETECTOR % "absent", model=detector())
    assert main(["check", str(repository.path)]) == 0
    expected = "lines version 1: its lines are not read: detection_text_model names model 'absent', which is not loaded"
    assert f"WARNING {expected}" in capsys.readouterr().err


def test_characters_that_fit_the_scores_are_recognised(server: Any) -> None:
    assert "recognised by its metadata: text of 3 characters" in server.notes("reader")
    assert not any("recognised" in note for note in server.notes("other_characters"))
