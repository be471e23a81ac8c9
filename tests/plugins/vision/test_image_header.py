"""Hostile and unusual files, checked by their bytes before decoding."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edge_server.errors import InvalidRequest
from edge_server.plugins.vision import image_header
from edge_server.plugins.vision.image_header import ImageFormat, read_header

SIGNATURES = [
    b"",
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"BM",
    b"RIFF\x10\x00\x00\x00WEBP",
    b"\xff\xd8\xff\xc0\x00\x11",
]


def read(data: bytes) -> image_header.ImageHeader:
    return read_header(memoryview(data), "model 'm', image for input 'x'")


def gradient(mode: str = "RGB") -> Image.Image:
    rows, columns = np.mgrid[0:19, 0:37]
    return Image.fromarray(np.dstack([rows * 13, columns * 6, rows + columns]).astype(np.uint8)).convert(mode)


CASES = [
    ("JPEG", "RGB", {}),
    ("JPEG", "L", {}),
    ("JPEG", "CMYK", {}),
    ("JPEG", "RGB", {"progressive": True}),
    ("JPEG", "RGB", {"comment": b"\xff\xc0\x00\x11\x08\x00\x01\x00\x01" * 40}),
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "P", {}),
    ("PNG", "1", {}),
    ("BMP", "RGB", {}),
    ("BMP", "L", {}),
    ("BMP", "1", {}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGB", {"lossless": True}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("WEBP", "RGB", {"exif": b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x00"}),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("form", "mode", "options"), CASES)
def test_the_size_is_read_without_decoding(encode, form, mode, options) -> None:
    found = read(encode(gradient(mode), form, **options))
    assert (found.format.value.upper(), found.width, found.height) == (form, 37, 19)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("form", "mode", "options"), CASES)
def test_a_truncated_file_is_never_accepted(encode, form, mode, options) -> None:
    whole = encode(gradient(mode), form, **options)
    for length in range(len(whole)):
        with pytest.raises(InvalidRequest):
            read(whole[:length])


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "WEBP"])
def test_trailing_bytes_are_ignored(encode, form) -> None:
    assert read(encode(gradient(), form) + bytes(500)).width == 37


def jpeg_of(width: int, height: int) -> bytes:
    frame = b"\xff\xc0\x00\x11\x08" + struct.pack(">HH", height, width) + b"\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01"
    return b"\xff\xd8" + frame + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + b"\xff\xd9"


def png_of(width: int, height: int) -> bytes:
    return (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", width, height) + bytes(20) + b"IEND\xae\x42\x60\x82"
    )


def webp_of(width: int, height: int) -> bytes:
    body = (
        b"WEBPVP8X\x0a\x00\x00\x00" + bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp_of(width: int, height: int) -> bytes:
    return b"BM" + bytes(8) + struct.pack("<IIiiHHI", 54, 40, width, height, 1, 1, 0) + bytes(20)


@pytest.mark.parametrize("make", [jpeg_of, png_of, webp_of])
def test_a_small_file_that_claims_billions_of_pixels_is_refused_before_allocation(make) -> None:
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match=r"at most 67108864 pixels, given a .* of 60000x60000"):
        read(make(60000, 60000))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_bitmap_must_hold_the_pixels_it_claims() -> None:
    with pytest.raises(InvalidRequest, match=r"60000x60000 pixels take 450\d+ bytes"):
        read(bmp_of(60000, -60000))


@pytest.mark.sample
@pytest.mark.parametrize("make", [jpeg_of, png_of, bmp_of])
@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(make, size) -> None:
    with pytest.raises(InvalidRequest, match="at least one pixel"):
        read(make(*size))


def test_the_largest_allowed_image_passes() -> None:
    assert read(png_of(8192, 8192)).width == 8192
    with pytest.raises(InvalidRequest, match="8192x8193"):
        read(png_of(8192, 8193))


def test_messages_name_model_input_expected_and_given() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(b"GIF89a" + bytes(20))
    text = str(caught.value)
    assert text == (
        "model 'm', image for input 'x': expected a JPEG, PNG, BMP or WebP image, "
        "given 26 bytes beginning with 0x4749463839610000"
    )
    with pytest.raises(InvalidRequest, match="given no bytes"):
        read(b"")


def test_the_end_marker_of_an_embedded_preview_does_not_end_the_image(encode) -> None:
    preview = encode(gradient(), "JPEG")
    whole = encode(gradient(), "JPEG", exif=b"Exif\x00\x00" + preview)
    assert preview in whole
    with pytest.raises(InvalidRequest, match="truncated"):
        read(whole[:-2] + b"\x00\x00")


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\x7f"
    with pytest.raises(InvalidRequest, match="more than 24 scans"):
        read(jpeg_of(8, 8)[:-2] + scan * 24 + b"\xff\xd9")


def test_a_jpeg_of_endless_segments_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="more than 2048 segments"):
        read(b"\xff\xd8\xff" + b"\xff\xfe\x00\x02" * 100_000)


def test_a_long_run_of_fill_bytes_is_read_in_one_pass(encode) -> None:
    whole = encode(gradient(), "JPEG")
    # Quadratic work on four million bytes would run into the test's time limit by far.
    assert read(whole[:2] + b"\xff" * 4_000_000 + whole[2:]).width == 37
    with pytest.raises(InvalidRequest, match="ends before the first scan"):
        read(whole[:2] + b"\xff" * 4_000_000 + b"\x00" * 10)


def test_an_animation_is_refused(encode) -> None:
    other = gradient().transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    animation = encode(gradient(), "WEBP", save_all=True, append_images=[other])
    with pytest.raises(InvalidRequest, match="animation"):
        read(animation)


def test_a_compressed_bitmap_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="compression is 1"):
        read(b"BM" + bytes(8) + struct.pack("<IIiiHHI", 54, 40, 2, 2, 1, 8, 1) + bytes(20))


def test_an_old_bitmap_header_is_read() -> None:
    data = b"BM" + bytes(8) + struct.pack("<IIHHHH", 26, 12, 3, 2, 1, 24) + bytes(24)
    assert read(data) == image_header.ImageHeader(ImageFormat.BMP, 3, 2)


@given(st.sampled_from(SIGNATURES), st.binary(max_size=80))
def test_any_bytes_give_a_header_or_a_refusal(signature, rest) -> None:
    try:
        found = read(signature + rest)
    except InvalidRequest:
        return
    assert 0 < found.width * found.height <= image_header.MAX_PIXELS
