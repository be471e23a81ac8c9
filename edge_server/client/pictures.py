"""Conversion of images to the frame messages of a stream: arrays, raw bytes, JPEG and PNG files, regions of shared
memory."""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edge_server.errors import InvalidRequest
from edge_server.protocol.frame_messages import Buffer, Frame, FrameHeader, RegionSlice

Image: TypeAlias = "npt.NDArray[Any] | bytes | bytearray | memoryview | RegionSlice"
Stamp: TypeAlias = "float | tuple[int, int]"

_NS = 1_000_000_000
_MAGIC = ((b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"))
_ENCODINGS = {
    ("uint8", 1): "mono8",
    ("uint8", 3): "bgr8",
    ("uint8", 4): "bgra8",
    ("uint16", 1): "mono16",
    ("float32", 1): "32FC1",
}
"""Element type and channels -> default encoding of an array; colours in OpenCV's order."""


def make_header(stamp: Stamp | None, frame_id: str, seq: int) -> FrameHeader:
    """Return a header. `stamp` is in seconds, or (seconds, nanoseconds) for full precision; None means now."""
    if stamp is None:
        sec, nanosec = divmod(time.time_ns(), _NS)
    elif isinstance(stamp, tuple):
        sec, nanosec = stamp
    else:
        sec, nanosec = divmod(round(stamp * _NS), _NS)
    return FrameHeader(sec, nanosec, frame_id, seq)


def make_frame(
    image: Image,
    header: FrameHeader,
    *,
    height: int = 0,
    width: int = 0,
    encoding: str = "",
    step: int = 0,
    is_bigendian: bool = False,
    format: str = "",
    age_us: int = 0,
    copies: bool = True,
) -> Frame:
    """Return a frame of `image`.

    An array gives its own height, width, step and byte order; its default `encoding` is bgr8, bgra8, mono8, mono16 or
    32FC1. Bytes can be a JPEG or PNG file; other bytes, and regions, need `encoding`, `height` and `width`, or
    `format`. With `copies`, data that the caller can change are copied; immutable bytes are not. Raises InvalidRequest
    for an invalid image, or if a required argument is missing.
    """
    if isinstance(image, np.ndarray):
        return _from_array(image, header, encoding, age_us, copies)
    if isinstance(image, RegionSlice):
        data: Buffer = b""
        region: RegionSlice | None = image
    else:
        data, region = _as_buffer(image, copies), None
        if not format and not encoding:
            begin = bytes(data[:8])
            format = next((name for magic, name in _MAGIC if begin.startswith(magic)), "")
    if not format and not (encoding and height and width):
        raise InvalidRequest(
            "a picture that is neither an array nor a JPEG or PNG file needs its encoding, height and width (or its "
            f"format), got encoding '{encoding}', height {height}, width {width}"
        )
    return Frame(header, height, width, encoding, step, is_bigendian, format, region, age_us, data)


def _from_array(image: npt.NDArray[Any], header: FrameHeader, encoding: str, age_us: int, copies: bool) -> Frame:
    channels = 1 if image.ndim == 2 else image.shape[-1]
    if image.ndim not in (2, 3) or image.size == 0:
        raise InvalidRequest(f"a picture must have the shape (height, width) or (height, width, channels), "
                             f"got {image.shape}")  # fmt: skip
    encoding = encoding or _ENCODINGS.get((image.dtype.newbyteorder("=").name, channels), "")
    if not encoding:
        raise InvalidRequest(f"a picture of {image.dtype} with {channels} channels needs its encoding")
    order = image.dtype.byteorder
    is_bigendian = order == ">" or (order == "=" and not _IS_LITTLE)
    packed = np.ascontiguousarray(image)
    data: Buffer = (
        packed.tobytes() if copies and np.may_share_memory(packed, image) else packed.reshape(-1).view(np.uint8).data
    )
    step = packed.strides[0]
    return Frame(header, image.shape[0], image.shape[1], encoding, step, is_bigendian, age_us=age_us, data=data)


_IS_LITTLE = np.dtype("<u2") == np.dtype("=u2")


def _as_buffer(image: Buffer, copies: bool) -> Buffer:
    """Return the bytes of an image, copied if `copies` and they can change. Raises InvalidRequest for another type."""
    if isinstance(image, bytes):
        return image
    try:
        view = memoryview(image)
    except TypeError:
        raise InvalidRequest(
            f"a picture must be an array, bytes, a RegionSlice or a Frame, got {type(image).__name__}"
        ) from None
    return view.tobytes() if copies or not view.c_contiguous else view.cast("B")
