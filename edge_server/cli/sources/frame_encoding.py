"""Encoding of a picture as the frame that is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.cli.sources.source_interface import SourceError, SourcePicture, opencv
from edge_server.core.frame_stream_types import Frame, FrameHeader

if TYPE_CHECKING:
    import numpy.typing as npt

RAW = ("bgr8", "rgb8", "mono8")
FILES = ("jpeg", "png")
JPEG_QUALITY = 90


def pack(shot: SourcePicture, encoding: str, header: FrameHeader) -> Frame:
    """Return the frame of a picture in one of RAW or FILES; "" leaves it as the source gave it, without a conversion.

    The frame's data is a view of the picture where nothing had to be converted. Raises SourceError for a file that
    does not decode, Unsupported where OpenCV is needed and missing.
    """
    if shot.pixels is None and encoding in ("", shot.format):
        return Frame(header, format=shot.format, data=shot.file)
    pixels = _decode(shot) if shot.pixels is None else shot.pixels
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


def _decode(shot: SourcePicture) -> npt.NDArray[np.uint8]:
    cv2 = opencv()
    try:
        pixels: npt.NDArray[np.uint8] | None = cv2.imdecode(np.frombuffer(shot.file, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise SourceError(f"{shot.name}: OpenCV cannot decode it: {error.err}") from None
    if pixels is None:
        raise SourceError(f"{shot.name}: OpenCV cannot decode it")
    return pixels


def _encode(pixels: npt.NDArray[np.uint8], encoding: str) -> memoryview:
    cv2 = opencv()
    if encoding == "jpeg":
        _, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    else:
        # The fastest level: this is for the way to the server, not for the disk.
        _, data = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    return memoryview(data).cast("B")


def _convert(pixels: npt.NDArray[np.uint8], encoding: str) -> npt.NDArray[np.uint8]:
    if encoding == "rgb8":
        return np.ascontiguousarray(pixels[:, :, ::-1])
    if encoding == "mono8":
        # Weights of BT.601 in 256ths.
        blue, green, red = (pixels[:, :, index].astype(np.uint16) for index in range(3))
        return ((29 * blue + 150 * green + 77 * red + 128) >> 8).astype(np.uint8)
    return np.ascontiguousarray(pixels)
