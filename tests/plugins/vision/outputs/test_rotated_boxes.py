"""Oriented boxes: YOLO's two output formats, conversion to the frame, and NMS, against plain loops over numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.vision.outputs.rotated_boxes import apply_rotated_nms, probabilistic_iou, regularize
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.protocol.frame_messages import Detection, Returns, RotatedBox

RETURNS = Returns(has_detections=True)
Row = list[float]
"""Centre x and y, width, height, angle."""


def decode(make_model: Any, head: str, values: np.ndarray, fit: Any, **parameters: str) -> tuple[Detection, ...]:
    stated = {f"detection_{key}": value for key, value in parameters.items()}
    spec = make_model({"detection_head": head, **stated}, {"out": values.shape}, size=(640, 640))
    decoder = make_perception_decoder(spec)
    assert decoder is not None
    return decoder.decode({"out": values[None].astype(np.float32)}, 0, fit, RETURNS, model="net").detections


def as_columns(boxes: list[Row], scores: list[float], classes: list[int], class_count: int = 3) -> np.ndarray:
    """[4 + C + 1, A] of YOLOv8."""
    made = np.zeros((4 + class_count + 1, len(boxes)))
    made[:4], made[-1] = np.array(boxes).T[:4], np.array(boxes).T[4]
    made[4 + np.array(classes), np.arange(len(boxes))] = scores
    return made


def as_rows(boxes: list[Row], scores: list[float], classes: list[int]) -> np.ndarray:
    """[A, 7] after NMS."""
    return np.array(
        [(*box[:4], score, index, box[4]) for box, score, index in zip(boxes, scores, classes, strict=True)]
    )


def corner_distance(box: RotatedBox, corners: list[tuple[float, float]]) -> float:
    """Greatest distance of a corner from the nearest of `corners`."""
    return max(min(math.dist(corner, other) for other in corners) for corner in box.corners())


def corners_of(x: float, y: float, width: float, height: float, angle: float) -> list[tuple[float, float]]:
    """Corners by complex numbers: a turn by the angle is a multiplication."""
    turn = complex(math.cos(angle), math.sin(angle))
    made = [complex(x, y) + turn * complex(a * width / 2, b * height / 2) for a in (-1, 1) for b in (-1, 1)]
    return [(corner.real, corner.imag) for corner in made]


@pytest.mark.parametrize("layout", [("yolov8_obb", as_columns), ("yolo26_obb", as_rows)], ids=lambda it: it[0])
@pytest.mark.parametrize("angle", [-0.7, 0.0, 0.3, math.pi / 2, 2.3])
def test_known_boxes_come_back_with_their_corners_in_a_letterboxed_frame(make_model, make_fit, layout, angle) -> None:
    head, write = layout
    fit = make_fit("letterbox", 1280, 720, (640, 640))
    truth = [(300.0, 200.0, 160.0, 40.0), (900.0, 500.0, 30.0, 220.0)]
    boxes = [[x / 2, y / 2 + 140, w / 2, h / 2, angle] for x, y, w, h in truth]
    first, second = decode(make_model, head, write(boxes, [0.9, 0.5], [2, 0]), fit)
    assert [first.class_index, second.class_index] == [2, 0]
    assert [first.score, second.score] == pytest.approx([0.9, 0.5])
    for found, (x, y, w, h) in zip((first, second), truth, strict=True):
        corners = corners_of(x, y, w, h, angle)
        assert found.rotated is not None
        assert 0 <= found.rotated.angle < math.pi / 2
        assert corner_distance(found.rotated, corners) < 0.001
        upright = [min(a for a, _ in corners), min(b for _, b in corners), *map(max, zip(*corners, strict=True))]
        assert [found.x_min, found.y_min, found.x_max, found.y_max] == pytest.approx(upright, abs=0.001)


@given(angle=st.floats(0, math.pi), width=st.integers(200, 2000), height=st.integers(200, 2000))
def test_a_distorted_frame_keeps_the_direction_and_the_length_of_long_objects(
    make_model, make_fit, angle, width, height
) -> None:
    """A thin bar that is 150 pixels long in the frame, as a network sees it in its square input."""
    fit = make_fit("stretch", width, height, (640, 640))
    x, y = width / 2, height / 2
    ends = [fit.to_input(x + side * 75 * math.cos(angle), y + side * 75 * math.sin(angle)) for side in (-1, 1)]
    (ax, ay), (bx, by) = ends
    seen = [(ax + bx) / 2, (ay + by) / 2, math.dist(*ends), 0.5, math.atan2(by - ay, bx - ax)]
    [found] = decode(make_model, "yolo26_obb", as_rows([seen], [0.9], [0]), fit)
    assert found.rotated is not None
    long_side = max(found.rotated.width, found.rotated.height)
    turn = found.rotated.angle + (math.pi / 2 if found.rotated.height > found.rotated.width else 0)
    assert long_side == pytest.approx(150, rel=1e-4)
    assert math.sin(turn - angle) == pytest.approx(0, abs=1e-4)
    assert found.rotated.width * found.rotated.height == pytest.approx(
        seen[2] * 0.5 * width / 640 * height / 640, rel=1e-4
    )


edges = st.sampled_from([-1e-20, math.pi / 2, math.pi, -math.pi / 2, math.nextafter(math.pi / 2, 0)])


@given(angle=st.floats(-20, 20) | edges, size=st.tuples(st.floats(0.1, 900), st.floats(0.1, 900)))
def test_regular_angles_are_the_same_rectangle(angle, size) -> None:
    [[x, y, width, height, regular]] = regularize(np.array([[3.0, 4.0, *size, angle]])).tolist()
    assert 0 <= regular < math.pi / 2
    assert corner_distance(RotatedBox(x, y, width, height, regular), corners_of(3, 4, *size, angle)) < 1e-9


def probability_overlap(first: Row, second: Row) -> float:
    """ProbIoU by the general formulas for two Gaussians, with matrices."""
    covariances, means = [], []
    for x, y, width, height, angle in (first, second):
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        covariances.append(turn @ np.diag([width**2 / 12, height**2 / 12]) @ turn.T)
        means.append(np.array([x, y]))
    mean, difference = (covariances[0] + covariances[1]) / 2, means[0] - means[1]
    distance = difference @ np.linalg.solve(mean, difference) / 8
    product = np.linalg.det(covariances[0]) * np.linalg.det(covariances[1])
    distance += math.log(np.linalg.det(mean) / math.sqrt(product)) / 2
    return 1 - math.sqrt(max(0.0, 1 - math.exp(-distance)))


many_boxes = st.lists(
    st.tuples(
        st.integers(0, 100), st.integers(0, 100), st.integers(2, 60), st.integers(2, 60), st.integers(-8, 24)
    ).map(lambda it: [*map(float, it[:4]), it[4] / 10]),
    max_size=20,
)


@given(boxes=many_boxes)
def test_the_overlap_is_that_of_gaussians(boxes: list[Row]) -> None:
    for box in boxes:
        [overlap] = probabilistic_iou(np.array([boxes[0]]), np.array([box])).tolist()
        assert overlap == pytest.approx(probability_overlap(boxes[0], box), abs=1e-3)


@given(boxes=many_boxes, seed=st.integers(0, 1000), is_agnostic=st.booleans())
@pytest.mark.parametrize("threshold", [0.0, 0.0123457, 0.4501237, 0.9])
def test_kept_boxes_are_those_without_a_better_one_of_their_class(boxes, seed, is_agnostic, threshold) -> None:
    classes = np.random.default_rng(seed).choice([0, 1, 2**32 - 1], len(boxes))
    rotated = np.array(boxes).reshape(-1, 5)
    overlaps = [[probabilistic_iou(rotated[[i]], rotated[[j]])[0] for i in range(j)] for j in range(len(boxes))]
    expected = [
        j for j in range(len(boxes))
        if not any(overlaps[j][i] > threshold and (is_agnostic or classes[i] == classes[j]) for i in range(j))
    ]  # fmt: skip
    assert apply_rotated_nms(rotated, None if is_agnostic else classes, threshold).tolist() == expected


def test_many_boxes_are_compared_block_by_block() -> None:
    """Copies of boxes that are far apart, in other blocks than the originals."""
    grid = np.array([(40.0 * x, 40.0 * y, 30.0, 10.0, 0.4) for x in range(10) for y in range(10)])
    assert apply_rotated_nms(np.concatenate((grid, grid + 0.5)), None, 0.45).tolist() == list(range(100))


@pytest.mark.parametrize("row", [(100, 100, 0, 10), (100, 100, 10, -3), (-300, 100, 20, 20), (100, 100, math.nan, 20)])
def test_boxes_without_an_area_or_outside_the_frame_are_omitted(make_model, make_fit, row) -> None:
    fit = make_fit("stretch", 640, 640, (640, 640))
    right = [200.0, 200.0, 30.0, 20.0, 0.2]
    found = decode(make_model, "yolov8_obb", as_columns([[*row, 0.5], right], [0.9, 0.8], [0, 0]), fit)
    assert [round(one.score, 3) for one in found] == [0.8]


def test_the_upright_box_lies_within_the_frame_and_the_oriented_one_may_reach_out(make_model, make_fit) -> None:
    fit = make_fit("stretch", 640, 640, (640, 640))
    [found] = decode(make_model, "yolo26_obb", as_rows([[10.0, 320.0, 100.0, 20.0, math.pi / 4]], [0.9], [0]), fit)
    assert (found.x_min, found.rotated.x, found.rotated.width) == (0, 10, 100)
    assert min(x for x, _ in found.rotated.corners()) == pytest.approx(10 - 60 / math.sqrt(2))


def test_normalized_boxes_are_fractions_of_the_input(make_model, make_fit) -> None:
    fit = make_fit("stretch", 640, 640, (640, 640))
    values = as_columns([[0.5, 0.25, 0.25, 0.125, 0.3]], [0.9], [1])
    [found] = decode(make_model, "yolov8_obb", values, fit, box_unit="normalized")
    assert corner_distance(found.rotated, corners_of(320, 160, 160, 80, 0.3)) < 0.001


@given(seed=st.integers(0, 10_000))
@pytest.mark.parametrize(("head", "shape"), [("yolov8_obb", (8, 30)), ("yolo26_obb", (30, 7))])
def test_any_bits_give_valid_boxes(make_model, make_fit, head, shape, seed) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)
    fit = make_fit("crop", 200, 100, (640, 640))
    for one in decode(make_model, head, bits.view(np.float32), fit, score_threshold="0"):
        assert 0 <= one.x_min < one.x_max <= 200
        assert 0 <= one.y_min < one.y_max <= 100
        assert 0 <= one.rotated.angle < math.pi / 2
        assert all(map(math.isfinite, (one.score, *sum(one.rotated.corners(), ()))))
