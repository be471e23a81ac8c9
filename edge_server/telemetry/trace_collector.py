"""Thread that takes finished traces, and writes Triton's trace files or passes the traces to an export.

A request thread queues its finished trace and continues. The queue is bounded: traces that do not fit into it, or onto
the disk, are lost and counted.

A trace file (docs/user_guide/trace.md of Triton) is a JSON array of records, each with the `id` of its trace: first a
record of the model, then one record for each stamp and each tensor. A file is valid JSON except during the one write
that adds to it. New files, numbered files included, get their names when they are complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from edge_server.core.tensor import DType, Tensor
from edge_server.telemetry.trace_record import MAX_MODELS, MAX_TENSOR_BYTES, TracedRequest, TraceExport
from edge_server.telemetry.trace_sampling import TraceSampler

if TYPE_CHECKING:
    import numpy.typing as npt

_log = logging.getLogger(__name__)

MAX_TRACES = 4096
MAX_BYTES = 64 << 20
"""Most queued traces, and most bytes of their tensors; also the most characters kept for a numbered file."""

_LOSS_LOG_INTERVAL_S = 10.0
_PART_ELEMENTS = 1 << 16


class _UnwrittenRecords:
    """Records of one sampler that wait for the rest of their numbered file."""

    def __init__(self) -> None:
        self.records: list[str] = []
        self.size = 0

    def take_all(self) -> str:
        records, self.records, self.size = ",".join(self.records), [], 0
        return records


class TraceCollector:
    """Queue and thread that write finished traces, or give them to `export`. Thread-safe. Call `close` once."""

    def __init__(self, export: TraceExport | None = None) -> None:
        self._queue: queue.SimpleQueue[TracedRequest | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._queued = 0
        self._lost = 0
        self._loss_logged_s = 0.0
        self._has_warned_of_omissions = False
        self._unwritable: dict[str, tuple[str, int]] = {}
        """Path of a file -> why it cannot be written, and the number of traces lost for it so far."""
        self._files: dict[str, TraceFile] = {}
        self._unwritten: dict[TraceSampler, _UnwrittenRecords] = {}
        self._export = export
        self._thread = threading.Thread(target=self._run, name="edge-trace", daemon=True)
        self._thread.start()

    def add(self, trace: TracedRequest) -> None:
        """Queue a finished trace; return at once."""
        with self._lock:
            is_lost = self._queued >= MAX_TRACES or self._queued_bytes > MAX_BYTES
            if is_lost:
                self._lost += 1
            else:
                self._queued += 1
                self._queued_bytes += trace.byte_count
        if is_lost:
            sampler = trace.sampler
            self._queue.put(lambda: self._count_collected(sampler))
        else:
            self._queue.put(trace)

    def problem(self) -> str:
        """Return why traces are lost and how many, "" while they are written."""
        return "; ".join(
            f"'{path}' cannot be written: {reason}; {lost} trace(s) were lost"
            for path, (reason, lost) in list(self._unwritable.items())
        )

    def flush(self, sampler: TraceSampler) -> None:
        """Write the remaining records of a replaced sampler, after its last trace."""
        self._queue.put(lambda: self._write_rest(sampler) if not sampler.open else None)

    def close(self, timeout_s: float) -> None:
        """Write the queued traces, and wait at most `timeout_s` for that."""
        until_s = time.monotonic() + timeout_s
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("traces were still being written after %g s and are lost", timeout_s)
        if self._export is not None:
            self._export.close(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if not isinstance(item, TracedRequest):
                item()
                continue
            with self._lock:
                self._queued -= 1
                self._queued_bytes -= item.byte_count
            try:
                self._collect(item)
            except Exception:  # noqa: BLE001 - a thread's boundary, logged
                # One thread writes all traces: an error of one trace must not stop the others.
                _log.exception("a trace of model '%s' could not be written", item.model)
            self._count_collected(item.sampler)
            now_s = time.monotonic()
            if self._lost and now_s - self._loss_logged_s >= _LOSS_LOG_INTERVAL_S:
                with self._lock:
                    lost, self._lost = self._lost, 0
                self._loss_logged_s = now_s
                _log.warning("%d trace(s) were lost: they came faster than they could be written", lost)
        for sampler in list(self._unwritten):
            self._write_rest(sampler)

    def _collect(self, trace: TracedRequest) -> None:
        """Export one trace, or write it or keep it for a numbered file."""
        if trace.omitted_count and not self._has_warned_of_omissions:
            self._has_warned_of_omissions = True
            _log.warning(
                "a trace of model '%s' has no room for %d tensor(s) or runs of models: a trace holds at most %d bytes "
                "of tensors and %d runs; this warning is not repeated",
                trace.model, trace.omitted_count, MAX_TENSOR_BYTES, MAX_MODELS,
            )  # fmt: skip
        if self._export is not None:
            self._export.add(trace)
            return
        settings = trace.sampler.settings
        records = trace_records(trace)
        if not settings.log_frequency and settings.count < 0:
            self._write(lambda file: file.add(records), settings.file, 1)
            return
        unwritten = self._unwritten.setdefault(trace.sampler, _UnwrittenRecords())
        unwritten.records.append(records)
        unwritten.size += len(records)
        is_full = settings.log_frequency and len(unwritten.records) >= settings.log_frequency
        if is_full or unwritten.size > MAX_BYTES:
            self._write_numbered(trace.sampler)

    def _count_collected(self, sampler: TraceSampler) -> None:
        """Count a trace as collected; after the sampler's last one, write its remaining records."""
        if sampler.count_collected():
            if sampler.left == 0 and not sampler.is_replaced:
                self._write_numbered(sampler)
            else:
                self._write_rest(sampler)

    def _write_numbered(self, sampler: TraceSampler) -> None:
        unwritten = self._unwritten.get(sampler)
        if unwritten is not None and unwritten.records:
            count, records = len(unwritten.records), unwritten.take_all()
            self._write(lambda file: file.add_numbered(records), sampler.settings.file, count)

    def _write_rest(self, sampler: TraceSampler) -> None:
        """Write the remaining records into a numbered file if the settings ask for those, else into the file itself."""
        if sampler.settings.log_frequency:
            self._write_numbered(sampler)
        unwritten = self._unwritten.pop(sampler, None)
        if unwritten is not None and unwritten.records:
            count, records = len(unwritten.records), unwritten.take_all()
            self._write(lambda file: file.add(records), sampler.settings.file, count)
        if sampler.is_replaced:
            # Settings that name another file, or none, are how an operator mends it.
            self._unwritable.pop(sampler.settings.file, None)

    def _write(self, write: Callable[[TraceFile], None], path: str, count: int) -> None:
        file = self._files.setdefault(path, TraceFile(path))
        _, lost = self._unwritable.get(path, ("", 0))
        try:
            write(file)
        except OSError as error:
            reason = error.strerror or str(error)
            self._unwritable[path] = reason, lost + count
            if not lost:
                _log.warning("traces are lost until '%s' can be written: %s", path, reason)
            return
        if lost:
            del self._unwritable[path]
            _log.warning("%d trace(s) were lost while '%s' could not be written", lost, path)


