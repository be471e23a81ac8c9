"""A text detector and its recogniser, added by one command: which file is which, where the characters come from, what
is refused, and what stands in the configurations.

The detector finds dark pixels and what is near them, the recogniser reads "a" in dark and "b" in bright lines. Real
weights: tests/e2e/test_text_in_images.py.
"""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_server.cli.main import main
from tests.kit.server import COMMAND

cv2 = pytest.importorskip("cv2")

pytestmark = pytest.mark.usefixtures("folder", "tried_here")


def save(path: Path, nodes: Sequence[onnx.NodeProto], shapes: Sequence[Sequence[object]], metadata: str = "") -> None:
    given, output = shapes
    constants = {
        "zero": np.float32(0), "one": np.float32(1), "shape": np.array([0, -1, 1], np.int64),
        "levels": np.resize(np.array([9, -1, 1, 9], np.float32), output[2] if isinstance(output[2], int) else 1),
    }  # fmt: skip
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, given)],
        [helper.make_tensor_value_info("fetch_name_0", TensorProto.FLOAT, output)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    if metadata:
        helper.set_model_props(model, {"character": metadata})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())


def save_detector(path: Path) -> None:
    make = helper.make_node
    nodes = [
        make("ReduceMean", ["x"], ["gray"], axes=[1], keepdims=1),
        make("Neg", ["gray"], ["dark"]),
        make("Clip", ["dark", "zero", "one"], ["ink"]),
        make("MaxPool", ["ink"], ["cells"], kernel_shape=[8, 8], strides=[8, 8]),
        make("MaxPool", ["cells"], ["fetch_name_0"], kernel_shape=[1, 15], pads=[0, 7, 0, 7]),
    ]
    save(path, nodes, (["n", 3, "h", "w"], ["n", 1, "rows", "columns"]))


def save_recogniser(
    path: Path, metadata: str = "a\nb", *, scores: int = 4, pool: str = "GlobalAveragePool", height: int | str = "h"
) -> None:
    """Save a recogniser with one step, or with one for each column if `pool` is Identity."""
    make = helper.make_node
    nodes = [
        make("ReduceMean", ["x"], ["rows"], axes=[1, 2], keepdims=1),
        make(pool, ["rows"], ["steps"]),
        make("Reshape", ["steps", "shape"], ["values"]),
        make("Sub", ["values", "levels"], ["differences"]),
        make("Abs", ["differences"], ["distances"]),
        make("Sub", ["one", "distances"], ["fetch_name_0"]),
    ]
    save(path, nodes, (["n", 3, height, "w"], ["n", "steps", scores]), metadata)


def add(*arguments: str) -> int:
    return main(["add", *arguments, "--model-repository=models"])


def config(name: str) -> str:
    return Path("models", name, "config.pbtxt").read_text()


def test_a_folder_with_both_becomes_two_models_of_which_one_names_the_other(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_detector(folder / "ocr/det.onnx")
    save_recogniser(folder / "ocr/rec.onnx")
    save(folder / "ocr/cls.onnx", [helper.make_node("GlobalAveragePool", ["x"], ["fetch_name_0"])],
         ([1, 3, 48, 192], [1, 3, 1, 1]))  # fmt: skip
    assert add("ocr", "--name=text") == 0
    said = capsys.readouterr().out
    assert "kind    dbnet text; bgr, scale 1/255, mean 0.5, stddev 0.5" in said
    assert "reader  detection_text_model of its config.pbtxt names text_recogniser" in said
    assert "note    'cls.onnx' is left out" in said
    assert "kind    recogniser of text, 3 characters" in said
    assert said.count("reads   'b'") == 3
    assert "wrote models/text\nwrote models/text_recogniser\n" in said
    assert '\nparameters { key: "detection_text_model" value { string_value: "text_recogniser" } }' in config("text")
    assert 'label_filename: "labels.txt"' in config("text_recogniser")
    assert Path("models/text_recogniser/labels.txt").read_text() == "a\nb\n \n"
    assert sorted(os.listdir("models")) == ["text", "text_recogniser"]


@pytest.mark.full
def test_characters_come_from_a_text_file_in_any_order(folder: Path) -> None:
    save_detector(folder / "det.onnx")
    save_recogniser(folder / "rec.onnx", "")
    (folder / "keys.txt").write_text("é\n\u3000\n")
    assert add("rec.onnx", "keys.txt", "det.onnx") == 0
    assert Path("models/rec/labels.txt").read_text() == "é\n\u3000\n \n"
    assert "'keys.txt'" in config("rec")
    assert '"detection_text_model" value { string_value: "rec" }' in config("det")


@pytest.mark.full
@pytest.mark.parametrize(("scores", "is_said"), [(97, True), (85, False)])
def test_a_recogniser_without_its_characters_says_what_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str], scores: int, is_said: bool
) -> None:
    save_recogniser(folder / "rec.onnx", "", scores=scores, pool="Identity")
    assert add("rec.onnx") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("Name one, a file that ends in .txt with 95 or 96 lines, behind the model" in said) == is_said


