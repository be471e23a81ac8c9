"""Session of a model that runs in a child process: passes batches to the process, and starts it again when it
crashes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from edge_server.backends.base import Execution, OpenJob, RequestSession
from edge_server.backends.custom_metrics import REGISTRY
from edge_server.backends.isolation.child_process import ProcessEnded
from edge_server.backends.isolation.model_process_client import ModelProcess, SessionOpener
from edge_server.errors import EdgeServerError, Refusal

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_STABLE_S = 60.0
"""After this time without a crash the next restart has no delay."""


class IsolatedSession(RequestSession):
    """Keeps one child process running. A crash fails the batch that the process computes.

    The first restart is immediate; before each further one the delay doubles. Requests are refused during the delay,
    and wait while a process starts.
    """

    def __init__(self, job: OpenJob, opener: SessionOpener) -> None:
        """`opener` opens the model in the child. Raises LoadError."""
        self._job = job
        self._opener = opener
        self._changed = threading.Condition()
        self._is_closed = False
        self._process: ModelProcess | None = None
        self._restart_thread: threading.Thread | None = None
        self._lost: ModelProcess | None = None
        """The process that ended last. The restart thread closes it."""
        self._reason = ""
        self._failures = 0
        self._next_start_s = 0.0
        self._started_s = time.monotonic()
        if job.server is not None:
            job.server.add_metrics(REGISTRY.views)
        process = self._start_process()
        self._use_process(process)
        self.info = process.info
        self.has_health_check = process.has_health_check
        self._counts_runs = process.counts_runs

    @property
    def run_number(self) -> int | None:
        process = self._process
        if not self._counts_runs:
            return None
        return 0 if process is None else process.run_number

    def end_hung_run(self, reason: str) -> bool:
        process = self._process
        if self._counts_runs and process is not None:
            process.kill(reason)
        return self._counts_runs

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        process = self._process
        return None if process is None else process.pid

    def execute(self, executions: Sequence[Execution]) -> None:
        while True:
            try:
                self._wait_for_process().execute(executions)
            except ProcessEnded:
                continue
            return

    def is_healthy(self) -> bool:
        process = self._process
        return process is not None and (not self.has_health_check or process.is_healthy())

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            restart = self._restart_thread
            lost = self._lost if restart is None else None
        if restart is not None:
            restart.join()
        elif lost is not None:
            lost.close()
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _wait_for_process(self) -> ModelProcess:
        """Return the process; wait while one starts. Raises Refusal during the delay before a restart."""
        with self._changed:
            while self._process is None or self._process.is_over:
                left_s = self._next_start_s - time.monotonic()
                if self._lost is not None and self._restart_thread is None and not self._is_closed:
                    self._start_restart_thread()
                has_none = self._lost is not None and self._restart_thread is None
                if (self._process is None and (left_s > 0 or has_none)) or self._is_closed:
                    raise Refusal(
                        f"model '{self._job.spec.name}': its process {self._reason}; it is started again in "
                        f"{max(left_s, 0):.1f} s",
                        retry_after_s=max(left_s, 0.1),
                    )
                self._changed.wait(1.0)
            return self._process

    def _start_process(self) -> ModelProcess:
        process = ModelProcess(self._job, self._opener, self._on_lost)
        process.open()
        return process

    def _use_process(self, process: ModelProcess) -> None:
        """Execute on this process from now on. One that has ended already is ignored: `_on_lost` is called for it."""
        with self._changed:
            if not process.is_over:
                self._process = process
                self._started_s = time.monotonic()
                self._changed.notify_all()

    def _on_lost(self, process: ModelProcess, why: str) -> None:
        """Called on the process's receiving thread."""
        log.error("model '%s': the process of instance %s %s", self._job.spec.name, self._job.instance_name, why)
        with self._changed:
            self._process = None
            self._reason = why
            if self._is_closed:
                return
            if time.monotonic() - self._started_s > _STABLE_S:
                self._failures = 0
            self._set_next_start()
            self._lost = process
            self._start_restart_thread()

    def _start_restart_thread(self) -> None:
        """*Locked.* If the system grants no thread, the next request tries again."""
        thread = threading.Thread(target=self._restart, args=(self._lost,), name="edge-restart", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._restart_thread = None
            log.error("model '%s': its process cannot be started again: %s", self._job.spec.name, error)
        else:
            self._restart_thread = thread

    def _set_next_start(self) -> None:
        delay_s = 0.0 if self._failures == 0 else min(_FIRST_DELAY_S * 2 ** (self._failures - 1), _LONGEST_DELAY_S)
        self._failures += 1
        self._next_start_s = time.monotonic() + delay_s

    def _restart(self, lost: ModelProcess | None) -> None:
        """Start processes until one opens the model or the session is closed."""
        if lost is not None:
            lost.close()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, max(0.0, self._next_start_s - time.monotonic()))
                if self._is_closed:
                    return
            try:
                process = self._start_process()
            except EdgeServerError as error:
                log.error("model '%s': its process did not start again: %s", self._job.spec.name, error.message)
                with self._changed:
                    self._reason = f"did not start again: {error.message}"
                    self._set_next_start()
                continue
            self._use_process(process)
            return
