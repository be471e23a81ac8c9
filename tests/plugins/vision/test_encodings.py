"""Raw frames against the definition of their encoding, and every type of invalid frame."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest
from edge_server.plugins.vision.picture import Picture
from edge_server.plugins.vision.raw_encodings import ENCODINGS, MAX_SIDE, is_depth, pixels
from edge_server.plugins.vision.resize import Color
from edge_server.protocol.frame_messages import Frame

DEPTH = {"16UC1": "u2", "16SC1": "i2", "32FC1": "f4", "64FC1": "f8"}
IN_PIXELS = ["rgb8", "bgr8", "8UC3", "rgba8", "bgra8", "8UC4"]
SIXTEEN = ["mono16", "rgb16", "bgr16", "16UC3", "rgba16", "bgra16", "16UC4"]
GRAY = ["mono8", "8UC1", "mono16"]
YUV = ["uyvy", "yuv422", "yuyv", "yuv422_yuy2", "nv12", "nv21", "nv24"]
BAYER = [f"bayer_{sites}{bits}" for sites in ("rggb", "bggr", "gbrg", "grbg") for bits in (8, 16)]


def read(frame: Frame) -> Picture:
    return pixels(
        frame.height, frame.width, frame.encoding, frame.step, frame.is_bigendian, frame.data, error_prefix="model 'm'"
    )


def rgb_of(frame: Frame) -> np.ndarray:
    return read(frame).bgr()[:, :, ::-1]


def test_these_lists_contain_every_encoding() -> None:
    assert sorted({*DEPTH, *IN_PIXELS, *SIXTEEN, *GRAY, *YUV, *BAYER}) == sorted(ENCODINGS)
    assert [name for name in ENCODINGS if is_depth(name)] == list(DEPTH)


@pytest.mark.sample
@pytest.mark.parametrize("padding", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("is_bigendian", [False, True])
@pytest.mark.parametrize("encoding", [*IN_PIXELS, *SIXTEEN, *GRAY])
def test_stored_pixels_come_back_exactly(expose, noise, encoding, is_bigendian, padding) -> None:
    rgb = noise(10, 14)
    found = rgb_of(expose(rgb, encoding, padding=padding, is_bigendian=is_bigendian))
    luma = np.rint(rgb @ [0.299, 0.587, 0.114]).astype(np.uint8)
    np.testing.assert_array_equal(found, np.dstack([luma] * 3) if encoding in GRAY else rgb)


@pytest.mark.sample
@pytest.mark.parametrize("is_bigendian", [False, True])
@pytest.mark.parametrize(("encoding", "color"), [("mono16", Color.GRAY), ("rgb16", Color.RGB), ("bgra16", Color.BGR)])
def test_sixteen_bits_are_kept_until_eight_are_requested(expose, noise, encoding, color, is_bigendian) -> None:
    picture = read(expose(noise(6, 8), encoding, is_bigendian=is_bigendian, padding=3))
    assert (picture.pixels.dtype, picture.color) == (np.uint16, color)
    assert picture.pixels.dtype.isnative
    np.testing.assert_array_equal(picture.pixels >> 8, picture.eight_bits())
    assert not np.array_equal(picture.pixels & 255, picture.eight_bits())


@pytest.mark.sample
@pytest.mark.parametrize("padding", [0, 1, 6, 16])
@pytest.mark.parametrize("is_bigendian", [False, True])
@pytest.mark.parametrize("encoding", DEPTH)
def test_depth_values_come_back_exactly(encoding, is_bigendian, padding) -> None:
    dtype = np.dtype(DEPTH[encoding])
    values = np.random.default_rng(1).normal(0, 3000, (5, 7)).clip(0 if dtype.kind == "u" else -9e9).astype(dtype)
    rows = values.astype(dtype.newbyteorder(">" if is_bigendian else "<")).view(np.uint8).reshape(5, -1)
    data = np.pad(rows, ((0, 0), (0, padding)), constant_values=255).tobytes()
    picture = pixels(5, 7, encoding, 7 * dtype.itemsize + padding, is_bigendian, data, error_prefix="m")
    assert picture.color is Color.DEPTH
    assert picture.pixels.dtype == dtype
    assert picture.pixels.dtype.isnative
    np.testing.assert_array_equal(picture.pixels, values)
    assert picture.bgr().shape == (5, 7, 3)


def test_depth_is_shown_from_nearest_to_farthest_with_missing_values_black() -> None:
    values = np.array([[1.0, 2.0], [3.0, np.nan]], np.float32)
    assert pixels(2, 2, "32FC1", 0, False, values.tobytes(), error_prefix="m").bgr()[:, :, 0].tolist() == [
        [0, 127],
        [255, 0],
    ]
    nothing = np.full((2, 2), np.inf, np.float32)
    assert not pixels(2, 2, "32FC1", 0, False, nothing.tobytes(), error_prefix="m").bgr().any()


def smooth(height: int, width: int) -> np.ndarray:
    """Colours that change slowly and differently in every channel."""
    y, x = np.mgrid[0:height, 0:width]
    channels = (220 * x / width + 20, 200 * y / height + 30, 230 - 110 * (x / width + y / height))
    return np.rint(np.dstack(channels)).astype(np.uint8)


@pytest.mark.sample
@pytest.mark.parametrize("padding", [0, 2, 5, 64])
@pytest.mark.parametrize("encoding", YUV)
def test_yuv_is_converted_back_to_its_colours(expose, encoding, padding) -> None:
    rgb = smooth(120, 160)
    assert np.abs(rgb_of(expose(rgb, encoding, padding=padding)).astype(int) - rgb).max() <= 5


@pytest.mark.parametrize("encoding", ["uyvy", "yuyv", "nv12", "nv21", "nv24"])
def test_any_yuv_agrees_with_the_inverse_of_bt_601_in_limited_range(encoding) -> None:
    """Noise in the bytes, also outside the range that a camera sends."""
    height, width = 16, 24
    data = np.random.default_rng(5).integers(0, 256, height * width * 3, np.uint8)
    if encoding in ("uyvy", "yuyv"):
        data = data[: height * width * 2]
        samples = data.reshape(height, width // 2, 4)
        at = [(1, 0, 2), (3, 0, 2)] if encoding == "uyvy" else [(0, 1, 3), (2, 1, 3)]
        yuv = np.stack([samples[:, :, list(places)] for places in at], axis=2).reshape(height, width, 3)
    else:
        scale = 1 if encoding == "nv24" else 2
        data = data[: height * width + 2 * height * width // scale**2]
        luma = data[: height * width].reshape(height, width)
        pairs = data[height * width :].reshape(height // scale, width // scale, 2)
        if encoding == "nv21":
            pairs = pairs[:, :, ::-1]
        yuv = np.dstack([luma, pairs.repeat(scale, 0).repeat(scale, 1)])
    definition = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]]) / 255
    expected = ((yuv.astype(float) - (16, 128, 128)) @ np.linalg.inv(definition).T).clip(0, 255)
    found = pixels(height, width, encoding, 0, False, data.tobytes(), error_prefix="m").bgr()[:, :, ::-1]
    # OpenCV takes Y below 16 for 16: black is black.
    usual = yuv[:, :, 0] >= 16
    assert np.abs(found - expected)[usual].max() <= 2


@pytest.mark.sample
@pytest.mark.parametrize("padding", [0, 1, 2, 30])
@pytest.mark.parametrize("is_bigendian", [False, True])
@pytest.mark.parametrize("encoding", BAYER)
def test_each_bayer_pattern_is_demosaiced_to_its_colours(expose, encoding, is_bigendian, padding) -> None:
    rgb = smooth(80, 120)
    found = rgb_of(expose(rgb, encoding, padding=padding, is_bigendian=is_bigendian)).astype(int)
    # The outermost pixels have no neighbours on one side.
    assert np.abs(found - rgb)[1:-1, 1:-1].max() <= 2
    assert np.abs(found - rgb).max() <= 8


@pytest.mark.sample
@pytest.mark.parametrize("encoding", BAYER[::2])
@pytest.mark.parametrize("size", [(3, 3), (5, 8), (8, 5), (31, 33)])
def test_a_bayer_image_may_have_odd_sides(expose, encoding, size) -> None:
    rgb = np.broadcast_to(np.array([200, 120, 40], np.uint8), (*size, 3))
    np.testing.assert_array_equal(rgb_of(expose(rgb, encoding)), rgb)


@pytest.mark.sample
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("encoding", ["rgb8", "bgr8", "8UC3", "mono8", "mono16", "rgb16", "16UC1", "32FC1"])
def test_pixels_in_the_right_layout_are_views_of_the_frame(encoding, padding) -> None:
    size = {"rgb8": 3, "bgr8": 3, "8UC3": 3, "mono8": 1, "mono16": 2, "rgb16": 6, "16UC1": 2, "32FC1": 4}[encoding]
    data = bytearray(6 * (8 * size + padding))
    picture = pixels(6, 8, encoding, 8 * size + padding, False, data, error_prefix="m")
    assert np.shares_memory(picture.pixels, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("encoding", ["mono16", "rgb16", "32FC1", "bayer_rggb16"])
def test_unaligned_numbers_are_read_correctly(expose, noise, encoding) -> None:
    if encoding == "32FC1":
        frame = Frame(expose(noise(2, 2), "mono8").header, 4, 4, "32FC1", data=np.arange(16, dtype="<f4").tobytes())
    else:
        frame = expose(noise(6, 8), encoding)
    expected = read(frame).bgr()
    frame.data = memoryview(b"x" + bytes(frame.data))[1:]
    np.testing.assert_array_equal(read(frame).bgr(), expected)


def refused(height: int, width: int, encoding: str, step: int, size: int) -> str:
    with pytest.raises(InvalidRequest) as caught:
        pixels(height, width, encoding, step, False, bytes(size), error_prefix="model 'm', frame")
    assert str(caught.value).startswith("model 'm', frame: expected ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ((4, 6, "rgb8", 0, 71), "expected 72 bytes, for 6x4 pixels of rgb8 with a step of 18, given 71"),
        ((4, 6, "rgb8", 0, 73), "expected 72 bytes"),
        ((4, 6, "rgb8", 20, 72), "expected 80 bytes, for 6x4 pixels of rgb8 with a step of 20, given 72"),
        ((4, 6, "rgb8", 20, 78), "expected 80 bytes"),
        ((4, 6, "rgb8", 17, 68), "a step of at least 18 bytes, for 6 pixels of rgb8, given 17"),
        ((4, 6, "mono16", 11, 44), "a step of at least 12 bytes"),
        ((4, 6, "nv12", 0, 35), "expected 36 bytes"),
        ((4, 6, "nv12", 8, 36), "expected 48 bytes"),
        ((4, 6, "nv24", 0, 36), "expected 72 bytes"),
        ((4, 5, "uyvy", 0, 40), "an even width, as pixels of uyvy share colour, given 5"),
        ((4, 5, "nv12", 0, 30), "an even width"),
        ((5, 4, "nv21", 0, 30), "an even height, as rows of nv21 share colour, given 5"),
        ((2, 4, "bayer_rggb8", 0, 8), "at least 3x3 pixels of bayer_rggb8"),
        ((0, 4, "rgb8", 0, 0), "sides from 1 to 65535 and at most .* pixels, given 4x0"),
        ((4, 0, "rgb8", 0, 0), "given 0x4"),
        ((-1, -4, "mono8", 0, 4), "given -4x-1"),
        ((1, MAX_SIDE + 1, "mono8", 0, MAX_SIDE + 1), "given 65536x1"),
        ((MAX_SIDE, MAX_SIDE, "mono8", 0, 10), "at most 67108864 pixels, given 65535x65535"),
        ((1, 1, "mono8", 2**32 - 1, 1), "expected 4294967295 bytes"),
        ((4, 6, "rgb88", 0, 72), "an encoding out of rgb8, bgr8, .*; did you mean 'rgb8', given 'rgb88'"),
        ((4, 6, "RGB8", 0, 72), "an encoding out of"),
        ((4, 6, "", 0, 72), "an encoding out of .*; given none"),
        ((4, 6, "x" * 100_000, 0, 72), "given 'x{40}'$"),
    ],
)
def test_an_inconsistent_frame_is_refused_with_expected_and_given(case, message) -> None:
    assert re.search(message, refused(*case))


@given(
    st.integers(-2, 40), st.integers(-2, 40), st.sampled_from(ENCODINGS), st.integers(0, 200), st.booleans(),
    st.integers(0, 4000), st.booleans(),
)  # fmt: skip
def test_any_frame_gives_an_image_of_the_stated_size_or_is_refused(
    h, w, encoding, step, is_big, size, is_fitting
) -> None:
    if is_fitting and h > 0 and w > 0:
        factor = {"nv12": 1.5, "nv21": 1.5, "nv24": 3}.get(encoding, 1)
        size = int(h * step * factor)
    try:
        picture = pixels(h, w, encoding, step, is_big, bytes(size), error_prefix="m")
    except InvalidRequest:
        return
    assert (picture.height, picture.width) == (h, w)
    assert picture.pixels.shape[:2] == (h, w)
    assert picture.bgr().shape == (h, w, 3)
    assert picture.bgr().dtype == np.uint8
