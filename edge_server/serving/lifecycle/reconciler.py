"""Reconciler: carries out the loads and unloads that move models toward the desired state, on a few short-lived
threads.

This is the half of the manager that acts; `manager` is the half that is told what to serve. `placement` makes way for a
load, `router` takes requests to what serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from edge_server.core.version_lifecycle import LoadAction, VersionState, next_action, retry_delay_s
from edge_server.errors import ChangedWhileLoading, EdgeServerError, LoadError
from edge_server.serving.execution.admission_control import OPEN_GATE, AdmissionControl
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.lifecycle.admission import AskRoom, LoadAdmission, PendingLoad, Unloading
from edge_server.serving.lifecycle.ensemble_dependencies import Dependents, own_fingerprint, steps_of
from edge_server.serving.lifecycle.event_queue import ModelEventQueue, PublishModelEvent
from edge_server.serving.lifecycle.limits import ManagerLimits
from edge_server.serving.lifecycle.load_log import log_failure, log_ready
from edge_server.serving.lifecycle.loader import Loader, LoaderThreads, LoadSlot, LoadSlots
from edge_server.serving.lifecycle.model_state import EvictedVersion, Failure, ModelState, Retired
from edge_server.serving.routing.router import Router
from edge_server.serving.routing.version_interface import ServedVersion
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import (
    MODEL_DRAINING,
    MODEL_EVICTED,
    MODEL_FAILED,
    MODEL_LOADING,
    MODEL_READY,
    MODEL_UNLOADED,
)

if TYPE_CHECKING:
    from edge_server.serving.cache.response_cache import ResponseCache

log = logging.getLogger(__name__)

_THREAD_AGAIN_NS = 1_000_000_000
"""After how long a thread that the system did not grant is asked for again."""

_SLOT_PATIENCE_S = 60.0
"""A load that takes longer does not keep others from loading any more."""

_CLOSE_COUNT = 8
_CLOSE_PATIENCE_S = 1.0
"""How many versions are closed at a time, and after how long one does not keep others from being closed any more."""


class Reconciler:
    """Of the loads `load_threads` run at a time, of the closings a few; one that takes long, or hangs, does not count.
    A version that drains has no thread. One lock guards all records; it is never held while something is opened, closed
    or announced."""

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
        self._timer = timer
        self._limits = limits or ManagerLimits()
        self._loader = Loader(timer, settings, self._limits, gate, limiter, cache)
        self._changed = threading.Condition()
        self._models: dict[str, ModelState] = {}
        self._dependents = Dependents(self._models)
        self._proceeding: set[str] = set()
        self._lacking_memory: set[str] = set()
        """Models whose load failed because memory was short; it may hold others too."""
        self._slots = LoadSlots(load_threads, timer, self._limits.hang_timeout_s or _SLOT_PATIENCE_S)
        self._loads = LoaderThreads(self._slots, lambda work: self._start("edge-load", work))
        self._closings = LoaderThreads(
            LoadSlots(_CLOSE_COUNT, timer, _CLOSE_PATIENCE_S), lambda work: self._start("edge-drain", work)
        )
        self._threads: set[object] = set()
        """A mark for each load and drain that is under way."""
        self._is_closed = False
        self._news = ModelEventQueue(announce)
        self._router = Router(self._changed, self._models, timer, self._limits, self._news, self._demand)
        unloading = Unloading(self._is_wanted, lambda: self._is_closed, self._start_retire, self._evict)
        self._placement = LoadAdmission(self._changed, self._models, self._limits, ask_room, self._news, unloading)

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _proceed(self, model: ModelState) -> None:
        """Start the model's next actions, unless a load is under way, and those of ensembles that it is a member of."""
        if model.name in self._proceeding:
            return
        self._proceeding.add(model.name)
        self._proceed_alone(model)
        for ensemble in self._dependents.of(model.name):
            self._proceed(ensemble)
        self._proceeding.discard(model.name)
        self._changed.notify_all()

    def _proceed_alone(self, model: ModelState) -> None:
        model.wish = self._dependents.effective(model.stated)
        model.awaits = ""
        while model.loading is None and not self._is_closed:
            attempt = model.to_serve()
            if model.wish.reason and not attempt:
                break
            # The model's own policy is known once its configuration was read: Placement asks again with it.
            action = next_action(attempt, [item.snapshot() for item in model.living], model.failed())
            if action is None:
                break
            if isinstance(action, LoadAction):
                model.awaits = self._dependents.awaited(model)
                if model.awaits:
                    break
                self._start_load(model, action)
                continue
            version = model.of_generation(action.generation)
            if self._retire_users(model, version):
                break
            self._start_retire(model, version)

    def _retire_users(self, model: ModelState, version: ServedVersion) -> bool:
        """Begin to retire the ensembles that need a version which is to go. False when there is none: it may go."""
        users = self._dependents.users(model, version)
        for other, item in users:
            if item.state is VersionState.READY:
                self._start_retire(other, item)
        return bool(users)

    def _start_load(self, model: ModelState, action: LoadAction) -> None:
        model.generation += 1
        generation, mark = model.generation, self._begin()
        self._loads.run(lambda slot: self._carry_through(mark, lambda: self._load(model, action, generation, slot)))
        model.begin_load(action)

    def _start_retire(self, model: ModelState, version: ServedVersion) -> None:
        # First out of the table, so that whoever is refused finds the successor there.
        self._router.publish(model, without=version)
        version.stop_taking()
        self._news.add(MODEL_DRAINING, model=model.name, version=version.version, generation=version.generation)
        mark = self._begin()
        if version.in_flight:
            self._closings.run(lambda slot: self._news.tell())
        version.when_drained(
            lambda: self._closings.run(lambda slot: self._carry_through(mark, lambda: self._retire(model, version)))
        )

    def _begin(self) -> object:
        """Return the mark of something that `close` waits for; `_carry_through` takes it back."""
        mark = object()
        self._threads.add(mark)
        return mark

    def _carry_through(self, mark: object, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._changed:
                self._threads.discard(mark)
                self._changed.notify_all()

    def _start(self, name: str, work: Callable[[], None], refused_count: int = 0) -> None:
        """Run `work` on a daemon thread: once the system grants one, for who asks has nobody to do the work instead."""
        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        except RuntimeError as error:
            if not refused_count:
                log.error("no thread '%s' for now, it is asked for again every second: %s", name, error)
            when_ns = time.monotonic_ns() + _THREAD_AGAIN_NS
            self._timer.call_at(when_ns, lambda: self._start(name, work, refused_count + 1))

    def _demand(self, model: ModelState) -> None:
        """Bring back what of a model is out of memory: a request asks for it."""
        model.is_demanded = True
        self._proceed(model)

    def _evict(self, model: ModelState, reason: str) -> None:
        """Take a model out of memory that stays wished for; the next request brings it back."""
        # Whoever wanted it back had it: an order may have come when nothing of it was out of memory.
        model.is_demanded = False
        for item in model.living:
            if item.state is VersionState.READY:
                model.cold[item.version] = EvictedVersion(
                    item.fingerprint, item.spec, reason, item.generation, time.time()
                )
                self._news.add(
                    MODEL_EVICTED, model=model.name, version=item.version, generation=item.generation, reason=reason
                )
        self._proceed(model)

    def _is_wanted(self, model: ModelState, action: LoadAction) -> bool:
        wish = model.wish.versions.get(action.version)
        return not self._is_closed and wish is not None and wish.fingerprint == action.fingerprint

    # -- loading, on a loader thread --------------------------------------------------------------------------------

    def _load(self, model: ModelState, action: LoadAction, generation: int, slot: LoadSlot) -> None:
        version, cause = self._try_load(model, action, generation, slot)
        slot.leave()
        with self._changed:
            if version is not None:
                self._take_in(model, version)
            elif cause is not None:
                self._note_failure(model, action, generation, cause)
                self._retire_unfounded(model, action, cause)
            model.end_load()
            self._proceed(model)
            if model.loading is None:
                model.is_demanded = False
            found, lost = self._router.sort_parked(model)
        self._router.answer_parked(model, found, lost)
        self._news.tell()

    def _try_load(
        self, model: ModelState, action: LoadAction, generation: int, slot: LoadSlot
    ) -> tuple[ServedVersion | None, EdgeServerError | None]:
        """Return the open version, or why there is none: nothing when it is not wished for now, or must rest."""
        name = model.name
        cause: EdgeServerError
        with self._changed:
            # In one look: what is not wished for any more is not there any more.
            if not self._is_wanted(model, action):
                return None, None
            wish = model.wish.versions[action.version]
        self._news.add(MODEL_LOADING, model=name, version=action.version, generation=generation)
        try:
            self._news.tell()
            if model.stated.members:
                with self._changed:
                    self._dependents.check_circle(name)
            resolved = self._loader.resolve(wish, {})
            if not self._placement.make_way(PendingLoad(model, action, generation, slot), resolved):
                return None, None
            version = self._loader.open(wish, resolved, generation)
        except ChangedWhileLoading as error:
            if not self._is_wanted(model, action):
                # The new wish for the changed files is there already: nothing failed.
                return None, None
            cause = error.detached()
        except EdgeServerError as error:
            cause = error.detached()
        except BaseException as error:
            # Whatever a runtime does while it loads costs only this version: sys.exit(), too, must not end the
            # thread, for the model would be loading for ever.
            log.exception("model '%s' version %d failed to load", name, action.version)
            cause = LoadError(f"{type(error).__name__}: {error}")
        else:
            log_ready(version)
            return version, None
        return None, cause

    def _take_in(self, model: ModelState, version: ServedVersion) -> None:
        failure = model.failures.pop(version.version, None)
        if failure is not None:
            failure.forget_retry()
        model.retired.pop(version.version, None)
        model.cold.pop(version.version, None)
        model.living.append(version)
        self._dependents.note_members(model.name, steps_of(version))
        if self._is_closed:
            self._start_retire(model, version)
        else:
            model.has_served = True
            self._router.publish(model)
            self._news.add(MODEL_READY, model=model.name, version=version.version, generation=version.generation)

    def _note_failure(self, model: ModelState, action: LoadAction, generation: int, cause: EdgeServerError) -> None:
        before = model.failures.pop(action.version, None)
        failure = Failure(action.fingerprint, cause, generation)
        if before is not None:
            before.forget_retry()
            if before.fingerprint == action.fingerprint:
                failure.count += before.count
        model.cold.pop(action.version, None)
        model.failures[action.version] = failure
        if failure.lacks_memory:
            self._lacking_memory.add(model.name)
        delay_s: float | None = None
        if failure.can_heal and not self._is_closed:
            delay_s = retry_delay_s(failure.count)
            failure.retry_at_s = time.time() + delay_s
            when_ns = time.monotonic_ns() + int(delay_s * 1e9)
            failure.alarm = self._timer.call_at(when_ns, lambda: self._retry(model, action.version, failure))
        log_failure(model.name, action.version, failure, before)
        self._news.add(
            MODEL_FAILED,
            model=model.name, version=action.version, generation=generation,
            reason=failure.reason, failed_count=failure.count, retry_in_s=delay_s,
        )  # fmt: skip

    def _retire_unfounded(self, model: ModelState, action: LoadAction, cause: EdgeServerError) -> None:
        """Let go of an ensemble that failed to be made anew though nothing of its own changed: its members did."""
        if isinstance(cause, ChangedWhileLoading):
            return
        for item in list(model.living):
            is_same = item.version == action.version and item.state is VersionState.READY
            is_same = is_same and own_fingerprint(item.fingerprint) == own_fingerprint(action.fingerprint)
            if model.stated.members and is_same:
                item.reason = cause.message
                self._start_retire(model, item)

    def _retry(self, model: ModelState, version: int, failure: Failure) -> None:
        """Try a failed load again; on the timer's thread, or because memory has become free."""
        with self._changed:
            if model.failures.get(version) is failure and not self._is_closed:
                failure.forget_retry()
                failure.is_due = True
                self._proceed(model)

    # -- unloading, on a loader thread ------------------------------------------------------------------------------

    def _retire(self, model: ModelState, version: ServedVersion) -> None:
        self._news.tell()
        version.close()
        log.info("model '%s' version %d is unloaded", version.name, version.version)
        with self._changed:
            model.living.remove(version)
            if not any(item.version == version.version for item in model.living):
                report = version.version_report(0.0)
                model.retired[version.version] = Retired(report.generation, report.since_s, report.served_count)
            self._news.add(MODEL_UNLOADED, model=model.name, version=version.version, generation=version.generation)
            self._proceed(model)
            for name in {member for member, _ in steps_of(version)} & self._models.keys():
                self._proceed(self._models[name])
            if self._is_closed:
                self._retire_unused({member for member, _ in steps_of(version)})
            lacking, self._lacking_memory = self._lacking_memory, set()
            for name in sorted(lacking):
                other = self._models[name]
                for number, failure in list(other.failures.items()):
                    if failure.lacks_memory and not failure.is_due:
                        self._retry(other, number, failure)
        self._news.tell()

    def _retire_unused(self, names: Iterable[str]) -> None:
        """Retire what of these models serves and no ensemble needs any more: the end has come."""
        for model in [self._models[name] for name in names if name in self._models]:
            for version in [item for item in model.living if item.state is VersionState.READY]:
                if not self._dependents.is_used(version):
                    self._start_retire(model, version)
