"""Router of requests: finds the version of a model that serves a request now, or lets it wait until the model is
loaded. Also answers questions about the states of the models."""

from __future__ import annotations

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request, ResponseSink, SequenceStep, SubmittedRequest
from edge_server.core.status_reports import IndexEntry, VersionReport
from edge_server.errors import Draining, EdgeServerError, MemberMissing, NotReady, UnknownModel
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.execution.transient_load_errors import MACHINE_ERRORS
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.model_table import ModelTable
from edge_server.serving.lifecycle.pending_requests import PendingRequest
from edge_server.serving.timer import Timer

_ROUTE_ATTEMPTS = 16
"""How often a request retries if its version is just being retired. One retry is normal."""


class Router:
    """Thread-safe. Reads the routes that the table publishes, without a lock; and the states where they say nothing."""

    def __init__(self, table: ModelTable, timer: Timer, lifecycle: LifecycleSettings) -> None:
        self._table = table
        self._timer = timer
        self._lifecycle = lifecycle

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float) -> SubmittedRequest:
        """Submit a request to the version that serves its model now; an evicted model is loaded first. After an error
        the request still belongs to the caller."""
        for _ in range(_ROUTE_ATTEMPTS):
            try:
                version = self.route_request(request.model, request.version, request.sequence)
            except (NotReady, UnknownModel):
                pending = PendingRequest(
                    request, sink, lambda again: self.submit(again, sink, hold_us=0.0), self._table.remove_pending
                )
                is_waiting = self._table.add_pending(pending)
                if is_waiting is None:
                    raise
                if not is_waiting:
                    # It was loaded meanwhile.
                    continue
                pending.wait_until_loaded(self._timer, self._lifecycle.on_demand_timeout_s)
                return pending
            try:
                return version.submit(request, sink, hold_us=hold_us)
            except Draining:
                # Retired between lookup and call: the new routes have its successor, or none.
                continue
        raise NotReady(f"model '{request.model}' is being replaced faster than requests can follow")

    def route(self, name: str, version: int | None) -> ServedVersion:
        """Return the version for questions about a model (metadata, configuration). Takes no lock.

        Raises UnknownModel or NotReady with Triton's words.
        """
        routes = self._table.routes.get(name)
        if routes is not None:
            found = routes.first if version is None else routes.ready.get(version)
            if found is not None:
                return found
        raise self._no_route(name, version)

    def route_request(self, name: str, version: int | None, step: SequenceStep | None = None) -> ServedVersion:
        """Return the version for a request, which may be a step of a sequence: as `route`, but a canary gets its share,
        and a sequence stays where it began. Call once per request."""
        if version is None:
            routes = self._table.routes.get(name)
            if routes is not None and routes.decides_each_request:
                return routes.next(step)
        return self.route(name, version)

    def end_sequence(self, name: str, version: int | None, sequence_id: int | str) -> None:
        """End a sequence whose client has disconnected. Does nothing for an unknown one. Returns at once."""
        routes = self._table.routes.get(name)
        if routes is None:
            return
        for item in routes.ready.values():
            if item.version == version or (version is None and item.has_sequence(sequence_id)):
                item.end_sequence(sequence_id)

    def spec(self, name: str, version: int | None) -> ModelSpec:
        """Return the specification for a request, also of an evicted model. Raises as `route`."""
        try:
            return self.route(name, version).spec
        except (NotReady, UnknownModel):
            evicted = self._evicted(name)
            if version is None and evicted:
                return evicted[max(evicted)]
            if version in evicted:
                return evicted[version]
            # It may have been loaded meanwhile.
            return self.route(name, version).spec

    def member_spec(self, name: str, version: int | None) -> ModelSpec:
        """Return the specification of an ensemble's member. Raises MemberMissing with the reason why it does not
        serve."""
        if problem := self._table.member_problem(name, version):
            raise MemberMissing(problem)
        try:
            return self.spec(name, version)
        except EdgeServerError as error:
            raise MemberMissing(error.message) from error

    # -- questions --------------------------------------------------------------------------------------------------

    def is_known(self, name: str) -> bool:
        """Return whether the model is desired now, or was before."""
        with self._table.reading() as models:
            return name in models

    def members_of(self, name: str) -> list[str]:
        """Return the member models of a desired ensemble; empty for any other model."""
        with self._table.reading() as models:
            model = models.get(name)
            return [] if model is None else list(dict.fromkeys(member for member, _ in model.stated.members))

    def failure(self, name: str) -> str | None:
        """Return why a model does not serve all its desired versions, in Triton's words; None if it does."""
        with self._table.reading() as models:
            model = models[name]
            if model.desired.reason:
                return model.desired.reason
            parts = [
                f"version {number} is at UNAVAILABLE state: {why.reason};" for number, why in model.failed().items()
            ]
            return " ".join(parts) or None

    def has_failures(self) -> bool:
        """Return whether any desired version is not served. A version that a request would load counts as served."""
        with self._table.reading() as models:
            return any(
                bool(model.desired.reason) or bool(model.desired.versions.keys() - set(self.offered_versions(name)))
                for name, model in models.items()
            )

    def has_unserved(self, *, ever_served: bool) -> bool:
        """Return whether a desired model has no serving version and none that a request would load.

        `ever_served`: models that have never served since they were added to the desired state do not count.
        """
        with self._table.reading() as models:
            return any(
                bool(model.desired.reason or model.desired.versions)
                and (model.has_served or not ever_served)
                and not self.offered_versions(name)
                for name, model in models.items()
            )

    def index(self) -> list[IndexEntry]:
        """Return every version that lives, failed, or was unloaded, with its state and reason."""
        entries: list[IndexEntry] = []
        with self._table.reading() as models:
            for name, model in sorted(models.items()):
                rows = model.index_rows()
                faults = {number for number, one in model.failures.items() if isinstance(one.cause, MACHINE_ERRORS)}
                entries += [
                    IndexEntry(name, str(version), *rows[version], is_machines_fault=version in faults)
                    for version in sorted(rows)
                ]
                if model.desired.reason:
                    entries.append(IndexEntry(name, "", "UNAVAILABLE", model.desired.reason))
        return entries

    def versions(self, name: str | None = None) -> list[VersionReport]:
        """Return the reports of all loaded, failed and unloaded versions, of one model or of all."""
        with self._table.reading() as models:
            chosen = [(key, model) for key, model in sorted(models.items()) if name in (None, key)]
            return [report for key, model in chosen for report in model.reports(self._table.routes.get(key))]

    def in_flight(self) -> int:
        """Return the number of requests that wait or run."""
        return sum(version.in_flight for version in self._table.loaded_versions())

    def serving_names(self) -> list[str]:
        """Return the models with a serving version."""
        return sorted(self._table.routes)

    def ready_versions(self, name: str) -> list[ServedVersion]:
        """Return the serving versions of a model, highest first; empty when there is none."""
        routes = self._table.routes.get(name)
        return list(routes.ready.values()) if routes is not None else []

    def all_ready(self) -> list[ServedVersion]:
        """Return every serving version, by model and then ascending."""
        return [version for name in self.serving_names() for version in reversed(self.ready_versions(name))]

    def offered_versions(self, name: str) -> list[int]:
        """Return the versions of a model that a request may name, ascending, evicted ones included."""
        routes = self._table.routes.get(name)
        return sorted({*(routes.ready if routes is not None else ()), *self._evicted(name)})

    def is_healthy(self, name: str, version: int | None) -> bool:
        """Return the health that the version reports; True for an evicted one. May take seconds."""
        try:
            serving = self.route(name, version)
        except (NotReady, UnknownModel):
            return True
        return serving.is_healthy()

    def _evicted(self, name: str) -> dict[int, ModelSpec]:
        """Return the evicted versions of a model that a request would load."""
        with self._table.reading() as models:
            model = models.get(name)
            return {} if model is None else {number: evicted.spec for number, evicted in model.on_demand().items()}

    def _no_route(self, name: str, version: int | None) -> EdgeServerError:
        """Return the error for a request without a route."""
        with self._table.reading() as models:
            model = models.get(name)
            if model is None or not (model.is_known or model.desired.reason):
                return UnknownModel(f"Request for unknown model: '{name}' is not found")
            rows = model.index_rows()
            retry_after_s = model.retry_after_s(version)
            is_replacing = model.is_replacing
            why = model.why_not_served()
        if version is not None and version in rows:
            state, reason = rows[version]
            tail = f": {reason}" if reason else f", it is {state}"
            return NotReady(
                f"Request for model '{name}' version {version} is not at ready state{tail}", retry_after_s=retry_after_s
            )
        if version is not None:
            return UnknownModel(f"Request for unknown model: '{name}' version {version} is not found")
        if is_replacing:
            return NotReady(f"model '{name}' is being replaced: its reload_policy unloads the old version first")
        if retry_after_s is not None:
            return NotReady(
                f"Request for model '{name}': no version is at ready state yet: {why}", retry_after_s=retry_after_s
            )
        tail = f": {why or 'they were unloaded, or its folder was removed'}"
        return UnknownModel(f"Request for unknown model: '{name}' has no available versions{tail}")
