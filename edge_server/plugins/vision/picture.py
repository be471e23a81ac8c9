"""Class `Picture`: decoded pixels, with their colour format (RGB, BGR, gray or depth) and the size of the original
frame."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.decode import opencv
from edge_server.plugins.vision.resize import Color
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt


@record(frozen=True, slots=True, eq=False)
class Picture:
    """Pixels `(height, width, 3)`, or `(height, width)` for gray and depth; often a view of the received bytes.

    Colour and gray are uint8 or uint16, depth is any number type in native byte order. Rows may be padded, pixels are
    not. `frame_size` is the `(width, height)` of the frame if a decoder has reduced the picture.
    """

    pixels: npt.NDArray[np.generic] = field(repr=False)
    color: Color
    frame_size: tuple[int, int] | None = None

    @property
    def width(self) -> int:
        """Width of the frame, in pixels."""
        return self.frame_size[0] if self.frame_size else self.pixels.shape[1]

    @property
    def height(self) -> int:
        """Height of the frame, in pixels."""
        return self.frame_size[1] if self.frame_size else self.pixels.shape[0]

    def copy(self) -> Picture:
        """Return a picture with pixels of its own."""
        return replace(self, pixels=self.pixels.copy())

    def eight_bits(self) -> npt.NDArray[np.uint8]:
        """Return colour or gray with 8 bits per channel: the upper 8 of 16 bits, or the pixels themselves."""
        if self.pixels.dtype == np.uint8:
            return self.pixels.view(np.uint8)
        halves = np.asarray(self.pixels, "<u2").view(np.uint8)
        upper = halves.reshape(*self.pixels.shape, 2)[..., 1]
        return np.ascontiguousarray(upper)

    def bgr(self) -> npt.NDArray[np.uint8]:
        """Return read-only BGR pixels `(height, width, 3)`: the pixels themselves if they are 8-bit BGR.

        Depth is shown as gray, from its smallest to its largest value; values that are not finite are black.
        """
        cv2 = opencv()
        pixels = _gray_of_depth(self.pixels) if self.color is Color.DEPTH else self.eight_bits()
        if self.color is Color.BGR:
            return pixels
        code = cv2.COLOR_RGB2BGR if self.color is Color.RGB else cv2.COLOR_GRAY2BGR
        turned: npt.NDArray[np.uint8] = cv2.cvtColor(pixels, code)
        return turned


def _gray_of_depth(pixels: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    values = pixels.astype(np.float64)
    is_number = np.isfinite(values)
    if not is_number.any():
        return np.zeros(pixels.shape, np.uint8)
    low, high = values[is_number].min(), values[is_number].max()
    values[~is_number] = low
    shown: npt.NDArray[np.uint8] = ((values - low) * (255 / max(high - low, 1e-300))).astype(np.uint8)
    return shown
