"""Pictures of a request: their bounds are checked in the headers, before anything is decoded."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.pictures import MAX_BYTES, MAX_PICTURES, check_pictures, decode_picture

COFFEE = (Path(__file__).parents[2] / "data/coffee.jpg").read_bytes()


def png(width: int, height: int, rest: int = 0) -> bytes:
    """Return a PNG file of a header and `rest` bytes that are no picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + bytes(rest) + chunk(b"IEND", b"")


def test_a_picture_comes_as_a_file_or_in_base64() -> None:
    assert check_pictures([COFFEE, base64.b64encode(COFFEE)], "input 'image'") == [COFFEE, COFFEE]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([png(1, 1)] * (MAX_PICTURES + 1), "expected at most 16 pictures, got 17"),
        ([png(1, 1, MAX_BYTES // 2)] * 2, "expected files of at most 32 MiB together, got"),
        ([png(4096, 4096)] * 2, "expected at most 16777216 pixels together, got 33554432"),
        ([png(1, 201)], "picture 0: expected a longer side of at most 200 times the shorter one, got 1x201"),
        ([COFFEE, b"no picture"], "picture 1: expected a JPEG, PNG, BMP or WebP file, or one in base64, got 10 bytes"),
        ([COFFEE, base64.b64encode(b"GIF89a")], "picture 1: expected a JPEG, PNG, BMP or WebP image, given 6 bytes"),
        ([COFFEE[:5000]], "picture 0: expected a complete JPEG image"),
        ([b""], "picture 0: expected a JPEG, PNG, BMP or WebP image, given no bytes"),
    ],
)
def test_what_is_refused(files: list[bytes], problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_pictures(files, "input 'image'")
    assert caught.value.message.startswith(("input 'image': ", "input 'image', picture "))
    assert problem in caught.value.message


def test_a_picture_is_decoded_to_red_green_blue() -> None:
    pixels = decode_picture(COFFEE, "picture 0")
    assert pixels.shape == (400, 600, 3)
    red, _, blue = pixels.reshape(-1, 3).mean(axis=0)
    assert red > blue + 40, "coffee is brown"


def test_a_picture_whose_header_alone_is_sound_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="picture 0: expected a sound PNG image"):
        decode_picture(png(8, 8), "picture 0")