@pytest.mark.full
def test_a_recogniser_of_lines_of_a_fixed_height_is_offered_as_no_detector(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_recogniser(folder / "rec.onnx", "", scores=97, pool="Identity", height=48)
    assert add("rec.onnx") == 0
    said = capsys.readouterr().out
    assert "with 95 or 96 lines" in " ".join(said.split())
    assert "detect" not in said
    assert "detection_head" not in config("rec")


@pytest.mark.full
def test_characters_come_from_the_file_of_paddleocr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_detector(folder / "small_det/inference.onnx")
    save_recogniser(folder / "small_rec/inference.onnx", "")
    (folder / "small_rec/inference.yml").write_text(
        "PostProcess:\n  name: CTCLabelDecode\n  character_dict:\n  - x\n  - '-'\n"
    )
    assert add("small_det", "small_rec") == 0
    assert "small_rec/inference.onnx: " in capsys.readouterr().out
    assert Path("models/small_rec/labels.txt").read_text() == "x\n-\n \n"
    assert '"detection_text_model" value { string_value: "small_rec" }' in config("small_det")


@pytest.mark.full
def test_on_a_terminal_both_are_added_without_a_question(folder: Path) -> None:
    save_detector(folder / "ocr/det.onnx")
    save_recogniser(folder / "ocr/rec.onnx")
    terminal, end = pty.openpty()
    with subprocess.Popen([COMMAND, "add", "ocr"], stdin=end, stdout=end, stderr=end, cwd=folder) as process:
        os.close(end)
        said = b""
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error.
            while b"Which one is it?" not in said and (chunk := os.read(terminal, 4096)):
                said += chunk
        os.close(terminal)
    assert process.returncode == 0, said.decode()
    assert b"wrote model_repository/rec" in said


@pytest.mark.full
def test_a_detector_alone_names_the_only_recogniser_of_the_repository_as_a_comment(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_detector(folder / "det.onnx")
    save_recogniser(folder / "rec.onnx")
    assert add("rec.onnx", "--name=reader") == 0
    said = capsys.readouterr().out
    assert said.count("reads   'b'") == 3
    assert said.endswith('\n  parameters { key: "detection_text_model" value { string_value: "reader" } }\n')
    assert add("det.onnx", "--name=lines") == 0
    assert '\n# parameters { key: "detection_text_model" value { string_value: "reader" } }' in config("lines")
    said = capsys.readouterr().out
    assert "detection_text_model of its config.pbtxt may name reader" in " ".join(said.split())
    assert "To have reader read the lines, add to models/lines/config.pbtxt:" in said
    assert add("rec.onnx", "--name=another") == 0
    assert "Name it in models/lines/config.pbtxt:" in capsys.readouterr().out
    assert add("det.onnx", "--name=more") == 0
    assert '\n# parameters { key: "detection_text_model" value { string_value: "NAME" } }' in config("more")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("det.onnx", "det2.onnx"), "given 'det.onnx', a text detector; 'det2.onnx', a text detector"),
        (("det.onnx", "bare.onnx"), "'bare.onnx', which is neither or has no list of characters"),
        (("det.onnx", "bare.onnx", "long.txt"), "2 or 3 characters for 4 scores, given 9 in 'long.txt'"),
        (("det.onnx", "keys.txt"), "'keys.txt': expected a recogniser of text or a classifier, given 'det.onnx'"),
        pytest.param(("det.onnx", "rec.onnx", "--picture=blank.png"), "'det.onnx' finds no text in the picture",
                     marks=pytest.mark.full),
        (("det.onnx", "gone.onnx"), "'gone.onnx' does not exist"),
        (("bare.onnx", "bare.onnx"), "add: add them one by one: `edge-server add bare.onnx`, then `edge-server add "),
        (("a/net.onnx", "b/net.onnx"), "both models would be named 'net'"),
    ],
)  # fmt: skip
def test_what_makes_no_pair_is_refused_and_leaves_nothing_behind(
    folder: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, ...], message: str
) -> None:
    for name in ("det.onnx", "det2.onnx", "a/net.onnx"):
        save_detector(folder / name)
    save_recogniser(folder / "rec.onnx")
    save_recogniser(folder / "b/net.onnx")
    save_recogniser(folder / "bare.onnx", "")
    (folder / "long.txt").write_text("x\n" * 9)
    (folder / "keys.txt").write_text("x\ny\n")
    cv2.imwrite("blank.png", np.full((64, 64, 3), 255, np.uint8))
    assert add(*files) == 2
    assert message in capsys.readouterr().err
    assert not Path("models").exists() or os.listdir("models") == []
