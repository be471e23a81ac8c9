"""Input tensors on which a model is tried: from a file, from the warm-up samples of the configuration, random, or with
values that runtimes are known to compute differently.

A sample has the arrays of one request. If the model batches, a sample has one row.
"""

from __future__ import annotations

import dataclasses
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.base import Array
from edge_server.backends.isolation.npz_tensor_files import Tensors
from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.plugins.vision.image_plan import make_image_plans
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


def usual_sizes(spec: ModelSpec, best_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of one row of each input whose variable dimensions have a known size: that of `best_shapes`, in
    which an engine is the fastest, or of the picture which the configuration or the exporter declares. Inputs of fixed
    dimensions are not in it."""
    found = {}
    for plan in make_image_plans(spec):
        dims = plan.shape[1:] if spec.max_batch_size > 0 else plan.shape
        found[plan.input_name] = dims
    for item in spec.inputs:
        if item.name in best_shapes and item.reshape is None:
            best = best_shapes[item.name]
            found[item.name] = best[1:] if spec.max_batch_size > 0 else best
    return {item.name: found[item.name] for item in spec.inputs if item.name in found and -1 in item.dims}


def random_samples(spec: ModelSpec, count: int, sizes: Mapping[str, tuple[int, ...]]) -> list[Tensors]:
    """Return random samples, the same ones in each call.

    A variable dimension gets its size of `sizes`, see `usual_sizes`, else 1. Integers are 0 or 1: they are often
    indices, and 0 and 1 exist in every vocabulary.
    """
    generator = np.random.default_rng(2026)
    wanted = [item for item in spec.inputs if not item.is_optional]
    return [{item.name: _random(item, _shape(spec, item, sizes), generator) for item in wanted} for _ in range(count)]


def edge_samples(spec: ModelSpec, sizes: Mapping[str, tuple[int, ...]]) -> list[Tensors]:
    """Return samples for the comparison of two runtimes, the same ones in each call.

    Floats are of both signs, large, or equal to others; integers are small, or need more than 24 and 32 bits. If the
    model batches, one sample has two rows. The variable dimensions of inputs have their size of `sizes`, else all of
    them one size, in each of _FREE_SIZES. A model may refuse some of them, such as integers that are no index of its
    table.
    """
    generator = np.random.default_rng(2026)
    wanted = [item for item in spec.inputs if not item.is_optional]
    has_free_size = any(-1 in item.dims and item.name not in sizes for item in wanted)
    found: list[Tensors] = []
    for size in _FREE_SIZES if has_free_size else (1,):
        for lead in ((1,), (2,))[: spec.max_batch_size] or ((),):
            shapes = {
                item.name: (*lead, *(size if dim < 0 else dim for dim in sizes.get(item.name, item.dims)))
                for item in wanted
            }
            if max(map(math.prod, shapes.values()), default=0) > _MAX_EDGE_ELEMENTS:
                continue
            found += [
                {item.name: _edge_values(item.dtype, shapes[item.name], *kind, generator) for item in wanted}
                for kind in _EDGE_KINDS
            ]
    return found


_FREE_SIZES = (1, 2, 7, 64, 96)
"""Small ones for texts and rows, others for pictures, whose sides many networks halve five times."""

_MAX_EDGE_ELEMENTS = 1 << 22

_EDGE_KINDS = (
    ("unit", "small"),
    ("normal", "small"),
    ("large", "small"),
    ("ties", "small"),
    ("unit", "signed"),
    ("unit", "wide"),
)
"""Floats and integers of a sample."""


def _edge_values(
    dtype: DType, shape: tuple[int, ...], floats: str, integers: str, generator: np.random.Generator
) -> Array:
    if dtype is DType.BYTES:
        return np.full(shape, b"", dtype=object)
    if dtype is DType.BF16 or dtype.numpy.kind == "f":
        values = {
            "unit": lambda: generator.random(shape),
            "normal": lambda: generator.normal(0.0, 3.0, shape),
            "large": lambda: generator.uniform(-30000.0, 30000.0, shape),
            "ties": lambda: generator.integers(-2, 3, shape) / 2,
        }[floats]()
        if dtype is DType.BF16:
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(dtype.numpy)
    if dtype is DType.BOOL or integers == "small":
        return generator.integers(0, 2, shape).astype(dtype.numpy)
    limits: Any = np.iinfo(dtype.numpy)
    if integers == "signed":
        return generator.integers(max(limits.min, -9), 10, shape).astype(dtype.numpy)
    # Odd ones, which a float rounds: beyond 24 bits, and beyond 32 where the type has them.
    wide = [value for value in ((1 << 24) + 1, (1 << 31) - 1, (1 << 40) + 1, limits.max) if value <= limits.max]
    return generator.choice(np.array(wide, dtype.numpy), shape)


def _shape(spec: ModelSpec, item: InputSpec, sizes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    dims = tuple(1 if size < 0 else size for size in sizes.get(item.name, item.dims))
    return (1, *dims) if spec.max_batch_size > 0 else dims


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
    given = read_arrays(path)
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


def read_arrays(path: Path) -> Mapping[str, Array]:
    """Return the arrays of an .npz file by name. Raises InvalidRequest for a file that is damaged or another."""
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
