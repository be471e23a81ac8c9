"""Data class of what the model table knows of one model: desired and loaded versions, failures, retries, evictions.
Guarded by the table's lock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple

from edge_server.core.model_spec import ModelSpec
from edge_server.core.status_reports import CANARY_FELL_BACK, EARLIER_GENERATION, UNLOADED, VersionReport
from edge_server.core.version_lifecycle import INDEX_STATES, DesiredModel, LoadAction, VersionState
from edge_server.errors import EdgeServerError, OutOfMemory
from edge_server.record import record
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.execution.transient_load_errors import TRANSIENT_ERRORS
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.pending_requests import PendingRequest
from edge_server.serving.lifecycle.version_routes import RejectedCanary, Routes
from edge_server.serving.timer import Alarm

_LOADING_RETRY_S = 1.0
"""Retry-After of a model that is being loaded. The duration of the load is unknown."""

_REPORTED_AFTER_S = 10.0
"""A load that takes longer has a reason in the index."""

UNLOADED_IDLE = "unloaded: idle; loads again on request"
UNLOADED_FOR_LIMIT = "unloaded: --max-resident-models are loaded; loads on request"


def _loading_reason(since_ns: int) -> str:
    """Return the index reason of a load that began at `since_ns` (time.monotonic_ns); "" in its first seconds."""
    seconds = (time.monotonic_ns() - since_ns) / 1e9
    return f"loading for {seconds:.0f} s" if seconds >= _REPORTED_AFTER_S else ""


@record(slots=True)
class Failure:
    """A load that failed. `retry_at_s` is the unix time of the next attempt; None if only new files or a load request
    help.

    `is_due`: that time has come.
    """

    fingerprint: str
    cause: EdgeServerError
    generation: int
    count: int = 1
    since_s: float = field(default_factory=time.time)
    retry_at_s: float | None = None
    alarm: Alarm | None = None
    is_due: bool = False

    @property
    def is_transient(self) -> bool:
        return isinstance(self.cause, TRANSIENT_ERRORS)

    @property
    def lacks_memory(self) -> bool:
        return isinstance(self.cause, OutOfMemory)

    @property
    def reason(self) -> str:
        message = self.cause.message or type(self.cause).__name__
        if self.retry_at_s is None:
            return message
        clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.retry_at_s))
        return f"{message} (failed {self.count} time(s), tried again at {clock})"

    def forget_retry(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()


class EvictedVersion(NamedTuple):
    """A desired version that is not in memory: its report, and the fingerprint it was checked with."""

    fingerprint: str
    spec: ModelSpec
    reason: str
    generation: int
    since_s: float


class RetiredVersion(NamedTuple):
    """The last report of a version that was unloaded."""

    generation: int
    since_s: float
    served_count: int


@record(slots=True, eq=False)
class ModelState:
    """State of one model. `loading` is the load in progress; `is_opening` is set when it takes memory. `is_demanded`:
    a request needs evicted versions. `failures` are those of the latest files."""

    desired: DesiredModel
    loaded: list[ServedVersion] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)
    retired: dict[int, RetiredVersion] = field(default_factory=dict)
    evicted: dict[int, EvictedVersion] = field(default_factory=dict)
    pending: set[PendingRequest] = field(default_factory=set)
    generation: int = 0
    loading: LoadAction | None = None
    is_opening: bool = False
    is_demanded: bool = False
    is_replacing: bool = False
    has_served: bool = False
    """Whether a version was READY since the model was last added to the desired state."""
    lost_gpu: set[int] = field(default_factory=set)
    """Desired versions that lost their GPU and were not loaded again since."""
    loading_since_s: float = 0.0
    loading_since_ns: int = 0
    """The same by time.monotonic_ns, for durations: the wall clock of a small machine may jump by years."""
    rejected: RejectedCanary | None = None
    stated: DesiredModel = field(init=False)
    """The desired state as it was set; for an ensemble `desired` also reflects its members."""
    awaits: str = ""
    """Member that the next load of an ensemble waits for."""
    keep_alive_s: float | None = None
    """Time without requests after which it is unloaded, as the last request with a `keep_alive` wants it; math.inf:
    never."""
    renewals: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Versions to load again although their files have not changed: their fingerprint, and a mark."""

    def __post_init__(self) -> None:
        self.stated = self.desired

    @property
    def name(self) -> str:
        return self.desired.name

    @property
    def is_known(self) -> bool:
        """Whether the model has or had any version."""
        return bool(self.desired.versions or self.loaded or self.failures or self.retired)

    @property
    def is_unsettled(self) -> bool:
        """Whether something is left to load."""
        return self.loading is not None or bool(self.awaits)

    @property
    def is_resident(self) -> bool:
        """Whether it is in memory or about to be."""
        return self.is_opening or any(item.spec.ensemble is None for item in self.loaded)

    @property
    def remains_resident(self) -> bool:
        """Whether it is in memory and will stay there."""
        return self.is_opening or any(
            item.state is VersionState.READY and item.spec.ensemble is None for item in self.loaded
        )

    def of_generation(self, generation: int) -> ServedVersion:
        """Return the loaded version of this generation; there is one."""
        return next(item for item in self.loaded if item.generation == generation)

    def begin_load(self, action: LoadAction) -> None:
        self.loading = action
        self.loading_since_s, self.loading_since_ns = time.time(), time.monotonic_ns()

    def end_load(self) -> None:
        self.loading = None
        self.is_opening = self.is_replacing = False

    def failed(self) -> dict[int, Failure]:
        """Return the desired versions whose present files failed to load."""
        desired = self.desired.versions
        return {
            number: failure
            for number, failure in sorted(self.failures.items())
            if number in desired and desired[number].fingerprint == failure.fingerprint and not failure.is_due
        }

    def on_demand(self) -> dict[int, EvictedVersion]:
        """Return the desired versions that stay evicted until a request needs them."""
        desired = self.desired.versions
        return {
            number: evicted
            for number, evicted in self.evicted.items()
            if number in desired and desired[number].fingerprint == evicted.fingerprint
        }

    def to_serve(self) -> dict[int, str]:
        """Return the versions, with fingerprints, that should be loaded now."""
        excluded = self.failed().keys() | (set() if self.is_demanded else self.on_demand().keys())
        return {
            number: desired.fingerprint for number, desired in self.desired.versions.items() if number not in excluded
        }

    def may_wait_for(self, version: int | None) -> bool:
        """Return whether a request for the version should wait for a load."""
        if self.loading is None and not self.on_demand():
            return False
        loadable = self.desired.versions.keys() - self.failed().keys()
        return bool(loadable) if version is None else version in loadable

    def can_be_evicted(self) -> bool:
        """Return whether it serves exactly the desired versions, without a request in flight.

        An old generation that serves because newer files failed could not be loaded again. Ensembles take no memory.
        """
        if self.stated.members:
            return False
        serving = {item.version: item.fingerprint for item in self.loaded if item.state is VersionState.READY}
        desired = {number: item.fingerprint for number, item in self.desired.versions.items()}
        is_quiet = self.loading is None and not self.pending and not any(item.in_flight for item in self.loaded)
        return bool(serving) and serving == desired and not self.desired.reason and is_quiet

    def idle_unload_s(self, lifecycle: LifecycleSettings) -> float | None:
        """Return after how many seconds without requests it is unloaded; None: never, or it is not loaded."""
        if not self.loaded:
            return None
        if self.keep_alive_s is not None:
            return self.keep_alive_s
        return lifecycle.idle_unload_s_of(self.loaded[0].spec) or None

    def last_used_ns(self) -> int:
        return max((item.last_used_ns for item in self.loaded), default=0)

    def retry_after_s(self, version: int | None) -> float | None:
        """Return after how long a request for a version (None: any) may succeed; None if only new files or a load
        request help."""
        rows = self.index_rows()
        if any(state == "LOADING" for number, (state, _) in rows.items() if version in (None, number)):
            return _LOADING_RETRY_S
        waits_s = [
            max((failure.alarm.when_ns - time.monotonic_ns()) / 1e9, _LOADING_RETRY_S)
            for number, failure in self.failed().items()
            if version in (None, number) and failure.alarm is not None
        ]
        return min(waits_s, default=None)

    def why_not_served(self) -> str:
        """Return why no desired version serves, highest version first; "" if none is desired."""
        if self.desired.reason:
            return self.desired.reason
        rows = self.index_rows()
        parts = []
        for number in sorted(self.desired.versions, reverse=True):
            state, reason = rows.get(number, ("UNAVAILABLE", ""))
            parts.append(f"version {number} is {state}" + (f" ({reason})" if reason else ""))
        return "; ".join(parts)

    def index_rows(self) -> dict[int, tuple[str, str]]:
        """Return (state, reason) of each version, with Triton's names."""
        failed = self.failed()
        rows: dict[int, tuple[str, str]] = dict.fromkeys(self.retired, ("UNAVAILABLE", UNLOADED))
        rows.update({number: ("UNAVAILABLE", failure.reason) for number, failure in self.failures.items()})
        rows.update({number: ("UNAVAILABLE", evicted.reason) for number, evicted in self.on_demand().items()})
        for item in self.loaded:
            # A version that is closed stays among the loaded ones for a moment.
            reason = UNLOADED if item.state is VersionState.RETIRED else ""
            rows[item.version] = (INDEX_STATES[item.state], item.reason or reason)
        if self.loading is not None or self.awaits:
            on_demand = set() if self.is_demanded else self.on_demand().keys()
            expected = self.desired.versions.keys() - failed.keys() - on_demand
            rows.update(dict.fromkeys(expected, ("LOADING", "")))
            if self.loading is not None and self.loading.version in expected:
                rows[self.loading.version] = ("LOADING", _loading_reason(self.loading_since_ns))
        for item in self.loaded:
            if item.state is VersionState.READY:
                rows[item.version] = ("READY", self._ready_note(item, failed))
        return rows

    def reports(self, routes: Routes | None) -> list[VersionReport]:
        """Return the reports of all versions, loaded ones first."""
        failed = self.failed()
        reports = [
            item.version_report(
                routes.share_of(item) if routes is not None else 0.0,
                self._ready_note(item, failed) if item.state is VersionState.READY else "",
            )
            for item in self.loaded
        ]
        loaded = {item.version for item in self.loaded}
        if self.loading is not None:
            number, since_s = self.loading.version, self.loading_since_s
            reason = _loading_reason(self.loading_since_ns)
            reports.append(VersionReport(self.name, number, self.generation, "LOADING", since_s, 0, reason, 0.0))
            loaded.add(number)
        return reports + [report for report in self._past_reports() if report.version not in loaded]

    def _past_reports(self) -> list[VersionReport]:
        past = {
            number: VersionReport(
                self.name, number, item.generation, "RETIRED", item.since_s, item.served_count, UNLOADED, 0.0
            )
            for number, item in self.retired.items()
        }
        for number, failure in self.failures.items():
            past[number] = VersionReport(
                self.name, number, failure.generation, "FAILED", failure.since_s, 0, failure.reason, 0.0
            )
        for number, evicted in self.on_demand().items():
            past[number] = VersionReport(
                self.name, number, evicted.generation, "RETIRED", evicted.since_s, 0, evicted.reason, 0.0
            )
        return [past[number] for number in sorted(past)]

    def _ready_note(self, item: ServedVersion, failed: dict[int, Failure]) -> str:
        if item.version in failed:
            return f"{EARLIER_GENERATION}: {failed[item.version].reason}"
        if self.rejected is not None and self.rejected.generation == item.generation:
            return f"{CANARY_FELL_BACK}: {self.rejected.reason}"
        return ""


def to_evict(staying: Sequence[ModelState], limit: int) -> list[ModelState]:
    """Return the models to evict so that one more fits, the least recently used first: of `staying`, `limit - 1` may
    stay.

    Models in use are left out, so there may be fewer than needed.
    """
    excess = len(staying) - limit + 1
    free = sorted((item for item in staying if item.can_be_evicted()), key=lambda item: item.last_used_ns())
    return free[: max(excess, 0)]
