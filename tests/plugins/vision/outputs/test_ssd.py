"""Boxes and scores as two outputs, with and without priors, against plain loops over the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.vision.perception_decoder import PerceptionDecoder, make_perception_decoder
from edge_server.protocol.frame_messages import Returns

WISH = Returns(has_detections=True)
WIDTH, HEIGHT = 96, 64
IOU = 0.4501237
COUNT = 25

inputs = given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["stretch", "letterbox", "crop"]),
    picture=st.tuples(st.integers(1, 300), st.integers(1, 300)),
)


@pytest.fixture(scope="module")
def plan(make_model: Any) -> Callable[..., PerceptionDecoder]:
    def make(shapes: dict[str, tuple[int, ...]], **parameters: str) -> PerceptionDecoder:
        stated = {f"detection_{key}": value for key, value in {"iou_threshold": str(IOU), **parameters}.items()}
        made = make_perception_decoder(make_model({"detection_head": "ssd", **stated}, shapes, size=(WIDTH, HEIGHT)))
        assert made is not None
        return made

    return make


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


@inputs
def test_decoded_boxes_and_probabilities(plan, make_fit, check_detections, seed, mode, picture) -> None:
    random = np.random.default_rng(seed)
    boxes = random.uniform(-0.2, 1.2, (COUNT, 4)).astype(np.float32)
    scores = (random.integers(0, 65, (COUNT, 3)) / 64).astype(np.float32)
    finds = []
    for (x_min, y_min, x_max, y_max), row in zip(boxes.tolist(), scores.tolist(), strict=True):
        best = row.index(max(row))
        if row[best] >= 0.25:
            finds.append(([x_min * WIDTH, y_min * HEIGHT, x_max * WIDTH, y_max * HEIGHT], row[best], best, []))
    made = plan({"scores": (COUNT, 3), "boxes": (COUNT, 4)})
    fit = make_fit(mode, *picture, size=(WIDTH, HEIGHT))
    found = made.decode({"scores": scores[None], "boxes": boxes[None]}, 0, fit, WISH, model="net").detections
    check_detections(found, finds, fit, iou=IOU)


def offsets_and_priors(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    offsets = random.normal(0, 2, (COUNT, 4)).astype(np.float32)
    priors = np.concatenate((random.uniform(0, 1, (COUNT, 2)), random.uniform(0.05, 0.5, (COUNT, 2))), axis=1)
    return offsets, priors.astype(np.float32)


def finds_of(offsets: list, priors: list, logits: list, variances: list, background: int) -> list:
    """Rows of priors are centre and size; each of four offsets has its own variance."""
    finds = []
    for (dx, dy, dw, dh), (cx, cy, w, h), row, (vx, vy, vw, vh) in zip(offsets, priors, logits, variances, strict=True):
        shares = [share if index != background else -1.0 for index, share in enumerate(softmax(row))]
        score = max(shares)
        if score < 0.25:
            continue
        x, y = cx + dx * vx * w, cy + dy * vy * h
        half_w, half_h = w * math.exp(dw * vw) / 2, h * math.exp(dh * vh) / 2
        box = [(x - half_w) * WIDTH, (y - half_h) * HEIGHT, (x + half_w) * WIDTH, (y + half_h) * HEIGHT]
        finds.append((box, score, shares.index(score), []))
    return finds


@inputs
@pytest.mark.parametrize("background", [0, 3])
def test_offsets_from_priors_with_background_class_and_logits(
    plan, make_fit, check_detections, background, seed, mode, picture
) -> None:
    random = np.random.default_rng(seed)
    offsets, priors = offsets_and_priors(random)
    logits = random.normal(0, 2, (COUNT, 4)).astype(np.float32)
    finds = finds_of(offsets.tolist(), priors.tolist(), logits.tolist(), [[0.2, 0.2, 0.3, 0.3]] * COUNT, background)
    made = plan(
        {"loc": (COUNT, 4), "conf": (COUNT, 4), "prior": (COUNT, 4)},
        outputs="loc, conf, prior",
        activation="softmax",
        background=str(background),
        variances="0.2,0.3",
    )
    fit = make_fit(mode, *picture, size=(WIDTH, HEIGHT))
    outputs = {"loc": offsets[None], "conf": logits[None], "prior": priors[None]}
    check_detections(made.decode(outputs, 0, fit, WISH, model="net").detections, finds, fit, iou=IOU)


@inputs
def test_corner_priors_have_their_own_variances(plan, make_fit, check_detections, seed, mode, picture) -> None:
    random = np.random.default_rng(seed)
    offsets, priors = offsets_and_priors(random)
    logits = random.normal(0, 2, (COUNT, 3)).astype(np.float32)
    variances = random.uniform(0.1, 0.3, (COUNT, 4)).astype(np.float32)
    finds = finds_of(offsets.tolist(), priors.tolist(), logits.tolist(), variances.tolist(), 0)
    corners = np.concatenate((priors[:, :2] - priors[:, 2:] / 2, priors[:, :2] + priors[:, 2:] / 2), axis=1)
    packed = np.stack((corners.ravel(), variances.ravel())).astype(np.float32)
    made = plan(
        {"loc": (COUNT, 4), "conf": (COUNT, 3), "prior": (2, 4 * COUNT)},
        outputs="loc,conf,prior",
        activation="softmax",
        background="0",
    )
    fit = make_fit(mode, *picture, size=(WIDTH, HEIGHT))
    outputs = {"loc": offsets[None], "conf": logits[None], "prior": packed[None]}
    check_detections(made.decode(outputs, 0, fit, WISH, model="net").detections, finds, fit, iou=IOU)


def test_with_an_iou_threshold_of_one_nothing_is_suppressed(plan, make_fit) -> None:
    boxes = np.tile(np.array([0.2, 0.2, 0.6, 0.6], np.float32), (1, 5, 1))
    scores = np.full((1, 5, 2), 0.5, np.float32)
    made = plan({"boxes": (5, 4), "scores": (5, 2)}, iou_threshold="1")
    fit = make_fit("stretch", 50, 50, size=(WIDTH, HEIGHT))
    assert len(made.decode({"boxes": boxes, "scores": scores}, 0, fit, WISH, model="net").detections) == 5


@given(seed=st.integers(0, 10_000))
def test_any_bits_give_valid_boxes(plan, make_fit, seed) -> None:
    shapes = {"loc": (COUNT, 4), "conf": (COUNT, 3), "prior": (COUNT, 4)}
    random = np.random.default_rng(seed)
    outputs = {
        name: random.integers(0, 2**32, (1, *shape), np.uint32).view(np.float32) for name, shape in shapes.items()
    }
    made = plan(shapes, outputs="loc,conf,prior", score_threshold="0", activation="softmax", background="1")
    fit = make_fit("letterbox", 200, 100, size=(WIDTH, HEIGHT))
    for one in made.decode(outputs, 0, fit, WISH, model="net").detections:
        assert 0 <= one.x_min < one.x_max <= 200
        assert 0 <= one.y_min < one.y_max <= 100
        assert math.isfinite(one.score)
        assert one.class_index in (0, 2)
