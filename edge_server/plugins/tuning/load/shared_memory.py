"""Shared memory for a load test: creates the regions, and makes requests whose tensors are in them."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.plugins.tuning.clients.client_interface import (
    MeasuredRequest,
    ModelFacts,
    ServerQueries,
    SharedMemoryOutput,
    SharedMemoryPlace,
)
from edge_server.protocol.raw_tensors import raw_from_tensor, raw_size

_FOLDER = Path("/dev/shm")
_ALIGN = 64

Write = Callable[[MeasuredRequest], bytes]


def in_bodies(
    model: ModelFacts, steps: Sequence[tuple[Tensor, ...]], write: Write, workers: int
) -> list[Sequence[bytes]]:
    """Return the encoded requests for each worker, with the tensors in the bodies. All workers share them."""
    written = [write(MeasuredRequest(model, tensors, {})) for tensors in steps]
    return [written] * workers


@contextlib.contextmanager
def in_shared_memory(
    model: ModelFacts,
    steps: Sequence[tuple[Tensor, ...]],
    write: Write,
    workers: int,
    control: ServerQueries,
    output_bytes: int,
) -> Iterator[list[Sequence[bytes]]]:
    """Create one region with the inputs and one for the outputs of all workers, and yield each worker's requests.

    `output_bytes` is the space for an output of variable size. Both regions are removed at the end. Raises
    RequestRefused if the server refuses the regions, and InvalidRequest if this machine has no shared memory left.
    """
    slots = [
        _Slot(output.name, _output_bytes(output.dtype, output.shape, steps[0], output_bytes))
        for output in model.outputs
    ]
    inputs_size = sum(_padded(raw_size(tensor)) for tensors in steps for tensor in tensors)
    outputs_size = sum(_padded(slot.size_bytes) for slot in slots) * workers
    with _region("in", inputs_size, control) as (source, memory), _region("out", outputs_size, control) as (sink, _):
        places = _copy_inputs(steps, source, memory)
        yield [
            [
                write(MeasuredRequest(model, tensors, placed, _output_places(slots, sink, worker)))
                for tensors, placed in zip(steps, places, strict=True)
            ]
            for worker in range(workers)
        ]


@dataclass(frozen=True, slots=True)
class _Slot:
    name: str
    size_bytes: int


def _output_bytes(dtype: DType, shape: Sequence[int], tensors: tuple[Tensor, ...], otherwise: int) -> int:
    """Return the size of an output in bytes, or `otherwise` if a dimension other than the batch is variable."""
    if dtype is DType.BYTES or -1 in shape[1:] or not tensors:
        return otherwise
    count = 1
    for dim in ((tensors[0].shape or (1,))[0] if shape[:1] == (-1,) else shape[0], *shape[1:]) if shape else ():
        count *= dim
    return count * dtype.itemsize


def _padded(size: int) -> int:
    return max(-(-size // _ALIGN), 1) * _ALIGN


def _copy_inputs(
    steps: Sequence[tuple[Tensor, ...]], region: str, memory: mmap.mmap
) -> list[dict[str, SharedMemoryPlace]]:
    places: list[dict[str, SharedMemoryPlace]] = []
    offset = 0
    for tensors in steps:
        placed = {}
        for tensor in tensors:
            raw = raw_from_tensor(tensor)
            memory[offset : offset + len(raw)] = bytes(raw)
            placed[tensor.name] = SharedMemoryPlace(region, len(raw), offset)
            offset += _padded(len(raw))
        places.append(placed)
    return places


def _output_places(slots: Sequence[_Slot], region: str, worker: int) -> tuple[SharedMemoryOutput, ...]:
    offset = worker * sum(_padded(slot.size_bytes) for slot in slots)
    wanted = []
    for slot in slots:
        wanted.append(SharedMemoryOutput(slot.name, SharedMemoryPlace(region, slot.size_bytes, offset)))
        offset += _padded(slot.size_bytes)
    return tuple(wanted)


@contextlib.contextmanager
def _region(kind: str, size: int, control: ServerQueries) -> Iterator[tuple[str, mmap.mmap]]:
    """Create and register a region of shared memory; unregister and remove it at the end."""
    name = f"edge_perf_{kind}_{os.getpid()}_{secrets.token_hex(4)}"
    path = _FOLDER / name
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise InvalidRequest(f"no shared memory can be made in {_FOLDER}: {error.strerror}") from None
    try:
        # Allocate the pages now. If the folder is full, writing to an unallocated page kills this process or the
        # server with SIGBUS.
        try:
            os.posix_fallocate(file, 0, max(size, _ALIGN))
        except OSError as error:
            raise InvalidRequest(
                f"{size >> 10} KiB of shared memory do not fit in {_FOLDER}: {error.strerror}"
            ) from None
        with mmap.mmap(file, max(size, _ALIGN)) as memory:
            control.register_region(name, f"/{name}", max(size, _ALIGN))
            try:
                yield name, memory
            finally:
                control.unregister_region(name)
    finally:
        os.close(file)
        path.unlink()
