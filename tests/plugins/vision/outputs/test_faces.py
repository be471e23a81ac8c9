"""YuNet and BlazeFace against plain loops over the same numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import BackendError
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.protocol.frame_messages import Returns

WISH = Returns(has_detections=True)
WIDTH, HEIGHT = 96, 64
SIZE = (WIDTH, HEIGHT)
IOU = 0.4501237
IOU_KEY = {"detection_iou_threshold": str(IOU)}

inputs = given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["stretch", "letterbox", "crop"]),
    picture=st.tuples(st.integers(1, 300), st.integers(1, 300)),
)


def cells(stride: int) -> list[tuple[int, int]]:
    return [(x, y) for y in range(HEIGHT // stride) for x in range(WIDTH // stride)]


PARTS = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
YUNET = {f"{part}_{stride}": (len(cells(stride)), width) for part, width in PARTS.items() for stride in (8, 16, 32)}


@pytest.fixture(scope="module")
def yunet(make_model: Any) -> Any:
    return make_perception_decoder(make_model({"detection_head": "yunet", **IOU_KEY}, YUNET, size=SIZE))


@inputs
def test_the_twelve_outputs_of_yunet(yunet, make_fit, check_detections, seed, mode, picture) -> None:
    random = np.random.default_rng(seed)
    # Squares, so that the root is exact; beyond 0 to 1 too, where scores are cut.
    levels = np.array([-1, 0, 1 / 4, 9 / 16, 1, 4], np.float32)
    outputs = {
        name: (random.choice(levels, shape) if name[:3] in ("cls", "obj") else random.normal(0, 1, shape)).astype(
            np.float32
        )[None]
        for name, shape in YUNET.items()
    }
    finds = []
    for stride in (8, 16, 32):
        for place, (x, y) in enumerate(cells(stride)):
            one, two = (float(outputs[f"{part}_{stride}"][0, place, 0]) for part in ("cls", "obj"))
            score = math.sqrt(min(max(one, 0), 1) * min(max(two, 0), 1))
            if score < 0.25:
                continue
            dx, dy, w, h = outputs[f"bbox_{stride}"][0, place].tolist()
            cx, cy, w, h = (x + dx) * stride, (y + dy) * stride, math.exp(w) * stride, math.exp(h) * stride
            marks = outputs[f"kps_{stride}"][0, place].tolist()
            points = [((x + marks[2 * i]) * stride, (y + marks[2 * i + 1]) * stride, 1.0) for i in range(5)]
            finds.append(([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], score, 0, points))
    fit = make_fit(mode, *picture, size=SIZE)
    check_detections(yunet.decode(outputs, 0, fit, WISH, model="net").detections, finds, fit, iou=IOU)


def test_outputs_of_other_shapes_are_refused_also_after_good_ones(yunet, make_fit) -> None:
    good = {name: np.zeros((1, *shape), np.float32) for name, shape in YUNET.items()}
    fit = make_fit("stretch", WIDTH, HEIGHT, size=SIZE)
    for _ in range(2):
        assert yunet.decode(good, 0, fit, WISH, model="net").detections == ()
        with pytest.raises(BackendError, match=r"'kps_16' \[3, 10\]"):
            yunet.decode({**good, "kps_16": np.zeros((1, 3, 10), np.float32)}, 0, fit, WISH, model="net")


ANCHORS = [(8, x, y) for x, y in cells(8) for _ in range(2)] + [(16, x, y) for x, y in cells(16) for _ in range(6)]
BLAZE = {"classificators": (len(ANCHORS), 1), "regressors": (len(ANCHORS), 16)}


@pytest.fixture(scope="module")
def blazeface(make_model: Any) -> Any:
    spec = make_model({"detection_head": "blazeface", **IOU_KEY}, BLAZE, size=SIZE)
    return make_perception_decoder(spec)


@inputs
def test_the_anchors_of_blazeface(blazeface, make_fit, check_detections, seed, mode, picture) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(0, 20, BLAZE["regressors"]).astype(np.float32)
    logits = random.normal(-1, 2, BLAZE["classificators"]).astype(np.float32)
    finds = []
    for (stride, x, y), row, [logit] in zip(ANCHORS, values.tolist(), logits.tolist(), strict=True):
        score = 1 / (1 + math.exp(-logit))
        if score < 0.25:
            continue
        cx, cy = (x + 0.5) * stride, (y + 0.5) * stride
        half_w, half_h = row[2] / 2, row[3] / 2
        middle_x, middle_y = cx + row[0], cy + row[1]
        points = [(cx + row[4 + 2 * i], cy + row[5 + 2 * i], 1.0) for i in range(6)]
        box = [middle_x - half_w, middle_y - half_h, middle_x + half_w, middle_y + half_h]
        finds.append((box, score, 0, points))
    fit = make_fit(mode, *picture, size=SIZE)
    outputs = {"regressors": values[None], "classificators": logits[None]}
    check_detections(blazeface.decode(outputs, 0, fit, WISH, model="net").detections, finds, fit, iou=IOU)


def test_the_short_range_network_has_896_anchors(make_model: Any) -> None:
    made = make_perception_decoder(
        make_model({"detection_head": "blazeface"}, {"box": (896, 16), "score": (896, 1)}, size=(128, 128))
    )
    assert made is not None


@pytest.mark.sample
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, 1.0])
@pytest.mark.parametrize(("head", "shapes"), [("yunet", YUNET), ("blazeface", BLAZE)])
def test_constant_outputs_give_valid_faces_or_none(make_model, make_fit, head, shapes, value) -> None:
    made = make_perception_decoder(make_model({"detection_head": head}, shapes, size=SIZE))
    outputs = {name: np.full((1, *shape), value, np.float32) for name, shape in shapes.items()}
    fit = make_fit("letterbox", 640, 480, size=SIZE)
    for one in made.decode(outputs, 0, fit, WISH, model="net").detections:
        assert 0 <= one.x_min < one.x_max <= 640
        assert all(math.isfinite(point.x + point.y) for point in one.keypoints)
