"""Verification samples: inputs for a new engine, and the serving runtime's answers to compare with.

They are ordinary requests to the version that serves: they wait in its queue, cost it no second copy of the model, and
count in its statistics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge_server.backends.base import Array
from edge_server.backends.tensorrt.verify_engine import VerificationSample
from edge_server.core.model_spec import ModelSpec, WarmupInput, WarmupSample
from edge_server.core.request_response import Request, Response, ResponseSink
from edge_server.core.shape_tensors import batched_shape_inputs, batched_shape_outputs, prepend_batch_size
from edge_server.core.tensor import DType, Tensor
from edge_server.core.tensorrt_engine import EngineOrder
from edge_server.errors import EdgeServerError, ServingFault
from edge_server.serving.execution.warmup import build

_PATIENCE_S = 120.0

Submit = Callable[[Request, ResponseSink], object]


def requests_for(spec: ModelSpec, order: EngineOrder, model_dir: Path) -> list[Request]:
    """Return the requests that an engine is checked with: every declared warm-up sample, and one of random numbers of
    the shapes that the engine is made fastest for. Raises WarmupFailed for data that cannot be read."""
    declared = [sample for sample in spec.warmup if sample.batch_size > 0]
    made = [build(spec, sample, model_dir) for sample in [*declared, _made_up(spec, order)]]
    made[-1] = Request(spec.name, {**made[-1].inputs, **_best_values(spec, order)}, id=made[-1].id)
    return [Request(spec.name, request.inputs, version=order.version, id=request.id) for request in made]


def answers(requests: list[Request], spec: ModelSpec, submit: Submit) -> list[VerificationSample]:
    """Have the serving version answer. Raises what it raises; ServingFault when no answer comes."""
    return [VerificationSample(_given(spec, request), _made(spec, _ask(request, submit))) for request in requests]


def unanswered(requests: list[Request], spec: ModelSpec) -> list[VerificationSample]:
    """Return the requests without answers, where nothing serves that could give them."""
    return [VerificationSample(_given(spec, request), {}) for request in requests]


def _made_up(spec: ModelSpec, order: EngineOrder) -> WarmupSample:
    profile = order.profiles[0]
    skip = 1 if spec.max_batch_size > 0 else 0
    rows = max((profile[item.name].best[0] for item in spec.inputs if item.name in profile), default=1) if skip else 1
    inputs = []
    for item in spec.inputs:
        if item.is_optional or item.is_shape_tensor or item.name not in profile:
            continue
        best = profile[item.name].best[skip:]
        dims = best if item.reshape is None else tuple(1 if size == -1 else size for size in item.dims)
        is_float = item.dtype.numpy.kind == "f" and item.dtype is not DType.BF16
        # Integers are indices as often as not: zeros are in every vocabulary.
        inputs.append(WarmupInput(item.name, item.dtype, dims, "random" if is_float else "zero"))
    return WarmupSample("engine check", rows, tuple(inputs))


def _best_values(spec: ModelSpec, order: EngineOrder) -> dict[str, Tensor]:
    """Return the shape tensors' values that the engine is made fastest for, as a client sends them."""
    skip = 1 if spec.max_batch_size > 0 else 0
    profile = order.profiles[0]
    return {
        item.name: Tensor(
            item.name, item.dtype, np.array(profile[item.name].best[skip:], item.dtype.numpy).reshape(item.dims)
        )
        for item in spec.inputs
        if item.is_shape_tensor and item.name in profile
    }


def _ask(request: Request, submit: Submit) -> Response:
    answered = threading.Event()
    responses: list[Response] = []

    def take(response: Response) -> None:
        responses.append(response)
        answered.set()

    submit(request, take)
    if not answered.wait(_PATIENCE_S):
        raise ServingFault(f"model '{request.model}' did not answer the check's request within {_PATIENCE_S:g} s")
    error: EdgeServerError | None = responses[0].error
    if error is not None:
        raise error
    return responses[0]


def _given(spec: ModelSpec, request: Request) -> dict[str, Array]:
    """Return a request's inputs with the shapes that a runtime is given."""
    told = batched_shape_inputs(spec)
    rows = next((tensor.shape[0] for name, tensor in request.inputs.items() if name not in told), 1) if told else 1
    return {
        name: prepend_batch_size(tensor.array, rows) if name in told else _reshaped(tensor, _reshape_of(spec, name))
        for name, tensor in request.inputs.items()
    }


def _made(spec: ModelSpec, response: Response) -> dict[str, Array]:
    """Return an answer's outputs with the shapes that a runtime yields."""
    told = batched_shape_outputs(spec)
    return {
        tensor.name: prepend_batch_size(tensor.array[0], len(tensor.array))
        if tensor.name in told
        else _reshaped(tensor, _reshape_of(spec, tensor.name))
        for tensor in response.outputs
    }


def _reshape_of(spec: ModelSpec, name: str) -> tuple[int, ...] | None:
    item = spec.input(name) or spec.output(name)
    if item is None or item.reshape is None:
        return None
    return (-1, *item.reshape) if spec.max_batch_size > 0 else item.reshape


def _reshaped(tensor: Tensor, shape: tuple[int, ...] | None) -> Array:
    array = np.array(tensor.array)
    if shape is None or shape.count(-1) > 1:
        return array
    rows = (len(array), *shape[1:]) if shape[:1] == (-1,) else shape
    reshaped: Array = array.reshape(rows)
    return reshaped
