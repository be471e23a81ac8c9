"""Conversion of pixel values to a network's numeric range and type, by scale, mean and standard deviation."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from edge_server.core.tensor import DType, bf16_bits
from edge_server.plugins.vision.decode import opencv
from edge_server.plugins.vision.image_parameters import DepthUnit
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

# OpenCV's lookup depends only on the size of values, not on their type. It has no uint32.
_BITS = {1: np.uint8, 2: np.uint16, 4: np.int32}

_MAX_BF16 = np.uint32(0x7F7F0000).view(np.float32)
"""Largest finite BF16 number."""


@record(frozen=True, slots=True, eq=False)
class ByteValues:
    """Conversion of 8-bit pixels: `table[c, v]` is the value of the network's channel c for the pixel value v.

    The table is computed in double precision and rounded once, so each way of writing gives the same values. BF16
    values are bit patterns.
    """

    table: npt.NDArray[np.generic] = field(repr=False)
    _bits: npt.NDArray[np.generic] = field(init=False, repr=False)
    _is_unchanged: bool = field(init=False)
    """Whether each value is that of its pixel, perhaps in another type. numpy converts types three times as fast as
    OpenCV looks values up, except FP16."""

    def __post_init__(self) -> None:
        bits = np.ascontiguousarray(self.table).view(_BITS[self.table.itemsize])
        object.__setattr__(self, "_bits", bits)
        is_unchanged = self.table.dtype != np.float16 and bool((self.table == np.arange(256)).all())
        object.__setattr__(self, "_is_unchanged", is_unchanged)

    def border(self, pad: tuple[int, ...]) -> npt.NDArray[np.generic]:
        """Return the values of the channels for a border of colour `pad`."""
        return self.table[np.arange(len(pad)), list(pad)]

    def write_chw(self, image: npt.NDArray[np.uint8], order: tuple[int, ...], window: npt.NDArray[np.generic]) -> None:
        """Write `image` into `window`, `(channels, height, width)`; channel c takes channel `order[c]`."""
        cv2 = opencv()
        if not self._is_unchanged:
            target = window.view(self._bits.dtype)
            planes = [image] if image.ndim == 2 else cv2.split(image, list(np.empty((3, *image.shape[:2]), np.uint8)))
            for channel, source in enumerate(order):
                cv2.LUT(planes[source], self._bits[channel], target[channel])
        elif image.ndim == 2:
            np.copyto(window, image)
        else:
            bytes_in_order = window if window.dtype == np.uint8 else np.empty((3, *image.shape[:2]), np.uint8)
            cv2.split(image, [bytes_in_order[order.index(channel)] for channel in range(3)])
            if bytes_in_order is not window:
                np.copyto(window, bytes_in_order)

    def write_hwc(self, image: npt.NDArray[np.uint8], order: tuple[int, ...], window: npt.NDArray[np.generic]) -> None:
        """Write `image` into `window`, `(height, width, channels)`; channel c takes channel `order[c]`."""
        cv2 = opencv()
        target = window.view(self._bits.dtype)
        if len(order) == 1:
            cv2.LUT(image, self._bits[0], target[:, :, 0])
            return
        if order != (0, 1, 2):
            code = cv2.COLOR_GRAY2RGB if image.ndim == 2 else cv2.COLOR_BGR2RGB
            if self._is_unchanged and window.dtype == np.uint8:
                cv2.cvtColor(image, code, target)
                return
            image = cv2.cvtColor(image, code)
        if self._is_unchanged:
            np.copyto(window, image)
        else:
            cv2.LUT(image, np.ascontiguousarray(self._bits.T)[None], target)


@record(frozen=True, slots=True)
class DepthValues:
    """Conversion of sensor measurements: (v * scale - mean) / stddev, rounded and clipped to the range of `dtype`.

    A value that is not finite was not measured and becomes 0, as in 16UC1. `unit` is the network's unit; by ROS REP
    118 integers are millimetres and floats metres. None: no unit conversion.
    """

    dtype: DType
    scale: float
    mean: float
    stddev: float
    unit: DepthUnit | None = None

    def border(self, pad: tuple[int, ...]) -> npt.NDArray[np.generic]:
        """Return the border values; `pad` is in the network's unit."""
        values = (np.array(pad, np.float64) * self.scale - self.mean) / self.stddev
        return cast_saturated(values.astype(np.float32), self.dtype)

    def write(self, numbers: npt.NDArray[np.generic], window: npt.NDArray[np.generic]) -> None:
        """Write `numbers` into `window`, both `(height, width)`."""
        numbers = zero_not_finite(numbers)
        unit_factor, given = 1.0, DepthUnit.METRES if numbers.dtype.kind == "f" else DepthUnit.MILLIMETRES
        if self.unit not in (None, given):
            unit_factor = 0.001 if self.unit is DepthUnit.METRES else 1000.0
        factor = self.scale * unit_factor / self.stddev
        is_in_place = self.dtype is DType.FP32
        values = window.view(np.float32) if is_in_place else np.empty(window.shape, np.float32)
        with np.errstate(over="ignore"):
            np.multiply(numbers, np.float32(factor), out=values, dtype=np.float32, casting="same_kind")
            values -= np.float32(self.mean / self.stddev)
        if is_in_place:
            limit = np.finfo(np.float32).max
            np.clip(values, -limit, limit, out=values)
        else:
            np.copyto(window, cast_saturated(values, self.dtype))


def zero_not_finite(numbers: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return `numbers` with 0 for each value that is not finite; the array itself if all are finite."""
    if numbers.dtype.kind != "f":
        return numbers
    is_number = np.isfinite(numbers)
    if is_number.all():
        return numbers
    return np.where(is_number, numbers, numbers.dtype.type(0))


def cast_exactly(values: npt.NDArray[np.float64], dtype: DType) -> npt.NDArray[np.generic] | None:
    """Return `values` as `dtype`, rounded to nearest (ties to even), or None if some do not fit."""
    if dtype is DType.BF16:
        kept = bf16_bits(values.astype(np.float32))
        return kept if bool((kept & 0x7F80 != 0x7F80).all()) else None
    if dtype.numpy.kind == "f":
        narrowed = values.astype(dtype.numpy)
        return narrowed if bool(np.isfinite(narrowed).all()) else None
    limits = np.iinfo(str(dtype.numpy))
    rounded = np.rint(values)
    if not bool(((rounded >= limits.min) & (rounded <= limits.max)).all()):
        return None
    return rounded.astype(dtype.numpy)


def cast_saturated(values: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.generic]:
    """Return `values` as `dtype`, rounded to nearest and clipped to its range."""
    if dtype.numpy.kind == "f" or dtype is DType.BF16:
        maximum = _MAX_BF16 if dtype is DType.BF16 else np.float32(np.finfo(str(dtype.numpy)).max)
        kept = values.clip(-maximum, maximum)
        return bf16_bits(kept) if dtype is DType.BF16 else kept.astype(dtype.numpy, copy=False)
    limits = np.iinfo(str(dtype.numpy))
    # Double precision holds the limits of all integer types in IMAGE_TYPES exactly.
    return np.rint(values.astype(np.float64)).clip(limits.min, limits.max).astype(dtype.numpy)
