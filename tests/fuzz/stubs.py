"""Stubs for readers: a region of shared memory, a model, and the comparison of results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import EdgeServerError, UnknownModel

REGION_BYTES = 64

_FOLDER = tempfile.TemporaryDirectory()


def new_folder(name: str) -> Path:
    """Return a folder for the files of one reader. It is deleted with the process."""
    folder = Path(_FOLDER.name) / name
    folder.mkdir()
    return folder


class Regions:
    """A registry with one region "r", which counts its pins."""

    def __init__(self) -> None:
        self.memory = bytearray(range(REGION_BYTES))
        self.pinned = 0

    def pin(self, name: str, offset: int, byte_size: int, *, writable: bool = False) -> _Pin:
        if name != "r" or offset + byte_size > REGION_BYTES:
            raise UnknownModel(f"Unable to find shared memory region: '{name}'")
        self.pinned += 1
        return _Pin(self, memoryview(self.memory)[offset : offset + byte_size])


class _Pin:
    device = None

    def __init__(self, regions: Regions, view: memoryview) -> None:
        self._regions = regions
        self.view = view

    def release(self) -> None:
        self._regions.pinned -= 1

    def write(self, data: bytes | memoryview) -> None:
        self.view[: len(data)] = data


def model(*dtypes: DType, max_batch_size: int = 0) -> ModelSpec:
    """Return a model "m" with an input IN<n> and an output OUT<n> of each data type."""
    return ModelSpec(
        name="m", backend="stub", platform="", max_batch_size=max_batch_size, instance_groups=(),
        inputs=tuple(InputSpec(f"IN{index}", dtype, (-1,)) for index, dtype in enumerate(dtypes)),
        outputs=tuple(OutputSpec(f"OUT{index}", dtype, (-1,)) for index, dtype in enumerate(dtypes)),
    )  # fmt: skip


def result_of(read: Callable[[], Any], errors: type[Exception] | tuple[type[Exception], ...] = EdgeServerError) -> Any:
    """Return what `read` returns, or None if it raises one of the errors that it may raise."""
    try:
        return read()
    except errors as error:
        message = getattr(error, "message", str(error))
        assert len(message) < 10_000, f"an error message of {len(message)} characters"
        message.encode("utf-8", "surrogateescape")
        return None


def tensors_key(tensors: Mapping[str, Tensor]) -> Any:
    """Return a value that is equal for equal tensors, NaN included."""
    return [
        (name, tensor.name, tensor.dtype, tuple(tensor.shape), tensor.array.dtype,
         tensor.array.reshape(-1).tolist() if tensor.dtype is DType.BYTES else tensor.array.tobytes())
        for name, tensor in tensors.items()
    ]  # fmt: skip


class InputFile:
    """A file in memory that holds each input in turn."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("input")
        self.path = Path(f"/proc/self/fd/{self._fd}")

    def write(self, data: bytes) -> Path:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        return self.path
