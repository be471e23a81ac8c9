"""Measurement of how far the outputs of a candidate (runtime, device, precision) are from those of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_server.backends.base import Array
from edge_server.plugins.tuning.trial.tensor_files import Tensors


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """`absolute` is the largest difference of any element.

    `relative` is the largest difference relative to the largest magnitude in the same output. It is infinite if shapes
    differ or if only one of two values is finite. For strings, booleans and integers it is the fraction of differing
    elements. `top1` is the fraction of rows with the same best class; None if no output looks like class scores.
    """

    absolute: float
    relative: float
    top1: float | None


def compare(
    reference: Sequence[Tensors], other: Sequence[Tensors], bf16: frozenset[str] = frozenset()
) -> OutputDifference:
    """Compare the outputs for the same samples. `bf16` names outputs that hold the bits of bfloat16 values."""
    absolute = relative = 0.0
    same = rows = 0
    for expected_outputs, found_outputs in zip(reference, other, strict=True):
        for name, expected in expected_outputs.items():
            one, two = (_as_float32(array, name in bf16) for array in (expected, found_outputs[name]))
            output_absolute, output_relative = _difference(one, two)
            absolute, relative = max(absolute, output_absolute), max(relative, output_relative)
            if _is_scores(one) and one.shape == two.shape:
                agree = one.reshape(-1, one.shape[-1]).argmax(1) == two.reshape(-1, one.shape[-1]).argmax(1)
                same, rows = same + int(agree.sum()), rows + agree.size
    return OutputDifference(absolute, relative, same / rows if rows else None)


def _as_float32(array: Array, is_bf16: bool) -> Array:
    return (array.astype(np.uint32) << 16).view(np.float32) if is_bf16 else array


def _is_scores(array: Array) -> bool:
    """Whether the array is one vector of at least two floats, for the one row of a sample."""
    return array.dtype.kind == "f" and array.ndim in (1, 2) and array.size == array.shape[-1] > 1


def _difference(expected: Array, found: Array) -> tuple[float, float]:
    """Return the absolute and the relative difference of one output."""
    if expected.shape != found.shape:
        return float("inf"), float("inf")
    if expected.size == 0:
        return 0.0, 0.0
    if expected.dtype.kind not in "fiu" or found.dtype.kind not in "fiu":
        fraction = float(np.mean(expected != found))
        return fraction, fraction
    one, two = expected.astype(np.float64), found.astype(np.float64)
    if expected.dtype.kind != "f":
        return float(np.abs(one - two).max()), float(np.mean(one != two))
    return _float_difference(one, two)


def _float_difference(one: npt.NDArray[np.float64], two: npt.NDArray[np.float64]) -> tuple[float, float]:
    is_same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        gaps = np.abs(np.where(is_same, 0.0, one - two))
    if not np.isfinite(gaps).all():
        return float("inf"), float("inf")
    scale = float(np.abs(one[np.isfinite(one)]).max(initial=0.0)) or 1.0
    return float(gaps.max()), float(gaps.max()) / scale
