"""Resizing of a picture to a network's input: geometry and interpolation.

Coordinates are continuous, in pixels, from the upper left corner of the upper left pixel: that pixel's centre is
(0.5, 0.5), and a picture of width w extends from 0 to w. Resizing maps them linearly, without half-pixel terms.
"""

from __future__ import annotations

import enum
import functools
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
    LINEAR and CUBIC use only the nearest pixels, as OpenCV's functions do. LINEAR_ANTIALIAS and CUBIC_ANTIALIAS use all
    pixels under a filter that is as wide as the reduction, as Pillow's BILINEAR and BICUBIC do and torchvision's, which
    Ultralytics' classifiers and Hugging Face's processors use. They cost about as much as AREA does to make a picture
    smaller.
    """

    AUTO = "auto"
    NEAREST = "nearest"
    LINEAR = "linear"
    CUBIC = "cubic"
    AREA = "area"
    LINEAR_ANTIALIAS = "linear_antialias"
    CUBIC_ANTIALIAS = "cubic_antialias"

    @property
    def is_antialiased(self) -> bool:
        """Whether each pixel of a picture has its own weight in the resized one."""
        return self in (Interpolation.LINEAR_ANTIALIAS, Interpolation.CUBIC_ANTIALIAS)


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
    `height`. None: just large enough to cover the input. Half a pixel of the cut is rounded down if `cuts_down`, as in
    transformers' center_crop, else to even, as in torchvision's CenterCrop. If it `cuts_first`, the centre is cut out
    of the picture, and then resized.
    """

    mode: FitMode
    width: int
    height: int
    resize: int | None = None
    interpolation: Interpolation = Interpolation.AUTO
    cuts_down: bool = False
    cuts_first: bool = False


@record(frozen=True, slots=True)
class ResizedPicture:
    """Size of a resized picture, and the position (`left`, `top`) of its upper left corner in the network's input.

    `part` is the part of the picture that is resized, as left, top, width and height; None: all of it.
    """

    width: int
    height: int
    left: int
    top: int
    part: tuple[int, int, int, int] | None = None


