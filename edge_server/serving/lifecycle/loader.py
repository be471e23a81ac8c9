"""Loader of model versions: chooses the backend, opens the model, tries again after a failure, and limits how many load
at the same time."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from edge_server.backends.base import ServerCalls
from edge_server.core.version_lifecycle import DesiredVersion, Resolved
from edge_server.errors import ChangedWhileLoading, EdgeServerError, LoadError
from edge_server.serving.execution.admission_control import ADMIT_ALL, AdmissionControl
from edge_server.serving.execution.gpu_state import Gpus
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.execution.thread_pool import RunPool
from edge_server.serving.execution.transient_load_errors import TRANSIENT_ERRORS, as_transient
from edge_server.serving.lifecycle.canary import parse_canary_terms
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.timer import Alarm, Timer

if TYPE_CHECKING:
    from edge_server.serving.cache.response_cache import ResponseCache
    from edge_server.serving.ensemble.ensemble_version import EnsembleVersion, Members
    from edge_server.serving.execution.model_version import ModelVersion, OnGpuFault

log = logging.getLogger(__name__)


class Loader:
    """Opens resolved versions. Keeps no version; several threads may use it."""

    def __init__(
        self,
        timer: Timer,
        backend_settings: Mapping[str, Mapping[str, str]],
        lifecycle: LifecycleSettings,
        admission_control: AdmissionControl = ADMIT_ALL,
        limiter: RateLimiter | None = None,
        cache: ResponseCache | None = None,
        *,
        members: Members,
        gpus: Gpus,
        on_gpu_fault: OnGpuFault,
    ) -> None:
        """`members` are the models for ensembles. `on_gpu_fault` is called with GPU errors of loads and runs."""
        self.server: ServerCalls | None = None
        """The server functions for models. None: there is no server."""
        self.pool = RunPool(timer)
        """Threads that run sessions without a thread of their own."""
        self._cache = cache
        self._admission_control = admission_control
        self._limiter = limiter
        self._timer = timer
        self._backend_settings = backend_settings
        self._lifecycle = lifecycle
        self._members = members
        self._gpus = gpus
        self._on_gpu_fault = on_gpu_fault

    def resolve(self, desired: DesiredVersion, passed_over: Mapping[str, str]) -> Resolved:
        """Return the resolved version with checked parameters. Raises LoadError."""
        # Imported by the first model, so that a server without models uses less memory.
        from edge_server.serving.execution.warmup import warmup_rules
        from edge_server.serving.sequence.scheduler import waiting_limits

        try:
            resolved = desired.resolve(passed_over)
        except (LoadError, OSError) as error:
            raise as_transient(error) from error
        spec = resolved.spec
        self._lifecycle.reload_policy_of(spec)
        self._lifecycle.idle_unload_s_of(spec)
        parse_canary_terms(spec)
        warmup_rules(spec)
        waiting_limits(spec)
        return resolved

    def open(self, desired: DesiredVersion, resolved: Resolved, generation: int, *, must_answer: bool) -> ServedVersion:
        """Return the opened version, READY. A load that fails for good is retried `load_retry_count` times at once.
        `must_answer`: see ModelVersion.

        Raises the last error: LoadError, BackendError ...
        """
        for tries_left in range(self._lifecycle.load_retry_count, -1, -1):
            try:
                return self._open_by_any(desired, resolved, generation, must_answer)
            except TRANSIENT_ERRORS:
                raise
            except EdgeServerError as error:
                if not tries_left:
                    raise
                name = resolved.spec.name
                log.warning("model '%s' failed to load, %d tries are left: %s", name, tries_left, error.message)
        raise AssertionError("unreachable: the last try returns or raises")

    def _open_by_any(
        self, desired: DesiredVersion, resolved: Resolved, generation: int, must_answer: bool
    ) -> ServedVersion:
        """Return the version, opened by the first candidate runtime that can open it."""
        if resolved.spec.ensemble is not None:
            return self._open_ensemble(desired, resolved, generation)
        passed_over: dict[str, str] = {}
        while True:
            version = self._make_version(desired, resolved, generation, must_answer)
            try:
                version.open()
            except ChangedWhileLoading:
                # Not the runtime's fault: the files are resolved again for the same runtime.
                raise
            except LoadError as failure:
                # The classes below it are no faults of the files.
                explained = resolved.explain(failure) if type(failure) is LoadError else None
                error = explained or failure
                if not resolved.has_alternatives or resolved.spec.backend in passed_over:
                    last = _with_other_reasons(error, resolved.skipped) if passed_over else error
                    if last is failure:
                        raise
                    raise last from failure
                passed_over[resolved.spec.backend] = error.message
            else:
                return version
            resolved = self.resolve(desired, passed_over)

    def _open_ensemble(self, desired: DesiredVersion, resolved: Resolved, generation: int) -> EnsembleVersion:
        from edge_server.serving.ensemble.ensemble_version import EnsembleVersion

        ensemble = EnsembleVersion(
            resolved, generation, desired.fingerprint, self._members, self._timer, self._cache,
            self._lifecycle.latencies,
        )  # fmt: skip
        ensemble.open()
        return ensemble

    def _make_version(
        self, desired: DesiredVersion, resolved: Resolved, generation: int, must_answer: bool
    ) -> ModelVersion:
        from edge_server.serving.execution.model_version import ModelVersion

        return ModelVersion(
            resolved, generation, desired.fingerprint, self._timer, self._backend_settings, self._admission_control,
            self._limiter, self.server, self._cache, pool=self.pool, gpus=self._gpus, on_gpu_fault=self._on_gpu_fault,
            must_answer=must_answer, latencies=self._lifecycle.latencies,
        )  # fmt: skip


class LoaderThreads:
    """Threads that load or close models: one for each job with a slot, and one that waits for the next slot.

    There are `count` slots. A job that takes longer than `timeout_s` no longer counts: two loads that hang in their
    runtimes must not block all others. `start` runs a function on a new thread. Thread-safe.
    """

    def __init__(self, count: int, timer: Timer, timeout_s: float, start: Callable[[Callable[[], None]], None]) -> None:
        self._free = threading.Semaphore(count)
        self._timer = timer
        self._timeout_s = timeout_s
        self._start = start
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[LoadSlot], None]] = deque()
        self._has_waiting_thread = False

    def run(self, job: Callable[[LoadSlot], None]) -> None:
        """Run a job on a thread that holds a slot, after the jobs given before. Returns at once."""
        with self._lock:
            self._jobs.append(job)
            if self._has_waiting_thread:
                return
            self._has_waiting_thread = True
        self._start(self._run_jobs)

    def _run_jobs(self) -> None:
        is_needed = True
        while is_needed:
            slot = LoadSlot(self._free, self._timer, self._timeout_s)
            slot.acquire()
            try:
                with self._lock:
                    job = self._jobs.popleft()
                    self._has_waiting_thread = bool(self._jobs)
                    needs_next = self._has_waiting_thread
                if needs_next:
                    self._start(self._run_jobs)
                job(slot)
                del job
            finally:
                slot.release()
            with self._lock:
                is_needed = bool(self._jobs) and not self._has_waiting_thread
                self._has_waiting_thread |= is_needed


class LoadSlot:
    """One thread's right to load, held from `acquire` to `release`, or until `timeout_s` is over."""

    def __init__(self, free: threading.Semaphore, timer: Timer, timeout_s: float) -> None:
        self._free = free
        self._timer = timer
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._hold = 0
        """Number of the present hold, 0 if there is none: the alarm of an earlier hold may still be running."""
        self._holds = itertools.count(1)
        self._alarm: Alarm | None = None

    def acquire(self) -> None:
        self._free.acquire()
        hold = self._hold = next(self._holds)
        when_ns = time.monotonic_ns() + int(self._timeout_s * 1e9)
        self._alarm = self._timer.call_at(when_ns, lambda: self._release(hold))

    def release(self) -> None:
        """Release the slot, so that others can load. Does nothing if it was released before."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._release(self._hold)

    @contextlib.contextmanager
    def release_while_waiting(self) -> Iterator[None]:
        """Release the slot while this thread only waits, and acquire it again."""
        self.release()
        try:
            yield
        finally:
            self.acquire()

    def _release(self, hold: int) -> None:
        with self._lock:
            if not hold or self._hold != hold:
                return
            self._hold = 0
        self._free.release()


def _with_other_reasons(error: LoadError, skipped: Sequence[str]) -> LoadError:
    """Return the error of the last runtime with the reasons why the preferred ones were passed over, which it would
    hide."""
    # Theirs lack the name of the file, so that an equal one is the end of the last.
    others = [text for text in skipped if not error.message.endswith(text.partition(": ")[2])]
    return type(error)("; ".join((error.message, *others)))
