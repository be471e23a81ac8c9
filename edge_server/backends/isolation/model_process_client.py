"""Client of a model's child process, used by the server: tells it to open the model, run batches, check health and
close."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from edge_server.backends.base import HEALTH_LIMIT_S, Execution, OpenJob, RequestSession, SessionInfo
from edge_server.backends.custom_metrics import REGISTRY
from edge_server.backends.isolation.call_relay import CallRelay
from edge_server.backends.isolation.child_process import (
    EXIT_TIMEOUT_S,
    ModelChildProcess,
    RequestsInProcess,
    log_from_process,
    log_level,
)
from edge_server.backends.option_parsers import whole_number
from edge_server.backends.runtime_errors import file_title, message_line
from edge_server.errors import EdgeServerError, LoadError, SessionLost

log = logging.getLogger(__name__)

_RUN_CHECK_S = 1.0
"""Interval at which a process with open requests is asked for the number of its run."""

_CHECK_S = 0.05
"""Interval of the checks for cancelled requests, for deadlocks, and for a new log level or work share."""

INITIALIZE_TIMEOUT = "initialize_timeout_s"
_INITIALIZE_S = 300
_PROGRESS_CHECK_S = 0.25
_PROGRESS_BYTES = 1 << 20
"""A process that has read or grown by so much since its last progress is loading, and not stuck."""

SessionOpener: TypeAlias = Callable[[OpenJob], RequestSession]
"""Opens a model in the child process. It is pickled, so it is a function of a module."""


class ModelProcess:
    """One process. The constructor starts it; `open` opens the model in it.

    `on_lost` is called once with this object and a text if the process ends after `open` without `close`.
    """

    def __init__(self, job: OpenJob, opener: SessionOpener, on_lost: Callable[[ModelProcess, str], None]) -> None:
        """Raises LoadError."""
        self._job = job
        self._opener = opener
        # First, as it may raise: there is no process yet that would have to be ended.
        self._initialize_s = whole_number(job.spec.name, job.spec.parameters, INITIALIZE_TIMEOUT, _INITIALIZE_S, 1)
        self._on_lost = on_lost
        self._health_numbers = itertools.count(1)
        self._health: dict[int, tuple[threading.Event, list[bool]]] = {}
        self._opening: tuple[Any, ...] = ()
        """Result of opening: ("opened",), ("failed", error) or ("ended", how). Valid once `_is_opening_done` is set."""
        self._is_opening_done = threading.Event()
        self._has_ended = threading.Event()
        self._is_closing = False
        self._is_open = False
        self.info = SessionInfo("", "", "")
        self.has_health_check = False
        self.counts_runs = False
        """Whether the session in the process has a `run_number`."""
        self.run_number = 0
        """See RequestSession. Odd while the process does not answer, or answers that it is still in the same run."""
        self._reported_run = 0
        self._is_asked = False
        self._killed_because = ""
        self._child = ModelChildProcess(job.file)
        self._requests = RequestsInProcess(self._child.channel.arena)
        self._relay = CallRelay(job.spec.name, job.server, self._child, self._requests)
        self._threads = [
            threading.Thread(target=target, name=f"{job.instance_name}-{name}"[:60], daemon=True)
            for target, name in ((self._receive_all, "receive"), (self._check_all, "check"))
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            failure = LoadError(f"{file_title(job.file)}: a process for it cannot be served: {message_line(error)}")
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
        """Whether the process has ended. It is set before `on_lost` is called."""
        return self._requests.is_over

    def open(self) -> None:
        """Open the model in the process, and wait. Raises LoadError; the process is ended then.

        A process that reads nothing and does not grow for the model's parameter `initialize_timeout_s` is killed.
        """
        job = dataclasses.replace(self._job, server=None)
        self._child.send(("open", job, self._job.server is not None, self._opener))
        loaded_bytes, progress_s = 0, time.monotonic()
        while not self._is_opening_done.wait(_PROGRESS_CHECK_S):
            now_s, now_bytes = time.monotonic(), self._child.loaded_bytes()
            if now_bytes >= loaded_bytes + _PROGRESS_BYTES:
                loaded_bytes, progress_s = now_bytes, now_s
            elif now_s - progress_s >= self._initialize_s:
                self._is_closing = True
                self._child.kill()
                self.close()
                raise LoadError(
                    f"{file_title(self._job.file)}: its process did not come through initialize: for "
                    f"{self._initialize_s} s it read nothing and took no more memory, and it was killed; the parameter "
                    f"{INITIALIZE_TIMEOUT} allows more"
                )
        kind, *rest = self._opening
        if kind == "opened":
            return
        self.close()
        raise rest[0] if kind == "failed" else LoadError(f"{file_title(self._job.file)}: its process {rest[0]}")

    def execute(self, executions: Sequence[Execution]) -> None:
        """Send a batch and wait until the model's `execute` returns. Fails open requests if the process ends.

        Raises ProcessEnded if the process had ended before.
        """
        batch, requests = self._requests.add(executions)
        try:
            offset = self._child.send(("execute", batch.number, requests))
        except BaseException:
            # An input cannot be read, or the message has no memory. The caller fails the whole batch.
            self._requests.remove(batch)
            raise
        if offset is not None:
            self._requests.set_offset(batch, offset)
        batch.taken.wait()

    def is_healthy(self) -> bool:
        """Return whether the session in the process is healthy; False if the process does not answer in time."""
        number, answered, result = next(self._health_numbers), threading.Event(), [False]
        self._health[number] = (answered, result)
        # A process that ended before the entry was made answers nothing.
        if not self.is_over and self._child.send_within(("healthy", number), HEALTH_LIMIT_S):
            answered.wait(HEALTH_LIMIT_S + 1)
        self._health.pop(number, None)
        return result[0]

    def kill(self, reason: str) -> None:
        """Kill the process. Its requests fail with "its process `reason`"."""
        self._killed_because = reason
        self._child.kill()

    def close(self) -> None:
        """Finalize the model and end the process; kill it if it does not end in time."""
        self._is_closing = True
        if not self._child.send_within(("close",), EXIT_TIMEOUT_S):
            # Threads that block in a send return with an error then.
            self._child.kill()
        if not self._child.wait_or_kill():
            log.warning(
                "the process of model '%s' did not end in %d s and was killed", self._job.spec.name, EXIT_TIMEOUT_S
            )
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
                    self._handle_message(message, is_lent=place is not None)
                channel.free(place)
                channel.flush()
        except (OSError, EOFError):
            self._end()
        except Exception as error:  # noqa: BLE001 - a corrupt message may raise any exception
            name = self._job.spec.name
            log.error(
                "model '%s': what its process sent cannot be taken: %s: %s",
                name,
                type(error).__name__,
                message_line(error),
            )
            self._child.kill()
            self._end()

    def _end(self) -> None:
        how = self._child.wait_for_exit()
        how = self._killed_because or how
        self._has_ended.set()
        left, batches = self._requests.end()
        self._relay.end()
        REGISTRY.report(self, ())
        for answered, _ in list(self._health.values()):
            answered.set()
        if not self._is_opening_done.is_set():
            self._opening = ("ended", how)
            self._is_opening_done.set()
        elif self._is_open and not self._is_closing:
            self._on_lost(self, how)
        text = f"model '{self._job.spec.name}': its process {how} with this request in its hands"
        for execution in left:
            execution.fail(SessionLost(text))
        for batch in batches:
            batch.taken.set()

    def _check_all(self) -> None:
        reported: set[int] = set()
        level, share, next_check_s = -1, 1.0, 0.0
        while not self._has_ended.wait(_CHECK_S):
            if log_level() != level:
                level = log_level()
                self._child.send(("log_level", level))
            if self._job.server is not None and self._job.server.work_share() != share:
                share = self._job.server.work_share()
                self._child.send(("work_share", share))
            executions = self._requests.open_executions()
            reported &= executions.keys()
            if self.counts_runs and time.monotonic() >= next_check_s:
                next_check_s = time.monotonic() + _RUN_CHECK_S
                self._check_run(has_requests=bool(executions))
            cancelled = [
                number for number, item in executions.items() if number not in reported and item.is_cancelled()
            ]
            if cancelled:
                reported.update(cancelled)
                self._child.send(("cancelled", cancelled))
            self._relay.refuse_deadlocked_calls()

    def _check_run(self, *, has_requests: bool) -> None:
        """Ask for the number of the run, and count the time until the answer as a part of the run: a library that hangs
        may not let the process answer."""
        if not self._is_asked and has_requests:
            self._is_asked = True
            self.run_number |= 1
            self._child.send(("run_number",))
        elif not has_requests and self.run_number % 2:
            self.run_number += 1

    # -- messages

    def _handle_message(self, message: tuple[Any, ...], *, is_lent: bool) -> None:
        """Handle one message of the process. `is_lent`: its arrays lie in memory that is freed afterwards."""
        kind, *rest = message
        if kind == "group":
            for item in rest[0]:
                self._handle_message(item, is_lent=is_lent)
        elif kind == "send":
            number, light, is_final, parameters = rest
            outputs = {
                name: np.array([value], object) if type(value) is bytes else value for name, value in light.items()
            }
            if is_lent:
                # Before `find`: if there is no memory for the copy, the request must still be open, to be failed.
                outputs = {name: np.array(array) for name, array in outputs.items()}
            if (execution := self._requests.find(number, is_final)) is not None:
                execution.send(outputs, is_final=is_final, parameters=parameters)
        elif kind in CallRelay.MESSAGES:
            getattr(self._relay, f"on_{kind}")(*rest)
        else:
            getattr(self, f"_on_{kind}")(*rest)

    def _on_fail(self, number: int, error: EdgeServerError, is_final: bool) -> None:
        if (execution := self._requests.find(number, is_final)) is not None:
            execution.fail(error, is_final=is_final)

    def _on_finish(self, number: int) -> None:
        if (execution := self._requests.find(number, True)) is not None:
            execution.finish()

    def _on_reschedule(self, number: int) -> None:
        if (execution := self._requests.find(number, True)) is not None:
            execution.reschedule()

    def _on_taken(self, batch: int) -> None:
        self._requests.set_taken(batch)

    def _on_run_number(self, number: int) -> None:
        is_same_run = number % 2 == 1 and number == self._reported_run
        if self.run_number % 2 and not is_same_run:
            self.run_number += 1
        self._reported_run = number
        self._is_asked = False

    def _on_opened(self, info: SessionInfo, has_health_check: bool, counts_runs: bool) -> None:
        # Stored here and not in `open`: the process may end before the thread in `open` runs again.
        self.info = dataclasses.replace(info, options={"isolation": "process"}, keeps_thread=False)
        self.has_health_check = has_health_check
        self.counts_runs = counts_runs
        self._is_open = True
        self._relay.begin()
        self._opening = ("opened",)
        self._is_opening_done.set()

    def _on_failed(self, error: LoadError) -> None:
        self._opening = ("failed", error)
        self._is_opening_done.set()

    def _on_closed(self) -> None:
        """Do nothing: the process ends next, and its connection with it."""

    def _on_log(self, name: str, level: int, text: str, traceback: str) -> None:
        log_from_process(name, level, text, traceback)

    def _on_metrics(self, views: Any) -> None:
        REGISTRY.report(self, views)

    def _on_health(self, number: int, is_healthy: bool) -> None:
        answered, result = self._health.get(number, (threading.Event(), [False]))
        result[0] = is_healthy
        answered.set()
