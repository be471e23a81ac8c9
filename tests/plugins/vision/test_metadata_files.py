"""Detectors that are recognised by files beside them or by their outputs, with further inputs, served with known boxes.

YOLO exports: test_yolo_exports.py. Metadata alone: tests/plugins/vision/test_exporters.py.
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
from edge_server.client import FrameStream, StreamError
from edge_server.protocol.frame_messages import Returns
from tests.e2e.yolo_exports import FOUND, NAMES, SIDE, scores, spread, stretched
from tests.kit.models import Repository, finish
from tests.kit.server import serve_here
from tests.plugins.vision.test_exporters import PADDLE, of_hugging_face

LOGITS = np.log(scores() / (1 - scores()))
PIXELS = np.array([box for box, _, _ in FOUND]) * np.array([SIDE / 640, SIDE / 480] * 2)
ROWS = np.concatenate(([[label, score] for _, label, score in FOUND], PIXELS), axis=1)


def answer(outputs: dict[str, np.ndarray], constants: dict[str, list[float]] | None = None) -> onnx.ModelProto:
    """Return a network with these outputs for any picture, times 1 only if its other inputs have the `constants`."""
    initializers = [numpy_helper.from_array(np.float32(0), "zero"), numpy_helper.from_array(np.float32(1), "one")]
    nodes = [
        helper.make_node("ReduceMean", ["image"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["difference0"]),
    ]
    for index, (name, values) in enumerate((constants or {}).items()):
        initializers.append(numpy_helper.from_array(np.array([values], np.float32), f"{name}_expected"))
        nodes += [
            helper.make_node("Sub", [name, f"{name}_expected"], [f"{name}_minus"]),
            helper.make_node("ReduceL2", [f"{name}_minus"], [f"{name}_norm"], keepdims=0),
            helper.make_node("Add", [f"difference{index}", f"{name}_norm"], [f"difference{index + 1}"]),
        ]
    nodes.append(helper.make_node("Sub", ["one", f"difference{len(constants or {})}"], ["factor"]))
    for name, array in outputs.items():
        initializers.append(numpy_helper.from_array(np.ascontiguousarray(array[None], np.float32), f"{name}_values"))
        nodes.append(helper.make_node("Mul", [f"{name}_values", "factor"], [name]))
    real = TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("image", real, [1, 3, SIDE, SIDE])]
    inputs += [helper.make_tensor_value_info(name, real, [1, len(v)]) for name, v in (constants or {}).items()]
    made = [helper.make_tensor_value_info(name, real, [1, *array.shape]) for name, array in outputs.items()]
    return finish(helper.make_graph(nodes, "net", inputs, made, initializers))


def rows_of_a_batch(constants: dict[str, list[float]]) -> onnx.ModelProto:
    """A detector of PaddleDetection with NMS inside, of batches of any size, whose rows are all in one list."""
    model = answer({"rows_of_one": spread(ROWS, 300, 6)}, constants)
    # Only rows with a score, so that no runtime computes their number beforehand.
    model.graph.node.extend(
        [
            helper.make_node("Squeeze", ["rows_of_one", "first"], ["every"]),
            helper.make_node("Gather", ["every", "second"], ["scores"], axis=1),
            helper.make_node("Greater", ["scores", "nothing"], ["is_found"]),
            helper.make_node("NonZero", ["is_found"], ["places"]),
            helper.make_node("Squeeze", ["places", "first"], ["found"]),
            helper.make_node("Gather", ["every", "found"], ["rows"]),
        ]
    )
    added = {"first": np.array([0]), "second": np.array(1), "nothing": np.float32(0)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in added.items())
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["boxes", 6]))
    for item in model.graph.input:
        item.type.tensor_type.shape.dim[0].dim_param = "pictures"
    return model


@pytest.fixture(scope="module")
def server(module_repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    def add(name: str, model: onnx.ModelProto, files: dict[str, str] | None = None, config: str = "") -> None:
        module_repository.add(name, config, model=model)
        for file_name, text in (files or {}).items():
            (module_repository.path / name / file_name).write_text(text)

    processor = {"size": {"height": SIDE, "width": SIDE}}
    files = of_hugging_face({}, processor)
    detr = {
        "logits": spread(LOGITS, 300, 3) - 9 * (spread(LOGITS, 300, 3) == 0),
        "pred_boxes": spread(stretched(), 300, 4),
    }
    add("hugging_face", answer(detr), {f"1/{name}": text for name, text in files.items()})
    add("hugging_face_of_another", answer(detr), of_hugging_face({"id2label": {"0": "a"}}, processor))
    add("rf_detr", answer({"labels": detr["logits"], "dets": detr["pred_boxes"]}))
    paddle = PADDLE.replace("640", str(SIDE))
    constants = {"im_shape": [SIDE, SIDE], "scale_factor": [1.0, 1.0]}
    add("paddle", answer({"rows": spread(ROWS, 300, 6)}, constants), {"infer_cfg.yml": paddle})
    add("paddle_of_batches", rows_of_a_batch(constants), {"infer_cfg.yml": paddle})
    add("paddle_of_batches_without_file", rows_of_a_batch(constants))
    export = tmp_path_factory.mktemp("export")
    (export / "model.onnx").write_bytes(rows_of_a_batch(constants).SerializeToString())
    (export / "infer_cfg.yml").write_text(paddle)
    assert main(["add", str(export), "--name=paddle_added", f"--model-repository={module_repository.path}"]) == 0
    with serve_here(module_repository.path) as server:
        server.config = (module_repository.path / "paddle_added/config.pbtxt").read_text()
        yield server


NOTES = {
    "hugging_face": "recognised by its metadata: d_fine detect, 3 classes",
    "rf_detr": "recognised by its outputs: rf-detr detect, 3 classes",
    "paddle": "recognised by its metadata: PaddleDetection YOLO detect, 3 classes",
}


@pytest.mark.parametrize("model", [*NOTES, "paddle_added"])
def test_boxes_of_a_model_without_configuration(server: Any, picture: bytes, model: str) -> None:
    status, body = server.request("POST", f"/edge/v1/models/{model}/perception", picture)
    assert status == 200, body
    detections = json.loads(body)["detections"]
    assert len(detections) == len(FOUND)
    for seen, (box, index, score) in zip(detections, FOUND, strict=True):
        assert (seen["class_index"], seen["label"]) == (index, "" if model == "rf_detr" else NAMES[index])
        assert seen["score"] == pytest.approx(score, abs=1e-3)
        assert [seen[key] for key in ("x_min", "y_min", "x_max", "y_max")] == pytest.approx(box, abs=0.1)
    assert model not in NOTES or NOTES[model] in server.notes(model)


def test_rows_of_a_whole_batch_need_a_model_without_batches_which_add_writes(server: Any) -> None:
    assert f'\nmax_batch_size: 0\ninput {{ name: "image" dims: [-1, 3, {SIDE}, {SIDE}] }}\n' in server.config
    assert "# The rows of all pictures of a batch are in one list" in server.config
    index = server.index()
    for model in ("paddle_of_batches", "paddle_of_batches_without_file"):
        assert f"model '{model}': expected max_batch_size 0 and an input with dims [-1, ...]" in index[model]["reason"]


def test_frames_fill_the_other_inputs_too(server: Any, picture: bytes) -> None:
    with FrameStream(server.grpc, "paddle") as stream:
        (result,) = stream.results([picture])
    assert not result.error
    assert [item.label for item in result.detections] == [NAMES[0], NAMES[2]]


def test_files_of_another_model_say_why_nothing_is_recognised(server: Any, picture: bytes) -> None:
    (note,) = [note for note in server.notes("hugging_face_of_another") if "metadata" in note]
    assert note.startswith("its metadata are those of Hugging Face's transformers, but nothing is recognised: output ")
    status, body = server.request("POST", "/edge/v1/models/hugging_face_of_another/perception", picture)
    assert (status, note in json.loads(body)["error"]) == (400, True)
    stream = FrameStream(server.grpc, "hugging_face_of_another", returns=Returns(has_detections=True))
    with stream, pytest.raises(StreamError) as caught:
        list(stream.results([picture]))
    assert note in str(caught.value)
