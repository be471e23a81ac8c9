"""Reconciler: carries out the loads and unloads that move models toward the desired state, on a few short-lived
threads.

`manager` owns it and sets the desired state. `admission` frees memory for a load, `router` sends requests to the
serving versions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from edge_server.core.version_lifecycle import LoadAction, VersionState, next_action, retry_delay_s
from edge_server.errors import ChangedWhileLoading, EdgeServerError, LoadError
from edge_server.serving.execution.version_interface import ServedVersion
from edge_server.serving.lifecycle.admission import AskRoom, LoadAdmission, PendingLoad, Unloading
from edge_server.serving.lifecycle.ensemble_dependencies import Dependents, own_fingerprint, steps_of
from edge_server.serving.lifecycle.event_queue import ModelEventQueue
from edge_server.serving.lifecycle.limits import ManagerLimits
from edge_server.serving.lifecycle.load_log import log_failure, log_ready
from edge_server.serving.lifecycle.loader import Loader, LoaderThreads, LoadSlot, LoadSlots
from edge_server.serving.lifecycle.model_state import EvictedVersion, Failure, ModelState, Retired
from edge_server.serving.routing.router import Router
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import (
    MODEL_DRAINING,
    MODEL_EVICTED,
    MODEL_FAILED,
    MODEL_LOADING,
    MODEL_READY,
    MODEL_UNLOADED,
)

log = logging.getLogger(__name__)

_THREAD_AGAIN_NS = 1_000_000_000
"""Interval at which a thread is asked for again that the system refused."""

_SLOT_PATIENCE_S = 60.0
"""A load that takes longer does not block other loads any more."""

_CLOSE_COUNT = 8
_CLOSE_PATIENCE_S = 1.0
"""Number of versions that are closed at a time, and the time after which a closing does not block others any more."""


class Reconciler:
    """`load_threads` loads and a few closings run at a time; one that takes long or hangs does not count. A draining
    version has no thread. One lock guards all model states; it is never held during a load, a close or an event."""

    def __init__(
        self,
        timer: Timer,
        loader: Loader,
        limits: ManagerLimits,
        events: ModelEventQueue,
        *,
        load_threads: int,
        ask_room: AskRoom | None,
        on_loaded: Callable[[ModelState, ServedVersion], None],
        on_load_failed: Callable[[ModelState, LoadAction, EdgeServerError], None],
    ) -> None:
        """`on_loaded` and `on_load_failed` are called under the lock, after the model's state has changed."""
        self._timer = timer
        self._limits = limits
        self._loader = loader
        self._events = events
        self._on_loaded = on_loaded
        self._on_load_failed = on_load_failed
        self.changed = threading.Condition()
        """The lock of all model states, notified after each change."""
        self.models: dict[str, ModelState] = {}
        self.dependents = Dependents(self.models)
        self.proceeding: set[str] = set()
        """Models whose next actions are being started; under the lock."""
        self._lacking_memory: set[str] = set()
        """Models whose load failed for lack of memory; may contain others too."""
        self._slots = LoadSlots(load_threads, timer, limits.hang_timeout_s or _SLOT_PATIENCE_S)
        self._loads = LoaderThreads(self._slots, lambda work: self.start_thread("edge-load", work))
        self._closings = LoaderThreads(
            LoadSlots(_CLOSE_COUNT, timer, _CLOSE_PATIENCE_S), lambda work: self.start_thread("edge-drain", work)
        )
        self.running: set[object] = set()
        """One mark for each load and drain in progress."""
        self.is_closed = False
        self.router = Router(self.changed, self.models, timer, limits, events, self._demand)
        unloading = Unloading(self._is_wanted, lambda: self.is_closed, self._start_retire, self.evict)
        self._admission = LoadAdmission(self.changed, self.models, limits, ask_room, events, unloading)

    # -- under the lock ---------------------------------------------------------------------------------------------

    def proceed(self, model: ModelState) -> None:
        """Start the next actions of the model, unless a load is in progress, and those of its ensembles."""
        if model.name in self.proceeding:
            return
        self.proceeding.add(model.name)
        self._start_actions(model)
        for ensemble in self.dependents.of(model.name):
            self.proceed(ensemble)
        self.proceeding.discard(model.name)
        self.changed.notify_all()

    def _start_actions(self, model: ModelState) -> None:
        model.desired = self.dependents.effective(model.stated)
        model.awaits = ""
        while model.loading is None and not self.is_closed:
            attempt = model.to_serve()
            if model.desired.reason and not attempt:
                break
            # The model's own policy is known after its configuration was read; LoadAdmission checks again with it.
            action = next_action(attempt, [item.snapshot() for item in model.loaded], model.failed())
            if action is None:
                break
            if isinstance(action, LoadAction):
                model.awaits = self.dependents.awaited(model)
                if model.awaits:
                    break
                self._start_load(model, action)
                continue
            version = model.of_generation(action.generation)
            if self._retire_users(model, version):
                break
            self._start_retire(model, version)

    def _retire_users(self, model: ModelState, version: ServedVersion) -> bool:
        """Start to retire the ensembles that need the version. Return False if there is none, so it may be retired."""
        users = self.dependents.users(model, version)
        for other, item in users:
            if item.state is VersionState.READY:
                self._start_retire(other, item)
        return bool(users)

    def _start_load(self, model: ModelState, action: LoadAction) -> None:
        model.generation += 1
        generation, mark = model.generation, self._begin()
        self._loads.run(lambda slot: self._run_marked(mark, lambda: self._load(model, action, generation, slot)))
        model.begin_load(action)

    def _start_retire(self, model: ModelState, version: ServedVersion) -> None:
        # Removed from the routing table first, so that a refused request finds the successor there.
        self.router.publish(model, without=version)
        version.stop_accepting()
        self._events.add(MODEL_DRAINING, model=model.name, version=version.version, generation=version.generation)
        mark = self._begin()
        if version.in_flight:
            self._closings.run(lambda slot: self._events.publish())
        version.when_drained(
            lambda: self._closings.run(lambda slot: self._run_marked(mark, lambda: self._retire(model, version)))
        )

    def _begin(self) -> object:
        """Return the mark of work that `close` waits for; `_run_marked` removes it."""
        mark = object()
        self.running.add(mark)
        return mark

    def _run_marked(self, mark: object, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self.changed:
                self.running.discard(mark)
                self.changed.notify_all()

    def start_thread(self, name: str, work: Callable[[], None], refused_count: int = 0) -> None:
        """Run `work` on a daemon thread. If the system refuses a thread, try again every second."""
        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        except RuntimeError as error:
            if not refused_count:
                log.error("no thread '%s' for now, it is asked for again every second: %s", name, error)
            when_ns = time.monotonic_ns() + _THREAD_AGAIN_NS
            self._timer.call_at(when_ns, lambda: self.start_thread(name, work, refused_count + 1))

    def _demand(self, model: ModelState) -> None:
        """Load the evicted versions of a model, because a request needs them."""
        model.is_demanded = True
        self.proceed(model)

    def evict(self, model: ModelState, reason: str) -> None:
        """Unload a model that stays desired; the next request loads it again."""
        # An earlier demand is satisfied; it may have come when nothing was evicted.
        model.is_demanded = False
        model.keep_alive_s = None
        for item in model.loaded:
            if item.state is VersionState.READY:
                model.evicted[item.version] = EvictedVersion(
                    item.fingerprint, item.spec, reason, item.generation, time.time()
                )
                self._events.add(
                    MODEL_EVICTED, model=model.name, version=item.version, generation=item.generation, reason=reason
                )
        self.proceed(model)

    def _is_wanted(self, model: ModelState, action: LoadAction) -> bool:
        desired = model.desired.versions.get(action.version)
        return not self.is_closed and desired is not None and desired.fingerprint == action.fingerprint

    # -- loading, on a loader thread --------------------------------------------------------------------------------

    def _load(self, model: ModelState, action: LoadAction, generation: int, slot: LoadSlot) -> None:
        version, cause = self._try_load(model, action, generation, slot)
        slot.leave()
        with self.changed:
            if version is not None:
                self._add_loaded(model, version)
            elif cause is not None and (model.desired.versions or model.desired.reason):
                # A model that was removed meanwhile has not failed, and its entry would stay in the index.
                self.record_failure(model, action, generation, cause)
                self._retire_unfounded(model, action, cause)
            model.end_load()
            self.proceed(model)
            if model.loading is None:
                model.is_demanded = False
            found, lost = self.router.sort_pending(model)
        self.router.answer_pending(model, found, lost)
        self._events.publish()

    def _try_load(
        self, model: ModelState, action: LoadAction, generation: int, slot: LoadSlot
    ) -> tuple[ServedVersion | None, EdgeServerError | None]:
        """Return the opened version, or the error; neither if the version is no longer desired or must stay evicted."""
        name = model.name
        cause: EdgeServerError
        with self.changed:
            # Both under one lock: a version that is no longer desired has no entry.
            if not self._is_wanted(model, action):
                return None, None
            desired = model.desired.versions[action.version]
        self._events.add(MODEL_LOADING, model=name, version=action.version, generation=generation)
        try:
            self._events.publish()
            if model.stated.members:
                with self.changed:
                    self.dependents.check_circle(name)
            resolved = self._loader.resolve(desired, {})
            if not self._admission.free_memory(PendingLoad(model, action, generation, slot), resolved):
                return None, None
            version = self._loader.open(desired, resolved, generation)
        except ChangedWhileLoading as error:
            if not self._is_wanted(model, action):
                # The desired state for the changed files is already set: nothing failed.
                return None, None
            cause = error.detached()
        except EdgeServerError as error:
            cause = error.detached()
        except BaseException as error:
            # An error of a runtime while it loads affects only this version. Even sys.exit() must not end the thread:
            # the model would stay in LOADING for ever.
            log.exception("model '%s' version %d failed to load", name, action.version)
            cause = LoadError(f"{type(error).__name__}: {error}")
        else:
            log_ready(version)
            return version, None
        return None, cause

    def _add_loaded(self, model: ModelState, version: ServedVersion) -> None:
        failure = model.failures.pop(version.version, None)
        if failure is not None:
            failure.forget_retry()
        model.retired.pop(version.version, None)
        model.evicted.pop(version.version, None)
        model.loaded.append(version)
        self.dependents.add_members(model.name, steps_of(version))
        if self.is_closed:
            self._start_retire(model, version)
        else:
            model.has_served = True
            self.router.publish(model)
            self._events.add(MODEL_READY, model=model.name, version=version.version, generation=version.generation)
        self._on_loaded(model, version)

    def record_failure(self, model: ModelState, action: LoadAction, generation: int, cause: EdgeServerError) -> None:
        before = model.failures.pop(action.version, None)
        failure = Failure(action.fingerprint, cause, generation)
        if before is not None:
            before.forget_retry()
            if before.fingerprint == action.fingerprint:
                failure.count += before.count
        model.evicted.pop(action.version, None)
        model.failures[action.version] = failure
        if failure.lacks_memory:
            self._lacking_memory.add(model.name)
        delay_s: float | None = None
        if failure.can_heal and not self.is_closed:
            delay_s = retry_delay_s(failure.count)
            failure.retry_at_s = time.time() + delay_s
            when_ns = time.monotonic_ns() + int(delay_s * 1e9)
            failure.alarm = self._timer.call_at(when_ns, lambda: self._retry(model, action.version, failure))
        log_failure(model.name, action.version, failure, before)
        self._events.add(
            MODEL_FAILED,
            model=model.name, version=action.version, generation=generation,
            reason=failure.reason, failed_count=failure.count, retry_in_s=delay_s,
        )  # fmt: skip
        self._on_load_failed(model, action, cause)

    def _retire_unfounded(self, model: ModelState, action: LoadAction, cause: EdgeServerError) -> None:
        """Retire an ensemble whose reload failed because its members changed."""
        if isinstance(cause, ChangedWhileLoading):
            return
        for item in list(model.loaded):
            is_same = item.version == action.version and item.state is VersionState.READY
            is_same = is_same and own_fingerprint(item.fingerprint) == own_fingerprint(action.fingerprint)
            if model.stated.members and is_same:
                item.reason = cause.message
                self._start_retire(model, item)

    def _retry(self, model: ModelState, version: int, failure: Failure) -> None:
        """Retry a failed load; on the timer's thread, or because memory became free."""
        with self.changed:
            if model.failures.get(version) is failure and not self.is_closed:
                failure.forget_retry()
                failure.is_due = True
                self.proceed(model)

    # -- unloading, on a loader thread ------------------------------------------------------------------------------

    def _retire(self, model: ModelState, version: ServedVersion) -> None:
        self._events.publish()
        version.close()
        log.info("model '%s' version %d is unloaded", version.name, version.version)
        with self.changed:
            model.loaded.remove(version)
            if not any(item.version == version.version for item in model.loaded):
                report = version.version_report(0.0)
                model.retired[version.version] = Retired(report.generation, report.since_s, report.served_count)
            self._events.add(MODEL_UNLOADED, model=model.name, version=version.version, generation=version.generation)
            self.proceed(model)
            for name in {member for member, _ in steps_of(version)} & self.models.keys():
                self.proceed(self.models[name])
            if self.is_closed:
                self.retire_unused({member for member, _ in steps_of(version)})
            lacking, self._lacking_memory = self._lacking_memory, set()
            for name in sorted(lacking):
                other = self.models[name]
                for number, failure in list(other.failures.items()):
                    if failure.lacks_memory and not failure.is_due:
                        self._retry(other, number, failure)
        self._events.publish()

    def retire_unused(self, names: Iterable[str]) -> None:
        """Retire the serving versions of these models that no ensemble needs, at the end of the server."""
        for model in [self.models[name] for name in names if name in self.models]:
            for version in [item for item in model.loaded if item.state is VersionState.READY]:
                if not self.dependents.is_used(version):
                    self._start_retire(model, version)

    # -- failed versions, under the lock ----------------------------------------------------------------------------

    def fail(self, model: ModelState, version: ServedVersion, reason: str) -> bool:
        """Take a serving version out of service for good. False if it was not serving."""
        if version.state is not VersionState.READY or self.is_closed:
            return False
        self.router.publish(model, without=version)
        version.stop_for_good(reason)
        # Not one of the threads that `close` waits for: closing a hung instance or a lost GPU may never end.
        self.start_thread("edge-close-failed", lambda: self._close_failed(model, version))
        return True

    def _close_failed(self, model: ModelState, version: ServedVersion) -> None:
        self._events.publish()
        version.close_after_hang()
        with self.changed:
            model.loaded.remove(version)
            self.proceed(model)
