"""Model manager: owns the state of every model and moves it toward the desired state, one action per model at a time.

This is the half that is told what to serve, and asked what became of it; `mover` is the half that acts.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from edge_server.backends.base import ServerCalls
from edge_server.core.ensemble_graph import members_first
from edge_server.core.model_spec import ModelSpec
from edge_server.core.status_reports import IndexEntry, VersionReport
from edge_server.core.version_lifecycle import DesiredModel, VersionState
from edge_server.errors import Draining, EdgeServerError, MemberMissing, SessionLost
from edge_server.serving.execution.admission_control import OPEN_GATE, AdmissionControl
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.lifecycle.admission import AskRoom
from edge_server.serving.lifecycle.event_queue import PublishModelEvent
from edge_server.serving.lifecycle.eviction import idle
from edge_server.serving.lifecycle.gpu_failover import GpuFailover
from edge_server.serving.lifecycle.hang_watchdog import HangWatchdog
from edge_server.serving.lifecycle.limits import ManagerLimits
from edge_server.serving.lifecycle.load_log import LONG_LOAD_S, log_long_loads
from edge_server.serving.lifecycle.model_state import UNLOADED_IDLE, Failure, ModelState
from edge_server.serving.routing.version_interface import ServedVersion
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import MODEL_HUNG

if TYPE_CHECKING:
    from edge_server.serving.cache.response_cache import ResponseCache

log = logging.getLogger(__name__)

_GRACE_S = 3.0
"""How long batches that run, and sessions that close, are still waited for when the time to drain is over."""

_LOOKS = 4
"""How many times within a time-out idle models and hung runs are looked for."""


class Manager(GpuFailover):
    """Thread-safe. See Mover for what happens on which thread, Router for `submit`, `route` and what else requests ask.

    `limits` None: the defaults of Limits. `ask_room` None: there is always memory enough. `gate` is asked before a
    request is taken up; `limiter` None: instances run whenever they are free; `cache` None: nothing is cached.
    """

    def __init__(
        self,
        timer: Timer,
        settings: Mapping[str, Mapping[str, str]],
        *,
        load_threads: int = 2,
        announce: PublishModelEvent | None = None,
        limits: ManagerLimits | None = None,
        ask_room: AskRoom | None = None,
        gate: AdmissionControl = OPEN_GATE,
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
        # What requests ask the router answers itself, with no call in between.
        self.router = router = self._router
        self.submit, self.spec, self.is_healthy = router.submit, router.spec, router.is_healthy
        self.route, self.route_request, self.routes_of = router.route, router.route_request, router.routes_of
        self.ready_versions, self.all_ready = router.ready_versions, router.all_ready
        self.offered_versions, self.serving_names = router.offered_versions, router.serving_names
        self._loader.members = self
        self._loader.on_gpu_fault = self.note_gpu_fault
        self._hangs = HangWatchdog(self._limits.hang_timeout_s)
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
        """Return the specification of an ensemble's member. Raises MemberMissing with the reason why it does not
        serve."""
        with self._changed:
            lack = self._dependents.lacks(name, version)
        if lack:
            raise MemberMissing(lack)
        try:
            return self.spec(name, version)
        except EdgeServerError as error:
            raise MemberMissing(error.message) from error

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

    def wish_for(self, wish: DesiredModel, *, retry: bool = False) -> None:
        """Replace the wish for one model. `retry` forgets earlier failures, so that they are tried again, and brings
        back what was taken out of memory.

        Raises Draining once `close` was called.
        """
        with self._changed:
            if self._is_closed:
                raise Draining(f"Server is stopping, model '{wish.name}' can be neither loaded nor unloaded")
            self._replace_wish(wish, retry=retry)
        self._news.tell()

    def wish_for_all(self, wishes: Iterable[DesiredModel], kept: Collection[str] = ()) -> None:
        """Replace the whole wish, but for that for `kept`: models that it leaves out are unloaded. Does nothing once
        `close` was called.

        Costs little for models whose wish is the same object as before, as the watcher gives it for unchanged files.
        """
        by_name = {wish.name: wish for wish in wishes if wish.name not in kept}
        with self._changed:
            if self._is_closed:
                return
            whole = {name: wish for name, wish in by_name.items() if not self._is_stated(wish)}
            for name in self._models.keys() - by_name.keys() - set(kept):
                if self._models[name].stated != DesiredModel(name):
                    whole[name] = DesiredModel(name)
            order = members_first({name: [member for member, _ in wish.members] for name, wish in whole.items()})
            # Ensembles see the wishes for all their members before anything is done about them.
            self._proceeding.update(order)
            for name in order:
                self._replace_wish(whole[name])
            self._proceeding.difference_update(order)
            for name in order:
                self._proceed(self._models[name])
        self._news.tell()

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
        self._news.tell()
        return True

    def wait_settled(self, names: Iterable[str] | None = None, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to load for these models (None: all) and what is not wished for takes nothing new.

        A load that is to be tried again later is not waited for. False on time-out, or when the manager is closed
        before that.
        """
        chosen = None if names is None else list(names)
        left: list[ModelState] = []

        def is_settled() -> bool:
            # Asked after every step of every model: most often the one that was not settled before still is not.
            if not left or not left[0].is_unsettled:
                left[:] = self._unsettled(chosen)
            return not left

        with self._changed:
            self._changed.wait_for(lambda: is_settled() or self._is_closed, timeout_s)
            has_settled = is_settled()
        self._news.tell()
        return has_settled

    # -- what became of it -----------------------------------------------------------------------------------------

    def is_known(self, name: str) -> bool:
        return name in self._models

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

    def has_failures(self) -> bool:
        """Return whether anything that is wished for is not served. What a request would bring back counts as such."""
        with self._changed:
            return any(
                bool(model.wish.reason) or bool(model.wish.versions.keys() - set(self.offered_versions(name)))
                for name, model in self._models.items()
            )

    def has_unserved(self, *, ever_served: bool) -> bool:
        """Return whether no version serves of a model that should be served, or would be loaded by a request.

        `ever_served`: models of which nothing has served since they were added to the desired state do not count.
        """
        with self._changed:
            return any(
                bool(model.wish.reason or model.wish.versions)
                and (model.has_served or not ever_served)
                and not self.offered_versions(name)
                for name, model in self._models.items()
            )

    def look_again(self) -> None:
        """Go on with what was held back: the gate allows more than before. Returns at once."""
        for version in self.living():
            version.look_again()

    def living(self) -> list[ServedVersion]:
        """Return the versions that hold a runtime, whatever their state."""
        with self._changed:
            return [item for model in self._models.values() for item in model.living]

    def in_flight(self) -> int:
        return sum(version.in_flight for version in self.living())

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
        """Return the reports of all loaded, failed and unloaded versions, of one model or of all."""
        with self._changed:
            chosen = [(key, model) for key, model in sorted(self._models.items()) if name in (None, key)]
            return [report for key, model in chosen for report in model.reports(self.routes_of(key))]

    # -- ending -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> bool:
        """Refuse new requests, drain for at most `timeout_s`, and close everything. False when requests were failed.

        What hangs in its runtime cannot be ended: its thread is left, and the process ends around it.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            parked = self._router.close()
            for model in self._models.values():
                for failure in model.failures.values():
                    failure.forget_retry()
            self._retire_unused(self._models)
            self._changed.notify_all()
        for item in parked:
            item.fail(Draining(f"Server is stopping, model '{item.request.model}' is not loaded any more"))
        self._news.tell()
        self._join(deadline)
        failed_count = sum(version.abandon_waiting() for version in self.living())
        self._join(time.monotonic() + _GRACE_S)
        failed_count += sum(version.abandon_running() for version in self.living())
        self._loader.pool.close()
        return failed_count == 0

    def _join(self, deadline: float) -> None:
        """Wait for loads and drains to end, those included that begin meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads, max(deadline - time.monotonic(), 0.0))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _unsettled(self, names: list[str] | None) -> list[ModelState]:
        """Return the last of these models that has something left to load, if any does: loads come in their order."""
        models = reversed(self._models.values()) if names is None else map(self._models.get, names)
        return list(itertools.islice((model for model in models if model is not None and model.is_unsettled), 1))

    def _is_stated(self, wish: DesiredModel) -> bool:
        """Return whether this wish, of a model that is no ensemble, was stated before: nothing is left to be done."""
        model = self._models.get(wish.name)
        return model is not None and model.stated is wish and not wish.members

    def _replace_wish(self, wish: DesiredModel, *, retry: bool = False) -> None:
        model = self._models.setdefault(wish.name, ModelState(wish))
        model.stated = wish
        self._dependents.note_members(wish.name, wish.members)
        model.wish = wish = self._dependents.effective(wish)
        if not wish.versions and not wish.reason:
            model.cold.clear()
            model.has_served = False
        for version, failure in list(model.failures.items()):
            wished = wish.versions.get(version)
            if retry or wished is None or wished.fingerprint != failure.fingerprint:
                failure.forget_retry()
                # Nothing tries it again now; should these files be wished for once more, that is a new try.
                failure.is_due = failure.can_heal
            if retry:
                del model.failures[version]
        if retry and model.cold:
            model.is_demanded = True
        self._proceed(model)

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
        versions = [item for item in self.living() if item.state is VersionState.READY]
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
            self._router.publish(model, without=version)
            version.stop_for_good(reason)
            model.failures[version.version] = Failure(version.fingerprint, SessionLost(reason), version.generation)
            self._proceed(model)
            self._news.add(
                MODEL_HUNG, model=model.name, version=version.version, generation=version.generation, reason=reason
            )
            # Not one of the threads that `close` waits for: it may never end.
            self._start("edge-bury", lambda: self._bury(model, version))
