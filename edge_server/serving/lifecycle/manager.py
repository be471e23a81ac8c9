"""Model manager: owns the state of every model and moves it toward the desired state, one action per model at a time.

It takes the desired state and answers questions about the models; its `Reconciler` loads and unloads.
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
from edge_server.serving.execution.admission_control import ADMIT_ALL, AdmissionControl
from edge_server.serving.execution.gpu_state import Gpus
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.execution.version_interface import ServedVersion
from edge_server.serving.lifecycle.admission import AskRoom
from edge_server.serving.lifecycle.event_queue import ModelEventQueue
from edge_server.serving.lifecycle.eviction import idle
from edge_server.serving.lifecycle.gpu_failover import GpuFailover
from edge_server.serving.lifecycle.hang_watchdog import HangWatchdog
from edge_server.serving.lifecycle.limits import ManagerLimits
from edge_server.serving.lifecycle.load_log import LONG_LOAD_S, log_long_loads
from edge_server.serving.lifecycle.loader import Loader
from edge_server.serving.lifecycle.model_state import UNLOADED_IDLE, Failure, ModelState
from edge_server.serving.lifecycle.reconciler import Reconciler
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import MODEL_HUNG, PublishEvent

if TYPE_CHECKING:
    from edge_server.serving.cache.response_cache import ResponseCache

log = logging.getLogger(__name__)

_GRACE_S = 3.0
"""How long `close` waits for running batches and closing sessions after the drain time."""

_CHECKS = 4
"""Number of checks for idle models and hung runs within a timeout."""


class Manager:
    """Thread-safe. It has a `Reconciler`, which loads and unloads on its own threads, and a `GpuFailover`. `router`
    answers requests without a call to the manager."""

    def __init__(
        self,
        timer: Timer,
        settings: Mapping[str, Mapping[str, str]],
        *,
        load_threads: int = 2,
        publish: PublishEvent | None = None,
        limits: ManagerLimits | None = None,
        ask_room: AskRoom | None = None,
        admission_control: AdmissionControl = ADMIT_ALL,
        limiter: RateLimiter | None = None,
        cache: ResponseCache | None = None,
        gpus: Gpus | None = None,
        server: Callable[[], ServerCalls | None] = lambda: None,
        on_stranded: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`settings` are those of the backends, by name. `publish` is called with each model event.

        `limits` None: the defaults of ManagerLimits. `ask_room` None: there is always enough memory.
        `admission_control` is asked before a request runs. `limiter` None: instances run whenever they are free.
        `cache` None: no response cache. `gpus` None: no GPU. `server` returns the server functions for models.
        `on_stranded`: see `GpuFailover`.
        """
        self._timer = timer
        self._limits = limits or ManagerLimits()
        self._admission_control = admission_control
        gpus = gpus or Gpus()
        self._events = ModelEventQueue(publish)
        self._failover: GpuFailover
        self._loader = Loader(
            timer,
            settings,
            self._limits,
            admission_control,
            limiter,
            cache,
            members=self,
            server=server,
            gpus=gpus,
            on_gpu_fault=lambda version, fault, error: self._failover.handle_fault(version, fault, error),
        )
        self._reconciler = Reconciler(
            timer,
            self._loader,
            self._limits,
            self._events,
            load_threads=load_threads,
            ask_room=ask_room,
            on_loaded=lambda model, version: self._failover.on_loaded(model, version),
            on_load_failed=lambda model, action, cause: self._failover.on_load_failed(model, action, cause),
        )
        self._failover = GpuFailover(self._reconciler, gpus, self._events, on_stranded)
        self.lose_gpu = self._failover.lose_gpu
        self._changed, self._models = self._reconciler.changed, self._reconciler.models
        self._dependents = self._reconciler.dependents
        # Requests use the router directly.
        self.router = router = self._reconciler.router
        self.submit, self.spec, self.is_healthy = router.submit, router.spec, router.is_healthy
        self.route, self.route_request, self.routes_of = router.route, router.route_request, router.routes_of
        self.ready_versions, self.all_ready = router.ready_versions, router.all_ready
        self.offered_versions, self.serving_names = router.offered_versions, router.serving_names
        self._hangs = HangWatchdog(self._limits.hang_timeout_s)
        # A front end's own thread must not hang in a runtime.
        self.callers_may_run = self._limits.hang_timeout_s <= 0
        self._repeat(LONG_LOAD_S, self._log_long_loads)
        self._repeat(min(self._limits.idle_unload_s / _CHECKS or 1.0, 1.0), self._unload_idle)
        if self._limits.hang_timeout_s > 0:
            self._repeat(self._limits.hang_timeout_s / _CHECKS, self._check_for_hangs)

    # -- for ensembles ----------------------------------------------------------------------------------------

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
        """Return the member models of a desired ensemble; empty for any other model."""
        with self._changed:
            model = self._models.get(name)
            return [] if model is None else list(dict.fromkeys(member for member, _ in model.stated.members))

    def is_member(self, name: str) -> bool:
        """Return whether a desired ensemble has the model as a member."""
        with self._changed:
            return bool(self._dependents.of(name))

    # -- the desired ---------------------------------------------------------------------------------------------------

    def set_desired(self, desired: DesiredModel, *, retry: bool = False) -> None:
        """Replace the desired state of one model. `retry` forgets earlier failures, so that loads are tried again, and
        loads evicted versions.

        Raises Draining once `close` was called.
        """
        with self._changed:
            if self._reconciler.is_closed:
                raise Draining(f"Server is stopping, model '{desired.name}' can be neither loaded nor unloaded")
            self._replace_desired(desired, retry=retry)
        self._events.publish()

    def set_desired_state(self, desired: Iterable[DesiredModel], kept: Collection[str] = ()) -> None:
        """Replace the whole desired state, except for the models in `kept`. Models left out are unloaded. Does nothing
        after `close`.

        Models with the same object as before cost little; the watcher reuses the object for unchanged files.
        """
        by_name = {desired.name: desired for desired in desired if desired.name not in kept}
        with self._changed:
            if self._reconciler.is_closed:
                return
            whole = {name: desired for name, desired in by_name.items() if not self._is_stated(desired)}
            for name in self._models.keys() - by_name.keys() - set(kept):
                if self._models[name].stated != DesiredModel(name):
                    whole[name] = DesiredModel(name)
            order = members_first({name: [member for member, _ in desired.members] for name, desired in whole.items()})
            # Ensembles must see the desired state of all their members before any action starts.
            self._reconciler.proceeding.update(order)
            for name in order:
                self._replace_desired(whole[name])
            self._reconciler.proceeding.difference_update(order)
            for name in order:
                self._reconciler.proceed(self._models[name])
        self._events.publish()

    def renew(self, name: str, version: int, mark: str) -> bool:
        """Load a version again although its files have not changed, because something else that it depends on has:
        `mark` names it. Returns at once; False if the version is not desired. Later reloads keep the mark."""
        with self._changed:
            model = self._models.get(name)
            desired = None if model is None else model.stated.versions.get(version)
            if model is None or desired is None or self._reconciler.is_closed:
                return False
            model.renewals[version] = desired.fingerprint, mark
            self._reconciler.proceed(model)
        self._events.publish()
        return True

    def wait_settled(self, names: Iterable[str] | None = None, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to load for these models (None: all) and undesired versions accept no more
        requests.

        Does not wait for later retries. Returns False on time-out or if the manager is closed first.
        """
        chosen = None if names is None else list(names)
        left: list[ModelState] = []

        def is_settled() -> bool:
            # Called after every step of every model: most often the same model is still not settled.
            if not left or not left[0].is_unsettled:
                left[:] = self._unsettled(chosen)
            return not left

        with self._changed:
            self._changed.wait_for(lambda: is_settled() or self._reconciler.is_closed, timeout_s)
            has_settled = is_settled()
        self._events.publish()
        return has_settled

    def wait_engine_builds(self) -> None:
        """Wait until the only models left to load are those whose load builds an engine, and ensembles of them; or
        until the manager is closed."""
        with self._changed:
            desired = {name: model.desired for name, model in self._models.items()}
        members = {name: [member for member, _ in model.members] for name, model in desired.items()}
        building: set[str] = set()
        for name in members_first(members):
            if desired[name].builds_engine or building.intersection(members[name]):
                building.add(name)
        self.wait_settled(desired.keys() - building)

    # -- status -----------------------------------------------------------------------------------------

    def is_known(self, name: str) -> bool:
        return name in self._models

    def failure(self, name: str) -> str | None:
        """Return why a model does not serve all its desired versions, in Triton's words; None if it does."""
        with self._changed:
            model = self._models[name]
            if model.desired.reason:
                return model.desired.reason
            parts = [
                f"version {number} is at UNAVAILABLE state: {why.reason};" for number, why in model.failed().items()
            ]
            return " ".join(parts) or None

    def has_failures(self) -> bool:
        """Return whether any desired version is not served. A version that a request would load counts as served."""
        with self._changed:
            return any(
                bool(model.desired.reason) or bool(model.desired.versions.keys() - set(self.offered_versions(name)))
                for name, model in self._models.items()
            )

    def has_unserved(self, *, ever_served: bool) -> bool:
        """Return whether a desired model has no serving version and none that a request would load.

        `ever_served`: models that have never served since they were added to the desired state do not count.
        """
        with self._changed:
            return any(
                bool(model.desired.reason or model.desired.versions)
                and (model.has_served or not ever_served)
                and not self.offered_versions(name)
                for name, model in self._models.items()
            )

    def resume(self) -> None:
        """Start waiting requests, because admission control allows more than before. Returns at once."""
        for version in self.loaded_versions():
            version.resume()

    def loaded_versions(self) -> list[ServedVersion]:
        """Return all loaded versions, whatever their state."""
        with self._changed:
            return [item for model in self._models.values() for item in model.loaded]

    def in_flight(self) -> int:
        return sum(version.in_flight for version in self.loaded_versions())

    def index(self) -> list[IndexEntry]:
        """Return every version that lives, failed, or was unloaded, with its state and reason."""
        entries: list[IndexEntry] = []
        with self._changed:
            for name, model in sorted(self._models.items()):
                rows = model.index_rows()
                entries += [IndexEntry(name, str(version), *rows[version]) for version in sorted(rows)]
                if model.desired.reason:
                    entries.append(IndexEntry(name, "", "UNAVAILABLE", model.desired.reason))
        return entries

    def versions(self, name: str | None = None) -> list[VersionReport]:
        """Return the reports of all loaded, failed and unloaded versions, of one model or of all."""
        with self._changed:
            chosen = [(key, model) for key, model in sorted(self._models.items()) if name in (None, key)]
            return [report for key, model in chosen for report in model.reports(self.routes_of(key))]

    # -- close -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> bool:
        """Refuse new requests, drain for at most `timeout_s`, and close everything. Return False if requests were
        failed.

        A thread that hangs in a runtime cannot be stopped; it is left behind.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._reconciler.is_closed = True
            pending = self.router.close()
            for model in self._models.values():
                for failure in model.failures.values():
                    failure.forget_retry()
            self._reconciler.retire_unused(self._models)
            self._changed.notify_all()
        for item in pending:
            item.fail(Draining(f"Server is stopping, model '{item.request.model}' is not loaded any more"))
        self._events.publish()
        self._join(deadline)
        failed_count = sum(version.abandon_waiting() for version in self.loaded_versions())
        self._join(time.monotonic() + _GRACE_S)
        failed_count += sum(version.abandon_running() for version in self.loaded_versions())
        self._loader.pool.close()
        return failed_count == 0

    def _join(self, deadline: float) -> None:
        """Wait until all loads and drains have ended, including those that start meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reconciler.running, max(deadline - time.monotonic(), 0.0))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _unsettled(self, names: list[str] | None) -> list[ModelState]:
        """Return the last of these models with something left to load, if there is one: loads start in order."""
        models = reversed(self._models.values()) if names is None else map(self._models.get, names)
        return list(itertools.islice((model for model in models if model is not None and model.is_unsettled), 1))

    def _is_stated(self, desired: DesiredModel) -> bool:
        """Return whether the same desired state was set before, for a model that is no ensemble. Then nothing is to be
        done."""
        model = self._models.get(desired.name)
        return model is not None and model.stated is desired and not desired.members

    def _replace_desired(self, desired: DesiredModel, *, retry: bool = False) -> None:
        model = self._models.setdefault(desired.name, ModelState(desired))
        model.stated = desired
        self._dependents.add_members(desired.name, desired.members)
        model.desired = desired = self._dependents.effective(desired)
        if not desired.versions and not desired.reason:
            model.evicted.clear()
            model.has_served = False
        for version, failure in list(model.failures.items()):
            wanted = desired.versions.get(version)
            if retry or wanted is None or wanted.fingerprint != failure.fingerprint:
                failure.forget_retry()
                # There is no retry to come. If the same files become desired again, that is a new attempt.
                failure.is_due = failure.can_heal
            if retry or not (desired.versions or desired.reason):
                # The second: the model was removed. The index names it no longer.
                del model.failures[version]
        if retry and model.evicted:
            model.is_demanded = True
        self._reconciler.proceed(model)

    # -- periodic work, on the timer's thread -------------------------------------------------------------------

    def _repeat(self, period_s: float, work: Callable[[], None]) -> None:
        def again() -> None:
            if not self._reconciler.is_closed:
                work()
                self._repeat(period_s, work)

        self._timer.call_at(time.monotonic_ns() + int(period_s * 1e9), again)

    def _log_long_loads(self) -> None:
        with self._changed:
            log_long_loads(self._models.values(), LONG_LOAD_S)

    def _unload_idle(self) -> None:
        with self._changed:
            for model in idle(
                self._models.values(), time.monotonic_ns(), lambda model: model.idle_unload_s(self._limits)
            ):
                self._reconciler.evict(model, UNLOADED_IDLE)

    def work_share(self) -> float:
        """Return the part of its time that a model may compute now, as the governor decides."""
        return self._admission_control.share

    def set_keep_alive(self, name: str, seconds: float) -> None:
        """Set how long a model stays loaded without requests; math.inf: for ever. Holds until it is unloaded. Does
        nothing for an unknown model."""
        with self._changed:
            model = self._models.get(name)
            if model is not None:
                model.keep_alive_s = seconds

    def _check_for_hangs(self) -> None:
        versions = [item for item in self.loaded_versions() if item.state is VersionState.READY]
        for version, instance in self._hangs.find_hung(versions, time.monotonic_ns()):
            late = f"did not come back within --hang-timeout-secs={self._limits.hang_timeout_s:g}"
            reason = (
                f"instance {instance} of model '{version.name}' version {version.version} hangs: its runtime {late}"
            )
            if version.end_hung_run(instance, f"{late} and was killed"):
                log.error("%s; its process was killed", reason)
                self._events.add(
                    MODEL_HUNG,
                    model=version.name,
                    version=version.version,
                    generation=version.generation,
                    reason=reason,
                )
                self._events.publish()
            else:
                self._fail_hung(version, reason)

    def _fail_hung(self, version: ServedVersion, reason: str) -> None:
        """Fail a version that hangs. It is not loaded again: the server is not ready from now on, and systemd should
        restart it."""
        with self._changed:
            model = self._models[version.name]
            if version.state is not VersionState.READY or self._reconciler.is_closed:
                return
            log.error("%s", reason)
            # Before `fail`, whose thread publishes the event.
            self._events.add(
                MODEL_HUNG, model=model.name, version=version.version, generation=version.generation, reason=reason
            )
            self._reconciler.fail(model, version, reason)
            model.failures[version.version] = Failure(version.fingerprint, SessionLost(reason), version.generation)
            self._reconciler.proceed(model)
