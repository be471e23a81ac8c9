"""A detector's output for the sample image: layouts that it contradicts, doubtful layouts, correct ones.

The answers are made as networks for inputs of 320 x 320 give them: boxes of three grids, and one person in the middle.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2  # noqa: F401 - each test reads the sample image
import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, BadModelConfig
from edge_server.plugins.vision.demo_picture_path import PICTURE
from edge_server.plugins.vision.detector_sample_check import check_noise, sample_check

SIDE = 320
CELLS = np.array(
    [((x + 0.5) * s, (y + 0.5) * s) for s in (8, 16, 32) for y in range(SIDE // s) for x in range(SIDE // s)]
)
COUNT = len(CELLS)
FOUND = slice(1000, 1012)
"""Boxes that are detections."""


def numbers(low: float, high: float, *shape: int) -> np.ndarray:
    return np.random.default_rng(7).uniform(low, high, shape)


def boxes() -> np.ndarray:
    """Centre and size of each cell's box, in pixels: (boxes, 4)."""
    return np.concatenate((CELLS + numbers(-4, 4, COUNT, 2), numbers(9, 150, COUNT, 2)), axis=1)


def scores(classes: int) -> np.ndarray:
    made = numbers(0, 0.02, COUNT, classes)
    made[FOUND, classes // 3] = 0.9
    return made


def points(count: int) -> np.ndarray:
    each = np.concatenate((CELLS[:, None] + numbers(-50, 50, COUNT, count, 2), numbers(0, 1, COUNT, count, 1)), axis=2)
    return each.reshape(COUNT, -1)


def columns(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate((boxes(), *parts), axis=1).T


def yolov5(classes: int) -> np.ndarray:
    objectness = numbers(0, 0.02, COUNT, 1)
    objectness[FOUND] = 0.95
    return np.concatenate((boxes(), objectness, scores(classes)), axis=1)


def rows(count: int = 300) -> np.ndarray:
    """Box, score and class after NMS, best first: a person and a tie, then rows without a detection."""
    low = numbers(0, 200, count, 2)
    made = np.concatenate(
        (low, low + numbers(5, 100, count, 2), numbers(0, 0.2, count, 1), numbers(0, 79, count, 1)), axis=1
    )
    made[:, 5] = np.floor(made[:, 5])
    made[:2, 4:] = (0.93, 0), (0.6, 27)
    return made


def rtdetr(classes: int = 80) -> np.ndarray:
    """[boxes, 4 + classes], as Ultralytics exported RT-DETR until 8.3."""
    made = np.concatenate((numbers(0.1, 0.9, 300, 4), numbers(0, 0.02, 300, classes)), axis=1)
    made[5, 4] = 0.9
    return made


def logits(probabilities: np.ndarray) -> np.ndarray:
    held = np.clip(probabilities, 1e-4, 1 - 1e-4)
    return np.log(held / (1 - held))


def quantized(values: np.ndarray, step: float) -> np.ndarray:
    """Return `values` as a network with one step of 8 bits for the whole output answers them."""
    return np.clip(np.rint(values / step), -10, 245) * step


def normalized(values: np.ndarray, *, axis: int) -> np.ndarray:
    made = values.copy()
    np.moveaxis(made, axis, 0)[:4] /= SIDE
    return made


@pytest.fixture(scope="module")
def check(make_model: Any) -> Callable[..., tuple[str, ...]]:
    """Check a model that answers with `values`; returns the warnings."""

    def check(head: str, values: Any, labels: int = 0, dtype: DType = DType.FP32, **keys: str) -> tuple[str, ...]:
        outputs = values if isinstance(values, dict) else {"out": values}
        spec = make_model(
            {
                "detection_head": head,
                "image_scale": "1/255",
                **{f"detection_{key}": value for key, value in keys.items()},
            },
            {name: array.shape for name, array in outputs.items()},
            size=(SIDE, SIDE),
            labels={"out": tuple(f"thing {index}" for index in range(labels))},
            dtypes=dict.fromkeys(outputs, dtype),
        )

        def run(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
            (picture,) = inputs.values()
            assert picture.shape == (1, 3, SIDE, SIDE)
            assert picture.array.std() > 0.1, "a picture, not a plain surface"
            return {name: array[None].astype(dtype.numpy) for name, array in outputs.items()}

        made = sample_check(spec, PICTURE)
        assert made is not None
        return made(run)

    return check


POSE = columns(scores(1), points(17))
OBB = columns(scores(15), numbers(-0.7, 2.3, COUNT, 1))
SEGMENTATION = columns(scores(80), numbers(-1.5, 1.5, COUNT, 32))
COCO = columns(scores(80))
ROWS = rows()
OBB_ROWS = np.concatenate((ROWS, numbers(-0.7, 2.3, len(ROWS), 1)), axis=1)
DISPROVED = {
    "pose without keypoints": ("yolov8", POSE, {}, "scores up to 3", "detection_head yolov8, detection_keypoints 17"),
    "pose with other keypoints": ("yolov8", POSE, {"keypoints": "16"}, "scores up to", "detection_keypoints 17"),
    "oriented boxes": ("yolov8", OBB, {}, "scores up to 2.", "detection_head yolov8_obb"),
    "oriented boxes after NMS": ("yolov5", OBB_ROWS, {}, "scores up to", "detection_head yolo26_obb"),
    "segmentation": ("yolo11", SEGMENTATION, {}, "scores up to 1.5", "detection_mask_coefficients 32, with the"),
    "rows as columns": ("yolov8", ROWS, {}, "scores up to 2", "detection_head yolov10"),
    "RT-DETR": (
        "yolov8",
        rtdetr(),
        {},
        "84 boxes within a pixel",
        "answer fits detection_head rtdetr.",
    ),
    "class, score, box": (
        "yolov10",
        ROWS[:, [5, 4, 0, 1, 2, 3]],
        {},
        "scores up to",
        "detection_head yolov10, detection_columns class,score,box",
    ),
    "box, class, score": (
        "yolov10",
        ROWS[:, [0, 1, 2, 3, 5, 4]],
        {},
        "scores up to 7",
        "detection_columns box,class,score",
    ),
    "box, class, score of persons": (
        "yolov10",
        np.pad(ROWS[:1, [0, 1, 2, 3, 5, 4]], ((0, 99), (0, 0))),
        {},
        "class indices such as 0.93, expected whole numbers",
        "detection_columns box,class,score",
    ),
    "normalized boxes as pixels": (
        "yolov8",
        normalized(COCO, axis=0),
        {},
        "2048 boxes within a pixel",
        "detection_box_unit normalized",
    ),
    "pixels as normalized boxes": (
        "yolov8",
        COCO,
        {"box_unit": "normalized"},
        "pixels away",
        "answer fits detection_head yolov8.",
    ),
    "logits as probabilities": (
        "yolov8",
        columns(logits(scores(80))),
        {},
        "scores up to 2.1",
        "detection_head yolov8, detection_activation sigmoid",
    ),
    "yolov8 as yolov5": ("yolov5", COCO, {}, "scores up to", "answer fits detection_head yolov8."),
    "yolov5 as yolov8": ("yolov8", yolov5(80), {}, "scores up to", "answer fits detection_head yolov5, or"),
}


@pytest.mark.parametrize("name", DISPROVED)
def test_a_layout_that_the_outputs_contradict_is_refused_with_a_fitting_one(check: Any, name: str) -> None:
    head, values, keys, reason, layout = DISPROVED[name]
    with pytest.raises(BadModelConfig) as caught:
        check(head, values, **keys)
    message = str(caught.value)
    assert f"model 'net', detection_head {head}, answer 'out' {list(values.shape)} to the sample picture" in message
    assert reason in message
    assert layout in message
    assert "warmup_probe false" in message


NOTHING = np.concatenate((boxes(), numbers(0, 0.02, COUNT, 80)), axis=1).T
SSD_SCORES = np.concatenate((1 - scores(20).max(axis=1, keepdims=True), scores(20)), axis=1)
RIGHT = {
    "yolov5": ("yolov5", yolov5(80), {}),
    "yolov5 of one class": ("yolov5", yolov5(1), {}),
    "yolov8": ("yolov8", COCO, {}),
    "yolov8 of more classes than boxes": ("yolo11", columns(scores(3000)), {}),
    "yolov8 of normalized boxes": ("yolov8", normalized(COCO, axis=0), {"box_unit": "normalized"}),
    "yolov8 of logits": ("yolov8", columns(logits(scores(80))), {"activation": "sigmoid"}),
    "yolov8 that finds nothing": ("yolov8", NOTHING, {}),
    "yolov8 of a little more than 1, by quantization": ("yolov8", columns(scores(80) * 1.1), {}),
    "pose": ("yolov8", POSE, {"keypoints": "17"}),
    "oriented boxes": ("yolov8_obb", OBB, {}),
    "oriented boxes after NMS": ("yolo26_obb", OBB_ROWS, {}),
    "rows": ("yolov10", ROWS, {}),
    "rows of normalized boxes": ("yolov10", normalized(ROWS, axis=1), {"box_unit": "normalized"}),
    "rows of nothing": ("yolov10", np.zeros((300, 6)), {}),
    "rows filled with -1": ("yolov10", np.concatenate((ROWS[:2], np.full((98, 6), -1.0))), {}),
    "one row": ("yolov10", ROWS[:1], {}),
    "rows filled with a box": ("yolov10", np.concatenate((ROWS[:2], np.tile((0, 0, 1, 1, 0, 0), (98, 1)))), {}),
    "no rows but the filling": ("yolov10", np.tile((0, 0, 1, 1, 0, 0), (100, 1)), {}),
    "untrained grids": (
        "yolox",
        np.random.default_rng(3).normal(0, 0.05, (COUNT, 85)),
        {"activation": "sigmoid", "score_threshold": "0.3"},
    ),
    "ssd": (
        "ssd",
        {"boxes": normalized(boxes(), axis=1), "scores": SSD_SCORES},
        {"background": "0", "box_format": "cxcywh"},
    ),
    "nms inside": ("nms_inside", {"boxes": ROWS[:, :4], "scores": ROWS[:, 4], "classes": ROWS[:, 5]}, {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_layout_is_served_without_warnings(check: Any, name: str) -> None:
    head, values, keys = RIGHT[name]
    assert check(head, values, **keys) == ()


@pytest.mark.sample
@pytest.mark.parametrize("spread", [0.001, 0.05, 0.2])
@pytest.mark.parametrize(("head", "shape"), [("yolov5", (COUNT, 7)), ("yolov8", (84, COUNT)), ("yolov10", (40, 6))])
def test_untrained_weights_are_not_refused(check: Any, head: str, shape: tuple[int, int], spread: float) -> None:
    for seed in range(10):
        values = np.random.default_rng(seed).normal(0, spread, shape)
        if head == "yolov10":
            values[:, 5] = 7  # an index at any weights
        check(head, values)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.FP64])
@pytest.mark.parametrize("name", ["yolov5", "yolov8", "pose", "rows"])
def test_other_float_types_give_the_same_result(check: Any, name: str, dtype: DType) -> None:
    head, values, keys = RIGHT[name]
    assert check(head, values, dtype=dtype, **keys) == ()


DOUBTFUL = {
    "activation applied twice": ("yolov8", COCO, {"activation": "sigmoid"}, "scores are 0 to 1 before sigmoid"),
    "coordinates under an activation": ("yolov8", POSE, {"activation": "sigmoid"}, "as if they were coordinates"),
    "logits that find nothing": ("yolov8", columns(logits(numbers(0, 0.02, COUNT, 80))), {}, "as if they were logits"),
    "oriented boxes of small angles": (
        "yolov8",
        columns(scores(15), numbers(0.2, 0.9, COUNT, 1)),
        {},
        "detection_head yolov8_obb",
    ),
    "rows of nothing as columns": ("yolov8", np.zeros((300, 6)), {}, "few boxes for [4 + classes, boxes]"),
    "rows as yolov5": ("yolov5", np.pad(ROWS[:1], ((0, 299), (0, 0))), {}, "few boxes for [boxes, 5 + classes]"),
    "centres as corners": (
        "yolov10",
        np.concatenate((numbers(200, 300, 9, 2), numbers(10, 90, 9, 2), np.full((9, 2), 1.0)), axis=1),
        {},
        "detection_box_format",
    ),
    "one step for boxes and scores": (
        "yolov8",
        quantized(COCO, 1.24),
        {},
        "scores up to 1.24, expected at most 1",
    ),
    "one step for boxes and classes": ("yolov10", quantized(ROWS, 1.13), {}, "class indices such as"),
    "a small box": ("yolov10", np.array([[0.1, 0.2, 0.5, 0.9, 0.8, 3]]), {}, "1 boxes within a pixel"),
    "wrong keypoints": (
        "yolov8",
        columns(scores(1), numbers(-1.5, 1.5, COUNT, 33)),
        {"keypoints": "11"},
        "keypoint scores",
    ),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_outputs_that_only_look_wrong_give_a_warning(check: Any, name: str) -> None:
    head, values, keys, doubt = DOUBTFUL[name]
    (warning,) = check(head, values, **keys)
    assert warning.startswith(f"detection_head {head}, answer 'out' {list(values.shape)} to the sample picture: ")
    assert doubt in warning


@pytest.mark.parametrize(("head", "values"), [("yolov8", COCO), ("yolov5", yolov5(80))])
def test_a_label_count_that_differs_from_the_classes_is_a_warning(check: Any, head: str, values: np.ndarray) -> None:
    assert check(head, values, labels=80) == ()
    (warning,) = check(head, values, labels=79)
    assert warning.startswith(f"detection_head {head}: the outputs have 80 classes, label_filename names 79: ")
    assert "classes from 79 on have no name; expected 80 lines" in warning


@pytest.mark.parametrize(
    ("head", "scaling", "is_warned"),
    [
        ("yolov8", {}, True), ("yolov8", {"image_scale": "1"}, True), ("yolov8", {"image_scale": "1/255"}, False),
        ("yolov8", {"image_scale": "1", "image_stddev": "255"}, False), ("yolox_decoded", {}, False),
    ],
)  # fmt: skip
def test_a_yolo_that_gets_0_to_255_and_sees_objects_in_noise_has_one_warning(
    make_model: Any, head: str, scaling: dict[str, str], is_warned: bool
) -> None:
    def run(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        return {"out": values[None].astype(np.float32)}

    values = COCO if head == "yolov8" else yolov5(80)
    spec = make_model({"detection_head": head, **scaling}, {"out": values.shape}, size=(SIDE, SIDE))
    made = sample_check(spec, PICTURE)
    assert made is not None
    warnings = made(run)
    assert [("image_scale were another: networks of" in one) for one in warnings] == [True] * is_warned
    found = check_noise(spec, run)
    assert len(found) == 1, "these values are the answer to any picture"
    assert check_noise(replace(spec, warnings=warnings), run) == (() if is_warned else found)


def test_labels_are_checked_even_if_the_model_is_not_run(make_model: Any) -> None:
    spec = make_model({"detection_head": "yolov8"}, {"out": (9, 84)}, labels={"out": ("a", "b")})
    made = sample_check(spec, PICTURE)
    assert made is not None
    (warning,) = made(None)
    assert warning == (
        "detection_head yolov8: the outputs have 5 classes, label_filename names 2: classes from 2 on have no name; "
        "expected 5 lines, one for each class in the order of the scores"
    )


def test_a_model_that_cannot_run_the_sample_image_is_served_with_a_warning(make_model: Any) -> None:
    def run(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        raise BackendError("it takes other inputs")

    made = sample_check(make_model({"detection_head": "yolov8"}, {"out": (84, 9)}), PICTURE)
    assert made is not None
    assert made(run) == ("its detections were not checked with the sample picture: it takes other inputs",)


@pytest.mark.parametrize("shape", [(22, 2100), (7, 9, 1)])
def test_shapes_that_the_file_leaves_open_and_the_head_cannot_read_are_refused(
    make_model: Any, shape: tuple[int, ...]
) -> None:
    def run(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        values = columns(scores(18)) if len(shape) == 2 else np.zeros(shape)
        assert values.shape == shape
        return {"out": values[None].astype(np.float32)}

    spec = make_model({"detection_head": "yolov10"}, {"out": (-1, -1)}, size=(SIDE, SIDE))
    made = sample_check(spec, PICTURE)
    assert made is not None
    with pytest.raises(BadModelConfig) as error:
        made(run)
    given = f"expected [boxes, 6], given 'out' {list(shape)}"
    advice = ". The answer fits detection_head yolov8" if len(shape) == 2 else ". The parameter"
    assert given + advice in error.value.message


def test_an_answer_without_detections_proves_no_shape(make_model: Any) -> None:
    made = sample_check(make_model({"detection_head": "yolov10"}, {"out": (-1, -1)}, size=(SIDE, SIDE)), PICTURE)
    assert made is not None
    (warning,) = made(lambda inputs: {"out": np.zeros((1, 0), np.float32)})
    assert "were not checked with the sample picture" in warning


@pytest.mark.parametrize("shape", [(2,), (1, 2), (-1,)])
def test_a_classifier_with_another_number_of_labels_has_a_warning(make_model: Any, shape: tuple[int, ...]) -> None:
    parameters = {"image_top_k": "1"}
    for labels in (("a",), ("a", "b"), ("a", "b", "c")):
        made = sample_check(make_model(parameters, {"out": shape}, labels={"out": labels}), PICTURE)
        assert made is not None
        warnings = made(lambda inputs: {"out": np.zeros((1, 2), np.float32)})
        begin = f"output 'out' has 2 classes, label_filename names {len(labels)}: "
        effect = {1: "classes from 1 on have no name", 3: "the labels from line 3 on are not used"}
        assert [one.startswith(begin + effect[len(labels)]) for one in warnings] == [True] * (len(labels) != 2)


def test_models_without_a_head_and_labels_have_no_sample_check(make_model: Any) -> None:
    assert sample_check(make_model({}, {"out": (5,)}), PICTURE) is None
    assert sample_check(make_model({"class_activation": "softmax"}, {"out": (5,)}), PICTURE) is None


@pytest.fixture
def add_detector(tmp_path: Path) -> Callable[..., None]:
    """Add an ONNX model for pictures of 320 x 320 to the repository `tmp_path`, whose answer is `values`."""
    onnx = pytest.importorskip("onnx")
    helper, real = onnx.helper, onnx.TensorProto.FLOAT

    def add(name: str, values: np.ndarray, labels: int = 0, **parameters: str) -> None:
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True)
        nodes = [
            helper.make_node("ReduceMin", ["pixels"], ["least"], keepdims=0),
            helper.make_node("Mul", ["least", "zero"], ["nothing"]),
            helper.make_node("Add", ["answer", "nothing"], ["out"]),
        ]
        graph = helper.make_graph(
            nodes,
            name,
            [helper.make_tensor_value_info("pixels", real, [1, 3, SIDE, SIDE])],
            [helper.make_tensor_value_info("out", real, [1, *values.shape])],
            [
                onnx.numpy_helper.from_array(values[None].astype(np.float32), "answer"),
                onnx.numpy_helper.from_array(np.zeros((), np.float32), "zero"),
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.save(model, folder / "model.onnx")
        lines = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
        ]
        if labels:
            (tmp_path / name / "names.txt").write_text("".join(f"thing {index}\n" for index in range(labels)))
            lines.append('output { name: "out" label_filename: "names.txt" }')
        (tmp_path / name / "config.pbtxt").write_text("\n".join(lines))

    return add


def test_check_refuses_warns_and_passes_correct_models(
    add_detector: Any, tmp_path: Path, repository_root: Path
) -> None:
    right = {"image_scale": "0.0039", "detection_head": "yolov8"}
    add_detector("coco", COCO, **right)
    add_detector("pose", POSE, **right)
    add_detector("pose_unchecked", POSE, warmup_probe="false", **right)
    add_detector("twice", COCO, detection_activation="sigmoid", **right)
    add_detector("labels", COCO, labels=79, **right)
    with (tmp_path / "labels/config.pbtxt").open("a") as config:
        config.write("\ninstance_group [ { count: 2 kind: KIND_CPU } ]")
    command = [sys.executable, "-m", "edge_server", "check", str(tmp_path), str(repository_root / "model_repository")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    loaded = {line.split()[0] for line in done.stdout.splitlines() if " 1 " in line}
    assert loaded == {"coco", "pose_unchecked", "twice", "labels", "efficientnet_lite0", "face_detection_yunet"}
    every = [line for line in done.stderr.splitlines() if line.startswith(("FAILED", "WARNING", "NOTE"))]
    # These give their boxes for any picture.
    noise = [line.partition(":")[0] for line in every if "objects in noise, the best with a score of 0.9" in line]
    assert noise == ["WARNING coco version 1", "WARNING labels version 1"]
    lines = [line for line in every if "in noise" not in line]
    assert [line.split(":")[0] for line in lines] == [
        "WARNING labels version 1",
        "WARNING twice version 1",
        "FAILED pose version 1",
    ]
    assert "80 classes, label_filename names 79" in lines[0]
    assert "scores are 0 to 1 before sigmoid" in lines[1]
    assert "The answer fits detection_head yolov8, detection_keypoints 17" in lines[2]
    assert lines[2].count("scores up to") == 1, "two runtimes were tried, and gave the same reason"
    assert done.returncode == 1
