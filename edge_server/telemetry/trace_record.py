"""One traced request: the notes of the front end that took it and of every model that worked on it.

It is delivered once nobody can add to it any more: the front end has finished, and so has each model that began.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from edge_server.core.tensor import DType, Tensor
from edge_server.core.trace_settings import OPENTELEMETRY, TENSORS, TIMESTAMPS, CarriedTrace
from edge_server.telemetry.trace_context import RemoteParent, traceparent
from edge_server.telemetry.trace_sampling import TraceSampler

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

MOST_TENSOR_BYTES = 8 << 20
"""Bytes of tensors that one trace holds, a picture in full HD among them; what comes on top is left out of it. As text
they take several times as much."""

MOST_MODELS = 4096
"""Runs of models that one trace holds: a stream that never ends, or a model that asks others for ever, must not fill
the memory."""

_ELEMENT_BYTES = 48
"""What an element of BYTES takes beside its own bytes."""

Stamp = tuple[str, int]


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor as it was at an activity; `data` is a copy of its own."""

    activity: str
    tensor: Tensor


class TracedModel:
    """See core.trace.RequestTrace. `span_id` is that of its span, should it become one."""

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

    def computed(self, start_ns: int, input_end_ns: int, infer_end_ns: int, end_ns: int) -> None:
        self.compute = [
            (COMPUTE_START, start_ns),
            (COMPUTE_INPUT_END, input_end_ns),
            (COMPUTE_OUTPUT_START, infer_end_ns),
            (COMPUTE_END, end_ns),
        ]

    def outputs(self, tensors: Iterable[Tensor]) -> None:
        self.tensors += self._copies(TENSOR_BACKEND_OUTPUT, tensors)

    def refuse(self, ns: int) -> None:
        self.end(ns)

    def end(self, ns: int) -> None:
        if self._holds:
            self._holds = False
            self.stamps.append((REQUEST_END, ns))
            self.root.let_go()

    def child(self) -> TracedModel:
        return TracedModel(self.root, next(self.root.ids), self.id)

    def context(self) -> str | None:
        root = self.root
        if not root.makes_spans:
            return None
        # Both are of letters that JSON takes as they are, but for the state, which a client wrote.
        state = "" if root.parent is None else root.parent.state.replace("\\", "\\\\").replace('"', '\\"')
        tail = f', "tracestate": "{state}"' if state else ""
        return f'{{"traceparent": "{traceparent(root.trace_id, self.span_id)}"{tail}}}'

    def __reduce__(self) -> tuple[type[CarriedTrace], tuple[int, str | None]]:
        return CarriedTrace, (self.id, self.context())

    def _copies(self, activity: str, tensors: Iterable[Tensor]) -> list[TracedTensor]:
        """Copy what may change, or go, before it is written: inputs are views of what clients lend.

        Never raises: the threads that ask have requests to answer, and instances to give back.
        """
        copies: list[TracedTensor] = []
        if not self.root.keeps_tensors:
            return copies
        for item in tensors:
            try:
                if self.root.has_room(_size(item)):
                    copies.append(TracedTensor(activity, Tensor(item.name, item.dtype, item.array.copy())))
            except Exception:  # noqa: BLE001 - memory of a lost GPU, a string that is none: left out, and counted
                self.root.leave_out()
        return copies


class TracedRequest:
    """A request from its arrival at a front end to the end of whatever was done for it. Thread-safe.

    `parent` is the caller's span. `deliver` takes the whole when it is complete; it must return at once.
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
        """What to add to the stamps for nanoseconds since 1970."""
        self.trace_id = 0
        self.span_id = 0
        if self.makes_spans:
            self.trace_id = new_id(128) if parent is None else parent.trace_id
            self.span_id = new_id(64)
        self.stamps: list[Stamp] = []
        self.byte_count = 0
        self.left_out_count = 0
        """Tensors, and runs of models, for which there was no room."""
        self._deliver = deliver
        self._lock = threading.Lock()
        self._holders = 1
        self._is_finished = False
        self.first = TracedModel(self, next(ids), 0)
        self.models = [self.first]

    def stamp(self, name: str, at_ns: int = 0) -> None:
        """Note that something happens at `at_ns` (time.monotonic_ns; 0: now)."""
        self.stamps.append((name, at_ns or time.monotonic_ns()))

    def finish(self) -> None:
        """Say that the front end adds nothing any more. More than once is once."""
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = True
            self.end_ns = time.monotonic_ns()
        self.let_go()

    def hold(self, model: TracedModel) -> bool:
        """Keep the whole from being delivered until `let_go`. False when it was delivered already, or is full."""
        with self._lock:
            if not self._holders:
                return False
            if model not in self.models:
                if len(self.models) >= MOST_MODELS:
                    self.left_out_count += 1
                    return False
                self.models.append(model)
            self._holders += 1
            return True

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            is_complete = not self._holders
        if is_complete:
            self._deliver(self)

    def leave_out(self) -> None:
        """Count a tensor that the trace does without."""
        with self._lock:
            self.left_out_count += 1

    def has_room(self, count: int) -> bool:
        """Return whether a tensor of so many bytes may be added, and count it."""
        with self._lock:
            if self.byte_count + count > MOST_TENSOR_BYTES:
                self.left_out_count += 1
                return False
            self.byte_count += count
            return True


def new_id(bits: int) -> int:
    """Return a random number that is not 0, as W3C wants ids."""
    while not (number := random.getrandbits(bits)):
        pass
    return number


def _size(tensor: Tensor) -> int:
    if tensor.dtype is DType.BYTES:
        return sum(_ELEMENT_BYTES + len(item) for item in tensor.array.ravel().tolist())
    return tensor.array.nbytes
