"""Input tensors for load tests: random values, zeros or values from files, in shapes that the model accepts."""

from __future__ import annotations

import base64
import json
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.plugins.tuning.clients.client_interface import ModelFacts, TensorFacts
from edge_server.protocol.raw_tensors import tensor_from_raw

Array = npt.NDArray[Any]

MAX_BYTES = 1 << 30
"""Largest generated tensor. A mistaken shape must not fill the memory."""

STRING_BYTES = 128
"""Length of a random string."""


@dataclass(frozen=True, slots=True)
class InputChoice:
    """Choice of the input data. `kind`, "random" or "zero", applies to inputs that `files` do not hold.

    `shapes` have no batch dimension. `files` are pairs of tensor name and path; the name is "" for a file that contains
    the names of its tensors.
    """

    kind: str = "random"
    batch: int = 1
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    files: tuple[tuple[str, Path], ...] = ()
    seed: int = 0


def make_inputs(model: ModelFacts, choice: InputChoice) -> list[tuple[Tensor, ...]]:
    """Return the tensors of each request, for at least one request. Raises InvalidRequest."""
    _check_batch(model, choice.batch)
    names = [tensor.name for tensor in model.inputs]
    for name in (*choice.shapes, *(name for name, _ in choice.files if name)):
        if name not in names:
            raise InvalidRequest(f"model '{model.name}' has no input '{name}'; it has {', '.join(names)}")
    steps = _read_files(model, choice.files)
    generator = np.random.default_rng(choice.seed)
    made = {
        tensor.name: _generated_input(model, tensor, choice, generator)
        for tensor in model.inputs
        if not any(tensor.name in step for step in steps) and (not tensor.is_optional or tensor.name in choice.shapes)
    }
    return [
        tuple(
            _from_file(model, tensor, step[tensor.name], choice) if tensor.name in step else made[tensor.name]
            for tensor in model.inputs
            if tensor.name in step or tensor.name in made
        )
        for step in steps
    ]


def _check_batch(model: ModelFacts, batch: int) -> None:
    if batch > 1 and model.max_batch_size == 0:
        raise InvalidRequest(f"model '{model.name}' does not batch (max_batch_size 0), given a batch size of {batch}")
    if batch > model.max_batch_size > 0:
        raise InvalidRequest(
            f"model '{model.name}' takes at most max_batch_size {model.max_batch_size} rows, given a batch size of"
            f" {batch}"
        )


def _shape(model: ModelFacts, tensor: TensorFacts, choice: InputChoice) -> tuple[int, ...]:
    """Return the shape to send, including the batch dimension."""
    declared = tensor.shape[1:] if model.max_batch_size else tensor.shape
    given = choice.shapes.get(tensor.name)
    if given is None and declared.count(-1) == len(model.picture) == 2:
        sizes = iter(model.picture)  # height before width, whether colours come before or after them
        given = tuple(next(sizes) if dim < 0 else dim for dim in declared)
    if given is None:
        if -1 in declared:
            raise InvalidRequest(
                f"input '{tensor.name}' of model '{model.name}' has the shape {list(declared)}: give a size for each"
                f" -1, --shape {tensor.name}:{','.join('N' if dim < 0 else str(dim) for dim in declared)}"
            )
        given = declared
    _check_fit(model, tensor, declared, given)
    return (choice.batch, *given) if model.max_batch_size else given


def _check_fit(model: ModelFacts, tensor: TensorFacts, declared: Sequence[int], given: Sequence[int]) -> None:
    fits = len(declared) == len(given) and all(
        want in (-1, dim) and dim >= 0 for want, dim in zip(declared, given, strict=True)
    )
    if not fits:
        raise InvalidRequest(
            f"input '{tensor.name}' of model '{model.name}': expected the shape {list(declared)}, given {list(given)}"
        )


def _generated_input(
    model: ModelFacts, tensor: TensorFacts, choice: InputChoice, generator: np.random.Generator
) -> Tensor:
    shape = _shape(model, tensor, choice)
    if math.prod(shape) * (tensor.dtype.itemsize or STRING_BYTES) > MAX_BYTES:
        raise InvalidRequest(
            f"input '{tensor.name}' of model '{model.name}' would have {math.prod(shape)} elements in the shape"
            f" {list(shape)}; at most {MAX_BYTES >> 20} MiB are sent"
        )
    return Tensor(tensor.name, tensor.dtype, _values(tensor.dtype, shape, choice.kind, generator))


