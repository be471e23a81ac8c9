"""Record of one traced request: time stamps of the front end, and stamps and tensors of each model that ran for it.

The trace is delivered when it is complete: the front end and every model that began have finished.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from edge_server.core.tensor import DType, Tensor
from edge_server.core.trace_settings import OPENTELEMETRY, TENSORS, TIMESTAMPS, CarriedTrace
from edge_server.telemetry.trace_sampling import RemoteParent, TraceSampler, traceparent

REQUEST_START = "REQUEST_START"
QUEUE_START = "QUEUE_START"
COMPUTE_START = "COMPUTE_START"
COMPUTE_INPUT_END = "COMPUTE_INPUT_END"
COMPUTE_OUTPUT_START = "COMPUTE_OUTPUT_START"
COMPUTE_END = "COMPUTE_END"
REQUEST_END = "REQUEST_END"
TENSOR_QUEUE_INPUT = "TENSOR_QUEUE_INPUT"
TENSOR_BACKEND_OUTPUT = "TENSOR_BACKEND_OUTPUT"
"""Names of tritonserver.h (TRITONSERVER_InferenceTraceActivityString)."""

UNKNOWN_VERSION = -1

MAX_TENSOR_BYTES = 8 << 20
"""Most bytes of tensors in one trace: enough for an image in full HD. Further tensors are omitted. Their text takes
several times this size."""

MAX_MODELS = 4096
"""Most model runs in one trace: an endless stream, or a model that calls others without end, must not fill memory."""

_ELEMENT_BYTES = 48
"""Overhead of one BYTES element."""

Stamp = tuple[str, int]


class TracedTensor(NamedTuple):
    """Copy of a tensor at an activity."""

    activity: str
    tensor: Tensor


class TracedModel:
    """Trace of one model's run for a request; implements core.trace_settings.RequestTrace.

    `span_id` is 0 unless the trace becomes spans.
    """

    __slots__ = (
        "_holds", "compute", "id", "model", "parent_id", "request_id", "root", "span_id", "stamps", "tensors",
        "version",
    )  # fmt: skip

    def __init__(self, root: TracedRequest, number: int, parent_id: int) -> None:
        self.root = root
        self.id = number
        self.parent_id = parent_id
        self.model = root.model
        self.version = UNKNOWN_VERSION
        self.request_id = ""
        self.stamps: list[Stamp] = []
        self.compute: list[Stamp] = []
        self.tensors: list[TracedTensor] = []
        self.span_id = new_id(64) if root.makes_spans else 0
        self._holds = False

    def begin(self, model: str, version: int, request_id: str, ns: int, inputs: Iterable[Tensor]) -> None:
        now_ns = time.monotonic_ns()
        tensors = self._copies(TENSOR_QUEUE_INPUT, inputs)
        if not self._holds and not self.root.hold(self):
            return
        self._holds = True
        self.model, self.version, self.request_id = model, version, request_id
        self.stamps = [(REQUEST_START, ns), (QUEUE_START, max(ns, now_ns))]
        self.tensors = tensors

    def record_computation(self, start_ns: int, input_end_ns: int, infer_end_ns: int, end_ns: int) -> None:
        self.compute = [
            (COMPUTE_START, start_ns),
            (COMPUTE_INPUT_END, input_end_ns),
            (COMPUTE_OUTPUT_START, infer_end_ns),
            (COMPUTE_END, end_ns),
        ]

    def record_outputs(self, tensors: Iterable[Tensor]) -> None:
        self.tensors += self._copies(TENSOR_BACKEND_OUTPUT, tensors)

    def refuse(self, ns: int) -> None:
        self.end(ns)

    def end(self, ns: int) -> None:
        if self._holds:
            self._holds = False
            self.stamps.append((REQUEST_END, ns))
            self.root.release()

    def new_child(self) -> TracedModel:
        return TracedModel(self.root, next(self.root.ids), self.id)

    def context(self) -> str | None:
        root = self.root
        if not root.makes_spans:
            return None
        # Only the state, which a client wrote, can have characters that JSON escapes.
        state = "" if root.parent is None else root.parent.state.replace("\\", "\\\\").replace('"', '\\"')
        tail = f', "tracestate": "{state}"' if state else ""
        return f'{{"traceparent": "{traceparent(root.trace_id, self.span_id)}"{tail}}}'

    def __reduce__(self) -> tuple[type[CarriedTrace], tuple[int, str | None]]:
        return CarriedTrace, (self.id, self.context())

    def _copies(self, activity: str, tensors: Iterable[Tensor]) -> list[TracedTensor]:
        """Copy the tensors: inputs are views of memory that may change or be freed before the trace is written.

        Never raises: the calling thread must complete requests and release instances.
        """
        copies: list[TracedTensor] = []
        if not self.root.keeps_tensors:
            return copies
        for item in tensors:
            try:
                if item.dtype is DType.BYTES:
                    size = sum(_ELEMENT_BYTES + len(element) for element in item.array.ravel().tolist())
                else:
                    size = item.array.nbytes
                if self.root.reserve_bytes(size):
                    copies.append(TracedTensor(activity, Tensor(item.name, item.dtype, item.array.copy())))
            except Exception:  # noqa: BLE001 - e.g. memory of a lost GPU, an invalid string: omitted, and counted
                self.root.count_omitted()
        return copies


class TracedRequest:
    """Trace of a request from its arrival at a front end to the end of all work for it. Thread-safe.

    `parent` is the caller's span. `deliver` receives the complete trace; it must return at once.
    """

    def __init__(
        self,
        model: str,
        sampler: TraceSampler,
        ids: Iterator[int],
        deliver: Callable[[TracedRequest], None],
        parent: RemoteParent | None,
        now_ns: int,
    ) -> None:
        level, mode = sampler.settings.level, sampler.settings.mode
        self.model = model
        self.sampler = sampler
        self.ids = ids
        self.parent = parent
        self.makes_spans = mode == OPENTELEMETRY
        self.keeps_tensors = TENSORS in level and not self.makes_spans
        self.keeps_stamps = TIMESTAMPS in level
        self.start_ns = self.end_ns = now_ns
        self.epoch_ns = time.time_ns() - time.monotonic_ns()
        """Offset that turns a stamp into nanoseconds since 1970."""
        self.trace_id = 0
        self.span_id = 0
        if self.makes_spans:
            self.trace_id = new_id(128) if parent is None else parent.trace_id
            self.span_id = new_id(64)
        self.stamps: list[Stamp] = []
        self.byte_count = 0
        self.omitted_count = 0
        """Tensors and model runs that did not fit."""
        self._deliver = deliver
        self._lock = threading.Lock()
        self._holders = 1
        self._is_finished = False
        self.first = TracedModel(self, next(ids), 0)
        self.models = [self.first]

    def stamp(self, name: str, at_ns: int = 0) -> None:
        """Add a stamp at `at_ns` (time.monotonic_ns; 0: now)."""
        self.stamps.append((name, at_ns or time.monotonic_ns()))

    def finish(self) -> None:
        """Note that the front end has finished. Further calls have no effect."""
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = True
            self.end_ns = time.monotonic_ns()
        self.release()

    def hold(self, model: TracedModel) -> bool:
        """Delay the delivery until `release`. Return False when the trace is already delivered or full."""
        with self._lock:
            if not self._holders:
                return False
            if model not in self.models:
                if len(self.models) >= MAX_MODELS:
                    self.omitted_count += 1
                    return False
                self.models.append(model)
            self._holders += 1
            return True

    def release(self) -> None:
        """End one `hold`, and deliver the trace after the last one."""
        with self._lock:
            self._holders -= 1
            is_complete = not self._holders
        if is_complete:
            self._deliver(self)

    def count_omitted(self) -> None:
        """Count a tensor that is not in the trace."""
        with self._lock:
            self.omitted_count += 1

    def reserve_bytes(self, count: int) -> bool:
        """Reserve `count` bytes for a tensor. Return False, and count an omission, when they do not fit."""
        with self._lock:
            if self.byte_count + count > MAX_TENSOR_BYTES:
                self.omitted_count += 1
                return False
            self.byte_count += count
            return True


class TraceExport(Protocol):
    """Where finished traces go instead of a file. Used by one thread."""

    def add(self, trace: TracedRequest) -> None:
        """Queue a trace; return at once."""

    def close(self, timeout_s: float) -> None:
        """Send the queued traces for at most `timeout_s`; the rest is lost."""


def new_id(bits: int) -> int:
    """Return a random id; the W3C standard excludes 0."""
    while not (number := random.getrandbits(bits)):
        pass
    return number
