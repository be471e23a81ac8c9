"""Conversion of raw camera frames, in the encodings of ROS' sensor_msgs/Image, to pictures.

| encoding | picture |
|---|---|
| rgb8 bgr8 mono8 8UC1 8UC3 | a view of the frame; 8UC3 is taken as bgr8, as cv_bridge does |
| rgba8 bgra8 8UC4 | without the alpha channel; 8UC4 is bgra8 |
| mono16 rgb16 bgr16 16UC3 | 16 bits, a view if the byte order is the machine's; 16UC3 is bgr16 |
| rgba16 bgra16 16UC4 | the same without the alpha channel |
| 16UC1 16SC1 32FC1 64FC1 | depth, or another measurement: numbers in the sensor's unit |
| uyvy yuv422, yuyv yuv422_yuy2 | BGR; two pixels share one U and V |
| nv12 nv21 nv24 | BGR; a plane of Y, then one of UV pairs (VU in nv21), half as wide and high except in nv24 |
| bayer_{rggb,bggr,gbrg,grbg}{8,16} | BGR, interpolated bilinearly; the name gives the upper left 2x2 pixels |

YUV is ITU-R BT.601 with limited range (Y 16..235, U and V 16..240), as cameras deliver it and OpenCV converts it.

Rows are `step` bytes apart; 0 means without padding. Rows of UV are also `step` bytes apart in nv12 and nv21, but
2 * `step` in nv24, where they are twice as long.
"""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.plugins.vision.decode import opencv
from edge_server.plugins.vision.image_header import MAX_PIXELS
from edge_server.plugins.vision.picture import Picture
from edge_server.plugins.vision.resize import Color
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_SIDE = 65535
"""Maximum width or height of a raw frame, the same as of a JPEG."""


@record(frozen=True, slots=True)
class _Packed:
    """Consecutive pixels, each of `channels` numbers of the numpy type `dtype` (without byte order)."""

    dtype: str
    channels: int
    color: Color

    @property
    def pixel_bytes(self) -> int:
        return self.channels * int(self.dtype[1:])

    def picture(self, rows: npt.NDArray[np.uint8], width: int, is_bigendian: bool) -> Picture:
        numbers = _numbers(rows, self.dtype, is_bigendian)
        if self.channels == 1:
            return Picture(numbers, self.color)
        pixels = numbers.reshape(rows.shape[0], width, self.channels)
        if self.channels == 4:
            cv2 = opencv()
            # This conversion keeps the order of the three colours, so it serves RGB too.
            pixels = cv2.cvtColor(pixels, cv2.COLOR_BGRA2BGR)
        return Picture(pixels, self.color)


@record(frozen=True, slots=True)
class _Bayer:
    """One number per pixel, red, green or blue by its position. `code` is the cv2 attribute that converts to BGR."""

    dtype: str
    code: str

    @property
    def pixel_bytes(self) -> int:
        return int(self.dtype[1:])

    def picture(self, rows: npt.NDArray[np.uint8], width: int, is_bigendian: bool) -> Picture:
        cv2 = opencv()
        return Picture(cv2.cvtColor(_numbers(rows, self.dtype, is_bigendian), getattr(cv2, self.code)), Color.BGR)


@record(frozen=True, slots=True)
class _Yuv422:
    """Two pixels in four bytes. `code` is the cv2 attribute that converts to BGR."""

    code: str

    @property
    def pixel_bytes(self) -> int:
        return 2

    def picture(self, rows: npt.NDArray[np.uint8], width: int, is_bigendian: bool) -> Picture:
        cv2 = opencv()
        return Picture(cv2.cvtColor(rows.reshape(rows.shape[0], width, 2), getattr(cv2, self.code)), Color.BGR)


_Rows = _Packed | _Bayer | _Yuv422

