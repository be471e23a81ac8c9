"""Non-maximum suppression against plain loops, and for adversarial boxes."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.vision.outputs.box_candidates import apply_nms

Box = tuple[int, int, int, int]

boxes_of_all_kinds = st.lists(
    st.tuples(st.integers(-50, 50), st.integers(-50, 50), st.integers(1, 40), st.integers(1, 40)), max_size=25
)


def by_loops(boxes: list[list[float]], classes: list[int] | None, threshold: float) -> list[int]:
    stays: list[int] = []
    for index, (left, top, right, bottom) in enumerate(boxes):
        for other in stays:
            if classes is not None and classes[other] != classes[index]:
                continue
            other_left, other_top, other_right, other_bottom = boxes[other]
            width = max(0.0, min(right, other_right) - max(left, other_left))
            height = max(0.0, min(bottom, other_bottom) - max(top, other_top))
            union = (right - left) * (bottom - top) + (other_right - other_left) * (other_bottom - other_top)
            if width * height / (union - width * height) > threshold:
                break
        else:
            stays.append(index)
    return stays


def corners(shapes: list[Box]) -> np.ndarray:
    return np.array([(x, y, x + w, y + h) for x, y, w, h in shapes], np.float64).reshape(-1, 4)


# The thresholds are no ratio of small integers, so that no box is exactly at one.
@given(shapes=boxes_of_all_kinds, threshold=st.sampled_from([0.0123457, 0.3010299, 0.4501237, 0.7071067, 0.9990001]))
def test_kept_boxes_equal_those_of_a_plain_implementation(shapes: list[Box], threshold: float) -> None:
    boxes = corners(shapes)
    assert apply_nms(boxes, None, threshold).tolist() == by_loops(boxes.tolist(), None, threshold)


@given(shapes=boxes_of_all_kinds, seed=st.integers(0, 1000))
def test_boxes_of_different_classes_do_not_suppress_each_other(shapes: list[Box], seed: int) -> None:
    boxes = corners(shapes)
    classes = np.random.default_rng(seed).choice([0, 1, 7, 2**32 - 1], len(boxes))
    assert apply_nms(boxes, classes, 0.4501237).tolist() == by_loops(boxes.tolist(), classes.tolist(), 0.4501237)


def test_boxes_far_outside_the_frame_do_not_suppress_other_classes() -> None:
    """Moving classes apart by the largest coordinate alone, as OpenCV's own batched function does, fails here."""
    boxes = np.array([(-900, 0, -800, 10), (-889, 0, -789, 10)], np.float64)
    assert apply_nms(boxes, np.array([0, 1]), 0.4).tolist() == [0, 1]
    shapes = np.array([(-900, 0, 100, 10), (-889, 0, 100, 10)], np.float64)
    assert len(np.ravel(cv2.dnn.NMSBoxesBatched(shapes, np.array([0.9, 0.8]), np.array([0, 1]), 0.0, 0.4))) >= 1


def test_no_box_and_a_single_box_are_not_changed() -> None:
    assert apply_nms(np.empty((0, 4)), np.empty(0, np.int64), 0.5).tolist() == []
    assert apply_nms(np.array([[0.0, 0.0, 1.0, 1.0]]), None, 0.5).tolist() == [0]


def test_of_equal_boxes_the_first_is_kept() -> None:
    assert apply_nms(np.tile([1.0, 2.0, 3.0, 4.0], (2048, 1)), np.zeros(2048, np.int64), 0.99).tolist() == [0]


def test_two_thousand_separate_boxes_are_all_kept_in_order() -> None:
    left = np.arange(2048.0)[:, None] * [1, 0, 1, 0]
    boxes = left * 2 + [0, 0, 1, 1]
    assert apply_nms(boxes, None, 0.1).tolist() == list(range(2048))


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_the_widest_accepted_boxes_are_compared_correctly(threshold: float) -> None:
    boxes = np.array([(-1e6, -1e6, 1e6, 1e6), (-1e6, -1e6, 1e6, 1e6), (5e5, 5e5, 1e6, 1e6)])
    classes = np.array([3, 3, 4])
    assert apply_nms(boxes, classes, threshold).tolist() == [0, 2]
