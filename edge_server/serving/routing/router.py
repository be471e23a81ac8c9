"""Router: sends a request to the version that serves it now, or lets it wait until its model is loaded.

The routing table is read without a lock: it is replaced, never changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request, ResponseSink, SubmittedRequest
from edge_server.errors import Draining, EdgeServerError, NotReady, QueueFull, UnknownModel
from edge_server.serving.execution.version_interface import ServedVersion
from edge_server.serving.lifecycle.event_queue import ModelEventQueue
from edge_server.serving.lifecycle.limits import ManagerLimits
from edge_server.serving.lifecycle.model_state import ModelState
from edge_server.serving.routing.canary import CanaryTrial
from edge_server.serving.routing.pending_requests import PendingRequest, Submit
from edge_server.serving.routing.version_routes import RejectedCanary, Routes, plan_routes, ready_versions
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import MODEL_CANARY_FAILED

log = logging.getLogger(__name__)

_ROUTE_ATTEMPTS = 16
"""How often a request retries if its version is just being retired. One retry is normal."""

_MOST_PENDING = 1000
"""Most requests that may wait for the load of one model; each holds its inputs in memory."""


class Router:
    """Uses the manager's model states under its lock, `changed`, if the routing table is not enough.

    `demand` is called under the lock to load an evicted model.
    """

    def __init__(
        self,
        changed: threading.Condition,
        models: Mapping[str, ModelState],
        timer: Timer,
        limits: ManagerLimits,
        events: ModelEventQueue,
        demand: Callable[[ModelState], None],
    ) -> None:
        self._changed = changed
        self._models = models
        self._timer = timer
        self._limits = limits
        self._events = events
        self._demand = demand
        self._table: dict[str, Routes] = {}
        self.table_number = 0
        """Number of the present table. What was read from the table is valid while it has this number."""
        self._is_closed = False

    # -- requests, from any thread ----------------------------------------------------------------------------------

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float) -> SubmittedRequest:
        """Submit a request to the version that serves its model now; an evicted model is loaded first. After an error
        the request still belongs to the caller."""
        for _ in range(_ROUTE_ATTEMPTS):
            try:
                version = self.route_request(request.model, request.version)
            except (NotReady, UnknownModel):
                pending = self._wait_for_load(request, sink, lambda again: self.submit(again, sink, hold_us=0.0))
                if pending is None:
                    raise
                return pending
            try:
                return version.submit(request, sink, hold_us=hold_us)
            except Draining:
                # Retired between lookup and call: the new table has its successor, or none.
                continue
        raise NotReady(f"model '{request.model}' is being replaced faster than requests can follow")

    def route(self, name: str, version: int | None) -> ServedVersion:
        """Return the version for questions about a model (metadata, configuration). Takes no lock.

        Raises UnknownModel or NotReady with Triton's words.
        """
        routes = self._table.get(name)
        if routes is not None:
            found = routes.first if version is None else routes.ready.get(version)
            if found is not None:
                return found
        raise self._no_route(name, version)

    def route_request(self, name: str, version: int | None) -> ServedVersion:
        """Return the version for a request: as `route`, but a canary gets its share. Call once per request."""
        if version is None:
            routes = self._table.get(name)
            if routes is not None and routes.trial is not None:
                return routes.next()
        return self.route(name, version)

    def spec(self, name: str, version: int | None) -> ModelSpec:
        """Return the specification for a request, also of an evicted model. Raises as `route`."""
        try:
            return self.route(name, version).spec
        except (NotReady, UnknownModel):
            offered = self._out_of_memory(name)
            if version is None and offered:
                return offered[max(offered)]
            if version in offered:
                return offered[version]
            # It may have been loaded meanwhile.
            return self.route(name, version).spec

    # -- questions, from any thread ----------------------------------------------------------------------

    def routes_of(self, name: str) -> Routes | None:
        """Return the routes of a model, None if it has no serving version. Takes no lock."""
        return self._table.get(name)

    def serving_names(self) -> list[str]:
        """Return the models with a serving version."""
        return sorted(self._table)

    def ready_versions(self, name: str) -> list[ServedVersion]:
        """Return the serving versions of a model, highest first; empty when there is none."""
        routes = self._table.get(name)
        return list(routes.ready.values()) if routes is not None else []

    def all_ready(self) -> list[ServedVersion]:
        """Return every serving version, by model and then ascending."""
        return [version for name in sorted(self._table) for version in reversed(self.ready_versions(name))]

    def offered_versions(self, name: str) -> list[int]:
        """Return the versions of a model that a request may name, ascending, evicted ones included."""
        routes = self._table.get(name)
        return sorted({*(routes.ready if routes is not None else ()), *self._out_of_memory(name)})

    def is_healthy(self, name: str, version: int | None) -> bool:
        """Return the health that the version reports; True for an evicted one. May take seconds."""
        try:
            serving = self.route(name, version)
        except (NotReady, UnknownModel):
            return True
        return serving.is_healthy()

    # -- the table changes, under the lock --------------------------------------------------------------------------

    def publish(self, model: ModelState, without: ServedVersion | None = None) -> None:
        """Replace the routes of a model by those of its ready versions, except `without`."""
        name, rejected = model.name, model.rejected
        table = dict(self._table)
        ready = ready_versions(model.loaded, without)
        planned, model.rejected = plan_routes(ready, table.pop(name, None), rejected, self._on_canary_failed)
        if planned is not None:
            table[name] = planned
        self._table = table
        self.table_number += 1
        if model.rejected is not None and model.rejected is not rejected:
            canary = next(item for item in ready.values() if item.generation == model.rejected.generation)
            self._report_rejected(model, canary.version, model.rejected)

    def _on_canary_failed(self, trial: CanaryTrial, reason: str) -> None:
        """Send no more requests without a version to the canary of a trial. From any thread."""
        with self._changed:
            canary = trial.canary
            model = self._models[canary.spec.name]
            routes = self._table.get(model.name)
            if routes is not None and routes.trial is trial:
                log.error("model '%s' version %d is no canary any more: %s", model.name, canary.version, reason)
                self._table = {**self._table, model.name: Routes(routes.ready, routes.first)}
                self.table_number += 1
                trial.end()
                model.rejected = RejectedCanary(canary.generation, reason)
                self._report_rejected(model, canary.version, model.rejected)
        self._events.publish()

    def _report_rejected(self, model: ModelState, version: int, rejected: RejectedCanary) -> None:
        self._events.add(
            MODEL_CANARY_FAILED,
            model=model.name, version=version, generation=rejected.generation, reason=rejected.reason,
        )  # fmt: skip

    # -- requests that wait for a load ------------------------------------------------------------------------------

    def close(self) -> list[PendingRequest]:
        """Accept no more pending requests. Return the present ones. Under the lock."""
        self._is_closed = True
        return [item for model in self._models.values() for item in model.pending]

    def sort_pending(self, model: ModelState) -> tuple[list[PendingRequest], list[PendingRequest]]:
        """Return the pending requests that can be submitted now, and those that cannot succeed; others keep waiting.

        Under the lock, after a load.
        """
        routes = self._table.get(model.name)
        found, lost = [], []
        for pending in model.pending:
            version = pending.request.version
            if routes is not None and (version is None or version in routes.ready):
                found.append(pending)
            elif not model.may_wait_for(version):
                lost.append(pending)
        if model.loading is None and len(found) + len(lost) < len(model.pending):
            # The rest waits for evicted versions: load them.
            self._demand(model)
        return found, lost

    def answer_pending(self, model: ModelState, found: list[PendingRequest], lost: list[PendingRequest]) -> None:
        """Submit or fail pending requests. Until then they stay pending, so that the model is not evicted first."""
        for pending in found:
            pending.resume()
        for pending in lost:
            with self._changed:
                rows = model.index_rows()
                retry_after_s = model.retry_after_s(pending.request.version)
            number = max(rows) if pending.request.version is None and rows else pending.request.version
            words = rows.get(number or 0, ("UNAVAILABLE", ""))[1]
            why = f"model '{model.name}' could not be loaded for the request: {words or 'unloaded'}"
            pending.fail(NotReady(why, retry_after_s=retry_after_s))
        with self._changed:
            model.pending.difference_update(found, lost)

    def _wait_for_load(self, request: Request, sink: ResponseSink, submit: Submit) -> PendingRequest | None:
        """Let a request wait for an evicted model, and load the model. Returns at once.

        `submit` is called with the request, on a loading thread, once it can be. None when waiting would not help.
        Raises QueueFull when too many wait already.
        """
        pending = PendingRequest(request, sink, submit, self._forget)
        with self._changed:
            model = self._models.get(request.model)
            if model is None or self._is_closed or not self._may_load(model):
                return None
            routes = self._table.get(request.model)
            is_there = routes is not None and (request.version is None or request.version in routes.ready)
            if not is_there:
                if not model.may_wait_for(request.version):
                    return None
                if len(model.pending) >= _MOST_PENDING:
                    raise QueueFull(f"{_MOST_PENDING} requests wait for model '{model.name}' to be loaded already")
                model.pending.add(pending)
                self._demand(model)
        if is_there:
            # It was loaded meanwhile.
            pending.resume()
        else:
            pending.wait_until_loaded(self._timer, self._limits.on_demand_timeout_s)
        return pending

    def _may_load(self, model: ModelState) -> bool:
        """Return whether requests load the model, because it was or may be evicted. Under the lock."""
        limits = self._limits
        return bool(limits.max_resident_models or limits.idle_unload_s or model.is_demanded or model.resting())

    def _forget(self, pending: PendingRequest) -> None:
        with self._changed:
            model = self._models.get(pending.request.model)
            if model is not None:
                model.pending.discard(pending)

    def _out_of_memory(self, name: str) -> dict[int, ModelSpec]:
        """Return the evicted versions of a model that a request would load."""
        with self._changed:
            model = self._models.get(name)
            return {} if model is None else {number: cold.spec for number, cold in model.resting().items()}

    def _no_route(self, name: str, version: int | None) -> EdgeServerError:
        """Return the error for a request without a route."""
        with self._changed:
            model = self._models.get(name)
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
