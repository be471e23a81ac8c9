"""Decoder of image files (JPEG, PNG, BMP, WebP) to pixel arrays. OpenCV is imported with the first image."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import InvalidRequest, Unsupported, install_hint
from edge_server.plugins.vision.image_header import ImageHeader, read_header

if TYPE_CHECKING:
    import numpy.typing as npt


_imported: ModuleType | None = None
"""The module cv2, once it is imported."""


def opencv() -> ModuleType:
    """Return the module cv2. Raises Unsupported, with install instructions, if the import fails."""
    global _imported
    cv2 = _imported
    # A look-up costs a tenth of an import of what is imported: each frame needs some.
    if cv2 is None or sys.modules.get("cv2") is not cv2:
        try:
            cv2 = importlib.import_module("cv2")
        except ImportError as error:
            raise Unsupported(
                f"images need OpenCV, which does not import here ({error}); {install_hint('vision')}"
            ) from error
        # OpenCV's threads have no benefit, measured with two workers beside a model: models and other pictures need the
        # cores.
        cv2.setNumThreads(1)
        _imported = cv2
    return cv2


def decode_image(data: memoryview, *, as_gray: bool, error_prefix: str) -> npt.NDArray[np.uint8]:
    """Decode a JPEG, PNG, BMP or WebP file to 8 bits per channel: `(height, width, 3)` BGR, or `(height, width)` gray.

    The picture is rotated by its EXIF orientation, as people see it and as data sets store it; width and height are
    those of the rotated picture. Transparency is dropped; 16-bit files lose their lower byte. Raises InvalidRequest
    unless the data is a valid image of one of these formats and of an acceptable size (see `image_header.read_header`),
    and Unsupported if OpenCV is missing.
    """
    header = read_header(data, error_prefix)
    cv2 = opencv()
    flags = cv2.IMREAD_GRAYSCALE if as_gray else cv2.IMREAD_COLOR
    return decode_file(data, header, flags, error_prefix).view(np.uint8)


def decode_file(data: memoryview, header: ImageHeader, flags: int, error_prefix: str) -> npt.NDArray[np.generic]:
    """Decode a file with that header by the `flags` of cv2.imdecode. Raises InvalidRequest if it is damaged."""
    cv2 = opencv()
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        raise InvalidRequest(
            f"{error_prefix}: expected a sound {header.format.value} image, given one that OpenCV refuses: {error.err}"
        ) from None
    if image is None:
        raise InvalidRequest(
            f"{error_prefix}: expected a sound {header.format.value} image, "
            f"given {data.nbytes} bytes that do not decode"
        )
    decoded: npt.NDArray[np.generic] = image
    return decoded
