"""Main program of a model's child process: opens the model, runs the batches that the server sends, and sends the
responses back.

Command line: `python -m edge_server.backends.isolation.process_main SOCKET OWN OTHER LEVEL`, with the file descriptors
of the connection, of this process's shared memory and of the server's, and the lowest level to log.

It runs the same session as the server would; executions and calls to the server are messages. The main thread opens and
closes the model, and executes it, unless the session hands over: then the receiving thread executes it. Other threads
receive messages, report metrics, and send the answers to health checks. The process exits when the server tells it to,
or when the connection ends.
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
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.base import Array, BlsCall, CalledModel, OpenJob, RequestSession
from edge_server.backends.custom_metrics import REGISTRY
from edge_server.backends.isolation.process_channel import Arena, Channel
from edge_server.backends.running_batch import current_batch
from edge_server.core.metric_family import MetricSource
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import NO_PARAMETERS, Parameter, Request, Response, ResponseSink
from edge_server.errors import EdgeServerError, NotReady, Refusal, ServingFault
from edge_server.forked_signals import reset_in_forked_children

if TYPE_CHECKING:
    from edge_server.backends.isolation.model_process_client import SessionOpener

_METRICS_INTERVAL_S = 0.5
"""Interval at which changed metrics are sent."""


class RemoteExecution:
    """One request of the server. Its responses are sent as messages. See backends.base.Execution."""

    def __init__(self, number: int, request: Request, model: ModelRunner) -> None:
        self.request = request
        self._number = number
        self._model = model
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
        light = {
            # Its bytes alone are pickled in a third of the time.
            name: array[0] if array.dtype.hasobject and array.shape == (1,) and type(array[0]) is bytes else array
            for name, array in outputs.items()
        }
        try:
            self._model.send_response(self._number, is_final, ("send", self._number, light, is_final, dict(parameters)))
        except Refusal as error:  # no memory for the outputs
            self.fail(error.detached(), is_final=is_final)

    def fail(self, error: EdgeServerError, *, is_final: bool = True) -> None:
        self._model.send_response(self._number, is_final, ("fail", self._number, error, is_final))

    def finish(self) -> None:
        self._model.send_response(self._number, True, ("finish", self._number))

    def reschedule(self) -> None:
        self._model.send_response(self._number, True, ("reschedule", self._number))


class ServerCallProxy:
    """Sends calls to the server as messages. See backends.base.ServerCalls."""

    def __init__(self, channel: Channel) -> None:
        self.share = 1.0
        """The work share that the server sent last."""
        self._channel = channel
        self._numbers = itertools.count(1)
        self._sinks: dict[int, ResponseSink] = {}
        self._results: dict[int, queue.SimpleQueue[Any]] = {}

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0) -> BlsCall:
        number = next(self._numbers)
        self._sinks[number] = sink
        batch = current_batch.get()
        holds_instance = batch is not None and batch.holds_instance
        self._channel.send(("submit", number, request, holds_instance))
        return _RemoteCall(self._channel, number)

    def find(self, name: str, version: int | None) -> CalledModel:
        return _RemoteModel(self._call("find", name, version), self)

    def is_model_ready(self, name: str, version: int | None) -> bool:
        return bool(self._call("is_model_ready", name, version))

    def load_model(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> None:
        self._call("load_model", name, config_json, None if files is None else dict(files))

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        self._call("unload_model", name, unload_dependents)

    def work_share(self) -> float:
        return self.share

    def add_metrics(self, source: MetricSource) -> None:
        """Do nothing: this process reports its own registry."""

    def plugin(self, name: str) -> None:
        """Return None: plugins run in the server's process."""

    def receive_response(self, number: int, response: Response, offset: int | None) -> None:
        if offset is not None:
            for tensor in response.outputs:
                tensor.array = np.array(tensor.array)
            self._channel.free(offset)
        sink = self._sinks.pop(number, None) if response.is_final else self._sinks.get(number)
        if sink is not None:
            sink(response)

    def receive_result(self, number: int, result: Any) -> None:
        self._results.pop(number).put(result)

    def _call(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        results = self._results[number] = queue.SimpleQueue()
        self._channel.send(("call", number, method, arguments))
        result = results.get()
        if isinstance(result, EdgeServerError):
            raise result
        return result


class _RemoteModel:
    """See CalledModel."""

    def __init__(self, spec: ModelSpec, server: ServerCallProxy) -> None:
        self.spec = spec
        self.submit = server.submit


class _RemoteCall:
    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number

    def cancel(self) -> None:
        self._channel.send(("cancel_request", self._number))


class LogForwarder(logging.Handler):
    """Sends the log records of this process to the server's log."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(("log", record.name, record.levelno, record.getMessage(), _traceback(record)))
        except NotReady:  # in a process that the model forked
            print(self.format(record), file=sys.stderr)
        except OSError:
            return


def _traceback(record: logging.LogRecord) -> str:
    """Return the traceback of a log record as text, "" if it has none."""
    if record.exc_text:
        return record.exc_text
    if record.exc_info and record.exc_info[0] is not None:
        return logging.Formatter().formatException(record.exc_info)
    return ""


class ModelRunner:
    """Opens the model, runs its batches and closes it, as the server's messages say."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls = ServerCallProxy(channel)
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._open: dict[int, RemoteExecution] = {}
        self._session: RequestSession | None = None
        self._reported_metrics: Any = None

    def run(self) -> None:
        """Handle messages until the model is closed."""
        threading.Thread(target=self._receive_all, name="edge-receive", daemon=True).start()
        while self._jobs.get()():
            pass

    def send_response(self, number: int, is_final: bool, message: tuple[Any, ...]) -> None:
        if is_final:
            self._open.pop(number, None)
        self._channel.send(message)

    def _receive_all(self) -> None:
        try:
            while True:
                message, offset = self._channel.receive()
                if message is not None:
                    self.handle_message(message, offset)
        except (OSError, EOFError):
            # The server has ended or has cut the connection. The model may hang, so nothing is finalized.
            _end_group()
        except BaseException:  # noqa: BLE001 - no other code could handle it
            # A process that does not receive would block the server.
            traceback.print_exc()
            os._exit(1)

    def handle_message(self, message: tuple[Any, ...], offset: int | None) -> None:
        kind, *rest = message
        if kind == "execute":
            batch, requests = rest
            executions = [RemoteExecution(number, request, self) for number, request in requests]
            self._open.update({number: item for (number, _), item in zip(requests, executions, strict=True)})
            if self._session is not None and self._session.hands_over:
                # A change of threads would wait for the GIL, which a step of a language model holds.
                self._execute(batch, executions)
            else:
                self._jobs.put(lambda: self._execute(batch, executions))
        elif kind == "response":
            self._calls.receive_response(rest[0], rest[1], offset)
        elif kind == "call_result":
            self._calls.receive_result(rest[0], rest[1])
        elif kind == "cancelled":
            for number in rest[0]:
                if (execution := self._open.get(number)) is not None:
                    execution.cancel()
        elif kind == "run_number":
            self._channel.send(("run_number", None if self._session is None else self._session.run_number))
        elif kind == "work_share":
            self._calls.share = rest[0]
        elif kind == "log_level":
            logging.getLogger().setLevel(rest[0])
        elif kind == "healthy":

            def send_health() -> None:
                self._channel.send(("health", rest[0], self._session is None or self._session.is_healthy()))

            threading.Thread(target=send_health, daemon=True).start()
        elif kind == "open":
            self._jobs.put(lambda: self._open_model(*rest))
        elif kind == "close":
            self._jobs.put(self._close_model)

    def _open_model(self, job: OpenJob, has_server: bool, opener: SessionOpener) -> bool:
        try:
            if has_server:
                job = OpenJob(job.spec, job.file, job.instance_name, job.device_id, job.settings, self._calls)
            self._session = opener(job)
        except EdgeServerError as error:
            self._channel.send(("failed", error.detached()))
            return True
        self._send_metrics()
        session = self._session
        self._channel.send(("opened", session.info, session.has_health_check, session.run_number is not None))
        threading.Thread(target=self._report_metrics, name="edge-metrics", daemon=True).start()
        return True

    def _execute(self, batch: int, executions: Sequence[RemoteExecution]) -> bool:
        if self._session is None:
            raise AssertionError("a batch came before the model was open")
        self._session.execute(executions)
        self._channel.send(("taken", batch))
        return True

    def _close_model(self) -> bool:
        if self._session is not None:
            self._session.close()
        self._send_metrics()
        self._channel.send(("closed",))
        return False

    def _report_metrics(self) -> None:
        pause = threading.Event()
        while not pause.wait(_METRICS_INTERVAL_S):
            self._send_metrics()

    def _send_metrics(self) -> None:
        views = REGISTRY.views()
        if views != self._reported_metrics:
            self._reported_metrics = views
            self._channel.send(("metrics", views))


def _end_group() -> None:
    """End this process and those that the model started: no server is there to do it."""
    os.killpg(os.getpid(), signal.SIGKILL)


def main(command_line: Sequence[str]) -> None:
    """Run one model, or one function, for the server at the other end of the connection."""
    socket_fd, own_fd, other_fd, level = map(int, command_line)
    # The server handles signals to the process group, and ends this process when its turn comes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: None)
    reset_in_forked_children((signal.SIGINT, signal.SIGTERM))
    connection = socket.socket(fileno=socket_fd)
    # The server sees by the end of the connection that this process has ended: no other process may hold it.
    os.register_at_fork(after_in_child=connection.close)
    for fd in (socket_fd, own_fd, other_fd):
        os.set_inheritable(fd, False)
    channel = Channel(connection, Arena(own_fd), other_fd)
    logger = logging.getLogger()
    logger.addHandler(LogForwarder(channel))
    logger.setLevel(level)
    first, _ = channel.receive()
    if first is not None and first[0] == "run":
        _, function, arguments = first
        try:
            channel.send(("returned", function(*arguments)))
        except EdgeServerError as error:
            channel.send(("failed", error.detached()))
    else:
        runner = ModelRunner(channel)
        if first is not None:
            runner.handle_message(first, None)
        runner.run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for threads that the model left behind.
    os._exit(0)


if __name__ == "__main__":
    given, sys.argv = sys.argv[1:], [""]  # as in the server's process, see cli/main.py
    try:
        main(given)
    except (ConnectionError, EOFError):
        _end_group()
    except (OSError, ServingFault):
        os._exit(1)
