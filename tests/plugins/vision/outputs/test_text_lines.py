"""Boxes of text lines from a map of probabilities with known cores, against the formula of DBNet's authors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edge_server.errors import BadModelConfig
from edge_server.plugins.vision.outputs.text_lines import MAX_LINES
from edge_server.plugins.vision.perception_decoder import PerceptionDecoder, make_perception_decoder
from edge_server.protocol.frame_messages import Detection, Returns, RotatedBox

cv2 = pytest.importorskip("cv2")

SIDE = 256
RATIO = 1.6


@pytest.fixture
def decoder(make_model: Any) -> PerceptionDecoder:
    parameters = {"detection_head": "dbnet", "detection_score_threshold": "0.5", "detection_max": "1000"}
    model = make_model(parameters, {"map": (1, -1, -1)}, size=(SIDE, SIDE))
    made = make_perception_decoder(model)
    assert made is not None
    return made


def text_map(*cores: tuple[RotatedBox, float], side: int = SIDE) -> np.ndarray:
    """A map with a rectangle of one probability for each core."""
    row, column = np.mgrid[:side, :side] + 0.5
    found = np.full((side, side), 0.05, np.float32)
    for box, probability in cores:
        right, down = column - box.x, row - box.y
        along = right * math.cos(box.angle) + down * math.sin(box.angle)
        across = down * math.cos(box.angle) - right * math.sin(box.angle)
        found[(np.abs(along) < box.width / 2) & (np.abs(across) < box.height / 2)] = probability
    return found[None, None]


def read(decoder: PerceptionDecoder, found: np.ndarray, fit: Any) -> tuple[Detection, ...]:
    return decoder.decode({"map": found}, 0, fit, Returns(has_detections=True), model="net").detections


@pytest.mark.parametrize("degrees", [0, 3, 30, 45, 80])
def test_a_box_is_the_core_grown_by_area_over_circumference(decoder, make_fit, degrees: int) -> None:
    core = RotatedBox(128.0, 120.0, 120.0, 20.0, math.radians(degrees))
    (found,) = read(decoder, text_map((core, 0.9)), make_fit("letterbox", 2 * SIDE, 2 * SIDE, (SIDE, SIDE)))
    growth = core.width * core.height * RATIO / (core.width + core.height)
    expected = RotatedBox(
        2 * core.x, 2 * core.y, 2 * (core.width + growth), 2 * (core.height + growth), core.angle
    ).corners()
    assert found.rotated is not None
    # A pixel of the map is two of the picture, and whole pixels are enclosed.
    for corner in found.rotated.corners():
        assert min(math.dist(corner, other) for other in expected) < 6
    assert (found.label, found.class_index) == ("text", 0)
    assert 0.75 < found.score <= 0.9


def test_weak_and_tiny_cores_are_no_lines(decoder, make_fit) -> None:
    weak = RotatedBox(60.0, 60.0, 80.0, 16.0, 0.0), 0.4
    tiny = RotatedBox(60.0, 160.0, 20.0, 2.0, 0.0), 0.95
    sure = RotatedBox(180.0, 200.0, 80.0, 16.0, 0.0), 0.95
    found = read(decoder, text_map(weak, tiny, sure), make_fit("stretch", SIDE, SIDE, (SIDE, SIDE)))
    assert [round(one.rotated.x) for one in found if one.rotated] == [180]
    assert read(decoder, text_map(), make_fit("stretch", SIDE, SIDE, (SIDE, SIDE))) == ()


def test_a_smaller_map_covers_the_same_input(decoder, make_fit) -> None:
    small = text_map((RotatedBox(32.0, 30.0, 30.0, 8.0, 0.0), 0.9), side=SIDE // 4)
    (found,) = read(decoder, small, make_fit("stretch", SIDE, SIDE, (SIDE, SIDE)))
    assert found.rotated is not None
    assert (found.rotated.x, found.rotated.y) == pytest.approx((128, 120), abs=1)


def test_noise_gives_a_limited_number_of_lines(decoder, make_fit) -> None:
    noise = np.random.default_rng(0).random((1, 1, SIDE, SIDE), np.float32)
    noise[0, 0, :4] = np.nan
    assert len(read(decoder, noise, make_fit("stretch", SIDE, SIDE, (SIDE, SIDE)))) <= MAX_LINES


def test_an_output_that_is_no_map_is_refused(make_model) -> None:
    with pytest.raises(
        BadModelConfig, match=r"detection_head dbnet: expected \[1, height, width\], given 'map' \[3, 8, 8"
    ):
        make_perception_decoder(make_model({"detection_head": "dbnet"}, {"map": (3, 8, 8)}))
