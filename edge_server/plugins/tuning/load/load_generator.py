"""Generator of requests: keeps a fixed number of them in flight, or sends them at given times. Each worker has a
thread."""

from __future__ import annotations

import abc
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from edge_server.plugins.tuning.load.client_interface import Sender, SendFailed
from edge_server.plugins.tuning.load.measurement_windows import Answer

_FAILURE_PAUSE_S = 0.02
"""Pause after a failure, so that a server which refuses at once does not get 10,000 requests per second."""


class WorkerThreads(abc.ABC):
    """Context manager whose threads send requests and collect the answers.

    There is one thread for each of `worker_functions` and each index below `count`. A function gets its index and runs
    until `_is_over` is set.
    """

    def __init__(self, count: int, *worker_functions: Callable[[int], None]) -> None:
        self._is_over = threading.Event()
        self._answers: deque[Answer] = deque()
        self._worker_error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run_worker, args=(function, index), name=f"perf-{index}", daemon=True)
            for index in range(count)
            for function in worker_functions
        ]

    def __enter__(self) -> WorkerThreads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        # Closing the channel, socket or stream ends requests in flight without waiting for the server.
        self._close()
        for thread in self._threads:
            thread.join()

    @abc.abstractmethod
    def _close(self) -> None:
        """End the requests in flight."""

    def take_answers(self) -> list[Answer]:
        """Return the answers since the last call. Raises the error that stopped a worker."""
        if self._worker_error is not None:
            raise self._worker_error
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def dropped(self) -> dict[str, int]:
        """Return the dropped frames since the start of the load, by reason."""
        return {}

    def _run_worker(self, function: Callable[[int], None], index: int) -> None:
        try:
            function(index)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: `take_answers` raises it in the caller
            self._worker_error = error


class ConcurrencyLoad(WorkerThreads):
    """Keeps one request in flight per worker. Each worker has a sender and its own sequence of `requests`."""

    def __init__(self, senders: Sequence[Sender], requests: Sequence[Sequence[bytes]]) -> None:
        super().__init__(len(senders), self._run)
        self._senders = senders
        self._requests = requests

    def _close(self) -> None:
        for sender in self._senders:
            sender.close()

    def _run(self, index: int) -> None:
        self._send_all(self._senders[index], itertools.cycle(self._requests[index]))

    def _send_all(self, sender: Sender, requests: Iterator[bytes]) -> None:
        """Send requests until the load ends."""
        while not self._is_over.is_set():
            self._send(sender, next(requests), 0.0)

    def _send(self, sender: Sender, request: bytes, lag_s: float) -> None:
        start_s = time.perf_counter()
        try:
            text = sender.send(request)
        except SendFailed as error:
            end_s = time.perf_counter()
            if not self._is_over.is_set():
                self._answers.append(Answer(start_s, end_s, error.reason, error.message, lag_s))
                self._is_over.wait(_FAILURE_PAUSE_S)
            return
        self._answers.append(Answer(start_s, time.perf_counter(), lag_s=lag_s, text=text))


class ScheduledLoad(ConcurrencyLoad):
    """Sends requests at given times, each by a free worker. If all workers are busy, the request is sent late.

    `intervals_s` yields the intervals between requests and never ends.
    """

    def __init__(
        self, senders: Sequence[Sender], requests: Sequence[Sequence[bytes]], intervals_s: Iterator[float]
    ) -> None:
        super().__init__(senders, requests)
        self._intervals_s = intervals_s
        self._schedule_lock = threading.Lock()
        self._due_s = 0.0

    def __enter__(self) -> WorkerThreads:
        self._due_s = time.perf_counter()
        return super().__enter__()

    def _send_all(self, sender: Sender, requests: Iterator[bytes]) -> None:
        while True:
            with self._schedule_lock:
                self._due_s += next(self._intervals_s)
                due_s = self._due_s
            if self._is_over.wait(max(due_s - time.perf_counter(), 0.0)):
                return
            self._send(sender, next(requests), time.perf_counter() - due_s)


def constant(rate: float) -> Iterator[float]:
    """Yield equal intervals in seconds."""
    return itertools.repeat(1 / rate)


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield the intervals in seconds of a Poisson process with a mean of `rate` requests per second."""
    generator = random.Random(seed)
    while True:
        yield generator.expovariate(rate)
