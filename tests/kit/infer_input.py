"""Inputs of Triton's Python client."""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.utils import np_to_triton_dtype


def infer_input(api: Any, name: str, array: np.ndarray, datatype: str = "", **options: Any) -> Any:
    """Return an input that holds an array. `api` is tritonclient.http or tritonclient.grpc; the data type is that of
    the array unless it is given. `options` are those of `set_data_from_numpy`.

    >>> client.infer("same", [infer_input(tritonclient.grpc, "INPUT0", np.zeros((1, 4), np.float32))])
    """
    tensor = api.InferInput(name, list(array.shape), datatype or np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array, **options)
    return tensor
