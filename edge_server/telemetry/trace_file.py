"""Trace files as Triton writes them (docs/user_guide/trace.md): a JSON array of records, each with its trace's `id`.

First comes what the trace is of, then one record for each stamp and each tensor. Files are whole but while something is
added: that is one write, over the closing bracket. New files, numbered ones too, get their names when they are whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from edge_server.core.tensor import DType, Tensor
from edge_server.telemetry.trace_record import TracedModel, TracedRequest

_PART_ELEMENTS = 1 << 16


class TraceFile:
    """One path, and the numbered files beside it. For one thread. Methods raise OSError; what was written before is
    whole then."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)
        self._number = 0
        self._size = 0
        """Bytes up to the closing bracket, 0 before the first addition."""

    def add(self, records: str) -> None:
        """Write records into the file itself. The first ones replace what an earlier run left there."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC) if self._size else -1
        except FileNotFoundError:
            fd = -1
        if fd < 0:
            self._size = _write_new(self._path, records)
            return
        try:
            if os.fstat(fd).st_size != self._size + 1:
                # Somebody has changed it: it begins anew.
                self._size = _write_new(self._path, records)
                return
            data = f",{records}]".encode()
            try:
                _write_all(fd, data, self._size)
            except OSError:
                self._put_right(fd)
                raise
            self._size += len(data) - 1
        finally:
            os.close(fd)

    def add_numbered(self, records: str) -> None:
        """Write records into the next numbered file."""
        _write_new(f"{self._path}.{self._number}", records)
        self._number += 1

    def _put_right(self, fd: int) -> None:
        """Take back half an addition: the room for the bracket was there before."""
        os.ftruncate(fd, self._size)
        os.pwrite(fd, b"]", self._size)


def _write_new(path: str, records: str) -> int:
    """Write a file in the place of whatever is there. Return its size up to the closing bracket."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    partial, data = f"{path}.part", f"[{records}]".encode()
    try:
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return len(data) - 1


def _write_all(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def records_of(trace: TracedRequest) -> str:
    """Return the records of a trace, with commas in between."""
    parts: list[str] = []
    for model in trace.models:
        parts.append(json.dumps(_head(model), separators=(",", ":")))
        if trace.keeps_stamps:
            stamps = [*model.stamps, *model.compute, *(trace.stamps if model is trace.first else ())]
            stamps.sort(key=lambda stamp: stamp[1])
            parts += (
                f'{{"id":{model.id},"timestamps":[{{"name":"{name}","ns":{stamp_ns}}}]}}' for name, stamp_ns in stamps
            )
        parts += (_tensor_record(model.id, item.activity, item.tensor) for item in model.tensors)
    return ",".join(parts)


def _head(model: TracedModel) -> dict[str, object]:
    head: dict[str, object] = {"id": model.id, "model_name": model.model, "model_version": model.version}
    if model.request_id:
        head["request_id"] = model.request_id
    if model.parent_id:
        head["parent_id"] = model.parent_id
    return head


def _tensor_record(number: int, activity: str, tensor: Tensor) -> str:
    described = {
        "name": tensor.name,
        "data": _text(tensor),
        "shape": ",".join(map(str, tensor.array.shape)),
        "dtype": tensor.dtype.value,
    }
    return json.dumps({"id": number, "activity": activity, "tensor": described}, separators=(",", ":"))


def _text(tensor: Tensor) -> str:
    """Return the elements with commas in between. Part by part: each takes far more as an object than as text."""
    flat = tensor.array.ravel()
    parts = (flat[at : at + _PART_ELEMENTS] for at in range(0, flat.size, _PART_ELEMENTS))
    return ",".join([",".join(_elements(tensor.dtype, part)) for part in parts])


def _elements(dtype: DType, flat: npt.NDArray[np.generic]) -> Iterable[str]:
    """Return the elements as text, floating point with six digits, strings in quotes: as C++ streams write them.

    Unlike in Triton, bytes are written as numbers, not as characters, and the 16-bit floats are not left out.
    """
    if dtype is DType.BYTES:
        return (f'"{item.decode("utf-8", "backslashreplace")}"' for item in flat.tolist())
    if dtype is DType.BF16:
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    if flat.dtype.kind == "f":
        return map("%g".__mod__, flat.tolist())
    return map(str, (flat.view(np.uint8) if flat.dtype.kind == "b" else flat).tolist())
