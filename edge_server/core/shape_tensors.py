"""Shape tensors of models that batch: the batch size is one of the values that the model is given, and no dimension.

For `dims: [ n ]` and `is_shape_tensor: true` in a configuration with a max_batch_size:

    an input    the client sends n values, shape [n]; the model is given [rows of the whole batch, *values], shape [n+1]
    an output   the model answers [rows of the whole batch, *values]; each client gets its rows of them: [its rows, n],
                every row the same

Requests share a batch only if their values are the same: one run has one value of each. Models that do not batch have
none of this: their values are passed on as they are.

From Triton's source (core 73aad7c, tensorrt_backend e2ef6d7): `dims` are those that the request's shape must have,
with no batch dimension, and take no part in its batch size (InferenceRequest::Normalize); the total batch size is put
before the values of the first request (ShapeTensor::SetDataFromBuffer); the first value of an output must be the total
batch size, and the others are repeated for each row of a request (ReadOutputTensors, SetOutputShapeTensorBuffer); the
engine's tensor has one dimension, of one value more than `dims` (CompareShapeDimsSupported, InitIODims), INT32 or
INT64; values are compared before requests are joined (RequiredEqualInputs). Its tests send requests so
(qa/common/infer_util.py, infer_shape_tensor). Its guide, model_configuration.md, shows n+1 values with the batch size
among them: the code refuses such a request, and so do we. Metadata names the shape [-1, n] for both (TRITONSERVER_
ServerModelMetadata), though inputs are sent as [n].

Otherwise here: values are compared whole, where Triton's strncmp ends at the first zero byte; a shape tensor in a GPU's
memory is brought to the host, where Triton refuses it; any runtime that takes batches takes them, where Triton allows
them for TensorRT alone (an ONNX file is served by another runtime until its engine is built). Assumed, as Triton says
nothing of it: a request whose inputs are all shape tensors is one row.

Ensembles: Triton has no way to give a step such an input. An ensemble that marks a tensor is refused
(ValidateModelInput), and what else a step is given has a batch dimension, one of 1 where the maker has none
(EnsembleContext::ReshapeTensorDims), so that the member refuses every request. Here a step is given what a client would
send: `dims` values of a maker that does not batch, or of an input that the ensemble marks; or one row of another
model's shape tensor. What has rows that may differ is refused when the ensemble is loaded.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.core.tensor import DType

if TYPE_CHECKING:
    import numpy.typing as npt

    from edge_server.core.model_spec import ModelSpec

Array: TypeAlias = "npt.NDArray[np.generic]"

SHAPE_DTYPES = (DType.INT32, DType.INT64)
"""The types that shape tensors of a model that batches may have."""


def batched_shape_inputs(spec: ModelSpec) -> frozenset[str]:
    """Return the inputs that have the batch size among their values: none of a model that does not batch."""
    return frozenset(item.name for item in spec.inputs if item.is_shape_tensor and spec.max_batch_size > 0)


def batched_shape_outputs(spec: ModelSpec) -> frozenset[str]:
    """Return the outputs that have the batch size among their values: none of a model that does not batch."""
    return frozenset(item.name for item in spec.outputs if item.is_shape_tensor and spec.max_batch_size > 0)


def prepend_batch_size(values: Array, rows: int) -> Array:
    """Return what the model is given: the batch size, then the values."""
    whole = np.empty(values.size + 1, values.dtype)
    whole[0] = rows
    whole[1:] = values.reshape(-1)
    return whole


def replace_batch_size(whole: Array, given: int, rows: int) -> Array:
    """Return what `with_batch_size` does for another number of rows; as it is where it is none of `given` rows."""
    if whole.ndim != 1 or not whole.size or whole[0] != given:
        return whole
    return prepend_batch_size(whole[1:], rows)


def common_row_values(rows: Array) -> Array | None:
    """Return the values that each row repeats; None where rows differ, or where there are none."""
    if not len(rows) or (rows[1:] != rows[0]).any():
        return None
    values: Array = rows[0]
    return values


def repeat_values_per_row(whole: Array, dims: tuple[int, ...], rows: int) -> Array | None:
    """Return the values as `rows` equal rows of `dims`; None where the batch size is not before them, or where they are
    not as many as `dims` promise (a -1 in there is any size)."""
    if whole.ndim != 1 or not whole.size or whole[0] != rows:
        return None
    known = prod(size for size in dims if size != -1)
    count = whole.size - 1
    if (count % known if -1 in dims and known else count - known) or dims.count(-1) > 1:
        return None
    return np.tile(whole[1:].reshape(dims), (rows, *(1 for _ in dims)))
