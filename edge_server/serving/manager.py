"""The manager moves reality toward the latest wish, one action at a time for each model, and owns the routing table."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from edge_server.backends.base import ServerCalls
from edge_server.core.ensemble import members_first
from edge_server.core.lifecycle import ModelWish, VersionState
from edge_server.core.message import Request, ResponseSink
from edge_server.core.model import ModelSpec
from edge_server.core.view import IndexEntry, VersionReport
from edge_server.errors import Draining, EdgeServerError, MemberMissing, NotReady, QueueFull, SessionLost, UnknownModel
from edge_server.serving.gate import OPEN_GATE, Gate
from edge_server.serving.gpu_keeper import GpuKeeper
from edge_server.serving.hang import HangWatch
from edge_server.serving.limiter import RateLimiter
from edge_server.serving.limits import Limits
from edge_server.serving.load_log import LONG_LOAD_S, log_long_loads
from edge_server.serving.mover import Announce, AskRoom
from edge_server.serving.parked import Cancellable, ParkedRequest, Submit
from edge_server.serving.record import UNLOADED_IDLE, Failure, ModelRecord
from edge_server.serving.residency import idle
from edge_server.serving.routes import Routes
from edge_server.serving.served import ServedVersion
from edge_server.serving.timer import Timer
from edge_server.telemetry.events import MODEL_HUNG

if TYPE_CHECKING:
    from edge_server.serving.cache.cache import ResponseCache

log = logging.getLogger(__name__)

_GRACE_S = 3.0
"""How long batches that run, and sessions that close, are still waited for when the time to drain is over."""

_ROUTE_ATTEMPTS = 16
"""How often a request that met a version just being retired looks for its successor. One is the rule."""

_MOST_PARKED = 1000
"""How many requests may wait for one model to be loaded; each holds its inputs in memory."""

_LOOKS = 4
"""How many times within a time-out idle models and hung runs are looked for."""


class Manager(GpuKeeper):
    """Thread-safe. See Mover for what happens on which thread.

    `limits` None: the defaults of Limits. `ask_room` None: there is always memory enough. `gate` is asked before a
    request is taken up; `limiter` None: instances run whenever they are free; `cache` None: nothing is cached.
    """

    def __init__(
        self,
        timer: Timer,
        settings: Mapping[str, Mapping[str, str]],
        *,
        load_threads: int = 2,
        announce: Announce | None = None,
        limits: Limits | None = None,
        ask_room: AskRoom | None = None,
        gate: Gate = OPEN_GATE,
        limiter: RateLimiter | None = None,
        cache: ResponseCache | None = None,
    ) -> None:
        super().__init__(
            timer,
            settings,
            load_threads=load_threads,
            announce=announce,
            limits=limits,
            ask_room=ask_room,
            gate=gate,
            limiter=limiter,
            cache=cache,
        )
        self._loader.members = self
        self._loader.on_gpu_fault = self.note_gpu_fault
        self._hangs = HangWatch(self._limits.hang_timeout_s)
        # A caller whose own thread hangs in a runtime could not be told so.
        self.callers_may_run = self._limits.hang_timeout_s <= 0
        self._repeat(LONG_LOAD_S, self._tell_of_long_loads)
        if self._limits.idle_unload_s > 0:
            self._repeat(self._limits.idle_unload_s / _LOOKS, self._unload_idle)
        if self._limits.hang_timeout_s > 0:
            self._repeat(self._limits.hang_timeout_s / _LOOKS, self._look_for_hangs)

    def let_models_call(self, server: ServerCalls) -> None:
        """Hand models loaded from now on what they may ask of the server."""
        self._loader.server = server

    # -- what ensembles ask ----------------------------------------------------------------------------------------

    def member_spec(self, name: str, version: int | None) -> ModelSpec:
        """Return what a member of an ensemble promises. Raises MemberMissing, saying why it does not serve."""
        with self._changed:
            lack = self._dependents.lacks(name, version)
        if lack:
            raise MemberMissing(lack)
        try:
            return self.spec(name, version)
        except EdgeServerError as error:
            raise MemberMissing(error.message) from error

    def submit(self, request: Request, sink: ResponseSink, *, may_run: bool) -> Cancellable:
        """Have the model answer that the request names, whichever version of it serves now; one out of memory is
        brought back first. What it raises leaves the request with the caller."""
        for _ in range(_ROUTE_ATTEMPTS):
            try:
                version = self.route_request(request.model, request.version)
            except (NotReady, UnknownModel):
                parked = self.park(request, sink, lambda again: self.submit(again, sink, may_run=False))
                if parked is None:
                    raise
                return parked
            try:
                return version.submit(request, sink, may_run=may_run)
            except Draining:
                # Retired between the look and the call: the routing table names its successor, or says there is none.
                continue
        raise NotReady(f"model '{request.model}' is being replaced faster than requests can follow")

    def members_of(self, name: str) -> list[str]:
        """Return the models that a wished-for ensemble is made of; none of any other model."""
        with self._changed:
            model = self._models.get(name)
            return [] if model is None else list(dict.fromkeys(member for member, _ in model.stated.members))

    def is_member(self, name: str) -> bool:
        """Return whether an ensemble is wished for that the model is a member of."""
        with self._changed:
            return bool(self._dependents.of(name))

    # -- the wish ---------------------------------------------------------------------------------------------------

    def wish_for(self, wish: ModelWish, *, retry: bool = False) -> None:
        """Replace the wish for one model. `retry` forgets earlier failures, so that they are tried again, and brings
        back what was taken out of memory.

        Raises Draining once `close` was called.
        """
        with self._changed:
            if self._is_closed:
                raise Draining(f"Server is stopping, model '{wish.name}' can be neither loaded nor unloaded")
            self._replace_wish(wish, retry=retry)
        self._tell_news()

    def wish_for_all(self, wishes: Iterable[ModelWish]) -> None:
        """Replace the whole wish: models that it leaves out are unloaded. Does nothing once `close` was called."""
        by_name = {wish.name: wish for wish in wishes}
        with self._changed:
            if self._is_closed:
                return
            gone = {name: ModelWish(name) for name in self._models if name not in by_name}
            whole = by_name | gone
            order = members_first({name: [member for member, _ in wish.members] for name, wish in whole.items()})
            # Ensembles see the wishes for all their members before anything is done about them.
            self._proceeding.update(order)
            for name in order:
                self._replace_wish(whole[name])
            self._proceeding.difference_update(order)
            for name in order:
                self._proceed(self._models[name])
        self._tell_news()

    def renew(self, name: str, version: int, mark: str) -> bool:
        """Load a version anew although its files are as they were: what else it is made from has changed, for which
        `mark` stands. Returns at once; false when the version is not wished for. Ordinary reloads carry the mark on."""
        with self._changed:
            model = self._models.get(name)
            wish = None if model is None else model.stated.versions.get(version)
            if model is None or wish is None or self._is_closed:
                return False
            model.renewals[version] = wish.fingerprint, mark
            self._proceed(model)
        self._tell_news()
        return True

    def wait_settled(self, names: Iterable[str] | None = None, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to load for these models (None: all) and what is not wished for takes nothing new.

        A load that is to be tried again later is not waited for. False on time-out, or when the manager is closed
        before that.
        """
        chosen = None if names is None else list(names)
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(chosen) or self._is_closed, timeout_s)
            is_settled = self._is_settled(chosen)
        self._tell_news()
        return is_settled

    def failure(self, name: str) -> str | None:
        """Return why not all of the wish for a model is served, in Triton's words, or None when all of it is."""
        with self._changed:
            model = self._models[name]
            if model.wish.reason:
                return model.wish.reason
            parts = [
                f"version {number} is at UNAVAILABLE state: {why.reason};" for number, why in model.failed().items()
            ]
            return " ".join(parts) or None

    # -- routing ----------------------------------------------------------------------------------------------------

    def route(self, name: str, version: int | None) -> ServedVersion:
        """Return the version that stands for a model: metadata, configuration, types. Takes no lock: the table is
        replaced, never changed.

        Raises UnknownModel or NotReady with Triton's words.
        """
        routes = self._routes.get(name)
        if routes is not None:
            found = routes.first if version is None else routes.ready.get(version)
            if found is not None:
                return found
        raise self._no_route(name, version)

    def route_request(self, name: str, version: int | None) -> ServedVersion:
        """Return the version that takes a request: as `route`, but a canary gets its share. Ask once a request."""
        if version is None:
            routes = self._routes.get(name)
            if routes is not None and routes.trial is not None:
                return routes.next()
        return self.route(name, version)

    def routes_of(self, name: str) -> Routes | None:
        """Return the routing table of a model, None when nothing of it serves. Takes no lock."""
        return self._routes.get(name)

    def serving_names(self) -> list[str]:
        """Return the models of which something serves."""
        return sorted(self._routes)

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
            raise

    def is_healthy(self, name: str, version: int | None) -> bool:
        """Return what the version itself says of its health; True for one that is out of memory. May take seconds."""
        try:
            serving = self.route(name, version)
        except (NotReady, UnknownModel):
            return True
        return serving.is_healthy()

    def offered_versions(self, name: str) -> list[int]:
        """Return the versions of a model that a request may ask for, ascending; those too that it would bring back."""
        routes = self._routes.get(name)
        return sorted({*(routes.ready if routes is not None else ()), *self._out_of_memory(name)})

    def park(self, request: Request, sink: ResponseSink, submit: Submit) -> ParkedRequest | None:
        """Let a request for a model that is out of memory wait for it, and have it loaded. Returns at once.

        `submit` is called with the request, on a loading thread, once it can be. None when waiting would not help.
        Raises QueueFull when too many wait already.
        """
        if not self._limits.may_evict:
            return None
        parked = ParkedRequest(request, sink, submit, self._forget)
        with self._changed:
            model = self._models.get(request.model)
            if model is None or self._is_closed:
                return None
            routes = self._routes.get(request.model)
            is_there = routes is not None and (request.version is None or request.version in routes.ready)
            if not is_there:
                if not model.may_wait_for(request.version):
                    return None
                if len(model.parked) >= _MOST_PARKED:
                    raise QueueFull(f"{_MOST_PARKED} requests wait for model '{model.name}' to be loaded already")
                model.parked.add(parked)
                model.is_demanded = True
                self._proceed(model)
        if is_there:
            # It came back between the look at the table and this one.
            parked.resume()
        else:
            parked.wait_until_loaded(self._timer, self._limits.on_demand_timeout_s)
        return parked

    def ready_versions(self, name: str) -> list[ServedVersion]:
        """Return the serving versions of a model, highest first; empty when there is none."""
        routes = self._routes.get(name)
        return list(routes.ready.values()) if routes is not None else []

    def all_ready(self) -> list[ServedVersion]:
        return [version for name in sorted(self._routes) for version in reversed(self.ready_versions(name))]

    def is_known(self, name: str) -> bool:
        return name in self._models

    def has_failures(self) -> bool:
        """Return whether anything that is wished for is not served. What a request would bring back counts as such."""
        with self._changed:
            return any(
                bool(model.wish.reason) or bool(model.wish.versions.keys() - set(self.offered_versions(name)))
                for name, model in self._models.items()
            )

    def look_again(self) -> None:
        """Go on with what was held back: the gate allows more than before. Returns at once."""
        for version in self._living():
            version.look_again()

    def living(self) -> list[ServedVersion]:
        """Return the versions that hold a runtime, whatever their state."""
        return self._living()

    def in_flight(self) -> int:
        return sum(version.in_flight for version in self._living())

    def index(self) -> list[IndexEntry]:
        """Return every version that lives, failed, or was unloaded, with its state and reason."""
        entries: list[IndexEntry] = []
        with self._changed:
            for name, model in sorted(self._models.items()):
                rows = model.index_rows()
                entries += [IndexEntry(name, str(version), *rows[version]) for version in sorted(rows)]
                if model.wish.reason:
                    entries.append(IndexEntry(name, "", "UNAVAILABLE", model.wish.reason))
        return entries

    def versions(self, name: str | None = None) -> list[VersionReport]:
        """Return what is known of every version that lives, failed, or was unloaded; of one model or of all."""
        with self._changed:
            chosen = [(key, model) for key, model in sorted(self._models.items()) if name in (None, key)]
            return [report for key, model in chosen for report in model.reports(self._routes.get(key))]

    # -- ending -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> bool:
        """Refuse new requests, drain for at most `timeout_s`, and close everything. False when requests were failed.

        What hangs in its runtime cannot be ended: its thread is left, and the process ends around it.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            parked = [item for model in self._models.values() for item in model.parked]
            for model in self._models.values():
                for failure in model.failures.values():
                    failure.forget_retry()
            self._retire_unused()
            self._changed.notify_all()
        for item in parked:
            item.fail(Draining(f"Server is stopping, model '{item.request.model}' is not loaded any more"))
        self._tell_news()
        self._join(deadline)
        failed_count = sum(version.abandon_waiting() for version in self._living())
        self._join(time.monotonic() + _GRACE_S)
        failed_count += sum(version.abandon_running() for version in self._living())
        return failed_count == 0

    def _living(self) -> list[ServedVersion]:
        with self._changed:
            return [item for model in self._models.values() for item in model.living]

    def _join(self, deadline: float) -> None:
        """Wait for loads and drains to end, those included that begin meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads, max(deadline - time.monotonic(), 0.0))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _is_settled(self, names: list[str] | None) -> bool:
        return not any(
            model.loading or model.awaits for name, model in self._models.items() if names is None or name in names
        )

    def _replace_wish(self, wish: ModelWish, *, retry: bool = False) -> None:
        model = self._models.setdefault(wish.name, ModelRecord(wish))
        model.stated = wish
        model.wish = wish = self._dependents.effective(wish)
        if not wish.versions and not wish.reason:
            model.cold.clear()
        for version, failure in list(model.failures.items()):
            wished = wish.versions.get(version)
            if retry or wished is None or wished.fingerprint != failure.fingerprint:
                failure.forget_retry()
            if retry:
                del model.failures[version]
        if retry and model.cold:
            model.is_demanded = True
        self._proceed(model)

    def _out_of_memory(self, name: str) -> dict[int, ModelSpec]:
        """Return the versions that a request would bring back, or waits for while they are on their way."""
        if not self._limits.may_evict:
            return {}
        with self._changed:
            model = self._models.get(name)
            return {} if model is None else {number: cold.spec for number, cold in model.resting().items()}

    def _no_route(self, name: str, version: int | None) -> EdgeServerError:
        with self._changed:
            model = self._models.get(name)
            if model is None or not model.is_known:
                return UnknownModel(f"Request for unknown model: '{name}' is not found")
            rows = model.index_rows()
            is_replacing = model.is_replacing
        if version is None and is_replacing:
            return NotReady(f"model '{name}' is being replaced: its reload_policy unloads the old version first")
        if version is None:
            return UnknownModel(f"Request for unknown model: '{name}' has no available versions")
        if version not in rows:
            return UnknownModel(f"Request for unknown model: '{name}' version {version} is not found")
        state, reason = rows[version]
        tail = f": {reason}" if reason else f", it is {state}"
        return NotReady(f"Request for model '{name}' version {version} is not at ready state{tail}")

    def _forget(self, parked: ParkedRequest) -> None:
        with self._changed:
            model = self._models.get(parked.request.model)
            if model is not None:
                model.parked.discard(parked)

    # -- from time to time, on the timer's thread -------------------------------------------------------------------

    def _repeat(self, period_s: float, work: Callable[[], None]) -> None:
        def again() -> None:
            if not self._is_closed:
                work()
                self._repeat(period_s, work)

        self._timer.call_at(time.monotonic_ns() + int(period_s * 1e9), again)

    def _tell_of_long_loads(self) -> None:
        with self._changed:
            log_long_loads(self._models.values(), LONG_LOAD_S)

    def _unload_idle(self) -> None:
        with self._changed:
            for model in idle(self._models.values(), time.monotonic_ns(), self._limits.idle_unload_s):
                self._evict(model, UNLOADED_IDLE)

    def _look_for_hangs(self) -> None:
        versions = [item for item in self._living() if item.state is VersionState.READY]
        for version, instance in self._hangs.look(versions, time.monotonic_ns()):
            limit_s = self._limits.hang_timeout_s
            self._give_up(
                version,
                f"instance {instance} of model '{version.name}' version {version.version} hangs: its runtime did not "
                f"come back within --hang-timeout-secs={limit_s:g}",
            )

    def _give_up(self, version: ServedVersion, reason: str) -> None:
        """Fail a version that hangs. It is not loaded again by itself: the server is not ready from now on, and who
        watches over the process should start a new one."""
        with self._changed:
            model = self._models[version.name]
            if version.state is not VersionState.READY or self._is_closed:
                return
            log.error("%s", reason)
            self._publish_routes(model, without=version)
            version.stop_for_good(reason)
            model.failures[version.version] = Failure(version.fingerprint, SessionLost(reason), version.generation)
            self._proceed(model)
            self._tell(MODEL_HUNG, model, version.version, version.generation, reason=reason)
            # Not one of the threads that `close` waits for: it may never end.
            threading.Thread(target=self._bury, args=(model, version), name="edge-bury", daemon=True).start()
