"""Reader of an image file's format and size from its header, before a decoder allocates memory.

A file of a few hundred bytes may declare a billion pixels. So format, size and completeness are checked on the raw
bytes. Only four formats reach the decoder. Layouts: ITU-T T.81 annex B (JPEG), the PNG specification, the Windows
bitmap headers, and the WebP container specification with RFC 6386 (VP8).
"""

from __future__ import annotations

import enum
import re
import struct
from itertools import islice

from edge_server.errors import InvalidRequest
from edge_server.record import record

MAX_PIXELS = 64 * 1024 * 1024
"""Maximum image size, in pixels, above today's camera sensors (50 Mpixel). Decoded to colour it takes 192 MiB, and a
progressive JPEG three times as much during decoding, which a board with 4 GB can still provide."""

MAX_JPEG_SEGMENTS = 2048
"""Maximum number of segments before a JPEG's first scan. Files with embedded profiles and previews have a few
hundred."""

MAX_JPEG_SCANS = 24
"""Maximum number of scans of a progressive JPEG. Encoders write about 10. Each scan costs a pass over the whole image,
however few bytes it has; together with MAX_PIXELS this limits decoding to a few seconds."""

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"IEND\xae\x42\x60\x82"
# An 0xFF followed by anything but a stuffed zero or a fill byte starts a marker.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]")
_JPEG_SCAN = re.compile(rb"\xff\xda")
_JPEG_END = re.compile(rb"\xff\xd9")
# Start-of-frame markers: C0..CF without DHT (C4), JPG (C8) and DAC (CC).
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers without a length: TEM, RST0..7, SOI.
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
_WEBP_ANIMATION_FLAG = 0x02


class ImageFormat(enum.Enum):
    JPEG = "JPEG"
    PNG = "PNG"
    BMP = "BMP"
    WEBP = "WebP"


@record(frozen=True, slots=True)
class ImageHeader:
    """Format and stored size in pixels; a rotation in the metadata (EXIF) is not yet applied."""

    format: ImageFormat
    width: int
    height: int


class _Malformed(Exception):
    """The bytes violate their format; the text gives the reason."""


def read_header(data: memoryview, error_prefix: str) -> ImageHeader:
    """Return format and size of a complete encoded image.

    `error_prefix` begins every error message: the model and input for the image. Raises InvalidRequest for an unknown
    format, damaged or truncated data, an empty image, or more than MAX_PIXELS.
    """
    image_format = _format_of(data)
    if image_format is None:
        given = f"{data.nbytes} bytes beginning with 0x{bytes(data[:8]).hex()}" if data.nbytes else "no bytes"
        raise InvalidRequest(f"{error_prefix}: expected a JPEG, PNG, BMP or WebP image, given {given}")
    try:
        width, height = _READERS[image_format](data)
    except (_Malformed, struct.error, IndexError) as error:
        # struct.error and IndexError: a field is beyond the end of the data.
        reason = str(error) if isinstance(error, _Malformed) else "the data ends within the header"
        raise InvalidRequest(
            f"{error_prefix}: expected a complete {image_format.value} image, given {data.nbytes} bytes: {reason}"
        ) from None
    if width < 1 or height < 1:
        raise InvalidRequest(
            f"{error_prefix}: expected at least one pixel, given a {image_format.value} of {width}x{height}"
        )
    if width * height > MAX_PIXELS:
        raise InvalidRequest(
            f"{error_prefix}: expected an image of at most {MAX_PIXELS} pixels, "
            f"given a {image_format.value} of {width}x{height}"
        )
    return ImageHeader(image_format, width, height)


def _format_of(data: memoryview) -> ImageFormat | None:
    head = bytes(data[:12])
    if head.startswith(b"\xff\xd8\xff"):
        return ImageFormat.JPEG
    if head.startswith(_PNG_SIGNATURE):
        return ImageFormat.PNG
    if head.startswith(b"BM"):
        return ImageFormat.BMP
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return ImageFormat.WEBP
    return None


def _read_jpeg(data: memoryview) -> tuple[int, int]:
    size: tuple[int, int] | None = None
    position = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        found = _JPEG_MARKER.search(data, position)
        if found is None:
            raise _Malformed("it ends before the first scan")
        marker, position = data[found.end() - 1], found.end()
        if marker in _JPEG_BARE:
            continue
        if marker == 0xD9:
            raise _Malformed("it has no scan")
        if marker in _JPEG_FRAMES and size is None:
            height, width = struct.unpack_from(">HH", data, position + 3)
            size = (width, height)
        position += max(struct.unpack_from(">H", data, position)[0], 2)
        if marker == 0xDA:
            _check_jpeg_scans(data, found.start())
            if size is None:
                raise _Malformed("its first scan comes before its frame header")
            return size
    raise _Malformed(f"it has more than {MAX_JPEG_SEGMENTS} segments before its first scan")


def _check_jpeg_scans(data: memoryview, first_scan: int) -> None:
    """Raise _Malformed for too many scans or no end-of-image marker (a decoder would invent the rest)."""
    if bytes(data[-2:]) != b"\xff\xd9" and _JPEG_END.search(data, first_scan) is None:
        raise _Malformed("it is truncated: there is no end-of-image marker")
    if next(islice(_JPEG_SCAN.finditer(data, first_scan), MAX_JPEG_SCANS, None), None) is not None:
        raise _Malformed(f"it has more than {MAX_JPEG_SCANS} scans")


def _read_png(data: memoryview) -> tuple[int, int]:
    if bytes(data[12:16]) != b"IHDR":
        raise _Malformed("its first chunk is not IHDR")
    width, height = struct.unpack_from(">II", data, 16)
    if re.search(_PNG_END, data[33:]) is None:
        raise _Malformed("it is truncated: there is no IEND chunk")
    return width, height


def _read_bmp(data: memoryview) -> tuple[int, int]:
    pixels_at, header_bytes = struct.unpack_from("<II", data, 10)
    compression = 0
    if header_bytes == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    elif header_bytes >= 40:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
    else:
        raise _Malformed(f"its header size {header_bytes} is none of the known ones")
    if bits not in (1, 4, 8, 16, 24, 32):
        raise _Malformed(f"it has {bits} bits a pixel")
    if compression not in (0, 3):
        raise _Malformed(f"only uncompressed bitmaps are read, and its compression is {compression}")
    height = abs(height)  # a negative height means that the top row comes first
    stored = (width * bits + 31) // 32 * 4 * height
    if pixels_at + stored > data.nbytes and width > 0:
        raise _Malformed(f"it is truncated: {width}x{height} pixels take {stored} bytes from offset {pixels_at}")
    return width, height


def _read_webp(data: memoryview) -> tuple[int, int]:
    (riff_bytes,) = struct.unpack_from("<I", data, 4)
    if riff_bytes + 8 > data.nbytes:
        raise _Malformed(f"it is truncated: its header announces {riff_bytes + 8} bytes")
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        if data[20] & _WEBP_ANIMATION_FLAG:
            raise _Malformed("it is an animation, and one picture is expected")
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        (size,) = struct.unpack_from("<I", data, 21)
        return (size & 0x3FFF) + 1, (size >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise _Malformed(f"its first chunk is {kind!r}")


_READERS = {
    ImageFormat.JPEG: _read_jpeg,
    ImageFormat.PNG: _read_png,
    ImageFormat.BMP: _read_bmp,
    ImageFormat.WEBP: _read_webp,
}
