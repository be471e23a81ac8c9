"""Difference between a model's outputs and those expected for the same inputs: of another runtime or device, of an
engine, or of another version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edge_server.core.batch import Array
from edge_server.record import record


class ArrayDifference(NamedTuple):
    """`absolute` is the largest difference of any element.

    `relative` is the largest difference relative to the largest finite magnitude that is expected. Of integers,
    booleans and texts it is the fraction of the elements that differ, and for booleans and texts `absolute` is so, too.
    Both are infinite if shapes or types differ, or if only one of two floats is finite or they are different
    infinities. NaN is equal to NaN.
    """

    absolute: float
    relative: float


@record(frozen=True, slots=True)
class OutputDifference:
    """The largest ArrayDifference of all outputs. `top1` is the fraction of rows with the same best class; None if no
    output looks like class scores."""

    absolute: float
    relative: float
    top1: float | None


def compare_outputs(
    expected: Sequence[Mapping[str, Array]],
    found: Sequence[Mapping[str, Array]],
    bf16: frozenset[str] = frozenset(),
) -> OutputDifference:
    """Compare the outputs for the same samples. `bf16` names outputs that hold the bits of bfloat16 values."""
    absolute = relative = 0.0
    same = rows = 0
    for expected_outputs, found_outputs in zip(expected, found, strict=True):
        for name, array in expected_outputs.items():
            one, two = (_as_float32(one, name in bf16) for one in (array, found_outputs[name]))
            difference = compare_arrays(one, two)
            absolute, relative = max(absolute, difference.absolute), max(relative, difference.relative)
            if _is_scores(one) and one.shape == two.shape:
                agree = one.reshape(-1, one.shape[-1]).argmax(1) == two.reshape(-1, one.shape[-1]).argmax(1)
                same, rows = same + int(agree.sum()), rows + agree.size
    return OutputDifference(absolute, relative, same / rows if rows else None)


def describe_difference(
    expected: Mapping[str, Array],
    found: Mapping[str, Array],
    tolerance: float,
    other: str,
    tolerated: float = 0.0,
) -> str:
    """Return which output differs too much and by how much, "" if none does. `other` names whose outputs are expected.

    `tolerance` is relative, see ArrayDifference. Texts must be equal. An absolute difference of floats up to
    `tolerated` is none.
    """
    for name, array in expected.items():
        given = found.get(name)
        if given is None:
            return f"it has no output '{name}'"
        if given.shape != array.shape:
            return f"output '{name}' has the shape {list(given.shape)}, expected {list(array.shape)}"
        if given.dtype != array.dtype:
            return f"output '{name}' has the type {given.dtype}, expected {array.dtype}"
        difference = compare_arrays(array, given)
        if difference.relative == float("inf"):
            return f"output '{name}' is not finite where {other} is, or the reverse"
        if array.dtype == object and difference.relative > 0:
            return f"output '{name}' differs from {other}"
        is_float = array.dtype.kind == "f"
        if difference.relative > tolerance and not (is_float and difference.absolute <= tolerated):
            much = f"{difference.relative:.3g} of its largest value, more than {tolerance:g}"
            return f"output '{name}' differs from {other} by {much}"
    return ""


def compare_arrays(expected: Array, found: Array) -> ArrayDifference:
    """Return the difference of one output."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return ArrayDifference(float("inf"), float("inf"))
    if expected.size == 0:
        return ArrayDifference(0.0, 0.0)
    if expected.dtype.kind not in "fiu":
        fraction = float(np.mean(expected != found))
        return ArrayDifference(fraction, fraction)
    one, two = expected.astype(np.float64), found.astype(np.float64)
    if expected.dtype.kind != "f":
        return ArrayDifference(float(np.abs(one - two).max()), float(np.mean(expected != found)))
    is_same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        gaps = np.abs(np.where(is_same, 0.0, one - two))
    if not np.isfinite(gaps).all():
        return ArrayDifference(float("inf"), float("inf"))
    scale = float(np.abs(one[np.isfinite(one)]).max(initial=0.0)) or 1.0
    return ArrayDifference(float(gaps.max()), float(gaps.max()) / scale)


def _as_float32(array: Array, is_bf16: bool) -> Array:
    return (array.astype(np.uint32) << 16).view(np.float32) if is_bf16 else array


def _is_scores(array: Array) -> bool:
    """Whether the array is one vector of at least two floats, for the one row of a sample."""
    return array.dtype.kind == "f" and array.ndim in (1, 2) and array.size == array.shape[-1] > 1
