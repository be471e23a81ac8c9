"""Functions that the decoders of model outputs share: select a frame's outputs from a batch, convert number types, rank
scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BadModelConfig
from edge_server.plugins.vision.outputs.output_parameters import Activation
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

FloatArray: TypeAlias = "npt.NDArray[np.floating[Any]]"

_NO_NUMBERS = (DType.BYTES, DType.BOOL)


@record(frozen=True, slots=True)
class OutputTensor:
    """An output that a decoder reads; it has `rank` dimensions per frame."""

    name: str
    dtype: DType
    rank: int

    def select(self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, *, model: str) -> npt.NDArray[Any]:
        """Return the values of one frame as a view, in the model's data type.

        `item` None: the outputs belong to this frame alone, and may have a leading 1. Raises BackendError if the output
        is missing or has no such item.
        """
        array = outputs.get(self.name)
        if array is None:
            raise BackendError(f"model '{model}': expected an output '{self.name}', given {sorted(outputs)}")
        if item is None:
            return array[0] if array.ndim > self.rank and array.shape[0] == 1 else array
        if array.ndim == 0 or not 0 <= item < array.shape[0]:
            raise BackendError(
                f"model '{model}', output '{self.name}': expected a row {item}, given shape {list(array.shape)}"
            )
        selected: npt.NDArray[Any] = array[item]
        return selected

    def select_floats(self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, *, model: str) -> FloatArray:
        """Return the values of one frame as floating-point numbers; a view if they are FP32 or FP64."""
        return as_floats(self.select(outputs, item, model=model), self.dtype)


def as_floats(array: npt.NDArray[Any], dtype: DType) -> FloatArray:
    """Return `array` as FP32, or as FP64 if it is FP64 or has integers that FP32 may round."""
    if dtype is DType.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    is_wide = array.dtype.itemsize > 2 and array.dtype != np.float32
    return np.asarray(array, np.float64 if is_wide else np.float32)


def choose_output(spec: ModelSpec, key: str, name: str | None) -> OutputSpec:
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
    require_numbers(spec, found)
    return found


def require_numbers(spec: ModelSpec, output: OutputSpec) -> None:
    """Raise BadModelConfig for an output without numbers."""
    if output.dtype in _NO_NUMBERS:
        raise BadModelConfig(
            f"model '{spec.name}', output '{output.name}': expected numbers, given {output.dtype.value}"
        )


def drop_batch_dim(spec: ModelSpec, tensor: InputSpec | OutputSpec, rank: int) -> tuple[int, ...]:
    """Return the tensor's dims without a batch dimension, which max_batch_size or a leading 1 or -1 declares."""
    dims = tensor.dims
    has_batch_inside = spec.max_batch_size == 0 and len(dims) > rank and dims[0] in (1, -1)
    return dims[1:] if has_batch_inside else dims


def shape_matches(dims: Sequence[int], pattern: Sequence[int]) -> bool:
    """Return whether `dims` match `pattern`; -1 in either is any number."""
    return len(dims) == len(pattern) and all(
        -1 in (dim, wanted) or dim == wanted for dim, wanted in zip(dims, pattern, strict=True)
    )


def activate(scores: FloatArray, activation: Activation, *, axis: int) -> FloatArray:
    """Return probabilities; `axis` is the class axis. Without an activation, return the scores uncopied.

    Values that overflow become the limit or NaN; NaN is dropped later.
    """
    if activation is Activation.NONE:
        return scores
    if activation is Activation.SIGMOID:
        sigmoid: FloatArray = 1 / (1 + np.exp(-scores))
        return sigmoid
    powers = np.exp(scores - scores.max(axis=axis, keepdims=True))
    softmax: FloatArray = powers / powers.sum(axis=axis, keepdims=True)
    return softmax


def max_probability(scores: FloatArray, activation: Activation, *, axis: int) -> FloatArray:
    """Return the probability of the best class along `axis`, as `activate(...).max(axis)`.

    This is cheaper, because the activation does not change the order of classes.
    """
    highest: FloatArray = scores.max(axis=axis)
    if activation is Activation.SOFTMAX:
        probabilities: FloatArray = 1 / np.exp(scores - np.expand_dims(highest, axis)).sum(axis=axis)
        return probabilities
    return activate(highest, activation, axis=0)


def select_top_k(scores: FloatArray, threshold: float, k: int) -> npt.NDArray[np.intp]:
    """Return the indices of at most `k` finite scores of at least `threshold`, best first.

    Among equal scores the lower index is first. `scores` has one dimension. The time does not depend on the values.
    """
    passing = np.flatnonzero((scores >= threshold) & np.isfinite(scores))
    if passing.size > k:
        # Sorting all takes longer than finding the k-th largest. Of scores equal to it, the lowest indices remain.
        values = scores[passing]
        smallest = np.partition(values, values.size - k)[values.size - k] if k else np.inf
        is_selected = values > smallest
        ties = np.flatnonzero(values == smallest)
        is_selected[ties[: k - int(np.count_nonzero(is_selected))]] = True
        passing = passing[is_selected]
    order = np.argsort(-scores[passing], kind="stable")
    selected: npt.NDArray[np.intp] = passing[order]
    return selected
