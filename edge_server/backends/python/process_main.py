"""Main program of an isolated model's process: `python -m edge_server.backends.python.process_main LINE OWN OTHER
LEVEL`. The arguments are the file descriptors of the connection, of this process's shared memory and of the
server's, and the log level.

Runs the same PythonSession as the server would, over executions and server calls that are messages. Three threads: the
main one opens, executes and closes; one receives; one reports metrics. The process ends when the server says so, or is
gone.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edge_server.backends.base import Array, BlsCall, OpenJob
from edge_server.backends.python import backend
from edge_server.backends.python.calling_model import current_batch
from edge_server.backends.python.custom_metrics import REGISTRY
from edge_server.backends.python.process_channel import Channel
from edge_server.backends.python.session import PythonSession
from edge_server.core.custom_metric import MetricSource
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import NO_PARAMETERS, Parameter, Request, Response, ResponseSink
from edge_server.core.tensorrt_engine import EngineFile, EngineOrder
from edge_server.errors import EdgeServerError, ServingFault

_REPORT_S = 0.5
"""How often metrics are sent, when they changed."""


class SentExecution:
    """One request of the server's, answered by messages."""

    def __init__(self, number: int, request: Request, worker: Worker) -> None:
        self.request = request
        self._number = number
        self._worker = worker
        self._is_cancelled = False

    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        self._is_cancelled = True

    def send(
        self,
        outputs: Mapping[str, Array],
        *,
        is_final: bool = False,
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
    ) -> None:
        self._worker.answer(self._number, is_final, ("send", self._number, dict(outputs), is_final, dict(parameters)))

    def fail(self, error: EdgeServerError, *, is_final: bool = True) -> None:
        self._worker.answer(self._number, is_final, ("fail", self._number, error, is_final))

    def finish(self) -> None:
        self._worker.answer(self._number, True, ("finish", self._number))

    def reschedule(self) -> None:
        self._worker.answer(self._number, True, ("reschedule", self._number))


class ServerCallProxy:
    """The server's calls, by messages. See backends.base.ServerCalls."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._sinks: dict[int, ResponseSink] = {}
        self._questions: dict[int, queue.SimpleQueue[Any]] = {}

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0) -> BlsCall:
        number = next(self._numbers)
        self._sinks[number] = sink
        batch = current_batch.get()
        holds = batch is not None and batch.holds_instance
        self._channel.send(("submit", number, request, holds))
        return _SentCall(self._channel, number)

    def model_spec(self, name: str, version: int | None) -> ModelSpec:
        spec: ModelSpec = self._ask("model_spec", name, version)
        return spec

    def is_model_ready(self, name: str, version: int | None) -> bool:
        return bool(self._ask("is_model_ready", name, version))

    def load_model(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> None:
        self._ask("load_model", name, config_json, None if files is None else dict(files))

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        self._ask("unload_model", name, unload_dependents)

    def add_metrics(self, source: MetricSource) -> None:
        """Nothing to do: the process reports its registry by itself."""

    def find_engine(self, order: EngineOrder) -> EngineFile | None:
        """There is none: models in Python are not compiled."""
        return None

    def receive(self, number: int, response: Response, place: int | None) -> None:
        if place is not None:
            for tensor in response.outputs:
                tensor.array = np.array(tensor.array)
            self._channel.free(place)
        sink = self._sinks.pop(number, None) if response.is_final else self._sinks.get(number)
        if sink is not None:
            sink(response)

    def take_answer(self, number: int, answer: Any) -> None:
        self._questions.pop(number).put(answer)

    def _ask(self, what: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        box = self._questions[number] = queue.SimpleQueue()
        self._channel.send(("ask", number, what, arguments))
        answer = box.get()
        if isinstance(answer, EdgeServerError):
            raise answer
        return answer


class _SentCall:
    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number

    def cancel(self) -> None:
        self._channel.send(("cancel_call", self._number))


class SentLog(logging.Handler):
    """Hands the process's log on to the server's."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(("log", record.name, record.levelno, record.getMessage()))
        except OSError:
            return