def _values(dtype: DType, shape: tuple[int, ...], kind: str, generator: np.random.Generator) -> Array:
    """Return zeros, or random values that suit most models: floats in [0, 1), integers from 0 to 127."""
    if dtype is DType.BYTES:
        array: Array = np.empty(math.prod(shape), dtype=object)
        size = STRING_BYTES if kind == "random" else 0
        for index in range(array.size):
            array[index] = bytes(generator.integers(97, 123, size, dtype=np.uint8))
        return array.reshape(shape)
    if kind == "zero":
        return np.zeros(shape, dtype.numpy)
    if dtype is DType.BF16:
        # BF16 is the upper half of the FP32 bits.
        return (generator.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype is DType.BOOL:
        return generator.integers(0, 2, shape).astype(np.bool_)
    if dtype.numpy.kind == "f":
        return generator.random(shape, np.float32).astype(dtype.numpy)
    return generator.integers(0, 128, shape).astype(dtype.numpy)


# Files ---------------------------------------------------------------------------------------------------------------


def _read_files(model: ModelFacts, files: Sequence[tuple[str, Path]]) -> list[dict[str, Any]]:
    """Return the requests in the files, each as input name -> array or JSON value. Without files: one empty request."""
    steps: list[dict[str, Any]] = [{}]
    for name, path in files:
        found = _read_file(name, path)
        if len(steps) == 1 < len(found):
            steps = [dict(steps[0]) for _ in found]
        if len(found) not in (1, len(steps)):
            raise InvalidRequest(f"{path}: holds {len(found)} requests, and the files before it hold {len(steps)}")
        for index, step in enumerate(steps):
            step.update(found[index % len(found)])
    names = {tensor.name for tensor in model.inputs}
    for name in sorted({name for step in steps for name in step} - names):
        raise InvalidRequest(f"model '{model.name}' has no input '{name}'; it has {', '.join(sorted(names))}")
    return steps


def _read_file(name: str, path: Path) -> list[dict[str, Any]]:
    try:
        if path.suffix == ".json":
            return _read_json(path)
        if path.suffix in (".npy", ".npz"):
            # Given a path, numpy does not close a damaged archive.
            with path.open("rb") as file:
                loaded = np.load(file, allow_pickle=False)
                if isinstance(loaded, np.ndarray):
                    if not name:
                        raise InvalidRequest(f"{path}: name the input of this array, --input-data NAME={path}")
                    return [{name: loaded}]
                with loaded:
                    return [dict(loaded.items())]
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidRequest(f"{path}: cannot be understood: {error}") from None
    raise InvalidRequest(f"{path}: expected a .json, .npy or .npz file")


def _read_json(path: Path) -> list[dict[str, Any]]:
    """Read perf_analyzer's form: {"data": [{"INPUT0": [1, 2] | {"content": [1, 2], "shape": [2]} | {"b64": ""}}]}."""
    content = json.loads(path.read_text(encoding="utf-8"))
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, list) or not data or not all(isinstance(step, dict) for step in data):
        raise InvalidRequest(f"{path}: expected an object with 'data', a list of objects with a value for each input")
    return data


def _from_file(model: ModelFacts, tensor: TensorFacts, given: Any, choice: InputChoice) -> Tensor:
    """Return the tensor for one request. If the file holds one row and not a batch, repeat it for the batch size."""
    declared = tensor.shape[1:] if model.max_batch_size else tensor.shape
    try:
        array, shape = _array(model, tensor, given)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"input '{tensor.name}' of model '{model.name}': {error}") from None
    if model.max_batch_size and array.ndim == len(declared) + 1 and shape is None:
        if array.shape[0] != choice.batch:
            raise InvalidRequest(
                f"input '{tensor.name}' of model '{model.name}': the file holds {array.shape[0]} rows, the batch size"
                f" is {choice.batch}"
            )
        _check_fit(model, tensor, declared, array.shape[1:])
        return Tensor(tensor.name, tensor.dtype, array)
    row = shape or choice.shapes.get(tensor.name) or (array.shape if array.ndim == len(declared) else declared)
    if -1 in row:
        _shape(model, tensor, choice)
    _check_fit(model, tensor, declared, row)
    if array.size != math.prod(row):
        raise InvalidRequest(
            f"input '{tensor.name}' of model '{model.name}': expected {math.prod(row)} elements of shape {list(row)},"
            f" the file holds {array.size}"
        )
    array = array.reshape(row)
    if model.max_batch_size:
        array = np.ascontiguousarray(np.broadcast_to(array, (choice.batch, *row)))
    return Tensor(tensor.name, tensor.dtype, array)


def _array(model: ModelFacts, tensor: TensorFacts, given: Any) -> tuple[Array, tuple[int, ...] | None]:
    """Return the values, and the shape if the file contains it."""
    shape = None
    if isinstance(given, dict):
        shape = tuple(int(dim) for dim in given["shape"]) if "shape" in given else None
        if "b64" in given:
            raw = base64.b64decode(given["b64"], validate=True)
            if tensor.dtype is DType.BYTES:
                return np.array([raw], dtype=object), shape
            count = len(raw) // tensor.dtype.itemsize
            return tensor_from_raw(tensor.name, tensor.dtype, (count,), raw, model=model.name).array, shape
        if "content" not in given:
            raise ValueError("expected 'content' or 'b64'")
        given = given["content"]
    if tensor.dtype is DType.BYTES:
        texts = np.asarray(given, dtype=object)
        flat = [item if isinstance(item, bytes) else str(item).encode() for item in texts.reshape(-1)]
        array: Array = np.empty(len(flat), dtype=object)
        array[:] = flat
        return array.reshape(texts.shape), shape
    values = np.asarray(given)
    if tensor.dtype is DType.BF16 and values.dtype.kind == "f":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), shape
    if values.dtype.kind not in "biuf":
        raise ValueError(f"expected numbers, got {values.dtype}")
    if isinstance(given, np.ndarray) and values.dtype != tensor.dtype.numpy:
        raise ValueError(f"expected {tensor.dtype.value}, the file holds {values.dtype}")
    if tensor.dtype.numpy.kind in "iu" and not _holds(tensor.dtype.numpy, values):
        raise ValueError(f"expected whole numbers that {tensor.dtype.value} holds")
    return np.ascontiguousarray(values.astype(tensor.dtype.numpy)), shape


def _holds(dtype: np.dtype[Any], values: Array) -> bool:
    """Whether an integer type can represent all values. A cast would wrap others around without an error."""
    if values.size == 0 or values.dtype == dtype:
        return True
    low, high, bounds = values.min(), values.max(), np.iinfo(dtype)
    is_whole = values.dtype.kind != "f" or bool((values == np.floor(values)).all())
    return is_whole and bounds.min <= int(low) and int(high) <= bounds.max
