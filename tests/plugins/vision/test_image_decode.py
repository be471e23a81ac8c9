"""Decoding of valid, unusual and damaged files by OpenCV."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edge_server.errors import ErrorCode, InvalidRequest, Unsupported
from edge_server.plugins.vision.decode import decode_image


def decode(data: bytes, *, as_gray: bool = False) -> np.ndarray:
    return decode_image(memoryview(data), as_gray=as_gray, error_prefix="model 'm', image for input 'x'")


@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
def test_lossless_files_come_back_exactly_in_bgr_order(encode, noise, form, options) -> None:
    pixels = noise(13, 17)
    np.testing.assert_array_equal(decode(encode(pixels, form, **options)), pixels[:, :, ::-1])


def test_a_jpeg_agrees_with_another_decoder(encode, repository_root) -> None:
    path = repository_root / "tests/data/coffee.jpg"
    other = np.asarray(Image.open(path))[:, :, ::-1].astype(int)
    assert np.abs(decode(path.read_bytes()) - other).max() <= 3


def test_gray_and_colour_files_are_converted_on_request(encode, noise) -> None:
    gray = noise(9, 11)[:, :, 0].copy()
    data = encode(gray, "PNG")
    np.testing.assert_array_equal(decode(data), np.dstack([gray] * 3))
    np.testing.assert_array_equal(decode(data, as_gray=True), gray)
    luma = decode(encode(noise(9, 11), "PNG"), as_gray=True)
    assert np.abs(luma - noise(9, 11) @ [0.299, 0.587, 0.114]).max() <= 1


def test_transparency_is_dropped_and_sixteen_bits_lose_the_lower_byte(encode, noise) -> None:
    pixels = noise(9, 11)
    alpha = np.dstack([pixels, np.full((9, 11), 40, np.uint8)])
    np.testing.assert_array_equal(decode(encode(alpha, "PNG")), pixels[:, :, ::-1])
    deep = Image.fromarray(np.full((4, 4), 0x12FF, np.uint16))
    assert (decode(encode(deep, "PNG"), as_gray=True) == 0x12).all()


@pytest.mark.sample
@pytest.mark.parametrize("as_gray", [False, True])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_rotated_by_its_exif_orientation(encode, orientation, as_gray) -> None:
    stored = np.zeros((16, 32, 3), np.uint8)
    stored[:8, :8] = 255  # a mark in one corner
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(stored, "JPEG", quality=100, exif=exif)
    turned = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: stored.transpose(1, 0, 2)[:, ::-1],
        7: stored.transpose(1, 0, 2)[::-1, ::-1],
        8: stored.transpose(1, 0, 2)[::-1],
    }[orientation]
    upright = decode(data, as_gray=as_gray)
    expected = turned[:, :, 0] if as_gray else turned
    assert upright.shape == expected.shape
    assert np.abs(upright.astype(int) - expected).max() < 40


def test_a_damaged_file_is_refused(encode, noise) -> None:
    data = bytearray(encode(noise(64, 64), "PNG"))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(InvalidRequest, match=r"model 'm', image for input 'x': expected a sound PNG .* \d+ bytes"):
        decode(bytes(data))


def test_a_truncated_png_with_an_end_marker_is_refused(encode, noise) -> None:
    data = encode(noise(64, 64), "PNG")
    with pytest.raises(InvalidRequest):
        decode(data[: len(data) // 2] + b"\x00\x00\x00\x00IEND\xae\x42\x60\x82")


@given(st.data())
def test_flipped_bytes_give_an_image_or_a_refusal(encode, noise, data) -> None:
    form = data.draw(st.sampled_from(["JPEG", "PNG", "BMP", "WEBP"]))
    content = bytearray(encode(noise(24, 24), form))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        picture = decode(bytes(content))
    except InvalidRequest:
        return
    assert picture.dtype == np.uint8
    assert picture.ndim == 3


def test_without_opencv_an_image_is_refused_with_what_to_install(encode, noise, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(Unsupported, match=r"pip install '\.\[vision\]'") as caught:
        decode(encode(noise(4, 4), "PNG"))
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_opencv_starts_no_threads_of_its_own() -> None:
    code = "from edge_server.plugins.vision.decode import opencv; print(opencv().getNumThreads())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
