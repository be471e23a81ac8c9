"""Decoder of compressed camera frames (sensor_msgs/CompressedImage), by their `format`.

`format` is a codec ("jpeg", "png"), or image_transport's text: "bgr8; jpeg compressed bgr8", "16UC1; png compressed".
The encoding before the semicolon decides whether the frame is depth or a Bayer mosaic: compressed_image_transport
writes the mosaic into a gray file. Colours and codec are read from the file, for the codecs of `image_header`: drivers
write "jpg", "image/jpeg", "mjpeg" or nothing, and "jpeg" for a PNG.

Unlike an uploaded photograph, a frame is not rotated by its EXIF orientation: in ROS, camera_info, boxes and all other
nodes refer to the pixels as stored.
"""

from __future__ import annotations

import sys

import numpy as np

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.plugins.vision.decode import decode_file, opencv
from edge_server.plugins.vision.image_header import ImageFormat, ImageHeader, read_header
from edge_server.plugins.vision.picture import Picture
from edge_server.plugins.vision.raw_encodings import is_bayer, is_depth, pixels
from edge_server.plugins.vision.resize import Color, FitRule, place

_REDUCTIONS = (8, 4, 2)


def read_compressed(
    data: memoryview, frame_format: str, *, color: Color, shrinks_to: FitRule | None, error_prefix: str
) -> Picture:
    """Return the picture of one file: gray or depth if `color` is that, else BGR.

    A Bayer mosaic becomes BGR for any `color`. With `shrinks_to`, a JPEG of another kind may be decoded at 1/2, 1/4 or
    1/8 of its size, which costs less, but not smaller than the rule makes it. Raises InvalidRequest for a file that is
    none of `image_header` or is damaged, or depth instead of colour and colour instead of depth; Unsupported for
    compressedDepth.
    """
    encoding = frame_format.partition(";")[0].strip()
    if frame_format.rpartition(";")[2].lower().split()[:1] == ["compresseddepth"]:
        raise Unsupported(
            f"{error_prefix}: compressedDepth is not offered, given '{frame_format[:60]}'; send the raw 16UC1 or 32FC1 "
            "frame, or '16UC1; png compressed'"
        )
    if frame_format:
        error_prefix = f"{error_prefix}, format '{frame_format[:60]}'"
    header = read_header(data, error_prefix)
    if is_bayer(encoding):
        return _read_bayer(data, header, encoding, error_prefix)
    if color is Color.DEPTH:
        return _read_depth(data, header, error_prefix)
    if is_depth(encoding):
        raise InvalidRequest(
            f"{error_prefix}: expected a picture in colour or gray, given depth; a model that takes depth declares "
            "image_color depth"
        )
    decoded_color = Color.GRAY if color is Color.GRAY else Color.BGR
    reduction = _reduction(header, shrinks_to)
    decoded = decode_file(data, header, _flags(decoded_color, reduction), error_prefix).view(np.uint8)
    return Picture(decoded, decoded_color, (header.width, header.height) if reduction > 1 else None)


def _read_bayer(data: memoryview, header: ImageHeader, encoding: str, error_prefix: str) -> Picture:
    """Return the colours of a mosaic; a file with colours is taken as it is, because its writer interpolated them."""
    cv2 = opencv()
    flags = cv2.IMREAD_ANYDEPTH | cv2.IMREAD_ANYCOLOR | cv2.IMREAD_IGNORE_ORIENTATION
    values = decode_file(data, header, flags, error_prefix)
    if values.ndim == 3:
        return Picture(values, Color.BGR)
    # A JPEG has 8 bits of a mosaic of 16.
    encoding = f"{encoding.rstrip('0123456789')}{8 * values.itemsize}"
    height, width = values.shape
    return pixels(height, width, encoding, 0, sys.byteorder == "big", values.data, error_prefix=error_prefix)


def _read_depth(data: memoryview, header: ImageHeader, error_prefix: str) -> Picture:
    cv2 = opencv()
    values = decode_file(data, header, cv2.IMREAD_UNCHANGED, error_prefix)
    if values.ndim != 2:
        raise InvalidRequest(f"{error_prefix}: expected one channel of depth, given a colour picture")
    return Picture(values, Color.DEPTH)


def _reduction(header: ImageHeader, rule: FitRule | None) -> int:
    """Return the divisor by which the decoder may shrink the picture; resizing by halves would do the same first.

    The divisor must divide both sides: the decoder rounds up, which would move the content by a pixel or more.
    """
    if rule is None or header.format is not ImageFormat.JPEG:
        return 1
    wanted = place(rule, header.width, header.height)
    sides = ((header.width, wanted.width), (header.height, wanted.height))
    return next((n for n in _REDUCTIONS if all(side % n == 0 and side >= n * min_side for side, min_side in sides)), 1)


def _flags(color: Color, reduction: int) -> int:
    cv2 = opencv()
    flags: int = {
        (Color.BGR, 1): cv2.IMREAD_COLOR,
        (Color.BGR, 2): cv2.IMREAD_REDUCED_COLOR_2,
        (Color.BGR, 4): cv2.IMREAD_REDUCED_COLOR_4,
        (Color.BGR, 8): cv2.IMREAD_REDUCED_COLOR_8,
        (Color.GRAY, 1): cv2.IMREAD_GRAYSCALE,
        (Color.GRAY, 2): cv2.IMREAD_REDUCED_GRAYSCALE_2,
        (Color.GRAY, 4): cv2.IMREAD_REDUCED_GRAYSCALE_4,
        (Color.GRAY, 8): cv2.IMREAD_REDUCED_GRAYSCALE_8,
    }[color, reduction]
    return flags | int(cv2.IMREAD_IGNORE_ORIENTATION)