def place(rule: FitRule, width: int, height: int) -> ResizedPicture:
    """Return the placement of a picture of that size. Pure arithmetic, without a limit on sizes.

    Resized sides are rounded to whole pixels, at least 1. With `resize` the longer side is rounded down, to agree with
    the resize of common training code.
    """
    if rule.mode is FitMode.STRETCH:
        return ResizedPicture(rule.width, rule.height, 0, 0)
    if rule.mode is FitMode.LETTERBOX:
        scale = min(rule.width / width, rule.height / height)
        resized_width = min(rule.width, max(1, round(width * scale)))
        resized_height = min(rule.height, max(1, round(height * scale)))
        left, top = (rule.width - resized_width) // 2, (rule.height - resized_height) // 2
        return ResizedPicture(resized_width, resized_height, left, top)
    if rule.cuts_first:
        part_width = min(width, max(1, height * rule.width // rule.height))
        part_height = min(height, max(1, width * rule.height // rule.width))
        part = ((width - part_width) // 2, (height - part_height) // 2, part_width, part_height)
        return ResizedPicture(rule.width, rule.height, 0, 0, part)
    if rule.resize is not None:
        shorter = min(width, height)
        resized_width, resized_height = width * rule.resize // shorter, height * rule.resize // shorter
    else:
        scale = max(rule.width / width, rule.height / height)
        resized_width = max(rule.width, round(width * scale))
        resized_height = max(rule.height, round(height * scale))
    spare_width, spare_height = resized_width - rule.width, resized_height - rule.height
    if rule.cuts_down:
        return ResizedPicture(resized_width, resized_height, -(spare_width // 2), -(spare_height // 2))
    left, top = -round(spare_width / 2), -round(spare_height / 2)
    return ResizedPicture(resized_width, resized_height, left, top)


def make_fitted_picture(placement: ResizedPicture, width: int, height: int) -> FittedPicture:
    """Return the coordinate mapping for a picture of that size."""
    left, top, part_width, part_height = placement.part or (0, 0, width, height)
    scale_x, scale_y = placement.width / part_width, placement.height / part_height
    return FittedPicture(
        width, height, scale_x, scale_y, placement.left - left * scale_x, placement.top - top * scale_y
    )


def resized(image: Pixels, placement: ResizedPicture, rule: FitRule, error_prefix: str) -> Pixels:
    """Return the part of the resized picture inside the input: a view of `image` if no resizing is needed.

    `image` is `(height, width)` or `(height, width, 3)`, of 8 or 16 bits or floating point. Raises InvalidRequest if
    the aspect ratio is so extreme that the resized picture would have more than MAX_RESIZED_PIXELS.
    """
    if placement.part is not None:
        left, top, width, height = placement.part
        image = image[top : top + height, left : left + width]
    height, width = image.shape[:2]
    if placement.width * placement.height > max(MAX_RESIZED_PIXELS, rule.width * rule.height):
        raise InvalidRequest(
            f"{error_prefix}: expected an image that can be cut to {rule.width}x{rule.height}, given {width}x{height}, "
            f"which would first become {placement.width}x{placement.height}"
        )
    cut_x, cut_y = max(0, -placement.left), max(0, -placement.top)
    if (width, height) != (placement.width, placement.height):
        if rule.interpolation.is_antialiased:
            columns = (cut_x, min(cut_x + rule.width, placement.width))
            rows = (cut_y, min(cut_y + rule.height, placement.height))
            return _resize_antialiased(image, placement, columns, rows, rule.interpolation)
        image = _resize(image, placement.width, placement.height, rule.interpolation)
    return image[cut_y : cut_y + rule.height, cut_x : cut_x + rule.width]


def _resize(image: Pixels, width: int, height: int, interpolation: Interpolation) -> Pixels:
    if interpolation is Interpolation.NEAREST:
        return _nearest(image, width, height)
    cv2 = opencv()
    if interpolation is Interpolation.AUTO:
        while image.shape[1] >= 2 * width and image.shape[0] >= 2 * height:
            image = cv2.resize(image, (image.shape[1] // 2, image.shape[0] // 2), interpolation=cv2.INTER_AREA)
    flag = cv2.INTER_CUBIC if interpolation is Interpolation.CUBIC else cv2.INTER_LINEAR
    # OpenCV's area method repeats pixels when it enlarges.
    if interpolation is Interpolation.AREA and width <= image.shape[1] and height <= image.shape[0]:
        flag = cv2.INTER_AREA
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


_BAND_ROWS = 4
"""Rows that one matrix product makes: fewer are slower for large pictures, more for small ones."""

_MAX_STRIP_NUMBERS = 2**19
"""Numbers of a picture that are filtered at once, so that they stay in the processor's cache."""

_MAX_PRODUCTS = 2**18
"""Multiplications of one matrix product. OpenBLAS, in numpy's wheels, computes up to so many on the caller's thread
(GEMM_MULTITHREAD_THRESHOLD). Its other threads would wait for cores that models use."""


def _resize_antialiased(
    image: Pixels,
    placement: ResizedPicture,
    columns: tuple[int, int],
    rows: tuple[int, int],
    interpolation: Interpolation,
) -> Pixels:
    """Return these columns and rows of the resized picture, from a first to before a last one.

    Differs by at most 1 from Pillow's Image.resize with 8 bits: each row is filtered, and rounded, before the columns.
    (Since version 13, Pillow begins with the columns where that costs less, as for a very tall picture.)
    """
    cv2 = opencv()
    height, width = image.shape[:2]
    top, bottom, down = _filter_bands(height, placement.height, *rows, interpolation)
    # A side that keeps its length is not filtered: each weight would be 1.
    if width == placement.width:
        narrow = image[top:bottom, slice(*columns)]
    else:
        left, right, across = _filter_bands(width, placement.width, *columns, interpolation)
        image = image[top:bottom, left:right]
        narrow = np.empty((len(image), columns[1] - columns[0], *image.shape[2:]), image.dtype)
        strip = max(1, _MAX_STRIP_NUMBERS // image[0].size)
        for at in range(0, len(image), strip):
            turned = _filter_columns(cv2.transpose(image[at : at + strip]), across)
            narrow[at : at + strip] = cv2.transpose(turned)
    if height == placement.height:
        return narrow[rows[0] - top : rows[1] - top]
    return _filter_columns(narrow, down)


_Bands: TypeAlias = "list[tuple[slice, slice, npt.NDArray[np.floating[Any]]]]"


@functools.lru_cache(maxsize=16)
def _filter_bands(
    source: int, target: int, start: int, stop: int, interpolation: Interpolation
) -> tuple[int, int, _Bands]:
    """Return the weights that make the numbers `start` to `stop` of `target` ones from `source` ones.

    Each band has a slice of the made numbers, a slice of the given ones and a matrix of weights. Slices count from
    `start`, and from the first number that is needed, which is returned together with the last one. The weights are
    those of Pillow's precompute_coeffs (src/libImaging/Resample.c).
    """
    scale = source / target
    spread = max(scale, 1.0)
    reach = spread * (2.0 if interpolation is Interpolation.CUBIC_ANTIALIAS else 1.0)
    count = stop - start
    numbers = np.minimum(np.arange(-(-count // _BAND_ROWS) * _BAND_ROWS), count - 1).reshape(-1, _BAND_ROWS)
    centers = (numbers + start + 0.5) * scale
    firsts = np.maximum((centers - reach + 0.5).astype(int), 0)
    lasts = np.minimum((centers + reach + 0.5).astype(int), source)
    length = int((lasts[:, -1] - firsts[:, 0]).max())
    begins = np.minimum(firsts[:, 0], source - length)
    at = begins[:, None, None] + np.arange(length)
    distance = np.abs(at + 0.5 - centers[:, :, None]) / spread
    if interpolation is Interpolation.CUBIC_ANTIALIAS:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    else:
        weights = np.maximum(1 - distance, 0.0)
    weights *= (at >= firsts[:, :, None]) & (at < lasts[:, :, None])
    weights /= weights.sum(axis=2, keepdims=True)
    # Pillow's precision, so that sums that end in a half are rounded as there. They are common where a picture is
    # enlarged, and exact in double precision.
    weights = np.floor(weights * 2**22 + 0.5) / 2**22
    precise = weights.astype(np.float32 if scale > 1 else np.float64)
    low, high = int(begins.min()), int(begins.max()) + length
    bands = [
        (slice(made, min(made + _BAND_ROWS, count)), slice(begin - low, begin - low + length), matrix)
        for made, begin, matrix in zip(range(0, count, _BAND_ROWS), begins.tolist(), precise, strict=True)
    ]
    return low, high, bands


def _filter_columns(image: Pixels, bands: _Bands) -> Pixels:
    """Return the picture with each column filtered, rounded to the type of `image`."""
    values = image.reshape(len(image), -1).astype(bands[0][2].dtype)
    made = np.empty((bands[-1][0].stop, values.shape[1]), values.dtype)
    step = max(1, _MAX_PRODUCTS // bands[0][2].size)
    for at in range(0, values.shape[1], step):
        for rows, needed, weights in bands:
            part = made[rows, at : at + step]
            np.matmul(weights[: len(part)], values[needed, at : at + step], out=part)
    if image.dtype.kind != "f":
        limits = np.iinfo(image.dtype)
        made += 0.5
        np.clip(np.floor(made, out=made), limits.min, limits.max, out=made)
    return made.astype(image.dtype).reshape(len(made), *image.shape[1:])


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
