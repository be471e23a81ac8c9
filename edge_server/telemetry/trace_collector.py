"""From finished traces to files and collectors: one thread, and a bounded line of traces before it.

Whoever finishes a trace leaves it here and goes on. What does not fit into the line, or onto the disk, is lost and
counted; nothing but traces ever is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from edge_server.config import TraceConfig
from edge_server.core.trace_settings import OPENTELEMETRY
from edge_server.telemetry.trace_file import TraceFile, records_of
from edge_server.telemetry.trace_record import MOST_MODELS, MOST_TENSOR_BYTES, TracedRequest
from edge_server.telemetry.trace_sampling import TraceSampler

if TYPE_CHECKING:
    from edge_server.telemetry.opentelemetry_export import SpanExport

_log = logging.getLogger(__name__)

MAX_TRACES = 4096
MAX_BYTES = 64 << 20
"""Traces that wait for the thread, and bytes of their tensors; also the most characters kept for a numbered file."""

_COMPLAIN_EVERY_S = 10.0


class _Pending:
    """Records of one sampler that wait for the rest of their numbered file."""

    def __init__(self) -> None:
        self.records: list[str] = []
        self.size = 0

    def take(self) -> str:
        records, self.records, self.size = ",".join(self.records), [], 0
        return records


class TraceCollector:
    """Thread-safe. `close` once."""

    def __init__(self, config: TraceConfig) -> None:
        self._line: queue.SimpleQueue[TracedRequest | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._waiting = 0
        self._lost = 0
        self._complained_s = 0.0
        self._has_told_of_rest = False
        self._files: dict[str, TraceFile] = {}
        self._pending: dict[TraceSampler, _Pending] = {}
        self._export: SpanExport | None = None
        if config.mode == OPENTELEMETRY:
            # At the start, where a library that is missing is told of.
            from edge_server.telemetry.opentelemetry_export import SpanExport

            self._export = SpanExport(config)
        self._thread = threading.Thread(target=self._live, name="edge-trace", daemon=True)
        self._thread.start()

    def take(self, trace: TracedRequest) -> None:
        """Take a finished trace; returns at once."""
        with self._lock:
            if self._waiting >= MAX_TRACES or self._waiting_bytes > MAX_BYTES:
                self._lost += 1
                is_lost = True
            else:
                self._waiting += 1
                self._waiting_bytes += trace.byte_count
                is_lost = False
        if is_lost:
            sampler = trace.sampler
            self._line.put(lambda: self._end(sampler))
        else:
            self._line.put(trace)

    def flush(self, sampler: TraceSampler) -> None:
        """Write what is left of settings that were replaced, once their last trace is in."""
        self._line.put(lambda: self._write_rest(sampler) if not sampler.open else None)

    def close(self, timeout_s: float) -> None:
        """Write what waits, and wait for that at most `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        self._line.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("traces were still being written after %g s and are lost", timeout_s)
        if self._export is not None:
            self._export.close(max(0.0, until_s - time.monotonic()))

    def _live(self) -> None:
        while (item := self._line.get()) is not None:
            if not isinstance(item, TracedRequest):
                item()
                continue
            with self._lock:
                self._waiting -= 1
                self._waiting_bytes -= item.byte_count
            try:
                self._collect(item)
            except Exception:  # noqa: BLE001 - a thread's boundary, logged
                # The one thread for all traces: what is odd about one must not cost the others.
                _log.exception("a trace of model '%s' could not be written", item.model)
            self._end(item.sampler)
            self._complain()
        for sampler in list(self._pending):
            self._write_rest(sampler)

    def _collect(self, trace: TracedRequest) -> None:
        if trace.left_out_count and not self._has_told_of_rest:
            self._has_told_of_rest = True
            _log.warning(
                "a trace of model '%s' has no room for %d tensor(s) or runs of models: it holds %d bytes of tensors "
                "and %d runs at most; what later ones leave out is not told",
                trace.model, trace.left_out_count, MOST_TENSOR_BYTES, MOST_MODELS,
            )  # fmt: skip
        if self._export is not None:
            self._export.take(trace)
            return
        settings = trace.sampler.settings
        records = records_of(trace)
        if not settings.log_frequency and settings.count < 0:
            self._write(lambda file: file.add(records), settings.file, 1)
            return
        pending = self._pending.setdefault(trace.sampler, _Pending())
        pending.records.append(records)
        pending.size += len(records)
        is_full = settings.log_frequency and len(pending.records) >= settings.log_frequency
        if is_full or pending.size > MAX_BYTES:
            self._write_numbered(trace.sampler)

    def _end(self, sampler: TraceSampler) -> None:
        """Count a trace as done with; after the last one of a limited number, write what is left."""
        if sampler.collected():
            if sampler.left == 0 and not sampler.is_replaced:
                self._write_numbered(sampler)
            else:
                self._write_rest(sampler)

    def _write_numbered(self, sampler: TraceSampler) -> None:
        pending = self._pending.get(sampler)
        if pending is not None and pending.records:
            count, records = len(pending.records), pending.take()
            self._write(lambda file: file.add_numbered(records), sampler.settings.file, count)

    def _write_rest(self, sampler: TraceSampler) -> None:
        """Write what is left of settings that end: into a numbered file where they ask for such, else into the one."""
        if sampler.settings.log_frequency:
            self._write_numbered(sampler)
        pending = self._pending.pop(sampler, None)
        if pending is not None and pending.records:
            count, records = len(pending.records), pending.take()
            self._write(lambda file: file.add(records), sampler.settings.file, count)

    def _write(self, write: Callable[[TraceFile], None], path: str, count: int) -> None:
        file = self._files.setdefault(path, TraceFile(path))
        try:
            write(file)
        except OSError as error:
            with self._lock:
                self._lost += count
            self._complain(f": cannot write to '{path}': {error.strerror}")

    def _complain(self, why: str = "") -> None:
        """Tell of lost traces in the log, now and then."""
        now_s = time.monotonic()
        if not self._lost or now_s - self._complained_s < _COMPLAIN_EVERY_S:
            return
        with self._lock:
            lost, self._lost = self._lost, 0
        self._complained_s = now_s
        _log.warning("%d trace(s) were lost%s", lost, why or ": they came faster than they could be written")
