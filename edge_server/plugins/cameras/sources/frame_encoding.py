"""Encoder of a source's picture as a frame: raw pixels, JPEG or PNG."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.cameras.sources.source_interface import SourceError, SourcePicture, opencv
from edge_server.protocol.frame_messages import Frame, FrameHeader

if TYPE_CHECKING:
    import numpy.typing as npt

RAW = ("bgr8", "rgb8", "mono8")
FILES = ("jpeg", "png")
JPEG_QUALITY = 90


def encode_frame(picture: SourcePicture, encoding: str, header: FrameHeader) -> Frame:
    """Return a picture as a frame with an encoding of RAW or FILES; "" keeps the encoding of the source.

    Without a conversion, the frame's data is a view of the picture. Raises SourceError for a file that cannot be
    decoded, and Unsupported if OpenCV is needed and missing.
    """
    if picture.file and encoding in ("", picture.format):
        return Frame(header, format=picture.format, data=picture.file)
    pixels = picture_pixels(picture)
    if encoding in FILES:
        return Frame(header, format=encoding, data=_encode(pixels, encoding))
    pixels = _convert(pixels, encoding or "bgr8")
    height, width = pixels.shape[:2]
    return Frame(
        header,
        height=height,
        width=width,
        encoding=encoding or "bgr8",
        step=pixels.strides[0],
        data=pixels.reshape(-1).data,
    )


def picture_pixels(picture: SourcePicture) -> npt.NDArray[np.uint8]:
    """Return the pixels of a picture, 8-bit BGR (height, width, 3), as the file stores them: not rotated by EXIF.

    Raises SourceError for a file that cannot be decoded, and Unsupported if OpenCV is needed and missing.
    """
    if picture.pixels is not None:
        return picture.pixels
    if picture.convert is not None:
        return picture.convert()
    cv2 = opencv()
    try:
        pixels: npt.NDArray[np.uint8] | None = cv2.imdecode(
            np.frombuffer(picture.file, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
        )
    except cv2.error as error:
        raise SourceError(f"{picture.name}: OpenCV cannot decode it: {error.err}") from None
    if pixels is None:
        raise SourceError(f"{picture.name}: OpenCV cannot decode it")
    return pixels


def _encode(pixels: npt.NDArray[np.uint8], encoding: str) -> memoryview:
    cv2 = opencv()
    if encoding == "jpeg":
        _, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    else:
        # The fastest compression level, because the file is only sent to the server.
        _, data = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    return memoryview(data).cast("B")


def _convert(pixels: npt.NDArray[np.uint8], encoding: str) -> npt.NDArray[np.uint8]:
    if encoding == "rgb8":
        return np.ascontiguousarray(pixels[:, :, ::-1])
    if encoding == "mono8":
        # The weights of BT.601, times 256.
        blue, green, red = (pixels[:, :, index].astype(np.uint16) for index in range(3))
        return ((29 * blue + 150 * green + 77 * red + 128) >> 8).astype(np.uint8)
    return np.ascontiguousarray(pixels)
