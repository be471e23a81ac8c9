"""Interface of a loaded version of a model, implemented by `ModelVersion` and by `EnsembleVersion`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from edge_server.core.model_spec import ModelSpec
from edge_server.core.model_statistics import VersionStatistics, VersionWork
from edge_server.core.request_response import Request, ResponseSink, SubmittedRequest
from edge_server.core.status_reports import InstanceReport, VersionReport
from edge_server.core.version_lifecycle import SampleRun, VersionSnapshot, VersionState


class ServedVersion(Protocol):
    """Owned by the model table, which alone takes it out of service. Any thread may call `submit` while it is READY."""

    spec: ModelSpec
    name: str
    version: int
    generation: int
    fingerprint: str
    state: VersionState
    reason: str
    answers_made_up_inputs: bool
    """Whether it answered the inference that its load made up. False if there was none."""

    def open(self) -> None:
        """Open it and make it READY. Raises LoadError and others; nothing stays open then."""

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float) -> SubmittedRequest:
        """Check and accept a request. After an error the request still belongs to the caller; Draining: use the
        version's successor."""

    def resume(self) -> None:
        """Start waiting requests, because admission control allows more now."""

    def end_sequence(self, sequence_id: int | str) -> None:
        """End a sequence whose client has disconnected. Does nothing for an unknown one. Returns at once."""

    def has_sequence(self, sequence_id: int | str) -> bool:
        """Return whether a sequence with this id lives here that began with a request without a version."""

    def hold(self) -> Callable[[], None]:
        """Let the version take requests also after `stop_accepting`, until the returned function is called. Raises
        Draining after `stop_accepting`."""

    def stop_accepting(self) -> None:
        """Refuse new requests once nobody holds the version; waiting and running ones continue."""

    def drain(self) -> None:
        """Wait, after `stop_accepting`, for the last request. Holds do not count."""

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call the function on the timer's thread once the last request is over; after `stop_accepting`. Returns at
        once."""

    def abandon_waiting(self) -> int:
        """Fail the waiting requests. Return their number."""

    def abandon_running(self) -> int:
        """Fail all unanswered requests. Return their number."""

    def close(self) -> None: ...

    def probe(self, examine: Callable[[SampleRun | None], None]) -> float:
        """Run one inference past all queues, and return the seconds it took. Before it, call `examine` with a function
        that runs more of them.

        Raises NotWarmedUp if the inputs had to be guessed and do not fit, WarmupFailed and others if the model fails.
        """

    @property
    def in_flight(self) -> int: ...

    @property
    def last_used_ns(self) -> int: ...

    @property
    def run_numbers(self) -> Mapping[str, int]:
        """Each instance's number of beginnings and ends of runs."""

    def end_hung_run(self, instance_name: str, reason: str) -> bool:
        """End the run of an instance that hangs in a process of its own. Return False if it has none."""

    def observe(self, observer: Callable[[int | None], None] | None) -> None: ...

    def stop_for_good(self, reason: str) -> None:
        """Stop using it: its runtime hangs."""

    def close_after_hang(self) -> None:
        """Answer all waiting and running requests, and close once the runtime returns."""

    def snapshot(self) -> VersionSnapshot: ...

    def is_healthy(self) -> bool:
        """Return whether it reports that it can serve."""

    def statistics(self) -> VersionStatistics: ...

    def work(self) -> VersionWork: ...

    def report(self) -> InstanceReport: ...

    def version_report(self, share: float, reason: str = "") -> VersionReport: ...
