"""Source of a demo picture: a portrait that moves as if in front of a camera."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.cameras.sources.pattern import bounce
from edge_server.plugins.cameras.sources.source_interface import SourcePicture, opencv
from edge_server.plugins.vision.demo_picture import PICTURE

if TYPE_CHECKING:
    import numpy.typing as npt

SIZE = (384, 288)
"""(width, height) of the visible part."""
_RANGE = (128, 60)
"""Pixels by which the visible part moves to the right and down. The whole face is always visible."""


class Demo:
    """A moving part of the portrait. Endless. Needs OpenCV."""

    fps = 0.0
    length = 0
    is_live = False

    def __init__(self) -> None:
        cv2 = opencv()
        self._picture: npt.NDArray[np.uint8] = cv2.imdecode(np.fromfile(PICTURE, np.uint8), cv2.IMREAD_COLOR)
        self._next = 0
        self.title = f"moving portrait {SIZE[0]}x{SIZE[1]}"

    def read(self) -> SourcePicture | None:
        number, self._next = self._next, self._next + 1
        left, top = bounce(number * 2, _RANGE[0]), bounce(number, _RANGE[1])
        return SourcePicture(self._picture[top : top + SIZE[1], left : left + SIZE[0]].copy())

    def rewind(self) -> None:
        self._next = 0

    def close(self) -> None:
        """Do nothing."""
