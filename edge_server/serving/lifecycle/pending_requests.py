"""Requests that wait until a model, unloaded to free memory, is loaded again; none of them holds a thread."""

from __future__ import annotations

import dataclasses
import enum
import logging
import sys
import threading
import time
from collections.abc import Callable

from edge_server.core.request_response import Request, Response, ResponseSink, SubmittedRequest
from edge_server.errors import Cancelled, DeadlineExceeded, EdgeServerError, ServingFault
from edge_server.serving.timer import Alarm, Timer

log = logging.getLogger(__name__)


Submit = Callable[[Request], SubmittedRequest]


class _Stage(enum.Enum):
    WAITING = enum.auto()
    SUBMITTING = enum.auto()
    SUBMITTED = enum.auto()
    CLOSED = enum.auto()


class PendingRequest:
    """Replaces the ticket that the request does not have yet; to its caller both are the same.

    Exactly one of several racing events (loaded, failed to load, cancelled, timed out) ends the wait. `submit` must not
    answer before it returns, unless through `sink`, and leaves the request's `release` to this object if it raises.
    """

    def __init__(
        self, request: Request, sink: ResponseSink, submit: Submit, remove: Callable[[PendingRequest], None]
    ) -> None:
        self.request = request
        self._sink = sink
        self._submit = submit
        self._remove = remove
        self._lock = threading.Lock()
        self._stage = _Stage.WAITING
        self._is_cancelled = False
        self._ticket: SubmittedRequest | None = None
        self._alarm: Alarm | None = None
        self._since_ns = time.monotonic_ns()

    def wait_until_loaded(self, timer: Timer, timeout_s: float) -> None:
        """Begin to wait for `timeout_s`, or for the request's own timeout if that is shorter."""
        limit_us = min(timeout_s * 1e6, self.request.timeout_us or float("inf"))
        when_ns = min(self._since_ns + int(limit_us * 1000), self.request.deadline_ns or sys.maxsize)
        alarm = timer.call_at(when_ns, self._expire)
        with self._lock:
            self._alarm = alarm
            is_over = self._stage is not _Stage.WAITING
        if is_over:
            alarm.cancel()

    def resume(self) -> None:
        """Submit the request, unless it was answered meanwhile. An error of the submission is its answer."""
        if not self._end_wait(_Stage.SUBMITTING):
            return
        try:
            ticket = self._submit(self._with_remaining_timeout())
        except EdgeServerError as error:
            self._answer(error.detached())
            return
        except Exception as error:
            # A sink that raises must not keep the pending requests behind it from their answers.
            log.exception("request '%s' to model '%s' failed when it was resumed", self.request.id, self.request.model)
            self._answer(ServingFault(f"{type(error).__name__}: {error}"))
            return
        with self._lock:
            self._stage, self._ticket = _Stage.SUBMITTED, ticket
            is_cancelled = self._is_cancelled
        if is_cancelled:
            ticket.cancel()

    def fail(self, error: EdgeServerError) -> None:
        """Answer with an error, unless it was submitted or answered before."""
        if self._end_wait(_Stage.CLOSED):
            self._answer(error)

    def cancel(self) -> None:
        """Cancel the request: answered CANCELLED at once while it waits, else like any submitted request."""
        with self._lock:
            self._is_cancelled = True
            ticket = self._ticket
        if ticket is not None:
            ticket.cancel()
        elif self._end_wait(_Stage.CLOSED):
            self._remove(self)
            self._answer(Cancelled(f"request to model '{self.request.model}' was cancelled"))

    def _expire(self) -> None:
        if self._end_wait(_Stage.CLOSED):
            self._remove(self)
            name = self.request.model
            self._answer(DeadlineExceeded(f"Request timeout expired while model '{name}' was being loaded for it"))

    def _end_wait(self, then: _Stage) -> bool:
        """Claim the right to end the wait. True for exactly one caller."""
        with self._lock:
            if self._stage is not _Stage.WAITING:
                return False
            self._stage = then
            alarm = self._alarm
        if alarm is not None:
            alarm.cancel()
        return True

    def _with_remaining_timeout(self) -> Request:
        """Return the request with its timeout reduced by the time it waited."""
        if not self.request.timeout_us:
            return self.request
        waited_us = (time.monotonic_ns() - self._since_ns) // 1000
        return dataclasses.replace(self.request, timeout_us=max(1, self.request.timeout_us - waited_us))

    def _answer(self, error: EdgeServerError) -> None:
        request = self.request
        try:
            self._sink(Response(request.model, request.version or 0, request.id, error=error))
        except Exception:
            # A sink that raises must not keep the pending requests behind it from their answers.
            log.exception("a response to request '%s' could not be delivered", request.id)
        if request.release is not None:
            request.release()
