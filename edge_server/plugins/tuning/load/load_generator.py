"""Generator of requests: keeps a fixed number of them in flight, or sends them at given times.

One thread sends all requests and reads the answers, because threads of Python would wait for each other.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Iterator

from edge_server.plugins.tuning.clients.client_interface import TextTimes
from edge_server.plugins.tuning.clients.connection import ConnectionLoop, LoadWorker
from edge_server.plugins.tuning.load.measurement_results import Answer

_FAILURE_PAUSE_S = 0.02
"""Pause after a failure, so that a server which refuses at once does not get 10,000 requests per second."""

_TICK_S = 0.1
"""Longest wait for input, after which the end of the load and overdue answers are noticed."""

_LAST_ANSWERS_S = 0.5
"""Longest wait for the requests in flight at the end of the load, before the connections are closed. Servers count the
others as failures, and Triton has been seen to die of them."""


class RequestLoad:
    """Context manager whose thread sends the requests of `workers` over the connections of `loop`.

    Without `intervals_s` each worker sends its next request at once after an answer. Otherwise requests are due at
    these intervals, which never end, and a free worker sends each. If none is free, the request is sent late.
    """

    def __init__(
        self,
        loop: ConnectionLoop,
        timeout_s: float,
        intervals_s: Iterator[float] | None = None,
    ) -> None:
        self.workers: list[LoadWorker] = []
        """Set before the context is entered."""
        self._loop = loop
        self._timeout_s = timeout_s
        self._tick_s = min(_TICK_S, timeout_s / 4)
        self._intervals_s = intervals_s
        self._due_s = 0.0
        self._free: deque[LoadWorker] = deque()
        self._paused: deque[tuple[float, LoadWorker]] = deque()
        """Workers after a failure, with the end of their pause."""
        self._is_over = False
        self._answers: list[Answer] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="perf-load", daemon=True)

    def __enter__(self) -> RequestLoad:
        # The answers make no reference cycles, and a collection that walks through a million of them delays others.
        gc.disable()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        gc.enable()

    def take_answers(self) -> list[Answer]:
        """Return the answers since the last call. Raises the error that ended the thread."""
        if self._error is not None:
            raise self._error
        count = len(self._answers)
        answers = self._answers[:count]
        del self._answers[:count]
        return answers

    def dropped(self) -> dict[str, int]:
        """Return {}: no request is dropped."""
        return {}

    def on_answer(self, worker: LoadWorker, end_s: float, reason: str, message: str, text: TextTimes | None) -> None:
        """Record the outcome of a worker's request. Called by its connection."""
        self._answers.append(Answer(worker.start_s, end_s, reason, message, worker.lag_s, text))
        if reason:
            worker.is_busy = False
            self._paused.append((time.perf_counter() + _FAILURE_PAUSE_S, worker))
        elif self._intervals_s is None and not self._is_over:
            worker.connection.start(worker, next(worker.requests))
        else:
            worker.is_busy = False
            self._free.append(worker)

    def _run(self) -> None:
        try:
            self._send()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: `take_answers` raises it in the caller
            self._error = error

    def _send(self) -> None:
        self._due_s = time.perf_counter()
        self._free.extend(self.workers)
        if self._intervals_s is not None:
            self._due_s += next(self._intervals_s)
        next_check_s = 0.0
        while not self._is_over:
            now = time.perf_counter()
            wait_s = self._tick_s
            if self._free or self._paused:
                wait_s = self._send_due(now)
            if now >= next_check_s:
                self._cancel_overdue(now)
                next_check_s = now + self._tick_s
            self._loop.wait(wait_s, is_exact=wait_s < self._tick_s)
        end_s = time.perf_counter() + _LAST_ANSWERS_S
        while any(worker.is_busy for worker in self.workers) and (left_s := end_s - time.perf_counter()) > 0:
            self._loop.wait(left_s)

    def _send_due(self, now: float) -> float:
        """Send what is due, and return the time until the next request is, at most a tick."""
        while self._paused and self._paused[0][0] <= now:
            self._free.append(self._paused.popleft()[1])
        wait_s = self._tick_s
        while self._free:
            if self._intervals_s is not None:
                if self._due_s > now:
                    wait_s = min(wait_s, self._due_s - now)
                    break
                lag_s = now - self._due_s
                self._due_s += next(self._intervals_s)
            else:
                lag_s = 0.0
            worker = self._free.popleft()
            worker.is_busy, worker.lag_s = True, lag_s
            worker.connection.start(worker, next(worker.requests))
            worker.connection.flush()
        if self._paused:
            wait_s = min(wait_s, max(0.0, self._paused[0][0] - now))
        return wait_s

    def _cancel_overdue(self, now: float) -> None:
        for worker in self.workers:
            if worker.is_busy and now - worker.since_s > self._timeout_s:
                worker.connection.cancel(worker, f"no answer within {self._timeout_s:g} s")


def constant(rate: float) -> Iterator[float]:
    """Yield equal intervals in seconds."""
    return itertools.repeat(1 / rate)


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield the intervals in seconds of a Poisson process with a mean of `rate` requests per second."""
    generator = random.Random(seed)
    while True:
        yield generator.expovariate(rate)
