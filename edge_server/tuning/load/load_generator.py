"""Load generator: a number of concurrent requests, or requests at given times, each worker on a thread."""

from __future__ import annotations

import abc
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from edge_server.tuning.load.client_interface import Sender, SendFailed
from edge_server.tuning.load.measurement_windows import Answer

_PAUSE_S = 0.02
"""After a failure: a server that refuses at once shall not be asked ten thousand times a second."""


class WorkerThreads(abc.ABC):
    """Threads that ask from `with` to its end, and what they were answered meanwhile.

    Each thread runs one of `works` with one of the numbers below `count`, until `_is_over`.
    """

    def __init__(self, count: int, *works: Callable[[int], None]) -> None:
        self._is_over = threading.Event()
        self._answers: deque[Answer] = deque()
        self._broken: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, index), name=f"perf-{index}", daemon=True)
            for index in range(count)
            for work in works
        ]

    def __enter__(self) -> WorkerThreads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        # What is under way ends with its channel, socket or stream, not with the server's answer.
        self._close()
        for thread in self._threads:
            thread.join()

    @abc.abstractmethod
    def _close(self) -> None:
        """End what is under way."""

    def take(self) -> list[Answer]:
        """Return the responses since the last call. Raises the error that stopped a worker."""
        if self._broken is not None:
            raise self._broken
        taken = []
        while self._answers:
            taken.append(self._answers.popleft())
        return taken

    def dropped(self) -> dict[str, int]:
        """Return the dropped frames since the start of the load, by reason."""
        return {}

    def _guarded(self, work: Callable[[int], None], index: int) -> None:
        try:
            work(index)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: `take` raises it on the caller's
            self._broken = error


class ConcurrencyLoad(WorkerThreads):
    """Workers with a sender each. `requests` are one sequence for each worker, sent in turns."""

    def __init__(self, senders: Sequence[Sender], requests: Sequence[Sequence[bytes]]) -> None:
        super().__init__(len(senders), self._run)
        self._senders = senders
        self._requests = requests

    def _close(self) -> None:
        for sender in self._senders:
            sender.close()

    def _run(self, index: int) -> None:
        self._work(self._senders[index], itertools.cycle(self._requests[index]))

    def _work(self, sender: Sender, requests: Iterator[bytes]) -> None:
        """Send until it is over."""
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
                self._is_over.wait(_PAUSE_S)
            return
        self._answers.append(Answer(start_s, time.perf_counter(), lag_s=lag_s, text=text))


class ScheduledLoad(ConcurrencyLoad):
    """Sends when requests are due, whoever is free; a request that is due while all workers wait is sent late.

    `intervals_s` between one request and the next, without an end.
    """

    def __init__(
        self, senders: Sequence[Sender], requests: Sequence[Sequence[bytes]], intervals_s: Iterator[float]
    ) -> None:
        super().__init__(senders, requests)
        self._intervals_s = intervals_s
        self._turn = threading.Lock()
        self._due_s = 0.0

    def __enter__(self) -> WorkerThreads:
        self._due_s = time.perf_counter()
        return super().__enter__()

    def _work(self, sender: Sender, requests: Iterator[bytes]) -> None:
        while True:
            with self._turn:
                self._due_s += next(self._intervals_s)
                due_s = self._due_s
            if self._is_over.wait(max(due_s - time.perf_counter(), 0.0)):
                return
            self._send(sender, next(requests), time.perf_counter() - due_s)


def constant(rate: float) -> Iterator[float]:
    """Yield intervals in seconds, all alike."""
    return itertools.repeat(1 / rate)


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield intervals in seconds of requests that know nothing of each other, `rate` a second on average."""
    generator = random.Random(seed)
    while True:
        yield generator.expovariate(rate)
