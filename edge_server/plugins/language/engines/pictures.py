"""Checks and decoder of the pictures in a request to a vision-language model: number, bytes and pixels are bounded
before anything is decoded."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.plugins.vision.decode import decode_image
from edge_server.plugins.vision.image_header import read_header

MAX_PICTURES = 16
"""Of one request."""
MAX_BYTES = 32 << 20
"""Of the files of all pictures of a request."""
MAX_PIXELS = 16 << 20
"""Of all pictures of a request together: 48 MiB when they are decoded. In base64 that is 64 MiB, and llama.cpp's server
reads requests of up to 100 MB."""
MAX_SIDES_RATIO = 200
"""Of the longer side to the shorter one, as in the image processor of Qwen2-VL. Image processors enlarge a picture
until its shorter side has a size of their own."""

_FIRST_BYTES = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"RIFF")
"""Of the files that `decode_image` reads. No base64 text of such a file begins with them."""


def check_pictures(files: Sequence[bytes], title: str) -> list[bytes]:
    """Return the files of pictures; elements in base64, as those for Triton's vLLM backend, decoded.

    `title` names the model and the input. Raises InvalidRequest for too many or too large ones, and for bytes that are
    no picture.
    """
    if len(files) > MAX_PICTURES:
        raise InvalidRequest(f"{title}: expected at most {MAX_PICTURES} pictures, got {len(files)}")
    found = [_decode_base64(file, f"{title}, picture {index}") for index, file in enumerate(files)]
    size = sum(map(len, found))
    if size > MAX_BYTES:
        raise InvalidRequest(f"{title}: expected files of at most {MAX_BYTES >> 20} MiB together, got {size} bytes")
    pixels = 0
    for index, file in enumerate(found):
        header = read_header(memoryview(file), f"{title}, picture {index}")
        pixels += header.width * header.height
        short, long = sorted((header.width, header.height))
        if long > short * MAX_SIDES_RATIO:
            raise InvalidRequest(
                f"{title}, picture {index}: expected a longer side of at most {MAX_SIDES_RATIO} times the shorter one, "
                f"got {header.width}x{header.height}"
            )
    if pixels > MAX_PIXELS:
        raise InvalidRequest(f"{title}: expected at most {MAX_PIXELS} pixels together, got {pixels}")
    return found


def decode_picture(file: bytes, title: str) -> Any:
    """Return the pixels of a checked file as RGB, an array (height, width, 3) of uint8. Raises InvalidRequest."""
    return np.ascontiguousarray(decode_image(memoryview(file), as_gray=False, error_prefix=title)[:, :, ::-1])


def _decode_base64(file: bytes, title: str) -> bytes:
    if file.startswith(_FIRST_BYTES):
        return file
    try:
        return base64.b64decode(file, validate=True)
    except binascii.Error:
        raise InvalidRequest(
            f"{title}: expected a JPEG, PNG, BMP or WebP file, or one in base64, got {len(file)} bytes beginning with "
            f"0x{file[:8].hex()}"
        ) from None
