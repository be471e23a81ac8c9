"""Conversion of Triton's shape tensors (their values state a shape) between the form in a request and the form in a
batch.

For `dims: [ n ]` and `is_shape_tensor: true` in a configuration with a max_batch_size:

    an input    the client sends n values, shape [n]; the model gets [rows of the whole batch, *values], shape [n+1]
    an output   the model returns [rows of the whole batch, *values]; each client gets [its rows, n] with equal rows

Requests share a batch only if their values are equal: one run has one set of values. For models that do not batch, the
values are passed on unchanged.

Triton's source (core 73aad7c, tensorrt_backend e2ef6d7) does the following. The request's shape must be `dims`, without
a batch dimension, and does not count for its batch size (InferenceRequest::Normalize). The total batch size is put
before the values of the first request (ShapeTensor::SetDataFromBuffer). The first value of an output must be the total
batch size; the others are repeated for each row of a request (ReadOutputTensors, SetOutputShapeTensorBuffer). The
engine's tensor is INT32 or INT64 with one dimension, one value longer than `dims` (CompareShapeDimsSupported,
InitIODims). Values are compared before requests are joined (RequiredEqualInputs). Triton's tests send such requests
(qa/common/infer_util.py, infer_shape_tensor). Its guide, model_configuration.md, shows n+1 values with the batch size:
Triton's code rejects such a request, and so does this server. Metadata shows the shape [-1, n] for both
(TRITONSERVER_ServerModelMetadata), but inputs are sent as [n].

Differences here: values are compared completely; Triton's strncmp ends at the first zero byte. A shape tensor in GPU
memory is copied to the host; Triton rejects it. Any runtime that batches can use them; Triton allows only TensorRT (an
ONNX file is served by another runtime until its engine is built). Assumption, because Triton does not define it: a
request whose inputs are all shape tensors has one row.

Ensembles: Triton cannot pass such an input to a step. It rejects an ensemble that marks a tensor (ValidateModelInput).
All other step inputs get a batch dimension, of 1 if the source has none (EnsembleContext::ReshapeTensorDims), so that
the member rejects every request. Here a step gets the same as from a client: the `dims` values of a source that does
not batch, or of an input that the ensemble marks; or one row of another model's shape tensor. A source whose rows may
differ is rejected when the ensemble is loaded.
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
"""Data types of shape tensors of a model that batches."""


def batched_shape_inputs(spec: ModelSpec) -> frozenset[str]:
    """Return the inputs whose values include the batch size. A model that does not batch has none."""
    return frozenset(item.name for item in spec.inputs if item.is_shape_tensor and spec.max_batch_size > 0)


def batched_shape_outputs(spec: ModelSpec) -> frozenset[str]:
    """Return the outputs whose values include the batch size. A model that does not batch has none."""
    return frozenset(item.name for item in spec.outputs if item.is_shape_tensor and spec.max_batch_size > 0)


def prepend_batch_size(values: Array, rows: int) -> Array:
    """Return the model's input: the batch size, then the values."""
    whole = np.empty(values.size + 1, values.dtype)
    whole[0] = rows
    whole[1:] = values.reshape(-1)
    return whole


def replace_batch_size(whole: Array, given: int, rows: int) -> Array:
    """Return the tensor with the batch size `rows` instead of `given`; unchanged if its batch size is not `given`."""
    if whole.ndim != 1 or not whole.size or whole[0] != given:
        return whole
    return prepend_batch_size(whole[1:], rows)


def common_row_values(rows: Array) -> Array | None:
    """Return the values that all rows have in common, or None if rows differ or there are none."""
    if not len(rows) or (rows[1:] != rows[0]).any():
        return None
    values: Array = rows[0]
    return values


def repeat_values_per_row(whole: Array, dims: tuple[int, ...], rows: int) -> Array | None:
    """Return the values as `rows` equal rows of shape `dims`, in which a -1 is any size.

    None if the first value is not the batch size, or the number of values does not match `dims`.
    """
    if whole.ndim != 1 or not whole.size or whole[0] != rows:
        return None
    known = prod(size for size in dims if size != -1)
    count = whole.size - 1
    if (count % known if -1 in dims and known else count - known) or dims.count(-1) > 1:
        return None
    return np.tile(whole[1:].reshape(dims), (rows, *(1 for _ in dims)))
