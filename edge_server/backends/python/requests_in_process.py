"""Requests that a model's process is working on, and the shared memory of their inputs."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence

from edge_server.backends.base import Execution
from edge_server.backends.python.shared_arena import Arena
from edge_server.core.request_response import Request


class ProcessEnded(Exception):
    """The process had ended before it was given the batch."""


class BatchInProcess:
    """Requests that were handed over together. `taken` is set when the model's `execute` has returned."""

    __slots__ = ("left", "number", "offset", "taken")

    def __init__(self, number: int, count: int) -> None:
        self.number = number
        self.taken = threading.Event()
        self.left = count
        """How many are not answered yet."""
        self.offset: int | None = None
        """Where their inputs lie in shared memory, once that is known; freed when the last one is answered and the
        model's `execute` has returned, which may read them until then."""

    @property
    def is_done(self) -> bool:
        return self.left == 0 and self.taken.is_set()


class RequestsInProcess:
    """Requests by the numbers that messages name them by, from the first message to the final answer. Thread-safe."""

    def __init__(self, arena: Arena) -> None:
        self.is_over = False
        """Whether the process has ended: nothing is handed over any more."""
        self._arena = arena
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Execution, BatchInProcess]] = {}
        self._batches: dict[int, BatchInProcess] = {}
        """Those that the model has not taken yet."""

    def add(self, executions: Sequence[Execution]) -> tuple[BatchInProcess, list[tuple[int, Request]]]:
        """Return a new batch and its requests as they are sent, with their numbers. Raises ProcessGone."""
        batch = BatchInProcess(next(self._numbers), len(executions))
        numbered = [(next(self._numbers), execution) for execution in executions]
        with self._lock:
            if self.is_over:
                raise ProcessEnded
            self._batches[batch.number] = batch
            self._open.update((number, (execution, batch)) for number, execution in numbered)
        return batch, [
            (number, dataclasses.replace(item.request, release=None, targets=None, memo=None))
            for number, item in numbered
        ]

    def take_back(self, batch: BatchInProcess) -> None:
        """Know nothing any more of a batch that could not be sent."""
        with self._lock:
            self._batches.pop(batch.number, None)
            for number in [number for number, (_, other) in self._open.items() if other is batch]:
                del self._open[number]

    def settle(self, batch: BatchInProcess, offset: int) -> None:
        """Take note of where a batch lies, which may be after it was answered."""
        with self._lock:
            batch.offset = offset
            is_done = batch.is_done
        if is_done:
            self._arena.free(offset)

    def find(self, number: int, is_final: bool) -> Execution | None:
        """Return the request of a response; the final response ends it. None if it has already ended."""
        with self._lock:
            found = self._open.pop(number, None) if is_final else self._open.get(number)
            if found is None:
                return None
            execution, batch = found
            batch.left -= is_final
            offset = batch.offset if batch.is_done else None
        if offset is not None:
            self._arena.free(offset)
        return execution

    def take(self, number: int) -> None:
        """Let go whoever waits for the model to take this batch."""
        with self._lock:
            batch = self._batches.pop(number, None)
            if batch is None:
                return
            batch.taken.set()
            offset = batch.offset if batch.is_done else None
        if offset is not None:
            self._arena.free(offset)

    def now_open(self) -> dict[int, Execution]:
        with self._lock:
            return {number: execution for number, (execution, _) in self._open.items()}

    def end(self) -> tuple[list[Execution], list[BatchInProcess]]:
        """Take nothing more, and return the requests that are not answered, and the batches that are not taken."""
        with self._lock:
            self.is_over = True
            left, self._open = [execution for execution, _ in self._open.values()], {}
            batches, self._batches = list(self._batches.values()), {}
        return left, batches
