"""Heads of the YOLO family against plain loops over the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.tensor import DType
from edge_server.plugins.vision.perception_decoder import PerceptionDecoder, make_perception_decoder
from edge_server.protocol.frame_messages import Returns

WISH = Returns(has_detections=True)
SIZE = 64
GRID = [(stride, x, y) for stride in (8, 16, 32) for y in range(SIZE // stride) for x in range(SIZE // stride)]
IOU = 0.4501237

inputs = given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["stretch", "letterbox", "crop"]),
    picture=st.tuples(st.integers(1, 300), st.integers(1, 300)),
)


@pytest.fixture(scope="module")
def plan(make_model: Any) -> Callable[..., PerceptionDecoder]:
    def make(head: str, dims: tuple[int, ...], **parameters: str) -> PerceptionDecoder:
        stated = {f"detection_{key}": value for key, value in parameters.items()}
        nms = {} if head in ("yolov10", "rtdetr") else {"detection_iou_threshold": str(IOU)}
        made = make_perception_decoder(make_model({"detection_head": head, **nms, **stated}, {"out": dims}))
        assert made is not None
        return made

    return make


def exact_scores(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/64: their products are exact in FP32, so that loops in FP64 rank them alike."""
    return (random.integers(0, 65, shape) / 64).astype(np.float32)


def centred(cx: float, cy: float, w: float, h: float) -> list[float]:
    return [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]


def random_boxes(random: np.random.Generator, count: int) -> np.ndarray:
    return np.concatenate((random.uniform(-10, 74, (count, 2)), random.uniform(0.5, 50, (count, 2))), axis=1).astype(
        np.float32
    )


