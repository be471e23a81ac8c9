"""How a tensor of an ensemble becomes an input of a step, or an output: as it is, or with a dimension less or more."""

from __future__ import annotations

from edge_server.core.ensemble_graph import StepInput
from edge_server.core.shape_tensors import common_row_values
from edge_server.core.tensor import Tensor
from edge_server.errors import BackendError

_SHOWN_ROWS = 8
"""How many rows of values an error shows."""


def match_rank(tensor: Tensor, name: str, rank: int) -> Tensor:
    """Return the tensor under a name of the model that takes it, as one row or as what one row holds where just one of
    the two models has a batch dimension."""
    array = tensor.array
    if array.ndim + 1 == rank:
        array = array[None]
    elif array.ndim == rank + 1 and array.shape[0] == 1:
        array = array[0]
    elif tensor.name == name:
        return tensor
    return Tensor(name, tensor.dtype, array)


def step_input_tensor(tensor: Tensor, feed: StepInput) -> Tensor:
    """Return the tensor as a step's input takes it. Raises BackendError where rows have no values in common."""
    if not feed.is_values or tensor.array.ndim == feed.rank:
        return match_rank(tensor, feed.input, feed.rank)
    array = tensor.array
    values = common_row_values(array)
    if values is None:
        raise BackendError(
            f"input '{feed.input}' is a shape tensor of a model that batches: expected rows of equal values in tensor "
            f"'{feed.tensor}', given {array[:_SHOWN_ROWS].tolist()}"
        )
    return Tensor(feed.input, tensor.dtype, values)
