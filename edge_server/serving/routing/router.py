"""Router: sends a request to the version that serves it now, or lets it wait until its model is loaded.

The routing table is read without a lock: it is replaced, never changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request, ResponseSink
from edge_server.errors import Draining, EdgeServerError, NotReady, QueueFull, UnknownModel
from edge_server.serving.lifecycle.event_queue import ModelEventQueue
from edge_server.serving.lifecycle.limits import ManagerLimits
from edge_server.serving.lifecycle.model_state import ModelState
from edge_server.serving.routing.canary import CanaryTrial
from edge_server.serving.routing.pending_requests import Cancellable, PendingRequest, Submit
from edge_server.serving.routing.version_interface import ServedVersion
from edge_server.serving.routing.version_routes import RejectedCanary, Routes, plan_routes, ready_versions
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import MODEL_CANARY_FAILED

log = logging.getLogger(__name__)

_ROUTE_ATTEMPTS = 16
"""How often a request that met a version just being retired looks for its successor. One is the rule."""

_MOST_PARKED = 1000
"""How many requests may wait for one model to be loaded; each holds its inputs in memory."""


class Router:
    """Sees the manager's records, and takes its lock, `changed`, for what the table does not tell.

    `demand` is called under the lock to have a model brought back into memory.
    """

    def __init__(
        self,
        changed: threading.Condition,
        models: Mapping[str, ModelState],
        timer: Timer,
        limits: ManagerLimits,
        news: ModelEventQueue,
        demand: Callable[[ModelState], None],
    ) -> None:
        self._changed = changed
        self._models = models
        self._timer = timer
        self._limits = limits
        self._news = news
        self._demand = demand
        self._table: dict[str, Routes] = {}
        self.table_number = 0
        """Counts the tables. A request memo's route is current while it names this number."""
        self._is_closed = False

    # -- requests, from any thread ----------------------------------------------------------------------------------

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float) -> Cancellable:
        """Have the model answer that the request names, whichever version of it serves now; one out of memory is
        brought back first. What it raises leaves the request with the caller."""
        for _ in range(_ROUTE_ATTEMPTS):
            # First, so that a table that is replaced meanwhile leaves a route that is not current.
            table_number = self.table_number
            try:
                version = self.route_request(request.model, request.version)
            except (NotReady, UnknownModel):
                parked = self._park(request, sink, lambda again: self.submit(again, sink, hold_us=0.0))
                if parked is None:
                    raise
                return parked
            if request.memo is not None and (request.version is not None or not self._has_trial(request.model)):
                request.memo.route = (table_number, version)
            try:
                return version.submit(request, sink, hold_us=hold_us)
            except Draining:
                # Retired between the look and the call: the routing table names its successor, or says there is none.
                continue
        raise NotReady(f"model '{request.model}' is being replaced faster than requests can follow")

    def route(self, name: str, version: int | None) -> ServedVersion:
        """Return the version that stands for a model: metadata, configuration, types. Takes no lock.

        Raises UnknownModel or NotReady with Triton's words.
        """
        routes = self._table.get(name)
        if routes is not None:
            found = routes.first if version is None else routes.ready.get(version)
            if found is not None:
                return found
        raise self._no_route(name, version)

    def route_request(self, name: str, version: int | None) -> ServedVersion:
        """Return the version that takes a request: as `route`, but a canary gets its share. Ask once a request."""
        if version is None:
            routes = self._table.get(name)
            if routes is not None and routes.trial is not None:
                return routes.next()
        return self.route(name, version)

    def _has_trial(self, name: str) -> bool:
        routes = self._table.get(name)
        return routes is not None and routes.trial is not None

    def spec(self, name: str, version: int | None) -> ModelSpec:
        """Return the specification that a request would meet, of a model out of memory too. Raises as `route`."""
        try:
            return self.route(name, version).spec
        except (NotReady, UnknownModel):
            offered = self._out_of_memory(name)
            if version is None and offered:
                return offered[max(offered)]
            if version in offered:
                return offered[version]
            # It may have come back between the two looks.
            return self.route(name, version).spec

    # -- what the table holds, from any thread ----------------------------------------------------------------------

    def routes_of(self, name: str) -> Routes | None:
        """Return the routes of a model, None when nothing of it serves. Takes no lock."""
        return self._table.get(name)

    def serving_names(self) -> list[str]:
        """Return the models of which something serves."""
        return sorted(self._table)

    def ready_versions(self, name: str) -> list[ServedVersion]:
        """Return the serving versions of a model, highest first; empty when there is none."""
        routes = self._table.get(name)
        return list(routes.ready.values()) if routes is not None else []

    def all_ready(self) -> list[ServedVersion]:
        """Return every serving version, by model and then ascending."""
        return [version for name in sorted(self._table) for version in reversed(self.ready_versions(name))]

    def offered_versions(self, name: str) -> list[int]:
        """Return the versions of a model that a request may ask for, ascending; those too that it would bring back."""
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
        """Replace the routes of a model by those of the versions that are ready now, `without` left out."""
        name, fallen = model.name, model.fallen
        table = dict(self._table)
        ready = ready_versions(model.living, without)
        planned, model.fallen = plan_routes(ready, table.pop(name, None), fallen, self._on_canary_failed)
        if planned is not None:
            table[name] = planned
        self._table = table
        self.table_number += 1
        if model.fallen is not None and model.fallen is not fallen:
            canary = next(item for item in ready.values() if item.generation == model.fallen.generation)
            self._note_fallen(model, canary.version, model.fallen)

    def _on_canary_failed(self, trial: CanaryTrial, reason: str) -> None:
        """Take the canary of a trial out of the requests that name no version. From any thread."""
        with self._changed:
            canary = trial.canary
            model = self._models[canary.spec.name]
            routes = self._table.get(model.name)
            if routes is not None and routes.trial is trial:
                log.error("model '%s' version %d is no canary any more: %s", model.name, canary.version, reason)
                self._table = {**self._table, model.name: Routes(routes.ready, routes.first)}
                self.table_number += 1
                trial.end()
                model.fallen = RejectedCanary(canary.generation, reason)
                self._note_fallen(model, canary.version, model.fallen)
        self._news.tell()

    def _note_fallen(self, model: ModelState, version: int, fallen: RejectedCanary) -> None:
        self._news.add(
            MODEL_CANARY_FAILED,
            model=model.name, version=version, generation=fallen.generation, reason=fallen.reason,
        )  # fmt: skip

    # -- requests that wait for a load ------------------------------------------------------------------------------

    def close(self) -> list[PendingRequest]:
        """Let no more requests wait, and return those that do. Under the lock."""
        self._is_closed = True
        return [item for model in self._models.values() for item in model.parked]

    def sort_parked(self, model: ModelState) -> tuple[list[PendingRequest], list[PendingRequest]]:
        """Return the parked requests that can be submitted now, and those that wait in vain; others go on waiting.

        Under the lock, after a load.
        """
        routes = self._table.get(model.name)
        found, lost = [], []
        for parked in model.parked:
            version = parked.request.version
            if routes is not None and (version is None or version in routes.ready):
                found.append(parked)
            elif not model.may_wait_for(version):
                lost.append(parked)
        if model.loading is None and len(found) + len(lost) < len(model.parked):
            # What is left waits for versions that rest: their turn has come.
            self._demand(model)
        return found, lost

    def answer_parked(self, model: ModelState, found: list[PendingRequest], lost: list[PendingRequest]) -> None:
        """Submit, or refuse. Until then they stay parked, so that the model is not evicted before they are served."""
        for parked in found:
            parked.resume()
        for parked in lost:
            with self._changed:
                rows = model.index_rows()
                retry_after_s = model.retry_after_s(parked.request.version)
            number = max(rows) if parked.request.version is None and rows else parked.request.version
            words = rows.get(number or 0, ("UNAVAILABLE", ""))[1]
            why = f"model '{model.name}' could not be loaded for the request: {words or 'unloaded'}"
            parked.fail(NotReady(why, retry_after_s=retry_after_s))
        with self._changed:
            model.parked.difference_update(found, lost)

    def _park(self, request: Request, sink: ResponseSink, submit: Submit) -> PendingRequest | None:
        """Let a request for a model that is out of memory wait for it, and have it loaded. Returns at once.

        `submit` is called with the request, on a loading thread, once it can be. None when waiting would not help.
        Raises QueueFull when too many wait already.
        """
        if not self._limits.may_evict:
            return None
        parked = PendingRequest(request, sink, submit, self._forget)
        with self._changed:
            model = self._models.get(request.model)
            if model is None or self._is_closed:
                return None
            routes = self._table.get(request.model)
            is_there = routes is not None and (request.version is None or request.version in routes.ready)
            if not is_there:
                if not model.may_wait_for(request.version):
                    return None
                if len(model.parked) >= _MOST_PARKED:
                    raise QueueFull(f"{_MOST_PARKED} requests wait for model '{model.name}' to be loaded already")
                model.parked.add(parked)
                self._demand(model)
        if is_there:
            # It came back between the look at the table and this one.
            parked.resume()
        else:
            parked.wait_until_loaded(self._timer, self._limits.on_demand_timeout_s)
        return parked

    def _forget(self, parked: PendingRequest) -> None:
        with self._changed:
            model = self._models.get(parked.request.model)
            if model is not None:
                model.parked.discard(parked)

    def _out_of_memory(self, name: str) -> dict[int, ModelSpec]:
        """Return the versions that a request would bring back, or waits for while they are on their way."""
        if not self._limits.may_evict:
            return {}
        with self._changed:
            model = self._models.get(name)
            return {} if model is None else {number: cold.spec for number, cold in model.resting().items()}

    def _no_route(self, name: str, version: int | None) -> EdgeServerError:
        """Return why no version takes such a request."""
        with self._changed:
            model = self._models.get(name)
            if model is None or not (model.is_known or model.wish.reason):
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
        tail = f": {why}" if why else ""
        return UnknownModel(f"Request for unknown model: '{name}' has no available versions{tail}")
