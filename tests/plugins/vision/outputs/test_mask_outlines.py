"""Polygons of object masks enclose the object's pixels, and stay small."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.plugins.vision.outputs.instance_masks import MAX_OUTLINE_POINTS, MAX_OUTLINES, outline_polygons
from edge_server.protocol.frame_messages import ObjectMask

cv2 = pytest.importorskip("cv2")


def mask_of(pixels: np.ndarray) -> ObjectMask:
    return ObjectMask(10, 20, pixels.shape[1], pixels.shape[0], np.packbits(pixels).tobytes())


def area(polygon: list[list[int]]) -> float:
    return float(cv2.contourArea(np.array(polygon, np.int32)))


def test_a_rectangle_has_the_corners_of_its_outermost_pixels() -> None:
    pixels = np.zeros((6, 9), bool)
    pixels[1:4, 2:7] = True
    (polygon,) = outline_polygons(mask_of(pixels))
    assert sorted(map(tuple, polygon)) == [(12, 21), (12, 24), (17, 21), (17, 24)]


def test_a_single_pixel_is_a_square_and_no_pixel_is_nothing() -> None:
    assert [area(polygon) for polygon in outline_polygons(mask_of(np.ones((1, 1), bool)))] == [1.0]
    assert outline_polygons(mask_of(np.zeros((3, 5), bool))) == []


def test_parts_are_sorted_by_size_and_holes_are_filled() -> None:
    pixels = np.zeros((40, 60), bool)
    pixels[2:8, 2:8] = pixels[12:40, 20:60] = True
    pixels[20:30, 30:40] = False
    assert [area(polygon) for polygon in outline_polygons(mask_of(pixels))] == [28 * 40, 36]


def test_an_ellipse_is_enclosed_by_few_points() -> None:
    y, x = np.mgrid[:300, :200]
    pixels = ((x - 100) / 90) ** 2 + ((y - 150) / 140) ** 2 < 1
    (polygon,) = outline_polygons(mask_of(pixels))
    filled = cv2.fillPoly(np.zeros((300, 200), np.uint8), [np.array(polygon) - (10, 20)], 1)
    assert len(polygon) < 60
    assert (filled & pixels).sum() / (filled | pixels).sum() > 0.98


@pytest.mark.parametrize("blur", [0, 3, 9])
def test_noise_stays_within_the_limits(blur: int) -> None:
    noise = np.random.default_rng(1).normal(size=(400, 500))
    polygons = outline_polygons(mask_of((cv2.GaussianBlur(noise, (0, 0), blur) if blur else noise) > 0))
    assert 0 < len(polygons) <= MAX_OUTLINES
    assert sum(map(len, polygons)) <= MAX_OUTLINE_POINTS
