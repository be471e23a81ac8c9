"""Session of a Python model in its own process. A crash fails only the current batch, and the process is restarted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from edge_server.backends.base import Execution, OpenJob, RequestSession
from edge_server.backends.python.custom_metrics import REGISTRY
from edge_server.backends.python.model_process import ModelProcess
from edge_server.backends.python.requests_in_process import ProcessEnded
from edge_server.errors import EdgeServerError, Refusal

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_CALM_S = 60.0
"""A process that lived so long ended for a reason of its own: the next one is started at once."""


class IsolatedSession(RequestSession):
    """Keeps one process alive: the first restart comes at once, each further one after twice the time. While the time
    runs, requests are refused; while a process starts, they wait for it."""

    def __init__(self, job: OpenJob) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._is_closed = False
        self._process: ModelProcess | None = None
        self._healer: threading.Thread | None = None
        self._lost: ModelProcess | None = None
        """The process that ended last, which the healer gives back."""
        self._reason = ""
        self._failures = 0
        self._next_s = 0.0
        self._started_s = time.monotonic()
        if job.server is not None:
            job.server.add_metrics(REGISTRY.views)
        process = self._start()
        self._take(process)
        self.info = process.info
        self.has_health_check = process.has_health_check

    @property
    def pid(self) -> int | None:
        """The process's number, None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def execute(self, executions: Sequence[Execution]) -> None:
        while True:
            try:
                self._living().execute(executions)
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
            healer = self._healer
            lost = self._lost if healer is None else None
        if healer is not None:
            healer.join()
        elif lost is not None:
            lost.close()
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _living(self) -> ModelProcess:
        """Return the process, waiting for one that starts. Raises Refusal while none may be started."""
        with self._changed:
            while self._process is None or self._process.is_over:
                left_s = self._next_s - time.monotonic()
                if self._lost is not None and self._healer is None and not self._is_closed:
                    self._start_healer()
                has_none = self._lost is not None and self._healer is None
                if (self._process is None and (left_s > 0 or has_none)) or self._is_closed:
                    raise Refusal(
                        f"model '{self._job.spec.name}': its process {self._reason}; it is started again in "
                        f"{max(left_s, 0):.1f} s",
                        retry_after_s=max(left_s, 0.1),
                    )
                self._changed.wait(1.0)
            return self._process

    def _start(self) -> ModelProcess:
        process = ModelProcess(self._job, self._on_lost)
        process.open()
        return process

    def _take(self, process: ModelProcess) -> None:
        """Execute on this process from now on; not on one that has ended again, of which `_on_lost` is told."""
        with self._changed:
            if not process.is_over:
                self._process = process
                self._started_s = time.monotonic()
                self._changed.notify_all()

    def _on_lost(self, process: ModelProcess, why: str) -> None:
        """Told by the process's own thread."""
        log.error("model '%s': the process of instance %s %s", self._job.spec.name, self._job.instance_name, why)
        with self._changed:
            self._process = None
            self._reason = why
            if self._is_closed:
                return
            if time.monotonic() - self._started_s > _CALM_S:
                self._failures = 0
            self._put_off()
            self._lost = process
            self._start_healer()

    def _start_healer(self) -> None:
        """*Locked.* Where the system grants no thread, the next request tries again."""
        healer = threading.Thread(target=self._heal, args=(self._lost,), name="edge-heal", daemon=True)
        try:
            healer.start()
        except RuntimeError as error:
            self._healer = None
            log.error("model '%s': its process cannot be started again: %s", self._job.spec.name, error)
        else:
            self._healer = healer

    def _put_off(self) -> None:
        delay_s = 0.0 if self._failures == 0 else min(_FIRST_DELAY_S * 2 ** (self._failures - 1), _LONGEST_DELAY_S)
        self._failures += 1
        self._next_s = time.monotonic() + delay_s

    def _heal(self, lost: ModelProcess | None) -> None:
        """Start a process again and again, until one opens the model or the session is closed."""
        if lost is not None:
            lost.close()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, max(0.0, self._next_s - time.monotonic()))
                if self._is_closed:
                    return
            try:
                process = self._start()
            except EdgeServerError as error:
                log.error("model '%s': its process did not start again: %s", self._job.spec.name, error.message)
                with self._changed:
                    self._reason = f"did not start again: {error.message}"
                    self._put_off()
                continue
            self._take(process)
            return
