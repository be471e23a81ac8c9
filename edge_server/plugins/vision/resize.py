"""Resizing of a picture to a network's input: geometry and interpolation.

Coordinates are continuous, in pixels, from the upper left corner of the upper left pixel: that pixel's centre is
(0.5, 0.5), and a picture of width w extends from 0 to w. Resizing maps them linearly, without half-pixel terms.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.plugins.vision.decode import opencv
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

Position = TypeVar("Position", float, "npt.NDArray[np.float64]")

Pixels: TypeAlias = "npt.NDArray[Any]"

MAX_RESIZED_PIXELS = 16 * 1024 * 1024
"""Maximum intermediate picture, in pixels, when a margin is cut off after resizing. Only a strip far longer than any
camera picture comes near, because its shorter side is resized to the network's input."""


class FitMode(enum.Enum):
    """Method to fit a picture of another aspect ratio to the network's input: distort, add borders, or cut."""

    STRETCH = "stretch"
    LETTERBOX = "letterbox"
    CROP = "crop"


class Interpolation(enum.Enum):
    """Interpolation method for resizing.

    AUTO averages 2x2 pixels while the picture is at least twice too large, then continues as LINEAR: it skips no pixels
    at any reduction, at a fraction of the cost of AREA. AREA averages exactly if both sides shrink, else it is LINEAR.
    LINEAR and CUBIC use only the nearest pixels, as OpenCV's functions do.
    """

    AUTO = "auto"
    NEAREST = "nearest"
    LINEAR = "linear"
    CUBIC = "cubic"
    AREA = "area"


class Color(enum.Enum):
    """Order and meaning of the channels of a picture."""

    RGB = "rgb"
    BGR = "bgr"
    GRAY = "gray"
    DEPTH = "depth"
    """One channel of sensor measurements, not of brightness."""


@record(frozen=True, slots=True)
class FittedPicture:
    """Position of a picture in a network's input: `x_input = x * scale_x + offset_x`, and the same for y.

    `width` and `height` are the original picture's. Offsets are positive for added borders, negative for cuts.
    """

    width: int
    height: int
    scale_x: float
    scale_y: float
    offset_x: float
    offset_y: float

    def to_original(self, x: Position, y: Position) -> tuple[Position, Position]:
        """Convert input coordinates to picture coordinates. Points on an added border are outside the picture."""
        return (x - self.offset_x) / self.scale_x, (y - self.offset_y) / self.scale_y

    def to_input(self, x: float, y: float) -> tuple[float, float]:
        """Convert picture coordinates to input coordinates. Points that were cut off are outside the input."""
        return x * self.scale_x + self.offset_x, y * self.scale_y + self.offset_y


@record(frozen=True, slots=True)
class FitRule:
    """Rule that fits a picture of any size to `width` x `height`.

    `resize`, for CROP only, is the length of the shorter side before the centre is cut out, at least `width` and
    `height`. None: just large enough to cover the input.
    """

    mode: FitMode
    width: int
    height: int
    resize: int | None = None
    interpolation: Interpolation = Interpolation.AUTO


@record(frozen=True, slots=True)
class ResizedPicture:
    """Size of a resized picture, and the position (`left`, `top`) of its upper left corner in the network's input."""

    width: int
    height: int
    left: int
    top: int


def place(rule: FitRule, width: int, height: int) -> ResizedPicture:
    """Return the placement of a picture of that size. Pure arithmetic, without a limit on sizes.

    Resized sides are rounded to whole pixels, at least 1. With `resize` the longer side is rounded down and half a
    pixel of offset is rounded to even, to agree with the resize and centre crop of common training code.
    """
    if rule.mode is FitMode.STRETCH:
        return ResizedPicture(rule.width, rule.height, 0, 0)
    if rule.mode is FitMode.LETTERBOX:
        scale = min(rule.width / width, rule.height / height)
        resized_width = min(rule.width, max(1, round(width * scale)))
        resized_height = min(rule.height, max(1, round(height * scale)))
        left, top = (rule.width - resized_width) // 2, (rule.height - resized_height) // 2
        return ResizedPicture(resized_width, resized_height, left, top)
    if rule.resize is not None:
        shorter = min(width, height)
        resized_width, resized_height = width * rule.resize // shorter, height * rule.resize // shorter
    else:
        scale = max(rule.width / width, rule.height / height)
        resized_width = max(rule.width, round(width * scale))
        resized_height = max(rule.height, round(height * scale))
    left, top = -round((resized_width - rule.width) / 2), -round((resized_height - rule.height) / 2)
    return ResizedPicture(resized_width, resized_height, left, top)


