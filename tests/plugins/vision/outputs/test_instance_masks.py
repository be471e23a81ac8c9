"""Masks of objects against prototypes whose weighted sum is a known plane: a pixel belongs to the object where it is
above 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import BackendError, BadModelConfig
from edge_server.plugins.vision.outputs.instance_masks import MAX_MASKS
from edge_server.plugins.vision.perception_decoder import PerceptionDecoder, make_perception_decoder
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import Detection, Returns

SIDE, CELLS = 64, 16
MASKS = Returns(has_detections=True, has_mask=True)
SHAPES = {"yolov5": (40, 5 + 2 + 3), "yolov8": (4 + 2 + 3, 40), "yolov10": (40, 6 + 3)}


@pytest.fixture(scope="module")
def plan(make_model: Any) -> Callable[..., PerceptionDecoder]:
    def make(head: str, prototypes: tuple[int, ...] = (3, CELLS, CELLS), **parameters: str) -> PerceptionDecoder:
        stated = {"detection_head": head, "detection_mask_coefficients": "3", **parameters}
        made = make_perception_decoder(make_model(stated, {"boxes": SHAPES[head], "protos": prototypes}))
        assert made is not None
        return made

    return make


def planes() -> np.ndarray:
    """Prototypes: column, row and 1. Interpolation between their cells is exact."""
    row, column = np.mgrid[:CELLS, :CELLS]
    return np.stack((column, row, np.ones_like(row))).astype(np.float32)[None]


def answer(head: str, boxes: np.ndarray, coefficients: np.ndarray) -> dict[str, np.ndarray]:
    """Outputs with boxes as corners in the input; the scores fall."""
    scores = np.linspace(0.9, 0.5, len(boxes))[:, None]
    centred = np.concatenate(((boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]), axis=1)
    zeros, ones = np.zeros_like(scores), np.ones_like(scores)
    rows = {
        "yolov5": (centred, ones, zeros, scores, coefficients),
        "yolov8": (centred, zeros, scores, coefficients),
        "yolov10": (boxes, scores, ones, coefficients),
    }[head]
    found = np.concatenate(rows, axis=1).astype(np.float32)
    return {"boxes": (found.T if head == "yolov8" else found)[None], "protos": planes()}


def check_mask(found: Detection, coefficients: np.ndarray, fit: FittedPicture) -> None:
    mask = found.mask
    assert mask is not None
    columns, rows = np.arange(mask.x, mask.x + mask.width), np.arange(mask.y, mask.y + mask.height)
    box = (found.x_min, found.y_min, found.x_max, found.y_max)
    assert all(box[0] <= column < box[2] for column in columns)
    assert all(box[1] <= row < box[3] for row in rows)
    assert (len(columns), len(rows)) == (np.ceil(box[2]) - np.ceil(box[0]), np.ceil(box[3]) - np.ceil(box[1]))
    x = ((columns + 0.5) * fit.scale_x + fit.offset_x) * CELLS / SIDE - 0.5
    y = ((rows + 0.5) * fit.scale_y + fit.offset_y) * CELLS / SIDE - 0.5
    x, y = np.clip(x, 0, CELLS - 1), np.clip(y, 0, CELLS - 1)
    total = coefficients[0] * x + coefficients[1] * y[:, None] + coefficients[2]
    # OpenCV before 5 takes steps of a 32nd of a cell.
    is_clear = np.abs(total) > np.abs(coefficients[:2]).sum() / 16
    assert (mask.pixels() == (total > 0))[is_clear].all()


@pytest.mark.parametrize("head", SHAPES)
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["stretch", "letterbox", "crop"]),
    picture=st.tuples(st.integers(1, 300), st.integers(1, 300)),
)
def test_pixels_with_a_positive_sum_of_prototypes_belong_to_the_object(
    plan, make_fit, head, seed, mode, picture
) -> None:
    random = np.random.default_rng(seed)
    low = random.uniform(-10, 60, (5, 2))
    boxes = np.concatenate((low, low + random.uniform(1, 50, (5, 2))), axis=1)
    coefficients = random.normal(0, 1, (5, 3)).astype(np.float32)
    coefficients[:, 2] *= CELLS / 2
    fit = make_fit(mode, *picture)
    overlaps = {} if head == "yolov10" else {"detection_iou_threshold": "1"}
    outputs = answer(head, boxes, coefficients)
    decoder = plan(head, **overlaps)
    detections = decoder.decode(outputs, 0, fit, MASKS, model="net").detections
    for found in detections:
        index = int(np.argmin(np.abs(np.linspace(0.9, 0.5, 5) - found.score)))
        if found.mask is None:
            assert np.ceil(found.x_max) == np.ceil(found.x_min) or np.ceil(found.y_max) == np.ceil(found.y_min)
        else:
            check_mask(found, coefficients[index], fit)
    without = decoder.decode(outputs, 0, fit, Returns(has_detections=True), model="net").detections
    assert [found.mask for found in without] == [None] * len(detections)
    assert [found.x_min for found in without] == [found.x_min for found in detections]


def test_a_mask_is_detections_with_masks(plan) -> None:
    decoder = plan("yolov8")
    assert decoder.what == MASKS
    assert decoder.settle(Returns(has_mask=True), model="net") == MASKS
    assert decoder.settle(Returns(has_detections=True), model="net") == Returns(has_detections=True)
    assert decoder.output_names(Returns(has_detections=True)) == ("boxes",)
    assert decoder.output_names(MASKS) == ("boxes", "protos")


def test_only_the_best_objects_have_masks(plan, make_fit, monkeypatch) -> None:
    count = MAX_MASKS + 1
    boxes = np.array([(x, y, x + 4, y + 4) for y in range(0, 60, 5) for x in range(0, 60, 5)][:count], float)
    outputs = answer("yolov10", boxes, np.ones((count, 3)))
    decoder = plan("yolov10", detection_max="200")
    fit = make_fit("stretch", SIDE, SIDE)

    def has_mask() -> list[bool]:
        return [one.mask is not None for one in decoder.decode(outputs, 0, fit, MASKS, model="net").detections]

    assert has_mask() == [True] * MAX_MASKS + [False]
    monkeypatch.setattr("edge_server.plugins.vision.outputs.instance_masks.MAX_PIXELS", 3 * 16)
    assert has_mask() == [True] * 3 + [False] * (count - 3)


def test_prototypes_that_are_not_numbers_make_empty_masks(plan, make_fit) -> None:
    outputs = answer("yolov8", np.array([[0.0, 0, 30, 30]]), np.ones((1, 3)))
    outputs["protos"][:] = np.nan
    (found,) = plan("yolov8").decode(outputs, 0, make_fit("stretch", SIDE, SIDE), MASKS, model="net").detections
    assert found.mask is not None
    assert not found.mask.pixels().any()


def test_prototypes_of_another_shape_are_an_error(plan, make_fit) -> None:
    outputs = answer("yolov8", np.array([[0.0, 0, 30, 30]]), np.ones((1, 3)))
    outputs["protos"] = outputs["protos"][:, :2]
    with pytest.raises(BackendError, match=r"'protos': expected \[3, height, width\], given \[2, 16, 16\]"):
        plan("yolov8").decode(outputs, 0, make_fit("stretch", SIDE, SIDE), MASKS, model="net")


@pytest.mark.parametrize(
    ("parameters", "outputs", "reason"),
    [
        ({}, {"boxes": (9, 40)}, "expected 2 of its outputs"),
        ({}, {"boxes": (9, 40), "more": (9, 40)}, "given no parameter 'detection_outputs'"),
        ({}, {"boxes": (9, 40), "protos": (4, 16, 16)}, r"expected prototypes \[3, height, width\], given 'protos'"),
        ({}, {"boxes": (7, 40), "protos": (3, 16, 16)}, r"expected \[4 \+ classes \+ 3 mask coefficients, boxes\]"),
        ({"detection_keypoints": "1"}, {"boxes": (9, 40)}, "left out beside detection_keypoints"),
        ({"detection_head": "ssd"}, {"boxes": (9, 40)}, "detection_head ssd has no use for it"),
    ],
)
def test_outputs_that_give_no_masks_are_refused(make_model, parameters, outputs, reason) -> None:
    stated = {"detection_head": "yolov8", "detection_mask_coefficients": "3", **parameters}
    with pytest.raises(BadModelConfig, match=reason):
        make_perception_decoder(make_model(stated, outputs))
