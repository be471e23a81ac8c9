"""One scene by every path from a camera's frame to a network: the same position, and nearly the same values."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

from edge_server.plugins.vision.image_plan import ImagePlan
from edge_server.plugins.vision.raw_encodings import ENCODINGS, is_depth
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import Frame, FrameHeader, RegionSlice

HEIGHT, WIDTH = 360, 480
MARK = (310, 130, 390, 190)
"""x_min, y_min, x_max, y_max of what a detector would find."""

RULES = [
    {"image_fit": "stretch"},
    {"image_fit": "letterbox", "image_pad_value": "114"},
    {"image_fit": "crop"},
    {"image_fit": "letterbox", "image_interpolation": "linear"},
]

EXACT = [
    "rgb8", "bgr8", "8UC3", "rgba8", "bgra8", "8UC4", "rgb16", "bgr16", "16UC3", "rgba16", "bgra16", "16UC4",
]  # fmt: skip
GRAY = ["mono8", "8UC1", "mono16"]
# How far a value of 0..255 may be from that of rgb8, away from the edges of the mark, and how far all are in
# the mean: colour is stored for two or four pixels together, or one of three colours a pixel, which shows at edges.
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(EXACT, (0, 0)),
    "nv24": (3, 1),
    **dict.fromkeys(("uyvy", "yuv422", "yuyv", "yuv422_yuy2", "nv12", "nv21"), (4, 1.2)),
    **{name: (2, 1) for name in ENCODINGS if name.startswith("bayer_")},
}


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    """Slowly changing colours, and an evenly bright mark with sharp edges."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    channels = (120 * x / WIDTH + 20, 100 * y / HEIGHT + 30, 130 - 55 * (x / WIDTH + y / HEIGHT))
    rgb = np.rint(np.dstack(channels)).astype(np.uint8)
    x_min, y_min, x_max, y_max = MARK
    rgb[y_min:y_max, x_min:x_max] = (240, 220, 250)
    return rgb


@pytest.fixture(scope="module", params=RULES, ids=lambda rule: "-".join(rule.values()))
def plan(make_plan, request) -> ImagePlan:
    return make_plan(request.param, dims=(3, 160, 160))


def through(plan: ImagePlan, frame: Frame) -> tuple[np.ndarray, FittedPicture]:
    picture = plan.read_frame(frame, memoryview(frame.data), model="net")
    row = np.full(plan.item_shape, np.nan, plan.dtype.numpy)
    fit = plan.write(picture, row, model="net")
    return row, fit


def check_agreement(found: np.ndarray, expected: np.ndarray, fit: FittedPicture, bounds: tuple[float, float]) -> None:
    difference = np.abs(found - expected)
    left, top = fit.to_input(*MARK[:2])
    right, bottom = fit.to_input(*MARK[2:])
    y, x = np.mgrid[0 : found.shape[1], 0 : found.shape[2]] + 0.5
    from_mark = np.maximum(np.maximum(left - x, x - right), np.maximum(top - y, y - bottom))
    assert difference[:, np.abs(from_mark) > 3].max() <= bounds[0]
    assert difference.mean() <= bounds[1]


def found_mark(row: np.ndarray, fit: FittedPicture) -> tuple[float, float, float, float]:
    """Return the marker's box in the frame, found in the network's input by its brightness."""
    bright = row.min(axis=0) > 180
    rows, columns = np.flatnonzero(bright.any(axis=1)), np.flatnonzero(bright.any(axis=0))
    return (*fit.to_original(columns[0], rows[0]), *fit.to_original(columns[-1] + 1, rows[-1] + 1))


def test_these_lists_contain_every_image_encoding() -> None:
    assert sorted([*BOUNDS, *GRAY]) == sorted(name for name in ENCODINGS if not is_depth(name))


@pytest.mark.sample(12)
@pytest.mark.parametrize("padding", [0, 10])
@pytest.mark.parametrize("encoding", BOUNDS)
def test_raw_padded_and_interpolated_frames_agree(plan, expose, scene, encoding, padding) -> None:
    expected, expected_fit = through(plan, expose(scene, "rgb8"))
    found, fit = through(plan, expose(scene, encoding, padding=padding))
    assert fit == expected_fit
    check_agreement(found, expected, fit, BOUNDS[encoding])


