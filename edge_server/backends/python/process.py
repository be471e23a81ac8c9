"""The server's side of one model's process: starting it, talking to it, and telling why it ended."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge_server.backends.base import Call, Execution, ModelFile, OpenJob, ServerCalls, SessionInfo
from edge_server.backends.python.arena import Arena
from edge_server.backends.python.behind import models_behind
from edge_server.backends.python.calls import deadlock
from edge_server.backends.python.channel import Channel
from edge_server.backends.python.failures import error_of
from edge_server.backends.python.metrics import REGISTRY
from edge_server.backends.python.scope import Host
from edge_server.backends.python.session import HEALTH_LIMIT_S, WAITS
from edge_server.backends.runtime import file_title, whole_number
from edge_server.core.message import Request, Response
from edge_server.core.trace import RequestTrace
from edge_server.errors import BackendError, EdgeServerError, LoadError, SessionLost

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""How often the process is told which of its requests nobody waits for any more."""

INITIALIZE_TIMEOUT = "initialize_timeout_s"
_INITIALIZE_S = 300

_END_S = 10.0
"""How long a process may take to finalize its model before it is killed."""


def start_process(arena: Arena, other: Arena, line: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process with the other end of a connection, which is given up here. Spawned, not forked: this process
    has threads, and runtimes that do not survive a fork."""
    fds = (line.fileno(), other.fd, arena.fd)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "edge_server.backends.python.worker", *map(str, fds), str(log_level())],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )
    finally:
        line.close()


def log_level() -> int:
    """Return the least level that models may log at, which may change while the server runs."""
    return logging.getLogger("edge_server.model").getEffectiveLevel()


def end_of(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of a process whose connection broke, and return how it ended."""
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "closed its connection without ending, and was killed"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by signal {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class ProcessGone(Exception):
    """The process had ended before it was given the batch."""


class ModelProcess:
    """One living process with one open model. Made by `open_process`; `on_lost` is called once if it ends unasked."""

    def __init__(self, job: OpenJob, on_lost: Callable[[ModelProcess, str], None]) -> None:
        self._job = job
        # Before there is a process that somebody would have to end.
        self._initialize_s = whole_number(job.spec.name, job.spec.parameters, INITIALIZE_TIMEOUT, _INITIALIZE_S, 1)
        self._on_lost = on_lost
        self._host = Host(job.spec.name, "", job.server, WAITS)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Execution] = {}
        self._places: dict[int, _Place] = {}
        self._taken: dict[int, threading.Event] = {}
        self._health: dict[int, tuple[threading.Event, list[bool]]] = {}
        self._calls: dict[int, tuple[Call | None, str]] = {}
        self._waited_for: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._first: list[tuple[Any, ...]] = []
        self._answered = threading.Event()
        self._ended = threading.Event()
        self._is_asked_to_end = False
        self._is_open = False
        self.is_over = False
        self.info = SessionInfo("", "", "")
        self.has_health_check = False
        own, other = Arena(), Arena()
        mine, theirs = socket.socketpair()
        self._channel = Channel(mine, own, other.fd)
        # Only the process writes to it; here it stays open as the reader's file descriptor.
        self._process = start_process(own, other, theirs)
        other.forget()
        self._threads = [
            threading.Thread(target=target, name=f"{job.instance_name}-{name}"[:60], daemon=True)
            for target, name in ((self._receive_all, "receive"), (self._look_all, "look"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self) -> None:
        """Have it open the model, and wait. Raises LoadError; the process is gone then.

        A model that takes longer than its parameter `initialize_timeout_s` is not waited for: its process is killed.
        """
        job = dataclasses.replace(self._job, server=None)
        self._send(("open", job, self._job.server is not None))
        if not self._answered.wait(self._initialize_s):
            self._is_asked_to_end = True
            self._process.kill()
            self.close()
            raise LoadError(
                f"{file_title(self._job.file)}: its process did not come through initialize within "
                f"{self._initialize_s} s and was killed; the parameter {INITIALIZE_TIMEOUT} allows more"
            )
        kind, *rest = self._first[0]
        if kind == "opened":
            self.info, self.has_health_check = rest
            self._is_open = True
            WAITS.enter(self._job.spec.name, self._host)
            return
        self.close()
        raise rest[0] if kind == "failed" else LoadError(f"{file_title(self._job.file)}: its process {rest[0]}")

    def execute(self, executions: Sequence[Execution]) -> None:
        """Hand over a batch and wait until the model has taken it. What is open when the process ends is failed.

        Raises ProcessGone when it had ended before.
        """
        batch = next(self._numbers)
        taken = threading.Event()
        numbered = [(next(self._numbers), execution) for execution in executions]
        place = _Place(len(numbered))
        with self._lock:
            if self.is_over:
                raise ProcessGone
            self._taken[batch] = taken
            self._open.update(numbered)
            self._places.update((number, place) for number, _ in numbered)
        requests = [(number, dataclasses.replace(item.request, release=None)) for number, item in numbered]
        self._send(("execute", batch, requests), place)
        taken.wait()

    def is_healthy(self) -> bool:
        """Ask the model; a process that does not answer in time is not."""
        number, answered, found = next(self._numbers), threading.Event(), [False]
        self._health[number] = (answered, found)
        self._send(("healthy", number))
        answered.wait(HEALTH_LIMIT_S + 1)
        self._health.pop(number, None)
        return found[0]

    def close(self) -> None:
        """Have it finalize and end; kill it if it does not."""
        self._is_asked_to_end = True
        self._send(("close",))
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            log.warning("the process of model '%s' did not end in %d s and is killed", self._job.spec.name, _END_S)
            self._process.kill()
            self._process.wait()
        self._channel.cut()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._channel.close()

    # -- threads

    def _receive_all(self) -> None:
        try:
            while True:
                message, place = self._channel.receive()
                if message is not None:
                    self._take(message, place)
                self._channel.free(place)
                self._channel.flush()
        except (OSError, EOFError):
            self._end()

    def _end(self) -> None:
        why = end_of(self._process)
        self._ended.set()
        with self._lock:
            self.is_over = True
            calls, self._calls = list(self._calls.values()), {}
            left, self._open = list(self._open.values()), {}
            taken, self._taken = list(self._taken.values()), {}
            self._places.clear()
        for call, _ in calls:
            if call is not None:
                call.cancel()
        REGISTRY.report(self, ())
        WAITS.leave(self._job.spec.name, self._host)
        for answered, _ in list(self._health.values()):
            answered.set()
        if not self._answered.is_set():
            self._first.append(("ended", why))
            self._answered.set()
        elif self._is_open and not self._is_asked_to_end:
            self._on_lost(self, why)
        self._fail(left, taken, why)

    def _fail(self, left: Sequence[Execution], taken: Sequence[threading.Event], why: str) -> None:
        text = f"model '{self._job.spec.name}': its process {why} with this request in its hands"
        for execution in left:
            execution.fail(SessionLost(text))
        for event in taken:
            event.set()

    def _look_all(self) -> None:
        told: set[int] = set()
        level = -1
        while not self._ended.wait(_LOOK_S):
            if log_level() != level:
                level = log_level()
                self._send(("log_level", level))
            with self._lock:
                open_now = dict(self._open)
                waiting = dict(self._waited_for)
            told &= open_now.keys()
            news = [number for number, item in open_now.items() if number not in told and item.is_cancelled()]
            if news:
                told.update(news)
                self._send(("cancelled", news))
            for number, (model, behind) in waiting.items():
                if any(WAITS.is_stuck(name) for name in behind):
                    self._refuse_call(number, model, behind)

    # -- messages

    def _take(self, message: tuple[Any, ...], place: int | None) -> None:
        kind, *rest = message
        getattr(self, f"_on_{kind}")(*rest, **({"place": place} if kind == "send" else {}))

    def _on_send(self, number: int, outputs: Any, is_final: bool, parameters: Any, *, place: int | None) -> None:
        execution = self._execution(number, is_final)
        if execution is None:
            return
        if place is not None:
            outputs = {name: np.array(array) for name, array in outputs.items()}
        execution.send(outputs, is_final=is_final, parameters=parameters)

    def _on_fail(self, number: int, error: EdgeServerError, is_final: bool) -> None:
        if (execution := self._execution(number, is_final)) is not None:
            execution.fail(error, is_final=is_final)

    def _on_finish(self, number: int) -> None:
        if (execution := self._execution(number, True)) is not None:
            execution.finish()

    def _on_reschedule(self, number: int) -> None:
        if (execution := self._execution(number, True)) is not None:
            execution.reschedule()

    def _on_taken(self, batch: int) -> None:
        with self._lock:
            taken = self._taken.pop(batch, None)
        if taken is not None:
            taken.set()

    def _on_opened(self, info: SessionInfo, has_health_check: bool) -> None:
        info = dataclasses.replace(info, options={"isolation": "process"}, keeps_thread=False)
        self._first.append(("opened", info, has_health_check))
        self._answered.set()

    def _on_failed(self, error: LoadError) -> None:
        self._first.append(("failed", error))
        self._answered.set()

    def _on_closed(self) -> None:
        """The process ends next, and its connection with it."""

    def _on_log(self, name: str, level: int, text: str) -> None:
        logging.getLogger(name).log(level, "%s", text)

    def _on_metrics(self, views: Any) -> None:
        REGISTRY.report(self, views)

    def _on_health(self, number: int, is_healthy: bool) -> None:
        answered, found = self._health.get(number, (threading.Event(), [False]))
        found[0] = is_healthy
        answered.set()

    def _on_ask(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        # A load takes as long as it takes; messages must not wait for it.
        threading.Thread(target=self._answer, args=(number, what, arguments), daemon=True).start()

    def _answer(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        server = self._job.server
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
        self._send(("told", number, answer))

    def _on_submit(self, number: int, request: Request, holds: bool) -> None:
        server, model = self._job.server, request.model
        if server is None:
            return
        # The process reads on while others compute with them.
        for tensor in request.inputs.values():
            tensor.array = np.array(tensor.array)
        request.trace = self._child_of(request.trace)
        behind = self._models_behind(server, request) if holds else ()
        with self._lock:
            self._calls[number] = (None, model)
            if holds:
                self._waited_for[number] = (model, behind)
        for name in behind:
            WAITS.begin(self._host, name)
        if any(WAITS.is_stuck(name) for name in behind):
            self._refuse_call(number, model, behind)
            return
        try:
            call = server.submit(request, lambda response: self._hand_on(number, model, response))
        except EdgeServerError as error:
            self._hand_on(number, model, Response(model, 0, request.id, error=error.detached()))
            return
        with self._lock:
            if number in self._calls:
                self._calls[number] = (call, model)

    def _child_of(self, carried: RequestTrace | None) -> RequestTrace | None:
        """Return a trace for a request that the process makes on behalf of one that it works on."""
        if carried is None:
            return None
        with self._lock:
            traces = [execution.request.trace for execution in self._open.values()]
        return next((trace.child() for trace in traces if trace is not None and trace.id == carried.id), None)

    def _on_cancel_call(self, number: int) -> None:
        with self._lock:
            call = self._calls.get(number, (None, ""))[0]
        if call is not None:
            call.cancel()

    def _hand_on(self, number: int, model: str, response: Response) -> None:
        with self._lock:
            known = self._calls.pop(number, None) if response.is_final else self._calls.get(number)
            held = self._waited_for.pop(number, None) if response.is_final else None
        for name in () if held is None else held[1]:
            WAITS.end(self._host, name)
        if known is not None:
            self._send(("response", number, dataclasses.replace(response, spec=None)))

    def _models_behind(self, server: ServerCalls, request: Request) -> tuple[str, ...]:
        try:
            return models_behind(server, server.model_spec(request.model, request.version), request.outputs)
        except EdgeServerError:
            # The call itself will tell.
            return (request.model,)

    def _refuse_call(self, number: int, model: str, behind: Sequence[str]) -> None:
        self._on_cancel_call(number)
        error = error_of(deadlock(self._job.spec.name, model, behind))
        self._hand_on(number, model, Response(model, 0, "", error=error))

    # -- parts

    def _execution(self, number: int, is_final: bool) -> Execution | None:
        with self._lock:
            if not is_final:
                return self._open.get(number)
            place = self._places.pop(number, None)
            execution = self._open.pop(number, None)
        if place is not None and (offset := place.leave()) is not None:
            self._channel.arena.free(offset)
        return execution

    def _send(self, message: tuple[Any, ...], place: _Place | None = None) -> None:
        """Send, unless the process is gone: `_end` then answers for everything."""
        try:
            offset = self._channel.send(message)
        except (OSError, ValueError):
            # ValueError: its memory was given back already.
            return
        if place is not None and offset is not None and place.settle(offset):
            self._channel.arena.free(offset)


class _Place:
    """Shared memory that several requests of a batch lie in: freed when the last of them is answered."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._offset: int | None = None

    def settle(self, offset: int) -> bool:
        """Take note of the place. True when all were answered before it was known."""
        with self._lock:
            self._offset = offset
            return self._count == 0

    def leave(self) -> int | None:
        """Return the place if this was the last to lie there."""
        with self._lock:
            self._count -= 1
            return self._offset if self._count == 0 else None


def completed_in_process(file: ModelFile, config_json: str) -> str | None:
    """Ask a model for its configuration in a process that lives as long as that takes. Raises LoadError."""
    own, other = Arena(), Arena()
    mine, theirs = socket.socketpair()
    channel = Channel(mine, own, other.fd)
    process = start_process(own, other, theirs)
    other.forget()
    try:
        channel.send(("complete", file, config_json))
        while True:
            message, _ = channel.receive()
            if message is None:
                continue
            if message[0] == "failed":
                raise message[1]
            if message[0] == "completed":
                text: str | None = message[1]
                return text
            if message[0] == "log":
                logging.getLogger(message[1]).log(message[2], "%s", message[3])
    except (OSError, EOFError):
        raise LoadError(f"{file_title(file)}: its process {end_of(process)} in auto_complete_config") from None
    finally:
        channel.cut()
        end_of(process)
        channel.close()
