"""Positions of objects in rendered depth images: errors in millimetres against the scene."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.depth.camera_model import CameraModel
from edge_server.plugins.ros.depth.object_positions import DepthImage, detections3d_message, read_depth_image
from edge_server.plugins.ros.messages.message_conversion import Detection3DMessage
from edge_server.protocol.frame_messages import Detection, FrameHeader, FrameResult, ObjectMask, RotatedBox

CAMERA = CameraModel(640, 480, 525.0, 520.0, 320.0, 240.0)
HEADER = FrameHeader(12, 500, "camera_optical", 7)


def rays(camera: CameraModel, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x/z and y/z of each pixel's middle."""
    columns, rows = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    scale_x, scale_y = camera.width / width, camera.height / height
    return (columns * scale_x - camera.cx) / camera.fx, (rows * scale_y - camera.cy) / camera.fy


def render_plane(slope: float, distance: float, width: int = 640, height: int = 480) -> np.ndarray:
    """Return the depths of the plane z = distance + slope x."""
    x, _ = rays(CAMERA, width, height)
    return distance / (1 - slope * x)


def render_sphere(center: tuple[float, float, float], radius: float, width: int = 640, height: int = 480) -> np.ndarray:
    """Return the depths of a sphere's front, NaN beside it."""
    x, y = rays(CAMERA, width, height)
    square = x * x + y * y + 1
    half = (x * center[0] + y * center[1] + center[2]) / square
    with np.errstate(invalid="ignore"):
        depths: np.ndarray = half - np.sqrt(half * half - (np.dot(center, center) - radius**2) / square)
    return depths


def depth_image(depths: np.ndarray, encoding: str = "32FC1", is_bigendian: bool = False) -> DepthImage:
    """Return depths in metres as a message with padded rows, and read it."""
    order = ">" if is_bigendian else "<"
    if encoding == "16UC1":
        values = np.nan_to_num(depths * 1000).round().astype(f"{order}u2")
    else:
        values = depths.astype(f"{order}f4")
    rows = np.pad(np.ascontiguousarray(values).view(np.uint8), ((0, 0), (0, 12)), constant_values=255)
    return read_depth_image(depth_message(rows.tobytes(), *values.shape, encoding, rows.shape[1], is_bigendian))


def depth_message(
    data: bytes, height: int, width: int, encoding: str, step: int, is_bigendian: bool = False
) -> SimpleNamespace:
    stamp = SimpleNamespace(sec=12, nanosec=500)
    return SimpleNamespace(
        header=SimpleNamespace(stamp=stamp, frame_id="camera_optical"), height=height, width=width, encoding=encoding,
        step=step, is_bigendian=int(is_bigendian), data=data,
    )  # fmt: skip


def box_around(center: tuple[float, float, float], half_width: float, half_height: float) -> Detection:
    """Return the box that an upright rectangle with this centre has in a frame of 640 x 480."""
    x, y, z = center
    left, right = (CAMERA.cx + CAMERA.fx * (x + side * half_width) / z for side in (-1, 1))
    top, bottom = (CAMERA.cy + CAMERA.fy * (y + side * half_height) / z for side in (-1, 1))
    return Detection(left, top, right, bottom, 0.75, 3, "cup", track_id=7)


def place(image: DepthImage, *found: Detection, size: tuple[int, int] = (640, 480)) -> tuple[Detection3DMessage, ...]:
    result = FrameResult(HEADER, width=size[0], height=size[1], detections=found)
    message = detections3d_message(result, image, CAMERA)
    assert message.header == HEADER
    return message.detections


def error_mm(found: Detection3DMessage, truth: tuple[float, float, float]) -> float:
    return 1000 * math.dist((found.x, found.y, found.z), truth)


@pytest.mark.parametrize("encoding", ["16UC1", "32FC1"])
@pytest.mark.parametrize("is_bigendian", [False, True])
def test_an_object_before_a_wall_has_its_position_and_size(encoding: str, is_bigendian: bool) -> None:
    truth = (0.3, -0.2, 1.5)
    found = box_around(truth, 0.1, 0.15)
    depths = render_plane(0, 4.0)
    depths[int(found.y_min) : int(found.y_max) + 1, int(found.x_min) : int(found.x_max) + 1] = truth[2]
    (placed,) = place(depth_image(depths, encoding, is_bigendian), found)
    assert error_mm(placed, truth) < 1
    assert (placed.size_x, placed.size_y) == pytest.approx((0.2, 0.3), abs=1e-3)
    assert (placed.size_z, placed.theta) == (0, 0)
    assert (placed.hypothesis.class_id, placed.hypothesis.score, placed.track_id) == ("cup", 0.75, "7")


def test_the_position_on_an_inclined_plane_is_that_of_the_boxs_centre() -> None:
    slope, distance = 0.5, 2.0
    x = 0.25
    truth = (x, 0.1, distance + slope * x)
    (placed,) = place(depth_image(render_plane(slope, distance)), box_around(truth, 0.1, 0.1))
    # Depth grows faster than pixels.
    assert error_mm(placed, truth) < 3
    # The inner half of the box, without the outermost parts.
    assert placed.size_z == pytest.approx(0.9 * slope * 0.1, rel=0.15)


