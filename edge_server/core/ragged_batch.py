"""Ragged batches: joins requests of different shapes into one flat batch, and splits flat outputs per request.

A ragged input reaches the model as one row with all elements, request after request. Batch inputs tell the model where
each request begins. Batch outputs are flat too, and are split by the shapes of their source inputs. Kinds and values
follow Triton's model_config.proto. A *shape* here is the whole shape of a request, with rows. Counts are per request,
not per row; item shapes are per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.core.ensemble_and_sequence_spec import BatchInputKind
from edge_server.core.tensor import DType
from edge_server.errors import BackendError

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.generic]"
Shape: TypeAlias = tuple[int, ...]

BATCH_INPUT_DTYPES = (DType.INT32, DType.FP32)
"""Data types that Triton allows for a batch input."""


def join_flat(arrays: Sequence[Array]) -> Array:
    """Return all elements in one dimension. A single array gives a view if its memory layout allows it."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    return np.concatenate([array.reshape(-1) for array in arrays])


def make_batch_input(kind: BatchInputKind, dtype: DType, shapes: Sequence[Shape]) -> Array:
    """Return a batch input. `shapes` are the shapes of its source input, one per request.

    Raises BackendError if a number does not fit into INT32.
    """
    if kind is BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
        return np.zeros(max(prod(shape) for shape in shapes), dtype.numpy)
    if kind in (BatchInputKind.ITEM_SHAPE, BatchInputKind.ITEM_SHAPE_FLATTEN):
        items = [shape[1:] for shape in shapes for _ in range(shape[0])]
        found = _filled([size for item in items for size in item], dtype)
        return found if kind is BatchInputKind.ITEM_SHAPE_FLATTEN else found.reshape(len(items), -1)
    counts = [prod(shape) for shape in shapes]
    if kind is BatchInputKind.ACCUMULATED_ELEMENT_COUNT:
        counts = list(accumulate(counts))
    elif kind is BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
        counts = list(accumulate(counts, initial=0))
    return _filled(counts, dtype)


def _filled(values: Sequence[int], dtype: DType) -> Array:
    if dtype is DType.INT32 and max(values, default=0) > np.iinfo(np.int32).max:
        raise BackendError(f"a ragged batch of {max(values)} elements is more than its INT32 counts can hold")
    return np.array(values, dtype.numpy)


def ragged_output_shape(dims: Shape, source: Shape) -> Shape:
    """Return the shape of one request's part of a batch output.

    `dims` are those of the output, without rows. The rows, and each -1 in `dims`, come from the source input's shape.
    """
    return tuple(source[index] if size == -1 else size for index, size in enumerate((-1, *dims)))


def split_by_shapes(array: Array, shapes: Sequence[Shape]) -> list[Array] | None:
    """Return each request's part as a view of the flattened `array`; None if the number of elements does not match."""
    ends = list(accumulate(prod(shape) for shape in shapes))
    if array.size != ends[-1]:
        return None
    flat = array.reshape(-1)
    return [flat[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]
