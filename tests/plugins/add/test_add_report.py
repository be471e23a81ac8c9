"""`edge-server add`: what it says and what it writes. tests/e2e/test_add_command.py serves what it added."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_server.cli.main import main
from edge_server.errors import InvalidRequest, OutOfMemory
from edge_server.memory import available_memory
from edge_server.memory.available_memory import MemoryReading
from edge_server.plugins.add import command
from edge_server.plugins.trials import candidate_process_main
from tests.e2e.yolo_exports import SIDE, ULTRALYTICS, detect, export
from tests.kit.models import COFFEE, add_sub_model, finish
from tests.kit.server import COMMAND

cv2 = pytest.importorskip("cv2")

pytestmark = pytest.mark.usefixtures("folder")

TINY_LANGUAGE_MODEL = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"


def save(path: Path, model: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def test_a_file_that_may_hold_code_is_named_before_it_is_opened(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "net.pt2").write_bytes(b"x")
    (folder / "model_repository").mkdir()

    def add(*arguments: Any) -> None:
        assert "'model.pt2' may hold code" in capsys.readouterr().err
        raise InvalidRequest("not opened")

    monkeypatch.setattr(command.Addition, "add", add)
    assert main(["add", "net.pt2"]) != 0


def export_of_unknown_training(answers: dict[str, np.ndarray], scores: tuple[str, int]) -> onnx.ModelProto:
    """Return a detector without metadata that sees its boxes in smooth pictures from 0 to 1, and nothing in noise.

    `answers` are its outputs. `scores` are the output with the scores, and its first row of them.
    """
    constants: dict[str, Any] = {
        "eight": np.float32(8), "one": np.float32(1),
        "zero": np.float32(0), "start": np.array([1], np.int64), "end": np.array([SIDE], np.int64),
        "from": np.array([0], np.int64), "to": np.array([SIDE - 1], np.int64), "axis": np.array([3], np.int64),
    }  # fmt: skip
    make = helper.make_node
    nodes = [
        make("Slice", ["images", "start", "end", "axis"], ["right"]),
        make("Slice", ["images", "from", "to", "axis"], ["left"]),
        make("Sub", ["right", "left"], ["step"]),
        make("Abs", ["step"], ["size"]),
        make("ReduceMean", ["size"], ["mean"], axes=[1, 2, 3], keepdims=0),
        make("Mul", ["mean", "eight"], ["roughness"]),
        make("Sub", ["one", "roughness"], ["open"]),
        make("Clip", ["open", "zero", "one"], ["smoothness"]),
    ]
    for name, answer in answers.items():
        values = answer[None].astype(np.float32)
        is_score = np.zeros_like(values)
        if name == scores[0]:
            is_score[:, scores[1] :] = 1
        constants |= {f"{name}_answer": values, f"{name}_is_score": is_score, f"{name}_is_box": 1 - is_score}
        nodes += [
            make("Mul", [f"{name}_is_score", "smoothness"], [f"{name}_scaled"]),
            make("Add", [f"{name}_scaled", f"{name}_is_box"], [f"{name}_factor"]),
            make("Mul", [f"{name}_answer", f"{name}_factor"], [name]),
        ]
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, *one.shape)) for name, one in answers.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return finish(graph)


@pytest.mark.full
def test_the_report_of_a_forest_names_the_most_rows_and_both_libraries(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    pytest.importorskip("treelite")
    rows = np.arange(200.0).reshape(100, 2)
    data = lightgbm.Dataset(rows, rows[:, 0] > 100)
    lightgbm.train({"objective": "binary", "verbose": -1}, data, 2).save_model("sizes.txt")
    assert main(["add", "sizes.txt", "--model-repository=models"]) == 0
    said = capsys.readouterr().out
    assert "rows    up to 8192 in a request\n" in said
    assert re.search(r"^forest \(onnxruntime \S+\) +CPU", said, re.MULTILINE)
    assert "max_batch_size" not in (folder / "models/sizes/config.pbtxt").read_text()


@pytest.mark.usefixtures("tried_here")
def test_a_layout_that_alone_sees_something_is_chosen_and_the_doubts_are_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "bare.onnx", export_of_unknown_training({"output0": detect()}, ("output0", 4)))
    assert main(["add", "bare.onnx"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"kind    yolov8 detect, 3 classes; rgb, pixels / 255\nchosen  the file does not say it", said), (
        said
    )
    assert "but yolov8 alone sees something in the picture, in 4 combinations of scale and colour order" in " ".join(
        said.split()
    )
    assert re.search(r"picture 0 0\.[67]\d at .*\nnoise   0 detections", said)
    config = (folder / "model_repository/bare/config.pbtxt").read_text()
    assert '\nparameters { key: "image_scale" value { string_value: "1/255" } }' in config
    assert "# Not proven: the class names are unknown." in config
    assert "# Not chosen:" in config
    assert "bgr, pixels / 255: it sees 0 0." in config


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize(
    ("unit", "layout"), [(1.0, "boxes-and-scores-pixels"), (SIDE, "boxes-and-scores"), (0.0, "")], ids=str
)
def test_boxes_and_scores_of_other_names_are_a_detector_if_the_boxes_are_plausible(
    folder: Path, capsys: pytest.CaptureFixture[str], unit: float, layout: str
) -> None:
    rows = np.asarray(detect()).T
    centre, half = rows[:, :2], rows[:, 2:4] / 2
    boxes = np.concatenate((centre - half, centre + half), axis=1)
    # Without a unit: offsets from priors, which the network does not have.
    boxes = boxes / unit if unit else np.random.default_rng(5).normal(size=boxes.shape)
    answers = {"374": rows[:, 4:], "373": boxes}
    save(folder / "bare.onnx", export_of_unknown_training(answers, ("374", 0)))
    assert main(["add", "bare.onnx"]) == 0
    said = capsys.readouterr().out
    config = (folder / "model_repository/bare/config.pbtxt").read_text()
    if not layout:
        assert "Not decided" in said
        assert '\nparameters { key: "detection_head"' not in config
        return
    assert f"kind    {layout} detect, 3 classes; rgb, pixels / 255\nchosen  the file does not say it" in said, said
    assert re.search(r"picture 0 0\.[67]\d at .*\nnoise   0 detections", said)
    assert '\nparameters { key: "detection_outputs" value { string_value: "373,374" } }' in config
    assert ('\nparameters { key: "detection_box_unit" value { string_value: "pixels" } }' in config) == (unit == 1)


@pytest.mark.usefixtures("tried_here")
def test_what_is_not_decided_is_written_as_comments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder / "bare.onnx", export(detect(), {}))  # It sees its boxes in noise, too.
    assert main(["add", "bare.onnx"]) == 0
    said = capsys.readouterr().out
    assert "kind    not certain" in said
    assert "Not decided: config.pbtxt has them as comments" in said
    assert "\nDecide what it is, then ask it:\n  curl --data-binary @picture.jpg http://127.0.0.1:8000/edge/" in said
    assert "delete the folder 'model_repository/bare', then add the model again with --picture=FILE" in " ".join(
        said.split()
    )
    config = (folder / "model_repository/bare/config.pbtxt").read_text()
    assert '\n# parameters { key: "detection_head" value { string_value: "yolov8" } }' in config
    assert '# output { name: "output0" label_filename: "labels.txt" }' in config
    stated = [line for line in config.splitlines() if line.startswith("parameters")]
    assert stated == ['parameters { key: "preprocessing" value { string_value: "undecided" } }']
    assert main(["add", "bare.onnx", f"--picture={COFFEE}", "--name=tried"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Your picture did not decide: none of them sees more in it than in noise. Another picture of" in said


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize(
    ("scores", "layout", "seen"),
    [([4.0, -2.0, 1.0], "class-logits", "0 0.95"), ([0.75, 0.0, 0.25], "classes", "0 0.75")],
)
def test_a_classifier_is_offered_with_the_activation_that_its_scores_need(
    folder: Path, capsys: pytest.CaptureFixture[str], scores: list[float], layout: str, seen: str
) -> None:
    save(folder / "bare.onnx", export(np.array(scores), {}))
    assert main(["add", "bare.onnx"]) == 0
    assert f"picture {seen}; " in capsys.readouterr().out
    config = (folder / "model_repository/bare/config.pbtxt").read_text()
    assert f"1. {layout} classify, 3 classes" in config
    assert ("class-logits" in config, "classes classify" in config) == (layout == "class-logits", layout == "classes")
    assert main(["add", "bare.onnx", f"--picture={COFFEE}", "--name=tried"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"Your picture did not decide: class 0 is the best class of numbers? 1.* Of those that are right, take the ",
        said,
    ), said
    assert ("again with --picture" in said, "label_filename" in said.partition("Not decided")[2]) == (False, False)
    assert ("torchvision's weights" in " ".join(config.replace("#", "").split())) == (layout == "class-logits")


def brightness() -> onnx.ModelProto:
    """A classifier of brightness, trained on pixels / 255: dark, middle, bright."""
    weights = np.array([[-20, 0, 20]] * 3, np.float32) / 3
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "W", "b"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 3])],
        [numpy_helper.from_array(weights, "W"),
         numpy_helper.from_array(np.array([6.6, 0, -13.2], np.float32), "b")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.usefixtures("tried_here")
def test_a_classifier_of_ones_own_finds_its_scale_by_words_and_its_number(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "net.onnx", brightness())
    (folder / "names.txt").write_text("dark\nmiddle\nbright\n")
    cv2.imwrite("gray.png", np.full((64, 64, 3), 128, np.uint8))
    arguments = ["add", "net.onnx", "names.txt", "--picture=gray.png"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    found = dict(re.findall(r"^(\d) +logits classify, 3 classes; rgb, (.*)\n(?:.*\n)*?picture", said, re.MULTILINE))
    assert set(found.values()) == {"pixels / 255", "pixels 0 to 255", "ImageNet's mean", "-1 to 1"}
    (number,) = (number for number, words in found.items() if words == "pixels / 255")
    text = " ".join(said.split())
    assert f"'middle' is the best class of number {number}" in text
    assert "delete the folder 'model_repository/net', and add the model again with --choose=NUMBER" in text

    check = subprocess.run([COMMAND, "check", "model_repository"], capture_output=True, text=True, check=False)
    assert "NOTE net version 1: its preprocessing is not decided: config.pbtxt has the candidates" in check.stderr
    config = folder / "model_repository/net/config.pbtxt"
    config.write_text(
        config.read_text().replace('# parameters { key: "class_output"', 'parameters { key: "class_output"', 1)
    )
    check = subprocess.run([COMMAND, "check", "model_repository"], capture_output=True, text=True, check=False)
    assert "not decided" not in check.stderr

    shutil.rmtree("model_repository/net")
    assert main([*arguments, f"--choose={number}"]) == 0
    chosen = config.read_text()
    assert '\nparameters { key: "image_scale" value { string_value: "1/255" } }' in chosen
    assert '\nparameters { key: "image_mean"' not in chosen
    assert "undecided" not in chosen
    assert main([*arguments, "--name=other", "--choose=17"]) == 2
    assert "--choose=17: expected a number of the report, 1 to " in capsys.readouterr().err
    assert not Path("model_repository/other").exists()


@pytest.mark.usefixtures("tried_here")
def test_class_names_come_from_a_file_beside_the_model_or_named_behind_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "own/net.onnx", export(np.array([0.75, 0.0, 0.25]), {}))
    line = '# output { name: "output0" label_filename: "labels.txt" }'
    (folder / "own/classes.txt").write_text("cat\ndog\n")
    (folder / "own/notes.txt").write_text("three\nother\nlines\n")
    assert main(["add", "own", "--name=unnamed"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "note 'classes.txt' has 2 lines, expected 3, one for each class: not used" in said
    assert "The classes have no names: put a labels.txt with a line for each class beside config.pbtxt" in said
    assert line in (folder / "model_repository/unnamed/config.pbtxt").read_text()
    assert not (folder / "model_repository/unnamed/labels.txt").exists()
    (folder / "own/labels.txt").write_bytes("\ufeffcat\r\ndög\r\ncow".encode())
    for name, given, first in (("beside", ["own/net.onnx"], "cat"), ("behind", ["own", "own/notes.txt"], "three")):
        assert main(["add", *given, f"--name={name}"]) == 0
        said = capsys.readouterr().out
        assert (f"picture {first} 0.75; " in said, "have no names" in said) == (True, False), said
        assert line in (folder / f"model_repository/{name}/config.pbtxt").read_text()
        assert (folder / f"model_repository/{name}/labels.txt").read_text().startswith(f"{first}\n")
    assert main(["add", "own", "own/classes.txt", "--name=wrong"]) == 2
    assert "'classes.txt' has 2 lines, expected 3, one for each class" in capsys.readouterr().err


@pytest.mark.usefixtures("tried_here")
def test_a_named_file_replaces_the_class_names_of_the_metadata(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "net.onnx", export(detect(), ULTRALYTICS))
    (folder / "labels.txt").write_text("ein\nzwei\ndrei\n")
    assert main(["add", "net.onnx"]) == 0
    assert "zwei" not in capsys.readouterr().out, "a file that only lies beside it does not"
    assert main(["add", "net.onnx", "labels.txt", "--name=german"]) == 0
    assert "picture ein 0.90 at" in capsys.readouterr().out
    config = (folder / "model_repository/german/config.pbtxt").read_text()
    assert '\noutput { name: "output0" label_filename: "labels.txt" }' in config


@pytest.mark.full
def test_without_opencv_a_model_is_added_and_not_tried_with_a_picture(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    save(folder / "yolo11n.onnx", export(detect(), ULTRALYTICS))
    assert main(["add", "yolo11n.onnx"]) == 0
    said = capsys.readouterr().out
    assert "note    images need OpenCV" in said
    assert "kind    yolo detect, 3 classes" in said
    assert "picture" not in said.partition("Serve it")[0]


@pytest.mark.full
def test_a_layout_that_the_trial_disproves_is_not_configured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = detect()
    answer[4:] *= 3  # A server refuses scores above 1.
    save(folder / "wrong.onnx", export(answer, ULTRALYTICS))
    assert main(["add", "wrong.onnx"]) == 0
    assert "problem scores up to 2.7, expected at most 1" in capsys.readouterr().out
    config = (folder / "model_repository/wrong/config.pbtxt").read_text()
    assert '\n# parameters { key: "detection_head" value { string_value: "yolov8" } }' in config


@pytest.mark.full
def test_without_options_the_repository_is_made_in_the_current_folder(folder: Path) -> None:
    save(folder / "sums.onnx", add_sub_model())
    assert main(["add", "sums.onnx"]) == 0
    assert (folder / "model_repository/sums/1/model.onnx").is_file()


def test_a_file_that_no_runtime_opens_leaves_nothing_behind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "page.onnx").write_text("<!doctype html>")
    (folder / "cut.onnx").write_bytes(b"\x08\x07\x12\x00")
    for name, message in (("page.onnx", "'page.onnx' is an HTML page"), ("cut.onnx", "'cut.onnx': onnxruntime cannot")):
        assert main(["add", name, "--model-repository=models"]) == 2
        said = capsys.readouterr().err
        assert (message in said, ".add-" in said) == (True, False), said
    assert list((folder / "models").iterdir()) == []


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the extra llm-gguf")
def test_a_language_model_is_opened_before_it_is_added(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(TINY_LANGUAGE_MODEL, folder / "tiny.gguf")
    # The header is whole, so that only the runtime finds that a value is missing.
    damaged = TINY_LANGUAGE_MODEL.read_bytes().replace(b"layer_norm_rms_epsilon", b"layer_norm_rms_epsilxx")
    (folder / "damaged.gguf").write_bytes(damaged)
    assert main(["add", "damaged.gguf", "--model-repository=models"]) == 2
    assert "'damaged.gguf': llama_cpp cannot load it" in capsys.readouterr().err
    assert list((folder / "models").iterdir()) == []
    assert main(["add", "tiny.gguf", "--model-repository=models"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^tiny.gguf: \d+\.\d kB, opened by llama_cpp\nkind    a language model\n", said), said
    assert re.search(r"^llama_cpp .+ +CPU .* \d+ +-$", said, re.MULTILINE), said


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("openvino_genai") is None, reason="needs the extra llm")
def test_a_language_model_beyond_the_memory_of_the_machine_is_not_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "models/tiny/1").mkdir(parents=True)
    shutil.copy(TINY_LANGUAGE_MODEL, folder / "models/tiny/1/model.gguf")
    job = {
        "root": str(folder / "models"), "model": "tiny", "version": 1, "allows_external_links": False, "gpu_count": 0,
        "config_json": "{}", "settings": {},
    }  # fmt: skip
    monkeypatch.setattr(available_memory, "read_memory", lambda root: MemoryReading(5 << 20, 0.0))
    with pytest.raises(OutOfMemory, match="memory is short: 5 MiB are available, the model needs about"):
        candidate_process_main.open_once(job)


@pytest.mark.usefixtures("tried_here")
def test_a_robots_policy_is_named_with_what_its_user_has_to_fill_in(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = helper.make_node
    rows, repeats = np.array([1], np.int64), np.array([1, 50, 1], np.int64)
    graph = helper.make_graph(
        [make("Unsqueeze", ["observation.state", "rows"], ["row"]), make("Tile", ["row", "repeats"], ["action"])],
        "policy",
        [helper.make_tensor_value_info("observation.state", TensorProto.FLOAT, ["N", 7])],
        [helper.make_tensor_value_info("action", TensorProto.FLOAT, ["N", 50, 7])],
        [numpy_helper.from_array(rows, "rows"), numpy_helper.from_array(repeats, "repeats")],
    )
    save(folder / "arm.onnx", helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    (folder / "model_repository").mkdir()
    assert main(["add", "arm.onnx"]) == 0
    said = capsys.readouterr().out
    assert "kind    recognised by its inputs and outputs: robot policy, 50 actions of 7" in said
    assert said.splitlines()[-1].startswith("for a robot, by --policy-openpi")
    written = (folder / "model_repository/arm/config.pbtxt").read_text("utf-8")
    assert 'parameters { key: "policy_action_key" value { string_value: "action" } }' in written.splitlines()
    assert '# parameters { key: "policy_dt_ms" value { string_value: "" } }' in written.splitlines()
