"""A JSON text that is parsed already: a value for those who know it, a BYTES tensor for all others."""

from __future__ import annotations

import json
import pickle

import numpy as np

from edge_server.core.json_tensor import JsonTensor
from edge_server.core.tensor import DType

VALUE = [{"role": "user", "content": "Grüße", "n": [1, 0.5, True, None]}]


def test_its_array_is_the_text_of_the_value() -> None:
    tensor = JsonTensor("messages", VALUE)
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (DType.BYTES, (1,), np.empty(1, object).nbytes)
    assert tensor.array.shape == (1,)
    assert json.loads(tensor.array[0]) == VALUE


def test_another_process_gets_the_value() -> None:
    copy = pickle.loads(pickle.dumps(JsonTensor("messages", VALUE)))
    assert (copy.name, copy.value, copy.array.tolist()) == ("messages", VALUE, JsonTensor("", VALUE).array.tolist())
