"""Pool of threads that run batches, for runtimes that do not need a thread of their own.

At most `size` threads run at a time, so a thousand models do not need a thousand threads. A run that takes long, or
hangs, does not count: while a job waits, every thread whose job began before is replaced by another one. So a hung run
costs one thread and its own model (see `periodic_checks`), and no other model. For the same reason a model may wait for
the answer of another one: it does not block the thread that the other needs. A surplus thread ends after its job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from edge_server.serving.timer import Timer

log = logging.getLogger(__name__)

POOL_SIZE = 24
"""Several times the cores of a typical machine, so that runs that only wait do not block others."""

_LONG_RUN_S = 0.25
"""How long a job waits before the threads that are busy with earlier jobs are replaced."""

Job: TypeAlias = Callable[[], None]


class RunPool:
    """Thread-safe. Jobs begin in the order in which they come. A job must not raise."""

    def __init__(self, timer: Timer, size: int = POOL_SIZE, long_run_s: float = _LONG_RUN_S) -> None:
        self._timer = timer
        self._size = size
        self._long_run_ns = int(long_run_s * 1e9)
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._thread_count = 0
        self._replaced_count = 0
        self._waiting_since_ns = 0
        """Time since which the timer watches waiting jobs; 0: it does not."""
        self._is_closed = False

    @property
    def has_waiting(self) -> bool:
        """Whether jobs wait for a thread; a job with more to do should then post it as another job. Takes no lock."""
        return bool(self._jobs)

    @property
    def thread_count(self) -> int:
        return self._thread_count

    def post(self, job: Job) -> None:
        """Run the job on a thread. Returns at once."""
        with self._lock:
            if self._idle:
                # The thread that became idle last is first: its caches are warm.
                worker = self._idle.pop()
                worker.job = job
                self._begin(worker)
                needs_thread = False
            else:
                worker = None
                self._jobs.append(job)
                needs_thread = self._thread_count - self._replaced_count < self._size
                self._thread_count += needs_thread
                if not needs_thread:
                    self._watch()
        if worker is not None:
            worker.wake.release()
        elif needs_thread:
            self._start_thread()

    def close(self) -> None:
        """End the idle threads, and each of the others after its job. Waiting jobs are still run."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._thread_count -= len(idle)
        for worker in idle:
            worker.wake.release()

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._run_jobs, name="edge-run", daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._thread_count -= 1
                self._watch()
            log.error("the system grants no thread to run models, it is asked again: %s", error)

    def _run_jobs(self) -> None:
        worker = _Worker()
        while (job := self._next_job(worker)) is not None:
            job()
            # Drop the reference to the last batch and its memory before waiting for the next.
            del job

    def _next_job(self, worker: _Worker) -> Job | None:
        """Wait for the thread's next job and return it; None: the thread must end."""
        with self._lock:
            self._busy.discard(worker)
            if worker.is_replaced:
                worker.is_replaced = False
                self._replaced_count -= 1
            is_surplus = self._thread_count - self._replaced_count > self._size
            if is_surplus or (self._is_closed and not self._jobs):
                self._thread_count -= 1
                return None
            if self._jobs:
                self._begin(worker)
                return self._jobs.popleft()
            self._idle.append(worker)
        worker.wake.acquire()
        job, worker.job = worker.job, None
        return job

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _begin(self, worker: _Worker) -> None:
        worker.began_ns = time.monotonic_ns()
        self._busy.add(worker)

    def _watch(self) -> None:
        if not self._waiting_since_ns:
            now_ns = self._waiting_since_ns = time.monotonic_ns()
            self._timer.call_at(now_ns + self._long_run_ns, self._replace)

    # -- on the timer's thread --------------------------------------------------------------------------------------

    def _replace(self) -> None:
        """Start threads for jobs that have waited too long."""
        with self._lock:
            since_ns, self._waiting_since_ns = self._waiting_since_ns, 0
            if not self._jobs:
                return
            for worker in self._busy:
                if worker.began_ns <= since_ns and not worker.is_replaced:
                    worker.is_replaced = True
                    self._replaced_count += 1
            count = max(0, min(len(self._jobs), self._size - self._thread_count + self._replaced_count))
            self._thread_count += count
            self._watch()
        for _ in range(count):
            self._start_thread()


class _Worker:
    """A thread of the pool: its next job, and when its present job began."""

    __slots__ = ("began_ns", "is_replaced", "job", "wake")

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.job: Job | None = None
        self.began_ns = 0
        self.is_replaced = False
