"""Sources of generated pictures: a moving test pattern, which needs no OpenCV, and a portrait that moves as if in front
of a camera."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.cameras.sources.source_interface import SourcePicture, opencv
from edge_server.plugins.vision.demo_picture_path import PICTURE

if TYPE_CHECKING:
    import numpy.typing as npt

DEFAULT_SIZE = (640, 480)
_BARS = ((192, 192, 192), (0, 192, 192), (192, 192, 0), (0, 192, 0), (192, 0, 192), (0, 0, 192), (192, 0, 0))
"""Colour bars from left to right, BGR: gray, yellow, cyan, green, magenta, red, blue, at 75 % intensity."""
_STEP = 4
"""Pixels by which the bars move per picture."""
_DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "01110 10001 00001 00110 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""The digits as 5x7 dots, row by row."""


DEMO_SIZE = (384, 288)
"""(width, height) of the visible part."""
_DEMO_RANGE = (128, 60)
"""Pixels by which the visible part moves to the right and down. The whole face is always visible."""


class MadeUpPictures:
    """Base class of sources that draw their pictures. Endless."""

    is_live = False
    length = 0
    fps = 0.0
    _next = 0
    """Number of the next picture."""

    def read(self) -> SourcePicture | None:
        number, self._next = self._next, self._next + 1
        return SourcePicture(self.draw(number))

    def draw(self, number: int) -> npt.NDArray[np.uint8]:
        """Return picture `number` as a new array."""
        raise NotImplementedError

    def rewind(self) -> None:
        self._next = 0

    def close(self) -> None:
        """Do nothing."""


class Pattern(MadeUpPictures):
    """Colour bars that move to the left above a gray ramp, a bouncing square, and the number of the picture.

    The same number always gives the same picture.
    """

    def __init__(self, size: tuple[int, int] = DEFAULT_SIZE) -> None:
        """Prepare the background; `size` is `(width, height)`."""
        self._width, self._height = size
        self._background = _background(self._width, self._height)
        self._dots = [np.array([[dot == "1" for dot in row] for row in digit.split()]) for digit in _DIGITS]
        self.title = f"test pattern {self._width}x{self._height}"

    def draw(self, number: int) -> npt.NDArray[np.uint8]:
        left = number * _STEP % self._width
        pixels: npt.NDArray[np.uint8] = self._background[:, left : left + self._width].copy()
        side = max(min(self._width, self._height) // 8, 1)
        x, y = bounce(number * 5, self._width - side), bounce(number * 3, self._height - side)
        pixels[y : y + side, x : x + side] = 255
        self._draw_number(pixels, number)
        return pixels

    def _draw_number(self, pixels: npt.NDArray[np.uint8], number: int) -> None:
        """Draw the number, white on black, into the lower left corner, clipped to the picture."""
        gap = np.zeros((7, 1), bool)
        text = np.concatenate([part for digit in str(number) for part in (gap, self._dots[int(digit)])] + [gap], axis=1)
        scale = max(self._height // 120, 1)
        sign = np.pad(text, ((1, 1), (0, 0))).repeat(scale, 0).repeat(scale, 1).astype(np.uint8) * 255
        sign = sign[: self._height, : self._width]
        pixels[self._height - sign.shape[0] :, : sign.shape[1]] = sign[:, :, None]


def _background(width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return a background of twice the width, so that each shifted position is a slice of it."""
    columns = np.arange(width)
    bars = np.array(_BARS, np.uint8)[columns * len(_BARS) // width]
    ramp = np.repeat((columns * 255 // max(width - 1, 1)).astype(np.uint8)[:, None], 3, axis=1)
    picture = np.empty((height, width, 3), np.uint8)
    picture[: height * 3 // 4], picture[height * 3 // 4 :] = bars, ramp
    return np.concatenate([picture, picture], axis=1)


def bounce(distance: int, limit: int) -> int:
    """Return the position of a point that moves back and forth between 0 and `limit`, after `distance` steps."""
    if limit <= 0:
        return 0
    position = distance % (2 * limit)
    return min(position, 2 * limit - position)


class Demo(MadeUpPictures):
    """A moving part of the portrait. Needs OpenCV."""

    def __init__(self) -> None:
        cv2 = opencv()
        self._picture: npt.NDArray[np.uint8] = cv2.imdecode(np.fromfile(PICTURE, np.uint8), cv2.IMREAD_COLOR)
        self.title = f"moving portrait {DEMO_SIZE[0]}x{DEMO_SIZE[1]}"

    def draw(self, number: int) -> npt.NDArray[np.uint8]:
        left, top = bounce(number * 2, _DEMO_RANGE[0]), bounce(number, _DEMO_RANGE[1])
        part: npt.NDArray[np.uint8] = self._picture[top : top + DEMO_SIZE[1], left : left + DEMO_SIZE[0]].copy()
        return part
