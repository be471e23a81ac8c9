"""Input tensors on which `edge-server optimize` runs a model: from a file, from the warm-up samples of the
configuration, or random.

A sample has the arrays of one request. If the model batches, a sample has one row.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from edge_server.backends.base import Array
from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.plugins.tensorrt.engine_order import Profile
from edge_server.plugins.trials.tensor_files import Tensors
from edge_server.serving.execution.warmup import build

_VARIED_SOURCES = ("file", "random")
"""Warm-up sources with varied values. Constant inputs such as zeros do not show differences of precision."""


def from_warmup(spec: ModelSpec, model_dir: Path) -> list[Tensors]:
    """Return the warm-up samples with varied data. Raises WarmupFailed for data that cannot be read."""
    declared = [
        one for one in spec.warmup if one.batch_size > 0 and any(item.source in _VARIED_SOURCES for item in one.inputs)
    ]
    # All rows of a warm-up sample are equal, so one row is enough.
    requests = [build(spec, dataclasses.replace(one, batch_size=1), model_dir) for one in declared]
    return [{name: tensor.array for name, tensor in request.inputs.items()} for request in requests]


def random_samples(spec: ModelSpec, count: int, profile: Profile | None) -> list[Tensors]:
    """Return random samples, the same ones in each call.

    A variable dimension gets the optimal size of `profile`, or 1 without a profile. Integers are 0 or 1: they are often
    indices, and 0 and 1 exist in every vocabulary.
    """
    generator = np.random.default_rng(2026)
    wanted = [item for item in spec.inputs if not item.is_optional]
    return [{item.name: _random(item, _shape(spec, item, profile), generator) for item in wanted} for _ in range(count)]


def _shape(spec: ModelSpec, item: InputSpec, profile: Profile | None) -> tuple[int, ...]:
    best = profile[item.name].best if profile is not None and item.name in profile and item.reshape is None else None
    batch = spec.max_batch_size > 0
    sizes = item.dims if best is None else best[1:] if batch else best
    dims = tuple(max(size, 1) if size != 0 else 0 for size in sizes)
    return (1, *dims) if batch else dims


def _random(item: InputSpec, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    dtype = item.dtype
    if dtype is DType.BYTES:
        return np.full(shape, b"", dtype=object)
    if dtype is DType.BF16:
        bits = generator.random(shape, np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16)
    if dtype.numpy.kind == "f":
        return generator.random(shape).astype(dtype.numpy)
    return generator.integers(0, 2, shape).astype(dtype.numpy)


def from_file(spec: ModelSpec, path: Path) -> list[Tensors]:
    """Read samples from an .npz file with one array per input.

    An array has the shape of one request, or an additional leading dimension of samples. Raises InvalidRequest with the
    input, the expected and the given shape or type.
    """
    given = _read_arrays(path)
    known = {item.name: item for item in spec.inputs}
    stray = next((name for name in given if name not in known), None)
    if stray is not None:
        raise InvalidRequest(f"'{path}': model '{spec.name}' has no input '{stray}'; it has {', '.join(known)}")
    missing = next((item.name for item in spec.inputs if item.name not in given and not item.is_optional), None)
    if missing is not None:
        raise InvalidRequest(f"'{path}': there is no array for input '{missing}' of model '{spec.name}'")
    stacks = {name: _sample_stack(spec, known[name], array, path) for name, array in given.items()}
    counts = {name: len(stack) for name, stack in stacks.items()}
    if len(set(counts.values())) > 1:
        raise InvalidRequest(f"'{path}': expected as many samples for every input, given {counts}")
    if not any(counts.values()):
        raise InvalidRequest(f"'{path}': it holds no sample")
    lead = (1,) if spec.max_batch_size > 0 else ()
    return [
        {
            name: np.ascontiguousarray(stack[number]).reshape((*lead, *stack[number].shape))
            for name, stack in stacks.items()
        }
        for number in range(next(iter(counts.values())))
    ]


def _read_arrays(path: Path) -> Mapping[str, Array]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise InvalidRequest(f"'{path}': expected an .npz file with an array for each input, given one array")
        with loaded as arrays:
            return {name: arrays[name] for name in arrays.files}
    except OSError as error:
        raise InvalidRequest(f"'{path}' cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidRequest(f"'{path}': expected an .npz file of plain arrays: {error}") from error


def _sample_stack(spec: ModelSpec, item: InputSpec, array: Array, path: Path) -> Array:
    """Return the array of one input with a leading dimension of samples. Raises InvalidRequest."""
    if item.dtype is DType.BYTES and array.dtype.kind in "SU":
        texts = [str(text).encode() if array.dtype.kind == "U" else bytes(text) for text in array.flat]
        held = np.empty(len(texts), dtype=object)
        held[:] = texts
        array = held.reshape(array.shape)
    if array.dtype != item.dtype.numpy:
        raise InvalidRequest(
            f"'{path}': input '{item.name}' of model '{spec.name}': expected elements of {item.dtype.value} "
            f"({item.dtype.numpy}), given {array.dtype}"
        )
    if _fits(array.shape, item.dims) and spec.max_batch_size == 0:
        return array[np.newaxis]
    if _fits(array.shape[1:], item.dims) and array.ndim == len(item.dims) + 1:
        return array
    lead = "[samples" if spec.max_batch_size > 0 else f"{list(item.dims)}, or [samples"
    raise InvalidRequest(
        f"'{path}': input '{item.name}' of model '{spec.name}': expected the shape "
        f"{lead}{''.join(f', {size}' for size in item.dims)}], given {list(array.shape)}"
    )


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(shape) == len(dims) and all(want in (-1, size) for size, want in zip(shape, dims, strict=True))


def as_request(spec: ModelSpec, sample: Tensors) -> Request:
    """Return a request with the tensors of a sample."""
    known = {item.name: item.dtype for item in spec.inputs}
    tensors = {name: Tensor(name, known[name], array) for name, array in sample.items() if name in known}
    return Request(spec.name, tensors, id="optimize")


def batch_of(samples: Sequence[Tensors], first: int, rows: int) -> Tensors:
    """Return a batch of `rows` consecutive samples from `first` on, wrapping around.

    If their shapes differ, the batch repeats the first sample.
    """
    chosen = [samples[(first + number) % len(samples)] for number in range(rows)]
    shapes = {tuple(array.shape for array in sample.values()) for sample in chosen}
    if len(shapes) > 1:
        chosen = [chosen[0]] * rows
    return {name: np.concatenate([sample[name] for sample in chosen]) for name in chosen[0]}
