"""Abstract base class of `ModelVersion` and `EnsembleVersion`: one loaded generation of a version, from opening through
requests and draining to closing."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edge_server.core.status_reports import InstanceReport, VersionReport
from edge_server.core.version_lifecycle import Resolved, SampleRun, VersionSnapshot, VersionState, next_state
from edge_server.errors import Draining, NotReady

if TYPE_CHECKING:
    from edge_server.core.model_statistics import VersionStatistics, VersionWork
    from edge_server.core.request_response import Request, ResponseSink, SubmittedRequest
    from edge_server.serving.execution.counters import VersionCounters
    from edge_server.serving.execution.requests_in_flight import RequestsInFlight

CLOSE_TIMEOUT_S = 3.0
"""How long a stopping server, and `check`, wait for running batches and for sessions that close."""


class ServedVersion(ABC):
    """Owned by the model table, which alone takes it out of service. Any thread may call `submit` while it is READY."""

    def __init__(
        self,
        resolved: Resolved,
        generation: int,
        fingerprint: str,
        counters: VersionCounters,
        requests: RequestsInFlight[Any],
    ) -> None:
        self.spec = resolved.spec
        self.name = resolved.spec.name
        self.version = resolved.file.version
        self.generation = generation
        self.fingerprint = fingerprint
        self.state = VersionState.NEW
        self.reason = ""
        self.since_s = time.time()
        self.answers_generated_inputs = False
        """Whether it answered the generated inference of its load. False if there was none."""
        self._file = resolved.file
        self._confirm = resolved.confirm
        self._output_checks = resolved.output_checks
        self._counters = counters
        self._requests = requests
        self._load_s = 0.0
        self._hold_lock = threading.Lock()
        self._hold_count = 0
        self._is_ending = False

    @abstractmethod
    def open(self) -> None:
        """Open it and make it READY. Raises LoadError and others; nothing stays open then."""

    @abstractmethod
    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float) -> SubmittedRequest:
        """Check and accept a request. After an error the request still belongs to the caller; Draining: use the
        version's successor."""

    def resume(self) -> None:  # noqa: B027 - an ensemble holds nothing back
        """Start waiting requests, because admission control allows more now."""

    def end_sequence(self, sequence_id: int | str) -> None:  # noqa: B027 - an ensemble has none
        """End a sequence whose client has disconnected. Does nothing for an unknown one. Returns at once."""

    def has_sequence(self, sequence_id: int | str) -> bool:
        """Return whether a sequence with this id lives here that began with a request without a version."""
        return False

    # -- the end ------------------------------------------------------------------------------------------------------

    def hold(self) -> Callable[[], None]:
        """Let the version take requests also after `stop_accepting`, until the returned function is called, such as a
        robot's until the end of its episode. Raises Draining after `stop_accepting`."""
        with self._hold_lock:
            if self._is_ending:
                raise self._unloading_error()
            self._hold_count += 1
        is_held = True

        def release() -> None:
            nonlocal is_held
            with self._hold_lock:
                if not is_held:
                    return
                is_held = False
                self._hold_count -= 1
                is_last = self._is_ending and not self._hold_count
            if is_last:
                self._requests.close(self._unloading_error)

        return release

    def stop_accepting(self) -> None:
        """Refuse new requests when no hold is left. Waiting and running requests continue."""
        self._move(VersionState.DRAINING)
        with self._hold_lock:
            self._is_ending = True
            is_held = self._hold_count > 0
        if not is_held:
            self._requests.close(self._unloading_error)

    def _unloading_error(self) -> Draining:
        return Draining(f"model '{self.name}' version {self.version} is being unloaded")

    def drain(self) -> None:
        """Wait, after `stop_accepting`, for the last request. Holds do not count."""
        self._requests.wait_idle()

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call the function on the timer's thread once the last request is over; after `stop_accepting`. Returns at
        once."""
        self._requests.call_when_idle(call)

    @abstractmethod
    def abandon_waiting(self) -> int:
        """Fail the waiting requests; running ones continue. Return their number."""

    @abstractmethod
    def abandon_running(self) -> int:
        """Fail all unanswered requests. Return their number."""

    def close(self) -> None:
        """Close every instance once its batch is done."""
        self._move(VersionState.CLOSING)
        self._close_instances()
        self._move(VersionState.RETIRED)

    def _close_instances(self) -> None:  # noqa: B027 - an ensemble has none
        """Close what `open` has opened."""

    def stop_for_good(self, reason: str) -> None:
        """Accept no more requests: its runtime hangs. `close_after_hang` does the rest."""
        self.reason = reason
        self._move(VersionState.FAILED)
        self._requests.close(lambda: NotReady(reason, retry_after_s=None))

    @abstractmethod
    def close_after_hang(self) -> None:
        """Answer all waiting and running requests, and close once the runtime returns, which may be never."""

    # -- questions ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def probe(self, examine: Callable[[SampleRun | None], None]) -> float:
        """Run one inference past all queues, and return the seconds it took. Before it, call `examine` with a function
        that runs more of them.

        Raises NotWarmedUp if the inputs had to be guessed and do not fit, WarmupFailed and others if the model fails.
        """

    @property
    def in_flight(self) -> int:
        return self._requests.in_flight

    @property
    def last_used_ns(self) -> int:
        """Time of the last answer, else of the creation (time.monotonic_ns)."""
        return self._counters.last_used_ns

    @property
    def run_numbers(self) -> Mapping[str, int]:
        """Each instance's number of beginnings and ends of runs: odd while a run is in progress."""
        return {}

    def end_hung_run(self, instance_name: str, reason: str) -> bool:
        """End the run of an instance, named as in `run_numbers`, whose session has a process of its own. Return False
        if it has none."""
        return False

    def observe(self, observer: Callable[[int | None], None] | None) -> None:
        """See VersionCounters.observe."""
        self._counters.observe(observer)

    def snapshot(self) -> VersionSnapshot:
        return VersionSnapshot(self.version, self.generation, self.fingerprint, self.state)

    def is_healthy(self) -> bool:
        """Return whether every instance reports that it can serve. May take seconds for models with a health check."""
        return True

    @abstractmethod
    def statistics(self) -> VersionStatistics: ...

    def work(self) -> VersionWork:
        return self._counters.work()

    @abstractmethod
    def report(self) -> InstanceReport: ...

    def version_report(self, share: float, reason: str = "") -> VersionReport:
        """Return the report of this version; `share` is its share of the requests without a version.

        `reason` is the table's, if it has one.
        """
        count, message = self._counters.success_count, reason or self.reason
        return VersionReport(
            self.name, self.version, self.generation, self.state.name, self.since_s, count, message, share
        )

    def _move(self, state: VersionState) -> None:
        self.state = next_state(self.state, state)
        self.since_s = time.time()
