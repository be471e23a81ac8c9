"""Output tensors of one frame: selects its row, converts number types, checks shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from edge_server.core.model_spec import ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BadModelConfig

if TYPE_CHECKING:
    import numpy.typing as npt

Reals: TypeAlias = "npt.NDArray[np.floating[Any]]"

_NO_NUMBERS = (DType.BYTES, DType.BOOL)


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """One output that a head reads; it has `rank` dimensions per frame."""

    name: str
    dtype: DType
    rank: int

    def pick(self, outputs: Mapping[str, npt.NDArray[Any]], row: int | None, *, model: str) -> npt.NDArray[Any]:
        """Return the values of one frame as a view, in the model's data type.

        `row` None: the outputs belong to this frame alone, and may have a leading 1. Raises BackendError if the output
        is missing or has no such row.
        """
        array = outputs.get(self.name)
        if array is None:
            raise BackendError(f"model '{model}': expected an output '{self.name}', given {sorted(outputs)}")
        if row is None:
            return array[0] if array.ndim > self.rank and array.shape[0] == 1 else array
        if array.ndim == 0 or not 0 <= row < array.shape[0]:
            raise BackendError(
                f"model '{model}', output '{self.name}': expected a row {row}, given shape {list(array.shape)}"
            )
        picked: npt.NDArray[Any] = array[row]
        return picked

    def values(self, outputs: Mapping[str, npt.NDArray[Any]], row: int | None, *, model: str) -> Reals:
        """Return the values of one frame as floating-point numbers; a view if they are FP32 or FP64."""
        return reals(self.pick(outputs, row, model=model), self.dtype)


def reals(array: npt.NDArray[Any], dtype: DType) -> Reals:
    """Return `array` as FP32, or as FP64 if it is FP64 or has integers that FP32 may round."""
    if dtype is DType.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    is_wide = array.dtype.itemsize > 2 and array.dtype != np.float32
    return np.asarray(array, np.float64 if is_wide else np.float32)


def named_output(spec: ModelSpec, key: str, name: str | None) -> OutputSpec:
    """Return the output of that name; without a name, the only output with labels, else the only output.

    Raises BadModelConfig, which names `key`, if there is no such output, and for one without numbers.
    """
    found = None if name is None else spec.output(name)
    if name is None:
        labelled = [output for output in spec.outputs if output.labels]
        candidates = labelled if len(labelled) == 1 else list(spec.outputs)
        found = candidates[0] if len(candidates) == 1 else None
    names = ", ".join(f"'{output.name}'" for output in spec.outputs)
    if found is None:
        given = "nothing" if name is None else f"'{name}'"
        raise BadModelConfig(f"model '{spec.name}', parameter '{key}': expected one of {names}, given {given}")
    check_number(spec, found)
    return found


def check_number(spec: ModelSpec, output: OutputSpec) -> None:
    """Raise BadModelConfig for an output without numbers."""
    if output.dtype in _NO_NUMBERS:
        raise BadModelConfig(
            f"model '{spec.name}', output '{output.name}': expected numbers, given {output.dtype.value}"
        )


def frame_dims(spec: ModelSpec, output: OutputSpec, rank: int) -> tuple[int, ...]:
    """Return the output's dims without a batch dimension, which max_batch_size or a leading 1 or -1 declares."""
    dims = output.dims
    has_batch_inside = spec.max_batch_size == 0 and len(dims) > rank and dims[0] in (1, -1)
    return dims[1:] if has_batch_inside else dims


def fits(dims: Sequence[int], pattern: Sequence[int]) -> bool:
    """Return whether `dims` match `pattern`; -1 in either is any number."""
    return len(dims) == len(pattern) and all(
        -1 in (dim, wanted) or dim == wanted for dim, wanted in zip(dims, pattern, strict=True)
    )
