"""Running process of one isolated model: open, run batches, check health and close, by messages."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge_server.backends.base import Execution, OpenJob, SessionInfo
from edge_server.backends.python.bls_relay import CallRelay
from edge_server.backends.python.child_process import END_S, ModelChildProcess, log_level
from edge_server.backends.python.custom_metrics import REGISTRY
from edge_server.backends.python.requests_in_process import RequestsInProcess
from edge_server.backends.python.session import HEALTH_LIMIT_S
from edge_server.backends.runtime_library import file_title, whole_number, words
from edge_server.errors import EdgeServerError, LoadError, SessionLost

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""How often the process is told which of its requests nobody waits for any more."""

INITIALIZE_TIMEOUT = "initialize_timeout_s"
_INITIALIZE_S = 300


class ModelProcess:
    """Starts the process; `open` has it open the model. `on_lost` is called once if it ends unasked after that."""

    def __init__(self, job: OpenJob, on_lost: Callable[[ModelProcess, str], None]) -> None:
        """Raises LoadError."""
        self._job = job
        # Before there is a process that somebody would have to end.
        self._initialize_s = whole_number(job.spec.name, job.spec.parameters, INITIALIZE_TIMEOUT, _INITIALIZE_S, 1)
        self._on_lost = on_lost
        self._questions = itertools.count(1)
        self._health: dict[int, tuple[threading.Event, list[bool]]] = {}
        self._first: tuple[Any, ...] = ()
        """How opening ended: ("opened",), ("failed", error) or ("ended", how). There once `_answered` is set."""
        self._answered = threading.Event()
        self._ended = threading.Event()
        self._is_asked_to_end = False
        self._is_open = False
        self.info = SessionInfo("", "", "")
        self.has_health_check = False
        self._child = ModelChildProcess(job.file)
        self._handed = RequestsInProcess(self._child.channel.arena)
        self._relay = CallRelay(job.spec.name, job.server, self._child, self._handed)
        self._threads = [
            threading.Thread(target=target, name=f"{job.instance_name}-{name}"[:60], daemon=True)
            for target, name in ((self._receive_all, "receive"), (self._look_all, "look"))
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            failure = LoadError(f"{file_title(job.file)}: a process for it cannot be served: {words(error)}")
        else:
            return
        self._threads = [thread for thread in self._threads if thread.ident is not None]
        self._child.kill()
        self.close()
        raise failure

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended; set before `on_lost` is called."""
        return self._handed.is_over

    def open(self) -> None:
        """Have it open the model, and wait. Raises LoadError; the process is gone then.

        A model that takes longer than its parameter `initialize_timeout_s` is not waited for: its process is killed.
        """
        job = dataclasses.replace(self._job, server=None)
        self._child.send(("open", job, self._job.server is not None))
        if not self._answered.wait(self._initialize_s):
            self._is_asked_to_end = True
            self._child.kill()
            self.close()
            raise LoadError(
                f"{file_title(self._job.file)}: its process did not come through initialize within "
                f"{self._initialize_s} s and was killed; the parameter {INITIALIZE_TIMEOUT} allows more"
            )
        kind, *rest = self._first
        if kind == "opened":
            return
        self.close()
        raise rest[0] if kind == "failed" else LoadError(f"{file_title(self._job.file)}: its process {rest[0]}")

    def execute(self, executions: Sequence[Execution]) -> None:
        """Hand over a batch and wait until the model has taken it. What is open when the process ends is failed.

        Raises ProcessGone when it had ended before.
        """
        batch, requests = self._handed.add(executions)
        try:
            offset = self._child.send(("execute", batch.number, requests))
        except BaseException:
            # An input that cannot be read, no memory for the message: whoever called answers for all of them.
            self._handed.take_back(batch)
            raise
        if offset is not None:
            self._handed.settle(batch, offset)
        batch.taken.wait()

    def is_healthy(self) -> bool:
        """Ask the model; a process that does not answer in time is not."""
        number, answered, found = next(self._questions), threading.Event(), [False]
        self._health[number] = (answered, found)
        # One that had ended before the question was noted down answers nothing any more.
        if not self.is_over and self._child.send_within(("healthy", number), HEALTH_LIMIT_S):
            answered.wait(HEALTH_LIMIT_S + 1)
        self._health.pop(number, None)
        return found[0]

    def close(self) -> None:
        """Have it finalize and end; kill it if it does not."""
        self._is_asked_to_end = True
        if not self._child.send_within(("close",), END_S):
            # Whoever is sending to it waits no longer then.
            self._child.kill()
        if not self._child.wait():
            log.warning("the process of model '%s' did not end in %d s and was killed", self._job.spec.name, END_S)
        self._child.channel.cut()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._child.close()

    # -- threads

    def _receive_all(self) -> None:
        channel = self._child.channel
        try:
            while True:
                message, place = channel.receive()
                if message is not None:
                    self._take(message, is_lent=place is not None)
                channel.free(place)
                channel.flush()
        except (OSError, EOFError):
            self._end()
        except Exception as error:  # noqa: BLE001 - a process that has gone wrong may send what fails in any way
            name = self._job.spec.name
            log.error(
                "model '%s': what its process sent cannot be taken: %s: %s", name, type(error).__name__, words(error)
            )
            self._child.kill()
            self._end()

    def _end(self) -> None:
        how = self._child.end()
        self._ended.set()
        left, batches = self._handed.end()
        self._relay.end()
        REGISTRY.report(self, ())
        for answered, _ in list(self._health.values()):
            answered.set()
        if not self._answered.is_set():
            self._first = ("ended", how)
            self._answered.set()
        elif self._is_open and not self._is_asked_to_end:
            self._on_lost(self, how)
        text = f"model '{self._job.spec.name}': its process {how} with this request in its hands"
        for execution in left:
            execution.fail(SessionLost(text))
        for batch in batches:
            batch.taken.set()

    def _look_all(self) -> None:
        told: set[int] = set()
        level = -1
        while not self._ended.wait(_LOOK_S):
            if log_level() != level:
                level = log_level()
                self._child.send(("log_level", level))
            open_now = self._handed.now_open()
            told &= open_now.keys()
            news = [number for number, item in open_now.items() if number not in told and item.is_cancelled()]
            if news:
                told.update(news)
                self._child.send(("cancelled", news))
            self._relay.refuse_stuck()

    # -- messages

    def _take(self, message: tuple[Any, ...], *, is_lent: bool) -> None:
        """Do as a message says. `is_lent`: its arrays lie in memory that is given back afterwards."""
        kind, *rest = message
        if kind == "send":
            self._on_send(*rest, is_lent=is_lent)
        elif kind in CallRelay.MESSAGES:
            getattr(self._relay, f"on_{kind}")(*rest)
        else:
            getattr(self, f"_on_{kind}")(*rest)

    def _on_send(self, number: int, outputs: Any, is_final: bool, parameters: Any, *, is_lent: bool) -> None:
        if is_lent:
            # First: where there is no memory for it, the request must not have been let go of.
            outputs = {name: np.array(array) for name, array in outputs.items()}
        execution = self._handed.find(number, is_final)
        if execution is None:
            return
        execution.send(outputs, is_final=is_final, parameters=parameters)

    def _on_fail(self, number: int, error: EdgeServerError, is_final: bool) -> None:
        if (execution := self._handed.find(number, is_final)) is not None:
            execution.fail(error, is_final=is_final)

    def _on_finish(self, number: int) -> None:
        if (execution := self._handed.find(number, True)) is not None:
            execution.finish()

    def _on_reschedule(self, number: int) -> None:
        if (execution := self._handed.find(number, True)) is not None:
            execution.reschedule()

    def _on_taken(self, batch: int) -> None:
        self._handed.take(batch)

    def _on_opened(self, info: SessionInfo, has_health_check: bool) -> None:
        """Note it here, not in `open`: the process may end before whoever waits there goes on."""
        self.info = dataclasses.replace(info, options={"isolation": "process"}, keeps_thread=False)
        self.has_health_check = has_health_check
        self._is_open = True
        self._relay.begin()
        self._first = ("opened",)
        self._answered.set()

    def _on_failed(self, error: LoadError) -> None:
        self._first = ("failed", error)
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