class TraceFile:
    """A trace file and the numbered files beside it. For one thread. Methods raise OSError; the records written before
    stay readable."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)
        self._number = 0
        self._size = 0
        """Bytes up to the closing bracket, 0 before the first addition."""

    def add(self, records: str) -> None:
        """Write records into the file itself. The first ones replace the file of an earlier run."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC) if self._size else -1
        except FileNotFoundError:
            fd = -1
        if fd < 0:
            self._size = _write_new_file(self._path, records)
            return
        try:
            if os.fstat(fd).st_size != self._size + 1:
                # Another program has changed the file: start a new one.
                self._size = _write_new_file(self._path, records)
                return
            data = f",{records}]".encode()
            try:
                at, view = self._size + 1, memoryview(data)[1:]
                while view:
                    written = os.pwrite(fd, view, at)
                    view, at = view[written:], at + written
            except OSError:
                os.ftruncate(fd, self._size + 1)
                raise
            # The bracket goes last: a full disk may have no page for it any more once it is cut off.
            os.pwrite(fd, data[:1], self._size)
            self._size += len(data) - 1
        finally:
            os.close(fd)

    def add_numbered(self, records: str) -> None:
        """Write records into the next numbered file."""
        _write_new_file(f"{self._path}.{self._number}", records)
        self._number += 1


def _write_new_file(path: str, records: str) -> int:
    """Write a new file, replacing a regular file at `path`. Return its size up to the closing bracket."""
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


def trace_records(trace: TracedRequest) -> str:
    """Return the records of a trace as JSON objects, separated by commas."""
    parts: list[str] = []
    for model in trace.models:
        record: dict[str, object] = {"id": model.id, "model_name": model.model, "model_version": model.version}
        if model.request_id:
            record["request_id"] = model.request_id
        if model.parent_id:
            record["parent_id"] = model.parent_id
        parts.append(json.dumps(record, separators=(",", ":")))
        if trace.keeps_stamps:
            stamps = [*model.stamps, *model.compute, *(trace.stamps if model is trace.first else ())]
            stamps.sort(key=lambda stamp: stamp[1])
            parts += (
                f'{{"id":{model.id},"timestamps":[{{"name":"{name}","ns":{stamp_ns}}}]}}' for name, stamp_ns in stamps
            )
        for item in model.tensors:
            tensor = {
                "name": item.tensor.name,
                "data": _tensor_text(item.tensor),
                "shape": ",".join(map(str, item.tensor.array.shape)),
                "dtype": item.tensor.dtype.value,
            }
            tensor_record = {"id": model.id, "activity": item.activity, "tensor": tensor}
            parts.append(json.dumps(tensor_record, separators=(",", ":")))
    return ",".join(parts)


def _tensor_text(tensor: Tensor) -> str:
    """Return the elements separated by commas. Works in parts: Python objects need far more memory than the text."""
    flat = tensor.array.ravel()
    parts = (flat[at : at + _PART_ELEMENTS] for at in range(0, flat.size, _PART_ELEMENTS))
    return ",".join([",".join(_element_texts(tensor.dtype, part)) for part in parts])


def _element_texts(dtype: DType, flat: npt.NDArray[np.generic]) -> Iterable[str]:
    """Return the elements in the format of C++ streams: floating point with six digits, strings in quotes.

    Unlike Triton, bytes are written as numbers instead of characters, and 16-bit floats are included.
    """
    if dtype is DType.BYTES:
        return (f'"{item.decode("utf-8", "backslashreplace")}"' for item in flat.tolist())
    if dtype is DType.BF16:
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    if flat.dtype.kind == "f":
        return map("%g".__mod__, flat.tolist())
    return map(str, (flat.view(np.uint8) if flat.dtype.kind == "b" else flat).tolist())
