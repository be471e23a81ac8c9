"""Heads whose boxes were suppressed inside the network, against plain loops over the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.tensor import DType
from edge_server.plugins.vision.perception_decoder import PerceptionDecoder, make_perception_decoder
from edge_server.protocol.frame_messages import Returns

WISH = Returns(has_detections=True)
WIDTH, HEIGHT = 96, 64
COUNT = 20

inputs = given(seed=st.integers(0, 10_000), picture=st.tuples(st.integers(1, 300), st.integers(1, 300)))


@pytest.fixture(scope="module")
def plan(make_model: Any) -> Callable[..., PerceptionDecoder]:
    def make(head: str, shapes: dict[str, tuple[int, ...]], batch: int = 0, **parameters: str) -> PerceptionDecoder:
        stated = {f"detection_{key}": value for key, value in parameters.items()}
        spec = make_model({"detection_head": head, **stated}, shapes, size=(WIDTH, HEIGHT), max_batch_size=batch)
        made = make_perception_decoder(spec)
        assert made is not None
        return made

    return make


def pixels(box: list[float]) -> list[float]:
    return [box[0] * WIDTH, box[1] * HEIGHT, box[2] * WIDTH, box[3] * HEIGHT]


def random_finds(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    boxes = random.uniform(-0.2, 1.2, (COUNT, 4)).astype(np.float32)
    scores = (random.integers(0, 65, COUNT) / 64).astype(np.float32)
    return boxes, scores, random.integers(0, 5, COUNT).astype(np.float32)


@inputs
@pytest.mark.parametrize("stated", [0, 7, COUNT, COUNT + 9, -3])
def test_boxes_scores_classes_and_count(plan, make_fit, check_detections, stated, seed, picture) -> None:
    boxes, scores, classes = random_finds(np.random.default_rng(seed))
    finds = []
    for place in range(min(max(stated, 0), COUNT)):
        if scores[place] >= 0.25 and classes[place] != 2:
            y_min, x_min, y_max, x_max = boxes[place].tolist()
            finds.append((pixels([x_min, y_min, x_max, y_max]), float(scores[place]), int(classes[place]), []))
    # The names and the order of y and x are TensorFlow's.
    outputs = {
        "detection_boxes": boxes[None],
        "detection_classes": classes[None],
        "detection_scores": scores[None],
        "num_detections": np.array([stated], np.float32),
    }
    shapes = {name: (1, *array.shape[1:]) for name, array in outputs.items()}
    made = plan("nms_inside", shapes, box_format="yxyx", box_unit="normalized", background="2")
    fit = make_fit("letterbox", *picture, size=(WIDTH, HEIGHT))
    check_detections(made.decode(outputs, None, fit, WISH, model="net").detections, finds, fit, iou=None)


def test_outputs_of_efficient_nms_are_read_item_by_item(make_model, make_fit) -> None:
    outputs = {
        "num_dets": np.array([[1], [2]], np.int32),
        "det_boxes": np.array([[[1, 2, 11, 12], [0, 0, 0, 0]], [[3, 4, 13, 14], [5, 6, 15, 16]]], np.float32),
        "det_scores": np.array([[0.5, 0], [0.75, 0.875]], np.float32),
        "det_classes": np.array([[3, 0], [1, 2]], np.int32),
    }
    spec = make_model(
        {"detection_head": "nms_inside"},
        {name: array.shape[1:] for name, array in outputs.items()},
        dtypes={"num_dets": DType.INT32, "det_classes": DType.INT32},
        labels={"det_classes": ("cat", "dog", "cow")},
    )
    made = make_perception_decoder(spec)
    fit = make_fit("stretch", 64, 64)
    [only] = made.decode(outputs, 0, fit, WISH, model="net").detections
    assert (only.x_min, only.y_min, only.x_max, only.y_max, only.score) == (1, 2, 11, 12, 0.5)
    assert (only.class_index, only.label) == (3, "")
    found = made.decode(outputs, 1, fit, WISH, model="net").detections
    assert [(one.score, one.label, one.x_min) for one in found] == [(0.875, "cow", 5), (0.75, "dog", 3)]


@inputs
def test_seven_columns_end_at_a_negative_image_index(plan, make_fit, check_detections, seed, picture) -> None:
    random = np.random.default_rng(seed)
    boxes, scores, classes = random_finds(random)
    images = random.choice([0, 0, 0, 0, 0, 1, -1], COUNT)
    rows = np.concatenate((images[:, None], classes[:, None], scores[:, None], boxes), axis=1).astype(np.float32)
    finds = []
    for image, index, score, *box in rows.tolist():
        if image < 0:
            break
        if image == 0 and score >= 0.25:
            finds.append((pixels(box), score, int(index), []))
    made = plan("detection_output", {"found": (1, 1, COUNT, 7)})
    fit = make_fit("stretch", *picture, size=(WIDTH, HEIGHT))
    found = made.decode({"found": rows[None, None]}, None, fit, WISH, model="net").detections
    check_detections(found, finds, fit, iou=None)


@inputs
def test_indices_of_chosen_boxes(plan, make_fit, check_detections, seed, picture) -> None:
    random = np.random.default_rng(seed)
    boxes = random.uniform(-0.2, 1.2, (COUNT, 4)).astype(np.float32)
    scores = (random.integers(0, 65, (3, COUNT)) / 64).astype(np.float32)
    selected = np.stack(
        (random.choice([0, 0, 0, 1], 15), random.integers(-1, 4, 15), random.integers(-1, COUNT + 1, 15)), axis=1
    )
    finds = []
    for image, index, place in selected.tolist():
        if image == 0 and 0 <= index < 3 and 0 <= place < COUNT and scores[index, place] >= 0.25:
            y_one, x_one, y_two, x_two = boxes[place].tolist()
            box = pixels([min(x_one, x_two), min(y_one, y_two), max(x_one, x_two), max(y_one, y_two)])
            finds.append((box, float(scores[index, place]), index, []))
    made = plan("onnx_nms", {"scores": (1, 3, COUNT), "boxes": (1, COUNT, 4), "selected": (-1, 3)})
    fit = make_fit("letterbox", *picture, size=(WIDTH, HEIGHT))
    outputs = {"scores": scores[None], "boxes": boxes[None], "selected": selected.astype(np.int64)}
    check_detections(made.decode(outputs, None, fit, WISH, model="net").detections, finds, fit, iou=None)


def test_outputs_of_the_onnx_operator_are_read(plan, make_fit) -> None:
    node = onnx.helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou", "score"], ["selected"])
    graph = onnx.helper.make_graph(
        [node],
        "suppress",
        [
            onnx.helper.make_tensor_value_info("boxes", onnx.TensorProto.FLOAT, (1, 3, 4)),
            onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, (1, 2, 3)),
        ],
        [onnx.helper.make_tensor_value_info("selected", onnx.TensorProto.INT64, (None, 3))],
        [
            onnx.helper.make_tensor("most", onnx.TensorProto.INT64, (1,), [10]),
            onnx.helper.make_tensor("iou", onnx.TensorProto.FLOAT, (1,), [0.5]),
            onnx.helper.make_tensor("score", onnx.TensorProto.FLOAT, (1,), [0.25]),
        ],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    boxes = np.array([[[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.45], [0.9, 0.9, 0.5, 0.5]]], np.float32)
    scores = np.array([[[0.5, 0.75, 0.1], [0, 0, 0.875]]], np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [selected] = session.run(None, {"boxes": boxes, "scores": scores})
    shapes = {"boxes": (1, 3, 4), "scores": (1, 2, 3), "selected": (-1, 3)}
    # Three boxes: the dims alone do not distinguish scores from selected indices.
    made = plan("onnx_nms", shapes, outputs="boxes,scores,selected")
    outputs = {"boxes": boxes, "scores": scores, "selected": selected}
    fit = make_fit("stretch", 100, 100, size=(WIDTH, HEIGHT))
    first, second = made.decode(outputs, None, fit, WISH, model="net").detections
    assert (first.class_index, first.score) == (1, 0.875)
    assert (first.x_min, first.y_min, first.x_max, first.y_max) == pytest.approx((50, 50, 90, 90), abs=1e-4)
    assert (second.class_index, second.score) == (0, 0.75)
    assert (second.x_min, second.y_min, second.x_max, second.y_max) == pytest.approx((0, 0, 45, 50), abs=1e-4)


HOSTILE = {
    "nms_inside": {"boxes": (1, 9, 4), "scores": (1, 9), "classes": (1, 9), "count": (1, 1)},
    "onnx_nms": {"boxes": (1, 9, 4), "scores": (1, 2, 9), "selected": (9, 3)},
    "detection_output": {"found": (1, 1, 9, 7)},
}


@pytest.mark.sample
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, 1.0, 2.0**32])
@pytest.mark.parametrize("head", HOSTILE)
def test_constant_outputs_give_valid_boxes_or_none(plan, make_fit, head, value) -> None:
    made = plan(head, HOSTILE[head])
    outputs = {name: np.full(shape, value, np.float32) for name, shape in HOSTILE[head].items()}
    fit = make_fit("stretch", 100, 100, size=(WIDTH, HEIGHT))
    for one in made.decode(outputs, None, fit, WISH, model="net").detections:
        assert 0 <= one.x_min < one.x_max <= 100
        assert 0 <= one.class_index < 2**32


@given(seed=st.integers(0, 10_000))
@pytest.mark.parametrize("head", HOSTILE)
def test_any_bits_give_valid_boxes(plan, make_fit, head, seed) -> None:
    random = np.random.default_rng(seed)
    made = plan(head, HOSTILE[head], score_threshold="0")
    outputs = {
        name: random.integers(0, 2**32, shape, np.uint32).view(np.float32) for name, shape in HOSTILE[head].items()
    }
    fit = make_fit("stretch", 100, 100, size=(WIDTH, HEIGHT))
    for one in made.decode(outputs, None, fit, WISH, model="net").detections:
        assert 0 <= one.x_min < one.x_max <= 100
        assert math.isfinite(one.score)


@pytest.mark.parametrize("head", ["onnx_nms", "detection_output"])
def test_heads_that_list_all_items_of_a_batch_together_cannot_batch(plan, head) -> None:
    with pytest.raises(Exception, match="max_batch_size of at most 1"):
        plan(head, {name: shape[1:] for name, shape in HOSTILE[head].items()}, batch=4)