def with_objectness(random: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    rows = np.concatenate((random_boxes(random, 30), exact_scores(random, (30, 4))), axis=1)
    finds = []
    for cx, cy, w, h, objectness, *classes in rows.tolist():
        finds.append((centred(cx, cy, w, h), objectness * max(classes), classes.index(max(classes)), []))
    return rows, finds


def columns_as_fractions(random: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    rows = np.concatenate((random_boxes(random, 30) / SIZE, exact_scores(random, (30, 3))), axis=1)
    finds = []
    for cx, cy, w, h, *classes in rows.tolist():
        box = [value * SIZE for value in centred(cx, cy, w, h)]
        finds.append((box, max(classes), classes.index(max(classes)), []))
    return rows.T, finds


def columns_with_keypoints(random: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    points = random.uniform(-5, 70, (20, 6)).astype(np.float32)
    rows = np.concatenate((random_boxes(random, 20), exact_scores(random, (20, 1)), points), axis=1)
    finds = [(centred(*row[:4]), row[4], 0, [tuple(row[5:8]), tuple(row[8:])]) for row in rows.tolist()]
    return rows.T, finds


def raw_grid(random: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    """Cell by cell, of YOLOX."""
    offsets = random.normal(0, 1, (len(GRID), 4))
    rows = np.concatenate((offsets, exact_scores(random, (len(GRID), 3))), axis=1).astype(np.float32)
    finds = []
    for (stride, x, y), (dx, dy, w, h, objectness, *classes) in zip(GRID, rows.tolist(), strict=True):
        box = centred((x + dx) * stride, (y + dy) * stride, math.exp(w) * stride, math.exp(h) * stride)
        finds.append((box, objectness * max(classes), classes.index(max(classes)), []))
    return rows, finds


def suppressed_inside(random: np.random.Generator, points: int = 0) -> tuple[np.ndarray, list[Any]]:
    boxes = random.uniform(-20, 90, (20, 4)).astype(np.float32)
    keypoints = random.uniform(-20, 90, (20, 3 * points)).astype(np.float32)
    rows = np.concatenate((boxes, exact_scores(random, (20, 1)), random.integers(0, 5, (20, 1)), keypoints), axis=1)
    finds = [
        (row[:4], row[4], int(row[5]), [row[6 + 3 * place : 9 + 3 * place] for place in range(points)])
        for row in rows.tolist()
    ]
    return rows, finds


def queries(random: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    """Of RT-DETR: centre and size are fractions of the input, and nothing is suppressed."""
    rows = np.concatenate((random_boxes(random, 20) / SIZE, exact_scores(random, (20, 3))), axis=1)
    finds = [
        (centred(*(SIZE * number for number in row[:4])), max(row[4:]), row.index(max(row[4:]), 4) - 4, [])
        for row in rows.tolist()
    ]
    return rows, finds


FRACTIONS = {"score_threshold": "0.5", "box_unit": "normalized", "class_agnostic": "true"}


@inputs
@pytest.mark.parametrize(
    ("head", "made", "parameters", "rules"),
    [
        ("yolov5", with_objectness, {}, {"iou": IOU}),
        ("yolox_decoded", with_objectness, {}, {"iou": IOU}),
        ("yolov8", columns_as_fractions, FRACTIONS, {"iou": IOU, "is_agnostic": True}),
        ("yolo11", columns_as_fractions, FRACTIONS, {"iou": IOU, "is_agnostic": True}),
        ("yolov8", columns_with_keypoints, {"keypoints": "2"}, {"iou": IOU}),
        ("yolox", raw_grid, {}, {"iou": IOU}),
        ("yolov10", suppressed_inside, {"max": "7"}, {"iou": None, "most": 7}),
        ("yolov10", partial(suppressed_inside, points=2), {"keypoints": "2", "max": "7"}, {"iou": None, "most": 7}),
        ("rtdetr", queries, {"max": "7"}, {"iou": None, "most": 7}),
    ],
)
def test_boxes_scores_and_keypoints_of_each_head(
    plan, make_fit, check_detections, head, made, parameters, rules, seed, mode, picture
) -> None:
    array, finds = made(np.random.default_rng(seed))
    fit = make_fit(mode, *picture)
    least = float(parameters.get("score_threshold", 0.25))
    decoder = plan(head, array.shape, **parameters)
    found = decoder.decode({"out": array[None]}, 0, fit, WISH, model="net").detections
    check_detections(found, [find for find in finds if find[1] >= least], fit, **rules)


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(("head", "columns"), [("yolov5", 8), ("yolov8", 7), ("yolox", 8)])
def test_scores_before_activation_are_declared(plan, make_fit, head, columns) -> None:
    rows = np.full((len(GRID), columns), -20.0, np.float32)
    rows[:, :4] = (32, 32, 10, 10) if head != "yolox" else (0, 0, 0, 0)
    first = columns - 3
    rows[9, first:] = (1.5, 2.5, -1.0)
    rows[9, 4:first] = 0.5
    array = rows.T if head == "yolov8" else rows
    made = plan(head, array.shape, activation="sigmoid")
    [found] = made.decode({"out": array[None]}, 0, make_fit("stretch", 64, 64), WISH, model="net").detections
    expected = logistic(2.5) * (1 if head == "yolov8" else logistic(0.5))
    assert (found.class_index, found.score) == (1, pytest.approx(expected, abs=1e-6))


def test_softmax_divides_one_probability_among_the_classes(plan, make_fit) -> None:
    columns = np.zeros((7, 1), np.float32)
    columns[:4, 0], columns[4:, 0] = (32, 32, 10, 10), (0.5, 3.0, 1.0)
    made = plan("yolov8", (7, 1), activation="softmax")
    [found] = made.decode({"out": columns[None]}, 0, make_fit("stretch", 64, 64), WISH, model="net").detections
    total = math.exp(0.5) + math.exp(3.0) + math.exp(1.0)
    assert (found.class_index, found.score) == (1, pytest.approx(math.exp(3.0) / total, abs=1e-6))


@pytest.mark.parametrize("format_", ["xyxy", "yxyx", "cxcywh", "xywh"])
def test_each_box_format_gives_the_same_box(plan, make_fit, format_) -> None:
    written = {"xyxy": (10, 20, 40, 30), "yxyx": (20, 10, 30, 40), "cxcywh": (25, 25, 30, 10), "xywh": (10, 20, 30, 10)}
    row = np.array([[*written[format_], 1.0, 0.75]], np.float32)
    made = plan("yolov5", (1, 6), box_format=format_)
    [found] = made.decode({"out": row[None]}, 0, make_fit("stretch", 64, 64), WISH, model="net").detections
    assert (found.x_min, found.y_min, found.x_max, found.y_max) == (10, 20, 40, 30)


SHAPES = {
    "yolov5": (30, 7), "yolov8": (7, 30), "yolo11": (7, 30), "yolov10": (30, 6), "rtdetr": (30, 7),
    "yolox": (len(GRID), 7),
}  # fmt: skip


@pytest.mark.sample
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, 1.0])
@pytest.mark.parametrize("head", SHAPES)
def test_constant_outputs_give_few_and_valid_boxes(plan, make_fit, head, value) -> None:
    array = np.full((1, *SHAPES[head]), value, np.float32)
    made = plan(head, SHAPES[head], max="5")
    found = made.decode({"out": array}, 0, make_fit("letterbox", 640, 480), WISH, model="net").detections
    assert len(found) <= 5
    for one in found:
        assert 0 <= one.x_min < one.x_max <= 640
        assert 0 <= one.y_min < one.y_max <= 480
        assert math.isfinite(one.score)


@given(seed=st.integers(0, 10_000))
@pytest.mark.parametrize("head", SHAPES)
def test_any_bits_give_valid_boxes(plan, make_fit, head, seed) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, (1, *SHAPES[head]), np.uint32)
    found = (
        plan(head, SHAPES[head], score_threshold="0")
        .decode({"out": bits.view(np.float32)}, 0, make_fit("crop", 200, 100), WISH, model="net")
        .detections
    )
    for one in found:
        assert 0 <= one.x_min < one.x_max <= 200
        assert 0 <= one.y_min < one.y_max <= 100
        assert math.isfinite(one.score)


def test_a_grid_with_a_detection_in_every_row_gives_the_configured_maximum(plan, make_fit) -> None:
    random = np.random.default_rng(0)
    rows = np.ones((25200, 85), np.float32)
    rows[:, :4] = np.concatenate((random.uniform(0, 64, (25200, 2)), np.full((25200, 2), 0.01)), axis=1)
    made = plan("yolov5", (25200, 85), max="1000")
    found = made.decode({"out": rows[None]}, 0, make_fit("stretch", 64, 64), WISH, model="net").detections
    assert len(found) == 1000
    first = [one.x_min for one in found[:3]]
    assert first == pytest.approx((rows[:3, 0] - 0.005).clip(0).tolist(), abs=1e-4), "of equals the first rows stay"


def test_half_and_brain_floats_are_read_as_numbers(make_model, make_fit) -> None:
    row = np.array([[32, 32, 16, 16, 1, 0.75]], np.float32)
    for dtype, array in ((DType.FP16, row.astype(np.float16)), (DType.BF16, (row.view(np.uint32) >> 16).astype("<u2"))):
        spec = make_model({"detection_head": "yolov5"}, {"out": (1, 6)}, dtypes={"out": dtype})
        made = make_perception_decoder(spec)
        [found] = made.decode({"out": array[None]}, 0, make_fit("stretch", 64, 64), WISH, model="net").detections
        assert (found.x_min, found.x_max, found.score) == (24, 40, 0.75)


def test_items_of_a_batch_are_read_one_by_one(plan, make_fit) -> None:
    batch = np.zeros((3, 1, 6), np.float32)
    batch[:, 0, :] = [(10 + row, 10, 4, 4, 1, 0.5 + row / 8) for row in range(3)]
    made = plan("yolov5", (1, 6))
    for row in range(3):
        [found] = made.decode({"out": batch}, row, make_fit("stretch", 64, 64), WISH, model="net").detections
        assert (found.x_min, found.score) == (8 + row, 0.5 + row / 8)
