"""Camera models from CameraInfo: directions of pixels against OpenCV's projection, and refused calibrations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.depth.camera_model import is_rectified_topic, read_camera_info
from edge_server.plugins.ros.transports.transport import topic_beside

PLUMB_BOB = (-0.32, 0.12, 0.0009, -0.0007, -0.02)
"""A wide lens with strong barrel distortion."""

RATIONAL = (0.45, -2.6, 0.0008, -0.0004, 1.6, 0.33, -2.4, 1.5)
"""Coefficients of the size that depth cameras report."""


def camera_info(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "width": 640, "height": 480, "distortion_model": "plumb_bob", "d": [0.0] * 5,
        "k": [525.0, 0.0, 319.5, 0.0, 520.0, 239.5, 0.0, 0.0, 1.0],
        "p": [510.0, 0.0, 318.0, 0.0, 0.0, 510.0, 241.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        "binning_x": 0, "binning_y": 0, "roi": SimpleNamespace(x_offset=0, y_offset=0, width=0, height=0),
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def pixels_of(points: np.ndarray, info: Any) -> np.ndarray:
    """Project points in space by OpenCV; count pixels from the corner of the image."""
    matrix = np.array(info.k).reshape(3, 3)
    found, _ = cv2.projectPoints(points.reshape(-1, 1, 3), np.zeros(3), np.zeros(3), matrix, np.array(info.d))
    return found.reshape(-1, 2) + 0.5


@given(
    x=st.floats(-0.55, 0.55), y=st.floats(-0.42, 0.42), depth=st.floats(0.2, 20),
    d=st.sampled_from([(), (0.0,) * 5, PLUMB_BOB[:4], PLUMB_BOB, RATIONAL]), resolution=st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_the_direction_of_a_projected_point_leads_back_to_it(
    x: float, y: float, depth: float, d: tuple[float, ...], resolution: int
) -> None:
    point = np.array([[x * depth, y * depth, depth]])
    info = camera_info(d=list(d), distortion_model="rational_polynomial" if len(d) == 8 else "plumb_bob")
    camera = read_camera_info(info, is_rectified=False)
    pixels = pixels_of(point, info) * resolution
    direction = camera.find_directions(pixels, 640 * resolution, 480 * resolution)
    assert np.abs(direction * depth - point[:, :2]).max() < 1e-6 * depth


def test_the_matrix_of_a_rectified_image_is_p() -> None:
    camera = read_camera_info(camera_info(d=list(PLUMB_BOB)), is_rectified=True)
    assert camera == (640, 480, 510.0, 510.0, 318.5, 241.5, ())
    assert camera.find_directions(np.array([318.5, 751.5]), 640, 480).tolist() == [0.0, 1.0]


def test_binning_and_region_of_interest_move_the_centre() -> None:
    region = SimpleNamespace(x_offset=120, y_offset=40, width=400, height=300)
    info = camera_info(binning_x=2, binning_y=2, roi=region)
    camera = read_camera_info(info, is_rectified=False)
    assert (camera.width, camera.height) == (200, 150)
    point = np.array([[0.1, -0.05, 1.0]])
    pixel = (pixels_of(point, info) - (120, 40)) / 2
    assert camera.find_directions(pixel, 200, 150)[0] == pytest.approx((0.1, -0.05))


def test_a_pixel_that_the_lens_cannot_have_drawn_has_no_direction() -> None:
    info = camera_info(d=[-0.5, 0.0, 0.0, 0.0, 0.0])
    camera = read_camera_info(info, is_rectified=False)
    # x (1 - 0.5 x x) is at most 0.544.
    pixels = np.array([(320 + 0.5 * 525, 240.0), (320 + 0.6 * 525, 240.0)])
    near, far = camera.find_directions(pixels, 640, 480)
    assert math.isclose(near[0] * (1 - 0.5 * near[0] ** 2), 0.5, rel_tol=1e-9)
    assert np.isnan(far).all()


@pytest.mark.parametrize(
    ("changes", "is_rectified", "message"),
    [
        ({"k": [0.0] * 9}, False, r"expected a calibrated camera, given focal lengths 0 and 0 in K"),
        ({"p": [0.0] * 12}, True, r"expected a calibrated camera, given focal lengths 0 and 0 in P"),
        ({"k": [math.nan] * 9}, False, r"expected finite numbers in 'k' of a camera_info"),
        ({"p": [1.0] * 9}, True, r"expected finite numbers in 'p' of a camera_info"),
        ({"width": 0}, False, r"expected the size of the calibrated image, given 0x480"),
        (
            {"distortion_model": "equidistant", "d": [0.1, 0.0, 0.0, 0.0]}, False,
            r"expected the distortion model plumb_bob or .*, given 'equidistant' with 4; use the rectified image",
        ),
        ({"distortion_model": "rational_polynomial", "d": [0.1] * 14}, False, r"'rational_polynomial' with 14"),
    ],
)  # fmt: skip
def test_a_calibration_that_cannot_be_used_is_refused(
    changes: dict[str, Any], is_rectified: bool, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_camera_info(camera_info(**changes), is_rectified=is_rectified)


def test_an_image_of_another_shape_is_refused() -> None:
    camera = read_camera_info(camera_info(), is_rectified=False)
    expected = "expected one field of view, given 1920x1080 of the image and 640x480 of its camera_info"
    with pytest.raises(InvalidRequest, match=expected):
        camera.find_directions(np.zeros((1, 2)), 1920, 1080)


@pytest.mark.parametrize(
    ("image_topic", "info_topic", "is_rectified"),
    [
        ("/camera/color/image_raw", "/camera/color/camera_info", False),
        ("/camera/color/image_raw/compressed", "/camera/color/camera_info", False),
        ("/left/image_rect_color", "/left/camera_info", True),
        ("/left/image_rect/compressed", "/left/camera_info", True),
        ("/rect/direct", "/rect/camera_info", False),
        ("/image", "/camera_info", False),
        ("image", "camera_info", False),
    ],
)
def test_names_of_topics_follow_the_conventions_of_ros(image_topic: str, info_topic: str, is_rectified: bool) -> None:
    assert topic_beside(image_topic, "camera_info") == info_topic
    assert is_rectified_topic(image_topic) is is_rectified
