"""Built-in models `square` and `repeat`, which send several responses, or none, to one request, as Triton's decoupled
models do."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from edge_server.backends.base import Array, Execution, RequestSession, SessionInfo
from edge_server.backends.option_parsers import whole_number
from edge_server.core.model_spec import ModelSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig, EdgeServerError, InvalidRequest, SessionLost

Steps = Iterator[tuple[float, Mapping[str, Array]]]
"""Responses of one execution: the delay after the previous response in seconds, and the outputs."""

_CANCEL_POLL_S = 0.05


class StreamingSession(RequestSession):
    """Sends the responses of many executions at their times, from one thread of its own.

    A cancelled execution ends before its next response. `close` fails open executions and joins the thread.
    """

    def __init__(self, spec: ModelSpec, info: SessionInfo) -> None:
        self.info = info
        self._model = spec.name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Execution, Steps, Mapping[str, Array]]] = []
        self._order = itertools.count()
        self._is_closed = False
        self._thread = threading.Thread(target=self._send_responses, name=f"{spec.name}-responses", daemon=True)
        self._thread.start()

    def steps(self, execution: Execution) -> Steps:
        """Return the responses to one request. Raises InvalidRequest at once, not during the iteration."""
        raise NotImplementedError

    def hold_s(self, execution: Execution) -> float:
        """Return the time in seconds for which `execute` keeps the instance busy for this request."""
        return 0.0

    def execute(self, executions: Sequence[Execution]) -> None:
        for execution in executions:
            try:
                steps, hold_s = self.steps(execution), self.hold_s(execution)
            except EdgeServerError as error:
                execution.fail(error)
                continue
            self._schedule(execution, steps, time.monotonic())
            self._keep_busy(execution, hold_s)

    def _keep_busy(self, execution: Execution, hold_s: float) -> None:
        """Wait until the time is over, or the execution is cancelled."""
        until = time.monotonic() + hold_s
        with self._changed:
            while not self._is_closed and not execution.is_cancelled():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(min(left_s, _CANCEL_POLL_S))

    def _schedule(self, execution: Execution, steps: Steps, after: float) -> None:
        """Schedule the next response of an execution, or close it if there is none."""
        step = next(steps, None)
        if step is None:
            execution.finish()
            return
        delay_s, outputs = step
        with self._changed:
            is_closed = self._is_closed
            if not is_closed:
                heapq.heappush(self._due, (after + delay_s, next(self._order), execution, steps, outputs))
                self._changed.notify_all()
        if is_closed:
            execution.fail(SessionLost(f"model '{self._model}' was closed before its last response"))

    def _send_responses(self) -> None:
        while (entry := self._wait_for_next()) is not None:
            due, _, execution, steps, outputs = entry
            if execution.is_cancelled():
                execution.finish()
                continue
            execution.send(outputs)
            self._schedule(execution, steps, due)

    def _wait_for_next(self) -> tuple[float, int, Execution, Steps, Mapping[str, Array]] | None:
        """Wait for the next response that is due or cancelled, and return it; None when the session closes."""
        with self._changed:
            while not self._is_closed:
                left_s = self._due[0][0] - time.monotonic() if self._due else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._due)
                dropped = next((entry for entry in self._due if entry[2].is_cancelled()), None)
                if dropped is not None:
                    self._due.remove(dropped)
                    heapq.heapify(self._due)
                    return dropped
                self._changed.wait(None if left_s is None else min(left_s, _CANCEL_POLL_S))
        return None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        left, self._due = self._due, []
        for _, _, execution, _, _ in left:
            execution.fail(SessionLost(f"model '{self._model}' was closed before its last response"))


class SquareSession(StreamingSession):
    """Sends n responses with OUT = n for IN = n, and none for n <= 0."""

    def __init__(self, spec: ModelSpec, info: SessionInfo) -> None:
        _check_tensors(spec, {"IN": DType.INT32}, {"OUT": DType.INT32})
        self._delay_s = whole_number(spec.name, spec.parameters, "CUSTOM_INFER_DELAY_NS", 0) / 1e9
        super().__init__(spec, info)

    def steps(self, execution: Execution) -> Steps:
        given = _array(execution, "IN")
        if given.size != 1:
            raise InvalidRequest(f"model '{self._model}': input 'IN' must hold one element, got {given.size}")
        return ((self._delay_s, {"OUT": np.array(given)}) for _ in range(int(given.flat[0])))


class RepeatSession(StreamingSession):
    """Sends one response for each element of IN, DELAY milliseconds apart."""

    def __init__(self, spec: ModelSpec, info: SessionInfo) -> None:
        if spec.max_batch_size != 0:
            raise BadModelConfig(f"model '{spec.name}': repeat only supports models with max_batch_size 0")
        inputs = {"IN": DType.INT32, "DELAY": DType.UINT32, "WAIT": DType.UINT32}
        _check_tensors(spec, inputs, {"OUT": DType.INT32, "IDX": DType.UINT32})
        super().__init__(spec, info)

    def steps(self, execution: Execution) -> Steps:
        elements, delays_ms = _array(execution, "IN").reshape(-1), _array(execution, "DELAY").reshape(-1)
        if elements.size != delays_ms.size:
            raise InvalidRequest(
                f"model '{self._model}': inputs 'IN' and 'DELAY' must have as many elements as each other, "
                f"got {elements.size} and {delays_ms.size}"
            )
        return (
            (int(delays_ms[i]) / 1000, {"OUT": np.array(elements[i : i + 1]), "IDX": np.array([i], dtype="<u4")})
            for i in range(elements.size)
        )

    def hold_s(self, execution: Execution) -> float:
        wait_ms = _array(execution, "WAIT")
        if wait_ms.size != 1:
            raise InvalidRequest(f"model '{self._model}': input 'WAIT' must hold one element, got {wait_ms.size}")
        return int(wait_ms.flat[0]) / 1000


def _array(execution: Execution, name: str) -> Array:
    tensor = execution.request.inputs.get(name)
    if tensor is None:
        raise InvalidRequest(f"model '{execution.request.model}': input '{name}' is missing")
    return tensor.array


def _check_tensors(spec: ModelSpec, inputs: Mapping[str, DType], outputs: Mapping[str, DType]) -> None:
    """Raise BadModelConfig unless the model has exactly these tensors."""
    given = ({one.name: one.dtype for one in spec.inputs}, {one.name: one.dtype for one in spec.outputs})
    if given != (dict(inputs), dict(outputs)):
        wanted = ", ".join(f"{name} {dtype.config_name}" for name, dtype in {**inputs, **outputs}.items())
        found = ", ".join(f"{name} {dtype.config_name}" for part in given for name, dtype in part.items())
        raise BadModelConfig(f"model '{spec.name}': backend {spec.backend} expects {wanted}; the model has {found}")