class Worker:
    """The process, from its first message to its end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls = ServerCallProxy(channel)
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._open: dict[int, SentExecution] = {}
        self._session: PythonSession | None = None
        self._reported: Any = None

    def run(self) -> None:
        """Do as the server says until it says to end."""
        threading.Thread(target=self._receive_all, name="edge-receive", daemon=True).start()
        while self._jobs.get()():
            pass

    def answer(self, number: int, is_final: bool, message: tuple[Any, ...]) -> None:
        if is_final:
            self._open.pop(number, None)
        self._channel.send(message)

    def _receive_all(self) -> None:
        try:
            while True:
                message, place = self._channel.receive()
                if message is not None:
                    self._take(message, place)
        except (OSError, EOFError):
            # The server is gone, or wants no more of this process. A model may hang in its own code: no farewell.
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing is left that could handle it
            # Deaf, it would keep everybody waiting.
            traceback.print_exc()
            os._exit(1)

    def _take(self, message: tuple[Any, ...], place: int | None) -> None:
        kind, *rest = message
        if kind == "execute":
            batch, requests = rest
            executions = [SentExecution(number, request, self) for number, request in requests]
            self._open.update({number: made for (number, _), made in zip(requests, executions, strict=True)})
            self._jobs.put(lambda: self._execute(batch, executions))
        elif kind == "response":
            self._calls.receive(rest[0], rest[1], place)
        elif kind == "told":
            self._calls.take_answer(rest[0], rest[1])
        elif kind == "cancelled":
            for number in rest[0]:
                if (execution := self._open.get(number)) is not None:
                    execution.cancel()
        elif kind == "log_level":
            logging.getLogger().setLevel(rest[0])
        elif kind == "healthy":
            threading.Thread(target=self._tell_health, args=(rest[0],), daemon=True).start()
        elif kind == "open":
            self._jobs.put(lambda: self._start(rest[0], rest[1]))
        elif kind == "close":
            self._jobs.put(self._end)

    def _start(self, job: OpenJob, has_server: bool) -> bool:
        try:
            if has_server:
                job = OpenJob(job.spec, job.file, job.instance_name, job.device_id, job.settings, self._calls)
            self._session = PythonSession(job, waits=None)
        except EdgeServerError as error:
            self._channel.send(("failed", error.detached()))
            return True
        self._send_metrics()
        self._channel.send(("opened", self._session.info, self._session.has_health_check))
        threading.Thread(target=self._report_metrics, name="edge-metrics", daemon=True).start()
        return True

    def _execute(self, batch: int, executions: Sequence[SentExecution]) -> bool:
        if self._session is None:
            raise AssertionError("a batch came before the model was open")
        self._session.execute(executions)
        self._channel.send(("taken", batch))
        return True

    def _end(self) -> bool:
        if self._session is not None:
            self._session.close()
        self._send_metrics()
        self._channel.send(("closed",))
        return False

    def _tell_health(self, number: int) -> None:
        self._channel.send(("health", number, self._session is None or self._session.is_healthy()))

    def _report_metrics(self) -> None:
        pause = threading.Event()
        while not pause.wait(_REPORT_S):
            self._send_metrics()

    def _send_metrics(self) -> None:
        views = REGISTRY.views()
        if views != self._reported:
            self._reported = views
            self._channel.send(("metrics", views))


def complete(channel: Channel, file: Any, config_json: str) -> None:
    """Answer what `auto_complete_config` says."""
    from edge_server.backends.python.auto_complete import completed

    try:
        channel.send(("completed", completed(file, config_json, is_alone=True)))
    except EdgeServerError as error:
        channel.send(("failed", error.detached()))


def main(arguments: Sequence[str]) -> None:
    """Serve the connection named by its file descriptors."""
    from edge_server.backends.python.shared_arena import Arena

    line_fd, own_fd, other_fd, verbose = map(int, arguments)
    # Signals to the whole group are the server's business; it ends this process in its own order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: None)
    channel = Channel(socket.socket(fileno=line_fd), Arena(own_fd), other_fd)
    logger = logging.getLogger()
    logger.addHandler(SentLog(channel))
    logger.setLevel(verbose)
    backend.make("python")
    first, _ = channel.receive()
    if first is not None and first[0] == "complete":
        complete(channel, first[1], first[2])
    else:
        worker = Worker(channel)
        if first is not None:
            worker._take(first, None)
        worker.run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that the model left behind must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, EOFError, ServingFault):
        os._exit(1)