def test_the_position_of_a_sphere_is_on_its_front() -> None:
    center, radius = (-0.4, 0.25, 2.0), 0.2
    direction = np.array(center) / np.linalg.norm(center)
    front = np.array(center) - direction * radius
    depths = np.where(np.isnan(sphere := render_sphere(center, radius)), 5.0, sphere)
    (placed,) = place(depth_image(depths), box_around(center, radius, radius))
    # Within the inner part the surface recedes by up to 1 - sqrt(1 - 2 * 0.5 ** 2) of the radius.
    assert -5 < 1000 * (placed.z - front[2]) < 1000 * radius * 0.3
    assert 0 < placed.size_z < radius * 0.3


def test_two_objects_at_different_depths_are_kept_apart() -> None:
    near, far = (-0.2, 0.0, 1.0), (0.5, 0.1, 2.5)
    boxes = box_around(near, 0.15, 0.2), box_around(far, 0.3, 0.3)
    depths = render_plane(0, 6.0)
    for box, (_, _, z) in zip(reversed(boxes), (far, near), strict=True):
        depths[int(box.y_min) : int(box.y_max), int(box.x_min) : int(box.x_max)] = z
    placed = place(depth_image(depths, "16UC1"), *boxes)
    assert [error_mm(one, truth) < 1 for one, truth in zip(placed, (near, far), strict=True)] == [True, True]


def test_holes_and_noise_move_the_median_by_millimetres() -> None:
    chance = np.random.default_rng(5)
    truth = (0.1, 0.05, 1.2)
    found = box_around(truth, 0.12, 0.12)
    depths = render_plane(0, truth[2]) + chance.normal(0, 0.01, (480, 640))
    depths[chance.random((480, 640)) < 0.4] = np.nan
    # Some of the pixels at edges lie between the object and the wall behind it.
    flying = chance.random((480, 640)) < 0.1
    depths[flying] += chance.uniform(0, 3, int(flying.sum()))
    for encoding in ("32FC1", "16UC1"):
        (placed,) = place(depth_image(depths, encoding), found)
        assert error_mm(placed, truth) < 4
        assert placed.size_z < 0.06