@pytest.mark.sample(12)
@pytest.mark.parametrize("encoding", [*BOUNDS, *GRAY])
def test_the_marker_is_found_at_its_position(plan, expose, scene, encoding) -> None:
    row, fit = through(plan, expose(scene, encoding, padding=6))
    # A pixel of the input is up to three of the frame wide, and an edge may fall anywhere within it.
    np.testing.assert_allclose(found_mark(row, fit), MARK, atol=1.01 / min(fit.scale_x, fit.scale_y))


@pytest.mark.sample(6)
@pytest.mark.parametrize("encoding", [name for name in [*BOUNDS, *GRAY] if "16" in name])
def test_both_byte_orders_agree(plan, expose, scene, encoding) -> None:
    little, fit = through(plan, expose(scene, encoding))
    big, big_fit = through(plan, expose(scene, encoding, is_bigendian=True, padding=2))
    assert fit == big_fit
    np.testing.assert_array_equal(little, big)


@pytest.mark.sample
@pytest.mark.parametrize("encoding", ["mono16", "8UC1"])
def test_gray_frames_of_any_bit_depth_agree(plan, expose, scene, encoding) -> None:
    np.testing.assert_array_equal(
        through(plan, expose(scene, encoding))[0], through(plan, expose(scene, "mono8", padding=3))[0]
    )


@pytest.mark.sample
@pytest.mark.parametrize(
    ("form", "options", "text", "bounds"),
    [
        ("PNG", {}, "png", (0, 0)),
        ("PNG", {}, "rgb8; png compressed bgr8", (0, 0)),
        ("JPEG", {"quality": 95, "subsampling": 0}, "jpeg", (3, 1)),
        ("JPEG", {"quality": 90}, "bgr8; jpeg compressed bgr8", (10, 1)),
        ("WEBP", {"lossless": True}, "webp", (0, 0)),
    ],
)
def test_files_agree_with_raw_frames(plan, expose, encode, scene, form, options, text, bounds) -> None:
    expected, expected_fit = through(plan, expose(scene, "rgb8"))
    found, fit = through(plan, Frame(FrameHeader(), format=text, data=encode(scene, form, **options)))
    assert fit == expected_fit
    check_agreement(found, expected, fit, bounds)
    np.testing.assert_allclose(found_mark(found, fit), MARK, atol=1.01 / min(fit.scale_x, fit.scale_y))


@pytest.mark.sample
@pytest.mark.parametrize("encoding", ["rgb8", "bayer_gbrg8", "nv12", "JPEG"])
def test_shared_memory_and_message_give_equal_results(plan, expose, encode, scene, encoding) -> None:
    if encoding == "JPEG":
        frame = Frame(FrameHeader(), format="jpeg", data=encode(scene, "JPEG"))
    else:
        frame = expose(scene, encoding, padding=8)
    expected, expected_fit = through(plan, frame)
    size = len(frame.data)
    region = SharedMemory(create=True, size=size + 100)
    try:
        region.buf[33 : 33 + size] = frame.data
        frame.region, frame.data = RegionSlice("camera", 33, size), region.buf[33 : 33 + size].toreadonly()
        found, fit = through(plan, frame)
        frame.data.release()
    finally:
        region.close()
        region.unlink()
    assert fit == expected_fit
    np.testing.assert_array_equal(found, expected)


@pytest.mark.sample(10)
@pytest.mark.parametrize("encoding", [*BOUNDS, *GRAY])
def test_an_image_of_any_encoding_resembles_the_scene(make_plan, expose, scene, encoding) -> None:
    plan = make_plan({"image_fit": "stretch"}, dims=(3, 160, 160))
    frame = expose(scene, encoding, padding=4)
    shown = plan.read_frame(frame, memoryview(frame.data), model="net", is_drawn=True).bgr()[:, :, ::-1]
    x_min, y_min, x_max, y_max = MARK
    inside = shown[y_min + 2 : y_max - 2, x_min + 2 : x_max - 2].astype(int)
    expected = (240, 220, 250) if encoding not in GRAY else (229, 229, 229)
    assert np.abs(inside - expected).max() <= 3
