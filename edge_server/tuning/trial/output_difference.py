"""Difference between a candidate's outputs and the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_server.backends.base import Array
from edge_server.tuning.trial.tensor_files import Tensors


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """`absolute`: the largest of any element. `relative`: the largest as a part of its output's largest magnitude;
    infinite where shapes differ, or only one of the two is finite. For outputs without numbers, and whole numbers that
    differ, the part of elements that do. `top1`: the share of rows whose best class is the same; None where no output
    looks like scores of classes."""

    absolute: float
    relative: float
    top1: float | None


def compare(
    reference: Sequence[Tensors], other: Sequence[Tensors], bf16: frozenset[str] = frozenset()
) -> OutputDifference:
    """Compare answers to the same samples. `bf16` names outputs that are bit patterns of bfloat16."""
    absolute = relative = 0.0
    same = rows = 0
    for mine, theirs in zip(reference, other, strict=True):
        for name, expected in mine.items():
            one, two = (_widened(array, name in bf16) for array in (expected, theirs[name]))
            apart, part = _apart(one, two)
            absolute, relative = max(absolute, apart), max(relative, part)
            if _is_scores(one) and one.shape == two.shape:
                agree = one.reshape(-1, one.shape[-1]).argmax(1) == two.reshape(-1, one.shape[-1]).argmax(1)
                same, rows = same + int(agree.sum()), rows + agree.size
    return OutputDifference(absolute, relative, same / rows if rows else None)


def _widened(array: Array, is_bf16: bool) -> Array:
    return (array.astype(np.uint32) << 16).view(np.float32) if is_bf16 else array


def _is_scores(array: Array) -> bool:
    """Whether it is one vector of at least two floats for the one row that a sample has."""
    return array.dtype.kind == "f" and array.ndim in (1, 2) and array.size == array.shape[-1] > 1


def _apart(expected: Array, found: Array) -> tuple[float, float]:
    if expected.shape != found.shape:
        return float("inf"), float("inf")
    if expected.size == 0:
        return 0.0, 0.0
    if expected.dtype.kind not in "fiu" or found.dtype.kind not in "fiu":
        share = float(np.mean(expected != found))
        return share, share
    one, two = expected.astype(np.float64), found.astype(np.float64)
    if expected.dtype.kind != "f":
        return float(np.abs(one - two).max()), float(np.mean(one != two))
    return _floats_apart(one, two)


def _floats_apart(one: npt.NDArray[np.float64], two: npt.NDArray[np.float64]) -> tuple[float, float]:
    is_same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        gaps = np.abs(np.where(is_same, 0.0, one - two))
    if not np.isfinite(gaps).all():
        return float("inf"), float("inf")
    scale = float(np.abs(one[np.isfinite(one)]).max(initial=0.0)) or 1.0
    return float(gaps.max()), float(gaps.max()) / scale
