"""Relay of calls that a model in a child process makes to its server: carries requests to other models, load, unload
and readiness there, and the answers back."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_server.backends.base import BlsCall, CalledModel, ServerCalls
from edge_server.backends.deadlock_check import WAIT_GRAPH, deadlock_message, models_to_wait_for
from edge_server.backends.isolation.child_process import ModelChildProcess, RequestsInProcess
from edge_server.core.request_response import Request, Response
from edge_server.errors import BackendError, EdgeServerError, Refusal


class CallRelay:
    """Sends the process's calls to the server, and the responses back, by the process's call numbers.

    One thread handles the messages of the process with the methods `on_...`, and calls `end` after the last one.
    Responses come from any thread.
    """

    MESSAGES = frozenset(("call", "cancel_request", "submit"))

    def __init__(
        self, model: str, server: ServerCalls | None, child: ModelChildProcess, requests: RequestsInProcess
    ) -> None:
        self._model = model
        self._server = server
        self._child = child
        self._requests = requests
        self._lock = threading.Lock()
        self._calls: dict[int, BlsCall | None] = {}
        """Number of a request -> call, None until it is submitted."""
        self._waiting: dict[int, tuple[str, tuple[str, ...]]] = {}
        """Number of a request -> called model and the models that answer for it, of calls that block the instance."""

    def begin(self) -> None:
        """Register the process as an instance of the model for the deadlock check."""
        WAIT_GRAPH.add_instance(self._model, self)

    def end(self) -> None:
        """Cancel the open calls of the process, which has ended."""
        with self._lock:
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            if call is not None:
                call.cancel()
        WAIT_GRAPH.remove_instance(self._model, self)

    def refuse_deadlocked_calls(self) -> None:
        """Answer each call that has become part of a deadlock with an error."""
        with self._lock:
            waiting = dict(self._waiting)
        for number, (model, waits_for) in waiting.items():
            if any(WAIT_GRAPH.is_deadlocked(name) for name in waits_for):
                self._refuse(number, model, waits_for)

    def on_call(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        # A load may take minutes. The next messages must not wait for it.
        threading.Thread(target=self._run_call, args=(number, method, arguments), daemon=True).start()

    def on_submit(self, number: int, request: Request, holds_instance: bool) -> None:
        server, model = self._server, request.model
        if server is None:
            return
        # The inputs lie in memory that is freed after this message, while the called model still reads them.
        for tensor in request.inputs.values():
            tensor.array = np.array(tensor.array)
        if request.trace is not None:
            # The trace came as a copy. Continue the trace of the request that the process computes.
            traces = [execution.request.trace for execution in self._requests.open_executions().values()]
            trace_id = request.trace.id
            request.trace = next(
                (trace.new_child() for trace in traces if trace is not None and trace.id == trace_id), None
            )
        called: CalledModel | ServerCalls = server
        waits_for: tuple[str, ...] = ()
        if holds_instance:
            try:
                called = found = server.find(model, request.version)
                waits_for = models_to_wait_for(server, found.spec, request.outputs)
            except EdgeServerError:
                # The call itself reports this error.
                waits_for = (model,)
        with self._lock:
            self._calls[number] = None
            if holds_instance:
                self._waiting[number] = (model, waits_for)
        for name in waits_for:
            WAIT_GRAPH.add_wait(self, name)
        if any(WAIT_GRAPH.is_deadlocked(name) for name in waits_for):
            self._refuse(number, model, waits_for)
            return
        try:
            call = called.submit(request, lambda response: self._send_response(number, response))
        except EdgeServerError as error:
            self._send_response(number, Response(model, 0, request.id, error=error.detached()))
            return
        with self._lock:
            if number in self._calls:
                self._calls[number] = call

    def on_cancel_request(self, number: int) -> None:
        with self._lock:
            call = self._calls.get(number)
        if call is not None:
            call.cancel()

    def _run_call(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        server = self._server
        result: Any = None
        try:
            if server is None:
                raise BackendError("there is no server")
            if method == "unload_model":
                server.unload_model(arguments[0], unload_dependents=arguments[1])
            elif method == "find":
                result = server.find(*arguments).spec
            else:
                result = getattr(server, method)(*arguments)
        except EdgeServerError as error:
            result = error.detached()
        self._child.send(("call_result", number, result))

    def _send_response(self, number: int, response: Response) -> None:
        with self._lock:
            is_known = number in self._calls
            waits_for: Sequence[str] = ()
            if response.is_final:
                self._calls.pop(number, None)
                _, waits_for = self._waiting.pop(number, ("", ()))
        for name in waits_for:
            WAIT_GRAPH.remove_wait(self, name)
        if is_known:
            try:
                self._child.send(("response", number, dataclasses.replace(response, spec=None)))
            except Refusal as error:  # no memory for the outputs
                failed = dataclasses.replace(response, spec=None, outputs=(), error=error.detached())
                self._child.send(("response", number, failed))

    def _refuse(self, number: int, model: str, waits_for: Sequence[str]) -> None:
        self.on_cancel_request(number)
        error = BackendError(deadlock_message(self._model, model, waits_for))
        self._send_response(number, Response(model, 0, "", error=error))