@pytest.mark.parametrize("hole", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_an_object_that_is_mostly_a_hole_is_left_out(hole: float) -> None:
    glass, cup = box_around((-0.4, 0.0, 1.0), 0.1, 0.1), box_around((0.4, 0.0, 1.0), 0.1, 0.1)
    depths = render_plane(0, 1.0)
    depths[:, :320] = hole
    # A fifth of its inner part reflects something.
    depths[:, int(glass.x_min) : int(glass.x_min + 0.35 * (glass.x_max - glass.x_min))] = 0.8
    (placed,) = place(depth_image(depths), glass, cup)
    assert placed.x == pytest.approx(0.4)


def test_the_object_is_nearer_than_half_of_its_box() -> None:
    """Never between object and background: of two middle depths the nearer one counts."""
    found = box_around((0.0, 0.0, 1.0), 0.1, 0.1)
    depths = render_plane(0, 3.0)
    depths[:, : int(CAMERA.cx)] = 1.0
    (placed,) = place(depth_image(depths), found)
    assert placed.z == pytest.approx(1.0)


def test_the_mask_of_an_object_decides_which_pixels_are_its_own() -> None:
    found = box_around((0.0, 0.0, 1.0), 0.2, 0.2)
    x, y = int(found.x_min), int(found.y_min)
    size = int(found.x_max) - x
    depths = render_plane(0, 3.0)
    pixels = np.zeros((size, size), np.bool_)
    # A frame: the inner part of the box shows the wall behind it.
    pixels[: size // 6], pixels[:, : size // 6] = True, True
    depths[y : y + size, x : x + size][pixels] = 1.0
    (through,) = place(depth_image(depths), found)
    assert through.z == pytest.approx(3.0)
    mask = ObjectMask(x, y, size, size, np.packbits(pixels).tobytes())
    fields = {name: getattr(found, name) for name in ("x_min", "y_min", "x_max", "y_max", "score", "class_index")}
    (placed,) = place(depth_image(depths), Detection(**fields, mask=mask))
    assert placed.z == pytest.approx(1.0)


@pytest.mark.parametrize(("width", "height"), [(320, 240), (160, 120), (1280, 960)])
def test_a_depth_image_of_another_resolution_is_scaled(width: int, height: int) -> None:
    truth = (0.25, -0.1, 1.25)
    depths = render_plane(0.4, truth[2] - 0.4 * truth[0], width, height)
    (placed,) = place(depth_image(depths, "16UC1"), box_around(truth, 0.05, 0.05))
    assert error_mm(placed, truth) < 6


def test_a_frame_of_another_resolution_than_the_calibration_is_scaled() -> None:
    truth = (0.25, -0.1, 1.25)
    found = box_around(truth, 0.05, 0.05)
    double = Detection(*(2 * side for side in (found.x_min, found.y_min, found.x_max, found.y_max)), 0.5, 1)
    (placed,) = place(depth_image(render_plane(0, truth[2])), double, size=(1280, 960))
    assert error_mm(placed, truth) < 1
    assert placed.size_x == pytest.approx(0.1)


@given(
    x=st.floats(0, 640), y=st.floats(0, 480), width=st.floats(0.5, 300), height=st.floats(0.5, 300),
    angle=st.floats(0, math.pi / 2, exclude_max=True), depth=st.floats(0.1, 60),
)  # fmt: skip
def test_the_projected_position_is_the_centre_of_the_box(
    x: float, y: float, width: float, height: float, angle: float, depth: float
) -> None:
    box = RotatedBox(x, y, width, height, angle)
    found = Detection(0, 0, 640, 480, 0.5, 1, rotated=box)
    for placed in place(DepthImage(0, np.full((480, 640), depth, np.float32), 1.0, 0), found):
        assert placed.z == pytest.approx(depth)
        assert (placed.x / placed.z * CAMERA.fx + CAMERA.cx) == pytest.approx(x, abs=1e-6)
        assert (placed.y / placed.z * CAMERA.fy + CAMERA.cy) == pytest.approx(y, abs=1e-6)
        # The sides, turned by theta, are those of the box.
        side = np.array([math.cos(placed.theta), math.sin(placed.theta)]) * placed.size_x / placed.z
        assert side * (CAMERA.fx, CAMERA.fy) == pytest.approx(
            (width * math.cos(angle), width * math.sin(angle)), abs=1e-6
        )


def test_the_inner_part_of_an_oriented_box_is_turned_with_it() -> None:
    depths = render_plane(0, 3.0)
    rows, columns = np.mgrid[:480, :640]
    depths[np.abs((columns - 320) - (rows - 240)) < 15] = 1.0
    bar = Detection(200, 120, 440, 360, 0.5, 1, rotated=RotatedBox(320, 240, 300, 20, math.pi / 4))
    upright = Detection(200, 120, 440, 360, 0.5, 1)
    turned, box = place(depth_image(depths), bar, upright)
    assert (turned.z, box.z) == pytest.approx((1.0, 3.0))


def test_boxes_that_reach_out_of_the_frame_are_measured_inside() -> None:
    outside = Detection(0, 0, 1, 1, 0.5, 1, rotated=RotatedBox(-500, -500, 20, 20, 0.3))
    edge = Detection(600, 400, 640, 480, 0.5, 1, rotated=RotatedBox(630, 470, 60, 60, 0.7))
    empty = Detection(640, 480, 640, 480, 0.5, 1)
    (placed,) = place(depth_image(render_plane(0, 2.0)), outside, edge, empty)
    assert placed.z == pytest.approx(2.0)


def test_boxes_without_a_pixel_or_a_number_harm_no_other() -> None:
    tiny = Detection(100.2, 100.2, 100.7, 100.7, 0.5, 1, mask=ObjectMask(100, 100, 0, 0, b""))
    broken = [Detection(number, 0, 10, 10, 0.5, 1) for number in (math.nan, math.inf, -1e300)]
    (placed,) = place(depth_image(render_plane(0, 2.0)), *broken, tiny)
    assert placed.z == pytest.approx(2.0)
    last = np.nextafter(480.0, 0)
    edge = Detection(0, 0, 1, 1, 0.5, 1, rotated=RotatedBox(last, last, 0, 0, 0))
    assert len(place(depth_image(render_plane(0, 2.0, 343, 257)), edge)) == 1


def test_each_of_many_boxes_has_its_own_depth() -> None:
    slope, distance = 0.5, 2.0
    truths = [(x, 0.0, distance + slope * x) for x in np.linspace(-0.8, 0.8, 150)]
    placed = place(depth_image(render_plane(slope, distance)), *(box_around(truth, 0.02, 0.02) for truth in truths))
    assert len(placed) == 150
    assert all(error_mm(one, truth) < 3 for one, truth in zip(placed, truths, strict=True))


def test_a_frame_without_detections_has_an_empty_message() -> None:
    assert place(depth_image(render_plane(0, 2.0))) == ()


def test_a_depth_image_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="given 640x480 of the image and 640x360 of its depth image"):
        place(depth_image(render_plane(0, 2.0, 640, 360)), box_around((0, 0, 2), 0.1, 0.1))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (depth_message(bytes(12), 2, 2, "rgb8", 6), r"expected depth as 16UC1 .* or 32FC1 .*, given 'rgb8'"),
        (depth_message(bytes(8), 2, 2, "mono16", 4), "given 'mono16'"),
        (depth_message(bytes(8), 2, 2, "32FC1", 8), "expected 2 rows of 8 bytes with 2 pixels of 32FC1, given 8 bytes"),
        (depth_message(bytes(8), 2, 2, "16UC1", 3), "expected 2 rows of 3 bytes"),
        (depth_message(bytes(8), 0, 2, "16UC1", 4), "expected 0 rows"),
        (depth_message(bytes(8), 2**31, 2**31, "16UC1", 0), "given 8 bytes"),
    ],
)  # fmt: skip
def test_an_image_that_is_no_depth_image_is_refused(message: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        read_depth_image(message)