# OpenCV names a Bayer pattern by the second and third pixel of the second row, ROS by the first four pixels.
_BAYER_CODES = {
    "rggb": "COLOR_BayerBG2BGR",
    "bggr": "COLOR_BayerRG2BGR",
    "gbrg": "COLOR_BayerGR2BGR",
    "grbg": "COLOR_BayerGB2BGR",
}
_UYVY = _Yuv422("COLOR_YUV2BGR_UYVY")
_YUYV = _Yuv422("COLOR_YUV2BGR_YUY2")
_BY_ROWS: dict[str, _Rows] = {
    "rgb8": _Packed("u1", 3, Color.RGB),
    "bgr8": _Packed("u1", 3, Color.BGR),
    "rgba8": _Packed("u1", 4, Color.RGB),
    "bgra8": _Packed("u1", 4, Color.BGR),
    "mono8": _Packed("u1", 1, Color.GRAY),
    "8UC1": _Packed("u1", 1, Color.GRAY),
    "8UC3": _Packed("u1", 3, Color.BGR),
    "8UC4": _Packed("u1", 4, Color.BGR),
    "rgb16": _Packed("u2", 3, Color.RGB),
    "bgr16": _Packed("u2", 3, Color.BGR),
    "rgba16": _Packed("u2", 4, Color.RGB),
    "bgra16": _Packed("u2", 4, Color.BGR),
    "mono16": _Packed("u2", 1, Color.GRAY),
    "16UC3": _Packed("u2", 3, Color.BGR),
    "16UC4": _Packed("u2", 4, Color.BGR),
    "16UC1": _Packed("u2", 1, Color.DEPTH),
    "16SC1": _Packed("i2", 1, Color.DEPTH),
    "32FC1": _Packed("f4", 1, Color.DEPTH),
    "64FC1": _Packed("f8", 1, Color.DEPTH),
    "uyvy": _UYVY,
    "yuv422": _UYVY,
    "yuyv": _YUYV,
    "yuv422_yuy2": _YUYV,
    **{f"bayer_{name}8": _Bayer("u1", code) for name, code in _BAYER_CODES.items()},
    **{f"bayer_{name}16": _Bayer("u2", code) for name, code in _BAYER_CODES.items()},
}

# R, G and B of BT.601, limited range, from (Y, U, V, 1): the coefficients 255/219 and 255/112 of its definition, times
# 1 - Kb and 1 - Kr with Kr = 0.299, Kb = 0.114; given in the order B, G, R.
_LUMA, _CHROMA = 255 / 219, 255 / 112
_BLUE_U, _RED_V = _CHROMA * (1 - 0.114), _CHROMA * (1 - 0.299)
_GREEN_U, _GREEN_V = -_BLUE_U * 0.114 / 0.587, -_RED_V * 0.299 / 0.587
_BGR_OF_YUV = np.array(
    [
        [_LUMA, _BLUE_U, 0.0, -16 * _LUMA - 128 * _BLUE_U],
        [_LUMA, _GREEN_U, _GREEN_V, -16 * _LUMA - 128 * (_GREEN_U + _GREEN_V)],
        [_LUMA, 0.0, _RED_V, -16 * _LUMA - 128 * _RED_V],
    ]
)