def make_fitted_picture(placement: ResizedPicture, width: int, height: int) -> FittedPicture:
    """Return the coordinate mapping for a picture of that size."""
    return FittedPicture(
        width, height, placement.width / width, placement.height / height, float(placement.left), float(placement.top)
    )


def resized(image: Pixels, placement: ResizedPicture, rule: FitRule, error_prefix: str) -> Pixels:
    """Return the part of the resized picture inside the input: a view of `image` if no resizing is needed.

    `image` is `(height, width)` or `(height, width, 3)`, of 8 or 16 bits or floating point. Raises InvalidRequest if
    the aspect ratio is so extreme that the resized picture would have more than MAX_RESIZED_PIXELS.
    """
    height, width = image.shape[:2]
    if placement.width * placement.height > max(MAX_RESIZED_PIXELS, rule.width * rule.height):
        raise InvalidRequest(
            f"{error_prefix}: expected an image that can be cut to {rule.width}x{rule.height}, given {width}x{height}, "
            f"which would first become {placement.width}x{placement.height}"
        )
    if (width, height) != (placement.width, placement.height):
        image = _resize(image, placement.width, placement.height, rule.interpolation)
    cut_x, cut_y = max(0, -placement.left), max(0, -placement.top)
    return image[cut_y : cut_y + rule.height, cut_x : cut_x + rule.width]


def _resize(image: Pixels, width: int, height: int, interpolation: Interpolation) -> Pixels:
    if interpolation is Interpolation.NEAREST:
        return _nearest(image, width, height)
    cv2 = opencv()
    if interpolation is Interpolation.AUTO:
        while image.shape[1] >= 2 * width and image.shape[0] >= 2 * height:
            image = cv2.resize(image, (image.shape[1] // 2, image.shape[0] // 2), interpolation=cv2.INTER_AREA)
    is_shrinking = width <= image.shape[1] and height <= image.shape[0]
    flag = {
        Interpolation.AUTO: cv2.INTER_LINEAR,
        Interpolation.LINEAR: cv2.INTER_LINEAR,
        Interpolation.CUBIC: cv2.INTER_CUBIC,
        # OpenCV's area method repeats pixels when it enlarges.
        Interpolation.AREA: cv2.INTER_AREA if is_shrinking else cv2.INTER_LINEAR,
    }[interpolation]
    resized_image: Pixels = cv2.resize(image, (width, height), interpolation=flag)
    return resized_image


def _nearest(image: Pixels, width: int, height: int) -> Pixels:
    """Return the picture made of the pixels under the new pixels' centres.

    OpenCV is not used: INTER_NEAREST takes the pixel up and left of the centre, and INTER_NEAREST_EXACT of 4.10 reads
    beyond the picture's memory if a side exceeds 32767.
    """
    rows = (2 * np.arange(height) + 1) * image.shape[0] // (2 * height)
    columns = (2 * np.arange(width) + 1) * image.shape[1] // (2 * width)
    taken: Pixels = image[rows[:, None], columns]
    return taken


def channel_order(given: Color, wanted: Color) -> tuple[int, ...]:
    """Return, for each channel of the `wanted` order, its channel in a `given` picture. Gray feeds all three.

    Convert colour to gray with `to_gray` first.
    """
    if wanted is Color.GRAY:
        return (0,)
    if given is Color.GRAY:
        return (0, 0, 0)
    return (0, 1, 2) if given is wanted else (2, 1, 0)


def to_gray(image: npt.NDArray[np.uint8], given: Color) -> npt.NDArray[np.uint8]:
    """Return the luma (ITU-R BT.601) of a colour picture, `(height, width)`."""
    cv2 = opencv()
    gray: npt.NDArray[np.uint8] = cv2.cvtColor(
        np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY if given is Color.RGB else cv2.COLOR_BGR2GRAY
    )
    return gray
