"""BLS relay: calls, loads and unloads of a model in its own process, carried to the server."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_server.backends.base import BlsCall, ServerCalls
from edge_server.backends.python.bls_calls import deadlock
from edge_server.backends.python.call_graph import models_behind
from edge_server.backends.python.calling_model import Host
from edge_server.backends.python.child_process import ModelChildProcess
from edge_server.backends.python.error_translation import error_of
from edge_server.backends.python.requests_in_process import RequestsInProcess
from edge_server.backends.python.session import WAITS
from edge_server.core.request_response import Request, Response
from edge_server.core.trace_settings import RequestTrace
from edge_server.errors import BackendError, EdgeServerError


class CallRelay:
    """Hands calls on to the server and answers back, by the process's numbers. Messages of the process are taken by one
    thread, by the methods `on_...`, and `end` comes after the last; answers come from any."""

    MESSAGES = frozenset(("ask", "cancel_call", "submit"))

    def __init__(
        self, model: str, server: ServerCalls | None, child: ModelChildProcess, handed: RequestsInProcess
    ) -> None:
        self._model = model
        self._server = server
        self._child = child
        self._handed = handed
        self._host = Host(model, "", server, WAITS)
        self._lock = threading.Lock()
        self._calls: dict[int, BlsCall | None] = {}
        """Number -> the call, None until the server has it."""
        self._waited_for: dict[int, tuple[str, tuple[str, ...]]] = {}
        """Number -> the model that is called and those behind it, of calls that the instance waits for."""

    def begin(self) -> None:
        """Count the process among the model's instances, which others may wait for."""
        WAITS.enter(self._model, self._host)

    def end(self) -> None:
        """Cancel what the process, which is gone, waited for."""
        with self._lock:
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            if call is not None:
                call.cancel()
        WAITS.leave(self._model, self._host)

    def refuse_stuck(self) -> None:
        """Answer the calls that have come to wait for themselves."""
        with self._lock:
            waiting = dict(self._waited_for)
        for number, (model, behind) in waiting.items():
            if any(WAITS.is_stuck(name) for name in behind):
                self._refuse(number, model, behind)

    def on_ask(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        # A load takes as long as it takes; messages must not wait for it.
        threading.Thread(target=self._answer, args=(number, what, arguments), daemon=True).start()

    def on_submit(self, number: int, request: Request, holds: bool) -> None:
        server, model = self._server, request.model
        if server is None:
            return
        # The process reads on while others compute with them.
        for tensor in request.inputs.values():
            tensor.array = np.array(tensor.array)
        request.trace = self._child_of(request.trace)
        behind = self._models_behind(server, request) if holds else ()
        with self._lock:
            self._calls[number] = None
            if holds:
                self._waited_for[number] = (model, behind)
        for name in behind:
            WAITS.begin(self._host, name)
        if any(WAITS.is_stuck(name) for name in behind):
            self._refuse(number, model, behind)
            return
        try:
            call = server.submit(request, lambda response: self._hand_on(number, response))
        except EdgeServerError as error:
            self._hand_on(number, Response(model, 0, request.id, error=error.detached()))
            return
        with self._lock:
            if number in self._calls:
                self._calls[number] = call

    def on_cancel_call(self, number: int) -> None:
        with self._lock:
            call = self._calls.get(number)
        if call is not None:
            call.cancel()

    def _answer(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        server = self._server
        answer: Any = None
        try:
            if server is None:
                raise BackendError("there is no server")
            if what == "unload_model":
                server.unload_model(arguments[0], unload_dependents=arguments[1])
            else:
                answer = getattr(server, what)(*arguments)
        except EdgeServerError as error:
            answer = error.detached()
        self._child.send(("told", number, answer))

    def _child_of(self, carried: RequestTrace | None) -> RequestTrace | None:
        """Return a trace for a request that the process makes on behalf of one that it works on."""
        if carried is None:
            return None
        traces = [execution.request.trace for execution in self._handed.now_open().values()]
        return next((trace.child() for trace in traces if trace is not None and trace.id == carried.id), None)

    def _models_behind(self, server: ServerCalls, request: Request) -> tuple[str, ...]:
        try:
            return models_behind(server, server.model_spec(request.model, request.version), request.outputs)
        except EdgeServerError:
            # The call itself will tell.
            return (request.model,)

    def _hand_on(self, number: int, response: Response) -> None:
        with self._lock:
            is_known = number in self._calls
            behind: Sequence[str] = ()
            if response.is_final:
                self._calls.pop(number, None)
                _, behind = self._waited_for.pop(number, ("", ()))
        for name in behind:
            WAITS.end(self._host, name)
        if is_known:
            self._child.send(("response", number, dataclasses.replace(response, spec=None)))

    def _refuse(self, number: int, model: str, behind: Sequence[str]) -> None:
        self.on_cancel_call(number)
        error = error_of(deadlock(self._model, model, behind))
        self._hand_on(number, Response(model, 0, "", error=error))