@record(frozen=True, slots=True)
class _TwoPlanes:
    """A plane of Y, then one of pairs: rows `step_factor` * `step` apart, `divisor` times fewer in both directions.

    `code` is the cv2 attribute that converts to BGR; "" for pairs of U and V of each pixel, which OpenCV does not read.
    """

    divisor: int
    step_factor: int
    code: str

    def byte_size(self, height: int, step: int) -> int:
        return height * step + height // self.divisor * step * self.step_factor

    def picture(self, data: npt.NDArray[np.uint8], height: int, width: int, step: int) -> Picture:
        luma = data[: height * step].reshape(height, step)[:, :width]
        chroma = data[height * step :].reshape(height // self.divisor, step * self.step_factor)
        pairs = chroma[:, : 2 * width // self.divisor].reshape(height // self.divisor, -1, 2)
        cv2 = opencv()
        if self.code:
            return Picture(cv2.cvtColorTwoPlane(luma, pairs, getattr(cv2, self.code)), Color.BGR)
        return Picture(cv2.transform(cv2.merge((luma, *cv2.split(pairs))), _BGR_OF_YUV), Color.BGR)


_BY_PLANES = {
    "nv12": _TwoPlanes(2, 1, "COLOR_YUV2BGR_NV12"),
    "nv21": _TwoPlanes(2, 1, "COLOR_YUV2BGR_NV21"),
    "nv24": _TwoPlanes(1, 2, ""),
}

ENCODINGS = (*_BY_ROWS, *_BY_PLANES)
"""All supported encodings."""


def is_depth(encoding: str) -> bool:
    """Return whether a frame of that encoding holds measurements instead of brightness."""
    by_rows = _BY_ROWS.get(encoding)
    return isinstance(by_rows, _Packed) and by_rows.color is Color.DEPTH


def is_bayer(encoding: str) -> bool:
    """Return whether a frame of that encoding holds a Bayer mosaic: one colour of three for each pixel."""
    return encoding.startswith("bayer_")


def pixels(
    height: int,
    width: int,
    encoding: str,
    step: int,
    is_bigendian: bool,
    data: bytes | bytearray | memoryview,
    *,
    error_prefix: str,
) -> Picture:
    """Return the picture of a raw frame. It is a view of `data` where the table above says so.

    `data` holds exactly the frame. Raises InvalidRequest for an unknown encoding, and for sizes that the encoding
    cannot have, that exceed MAX_SIDE or `image_header.MAX_PIXELS`, or that do not match `data`. Raises Unsupported if
    the encoding needs OpenCV and it is missing.
    """
    by_rows, by_planes = _BY_ROWS.get(encoding), _BY_PLANES.get(encoding)
    if by_rows is None and by_planes is None:
        raise InvalidRequest(
            f"{error_prefix}: expected an encoding out of {', '.join(ENCODINGS)}; {_nearest(encoding)}"
        )
    _check_size(height, width, encoding, error_prefix)
    row_bytes = width * (by_rows.pixel_bytes if by_rows else 1)
    step = step or row_bytes
    if step < row_bytes:
        raise InvalidRequest(
            f"{error_prefix}: expected a step of at least {row_bytes} bytes, "
            f"for {width} pixels of {encoding}, given {step}"
        )
    expected = by_planes.byte_size(height, step) if by_planes else height * step
    view = memoryview(data).cast("B")
    if view.nbytes != expected:
        raise InvalidRequest(
            f"{error_prefix}: expected {expected} bytes, for {width}x{height} pixels of {encoding} "
            f"with a step of {step}, given {view.nbytes}"
        )
    flat = np.frombuffer(view, np.uint8)
    if by_planes:
        return by_planes.picture(flat, height, width, step)
    assert by_rows is not None
    return by_rows.picture(flat.reshape(height, step)[:, :row_bytes], width, is_bigendian)


def _nearest(encoding: str) -> str:
    if not encoding:
        return "given none"
    given = encoding[:40]
    nearest = difflib.get_close_matches(given, ENCODINGS, n=1, cutoff=0.0)[0]
    return f"did you mean '{nearest}', given '{given}'"


def _check_size(height: int, width: int, encoding: str, error_prefix: str) -> None:
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE and height * width <= MAX_PIXELS):
        raise InvalidRequest(
            f"{error_prefix}: expected sides from 1 to {MAX_SIDE} and at most {MAX_PIXELS} pixels, "
            f"given {width}x{height}"
        )
    is_halved = encoding in ("nv12", "nv21")
    if width % 2 and (is_halved or isinstance(_BY_ROWS.get(encoding), _Yuv422)):
        raise InvalidRequest(
            f"{error_prefix}: expected an even width, as pixels of {encoding} share colour, given {width}"
        )
    if height % 2 and is_halved:
        raise InvalidRequest(
            f"{error_prefix}: expected an even height, as rows of {encoding} share colour, given {height}"
        )
    if min(height, width) < 3 and is_bayer(encoding):
        raise InvalidRequest(
            f"{error_prefix}: expected at least 3x3 pixels of {encoding}, to interpolate between, "
            f"given {width}x{height}"
        )


def _numbers(rows: npt.NDArray[np.uint8], dtype: str, is_bigendian: bool) -> npt.NDArray[np.generic]:
    """Return rows of bytes as rows of native, aligned numbers: a view if possible, else a copy."""
    if dtype == "u1":
        return rows
    values = rows.view((">" if is_bigendian else "<") + dtype)
    is_native = is_bigendian == (sys.byteorder == "big")
    # OpenCV needs row strides that are a multiple of the number's size.
    if is_native and values.flags.aligned and values.strides[0] % values.itemsize == 0:
        return values.view(values.dtype.newbyteorder("="))
    return values.astype(values.dtype.newbyteorder("="))
