"""Carrying out what the rule decided: loads and drains, each on a thread of its own, and the routing table they change.

This is the half of the manager that acts; `manager` is the half that is asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from edge_server.core.lifecycle import Load, ReloadPolicy, Resolved, Retire, VersionState, next_action, retry_delay_s
from edge_server.core.model import ModelFile
from edge_server.errors import ChangedWhileLoading, EdgeServerError, LoadError, NotReady, OutOfMemory
from edge_server.serving.canary import Trial
from edge_server.serving.dependents import Dependents, is_used, own_fingerprint, steps_of
from edge_server.serving.gate import OPEN_GATE, Gate
from edge_server.serving.limiter import RateLimiter
from edge_server.serving.limits import Limits
from edge_server.serving.load_log import log_failure, log_ready
from edge_server.serving.loader import Loader, LoadSlot, LoadSlots
from edge_server.serving.parked import ParkedRequest
from edge_server.serving.record import UNLOADED_FOR_ROOM, ColdVersion, Failure, ModelRecord, Retired
from edge_server.serving.residency import to_evict
from edge_server.serving.routes import FallenCanary, Routes, plan_routes, ready_versions
from edge_server.serving.served import ServedVersion
from edge_server.serving.timer import Timer
from edge_server.telemetry.events import (
    MODEL_CANARY_FAILED,
    MODEL_DRAINING,
    MODEL_EVICTED,
    MODEL_FAILED,
    MODEL_LOADING,
    MODEL_READY,
    MODEL_UNLOADED,
    EventValue,
)

if TYPE_CHECKING:
    from edge_server.serving.cache.cache import ResponseCache

log = logging.getLogger(__name__)

_ROOM_PATIENCE_S = 5.0
"""How long a load that finds no room waits for what is being unloaded, or for a model in use to become free."""

_SLOT_PATIENCE_S = 60.0
"""A load that takes longer does not keep others from loading any more."""

_LOOK_AGAIN_S = 0.05
"""How often a load looks whether a model in use has become free: requests that end tell nobody."""


class Announce(Protocol):
    """Told of every step in a version's life: `kind` is one of the `MODEL_...` names of telemetry.events."""

    def __call__(self, kind: str, /, **fields: EventValue) -> object: ...


AskRoom = Callable[[ModelFile, int], str | None]
"""Says why there is no memory for a model's file in so many instances; None when there is."""


class Mover:
    """Each load and each drain has a thread of its own, for either may take long, or hang; of the loads `load_threads`
    run at a time. One lock guards all records; it is never held while something is opened, drained or announced."""

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
        self._timer = timer
        self._limits = limits or Limits()
        self._loader = Loader(timer, settings, self._limits, gate, limiter, cache)
        self._ask_room = ask_room or (lambda file, instance_count: None)
        self._changed = threading.Condition()
        self._models: dict[str, ModelRecord] = {}
        self._dependents = Dependents(self._models)
        self._proceeding: set[str] = set()
        self._routes: dict[str, Routes] = {}
        self._slots = LoadSlots(load_threads, timer, self._limits.hang_timeout_s or _SLOT_PATIENCE_S)
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        self._announce = announce or (lambda kind, /, **fields: None)
        self._announcing = threading.RLock()
        self._news: deque[tuple[str, dict[str, EventValue]]] = deque()

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _proceed(self, model: ModelRecord) -> None:
        """Start the model's next actions, unless a load is under way, and those of ensembles that it is a member of."""
        if model.name in self._proceeding:
            return
        self._proceeding.add(model.name)
        self._proceed_alone(model)
        for ensemble in self._dependents.of(model.name):
            self._proceed(ensemble)
        self._proceeding.discard(model.name)
        self._changed.notify_all()

    def _proceed_alone(self, model: ModelRecord) -> None:
        model.wish = self._dependents.effective(model.stated)
        model.awaits = ""
        while model.loading is None and not self._is_closed:
            attempt = model.to_serve()
            if model.wish.reason and not attempt:
                break
            # The model's own policy is known once its configuration was read: `_replace_old` asks again with it.
            action = next_action(attempt, [item.snapshot() for item in model.living], model.failed())
            if action is None:
                break
            if isinstance(action, Load):
                model.awaits = self._dependents.awaited(model)
                if model.awaits:
                    break
                self._start_load(model, action)
            elif not self._retire_users(model, _generation(model, action)):
                self._start_retire(model, _generation(model, action))
            else:
                break

    def _retire_users(self, model: ModelRecord, version: ServedVersion) -> bool:
        """Begin to retire the ensembles that need a version which is to go. False when there is none: it may go."""
        users = self._dependents.users(model, version)
        for other, item in users:
            if item.state is VersionState.READY:
                self._start_retire(other, item)
        return bool(users)

    def _start_load(self, model: ModelRecord, action: Load) -> None:
        model.generation += 1
        self._start_thread("edge-load", self._load, model, action, model.generation)
        model.begin_load(action)

    def _start_retire(self, model: ModelRecord, version: ServedVersion) -> None:
        # First out of the table, so that whoever is refused finds the successor there.
        self._publish_routes(model, without=version)
        version.stop_taking()
        self._tell(MODEL_DRAINING, model, version.version, version.generation)
        self._start_thread("edge-drain", self._retire, model, version)

    def _start_thread(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        """Run `work` on a daemon thread, which cannot get at the lock, and thus not end, before this caller let go."""

        def live() -> None:
            try:
                work(*arguments)
            finally:
                with self._changed:
                    self._threads.discard(thread)
                    self._changed.notify_all()

        thread = threading.Thread(target=live, name=name, daemon=True)
        thread.start()
        self._threads.add(thread)

    def _publish_routes(self, model: ModelRecord, without: ServedVersion | None = None) -> None:
        name, fallen = model.name, model.fallen
        routes = dict(self._routes)
        ready = ready_versions(model.living, without)
        planned, model.fallen = plan_routes(ready, routes.pop(name, None), fallen, self._on_canary_failed)
        if planned is not None:
            routes[name] = planned
        self._routes = routes
        if model.fallen is not None and model.fallen is not fallen:
            canary = next(item for item in ready.values() if item.generation == model.fallen.generation)
            self._tell(MODEL_CANARY_FAILED, model, canary.version, canary.generation, reason=model.fallen.reason)

    def _evict(self, model: ModelRecord, reason: str) -> None:
        """Take a model out of memory that stays wished for; the next request brings it back."""
        for item in model.living:
            if item.state is VersionState.READY:
                model.cold[item.version] = ColdVersion(
                    item.fingerprint, item.spec, reason, item.generation, time.time()
                )
                self._tell(MODEL_EVICTED, model, item.version, item.generation, reason=reason)
        self._proceed(model)

    def _tell(self, kind: str, model: ModelRecord, version: int, generation: int, **more: EventValue) -> None:
        self._news.append((kind, {"model": model.name, "version": version, "generation": generation, **more}))

    def _is_wanted(self, model: ModelRecord, action: Load) -> bool:
        wish = model.wish.versions.get(action.version)
        return not self._is_closed and wish is not None and wish.fingerprint == action.fingerprint

    # -- loading, on a thread of its own ----------------------------------------------------------------------------

    def _load(self, model: ModelRecord, action: Load, generation: int) -> None:
        version, cause = self._try_load(model, action, generation)
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
            found, lost = self._sort_parked(model)
        self._answer_parked(model, found, lost)
        self._tell_news()

    def _try_load(
        self, model: ModelRecord, action: Load, generation: int
    ) -> tuple[ServedVersion | None, EdgeServerError | None]:
        """Return the open version, or why there is none: nothing when it is not wished for now, or must rest."""
        name = model.name
        cause: EdgeServerError
        with self._slots.taken() as slot:
            if not self._is_wanted(model, action):
                return None, None
            wish = model.wish.versions[action.version]
            self._tell(MODEL_LOADING, model, action.version, generation)
            try:
                self._tell_news()
                if model.stated.members:
                    with self._changed:
                        self._dependents.check_circle(name)
                resolved = self._loader.resolve(wish, {})
                if not self._make_way(model, action, generation, resolved, slot):
                    return None, None
                version = self._loader.open(wish, resolved, generation)
            except ChangedWhileLoading as error:
                if not self._is_wanted(model, action):
                    # The new wish for the changed files is there already: nothing failed.
                    return None, None
                cause = error.detached()
            except EdgeServerError as error:
                cause = error.detached()
            except Exception as error:
                # Whatever a runtime does while it loads costs only this version.
                log.exception("model '%s' version %d failed to load", name, action.version)
                cause = LoadError(f"{type(error).__name__}: {error}")
            else:
                log_ready(version)
                return version, None
        return None, cause

    def _take_in(self, model: ModelRecord, version: ServedVersion) -> None:
        failure = model.failures.pop(version.version, None)
        if failure is not None:
            failure.forget_retry()
        model.retired.pop(version.version, None)
        model.cold.pop(version.version, None)
        model.living.append(version)
        if self._is_closed:
            self._start_retire(model, version)
        else:
            self._publish_routes(model)
            self._tell(MODEL_READY, model, version.version, version.generation)

    def _note_failure(self, model: ModelRecord, action: Load, generation: int, cause: EdgeServerError) -> None:
        before = model.failures.pop(action.version, None)
        failure = Failure(action.fingerprint, cause, generation)
        if before is not None:
            before.forget_retry()
            if before.fingerprint == action.fingerprint:
                failure.count += before.count
        model.cold.pop(action.version, None)
        model.failures[action.version] = failure
        delay_s: float | None = None
        if failure.can_heal and not self._is_closed:
            delay_s = retry_delay_s(failure.count)
            failure.retry_at_s = time.time() + delay_s
            when_ns = time.monotonic_ns() + int(delay_s * 1e9)
            failure.alarm = self._timer.call_at(when_ns, lambda: self._retry(model, action.version, failure))
        log_failure(model.name, action.version, failure, before)
        self._tell(
            MODEL_FAILED, model, action.version, generation,
            reason=failure.reason, failed_count=failure.count, retry_in_s=delay_s,
        )  # fmt: skip

    def _retire_unfounded(self, model: ModelRecord, action: Load, cause: EdgeServerError) -> None:
        """Let go of an ensemble that failed to be made anew though nothing of its own changed: its members did."""
        if isinstance(cause, ChangedWhileLoading):
            return
        for item in list(model.living):
            is_same = item.version == action.version and item.state is VersionState.READY
            is_same = is_same and own_fingerprint(item.fingerprint) == own_fingerprint(action.fingerprint)
            if model.stated.members and is_same:
                item.reason = cause.message
                self._start_retire(model, item)

    def _retry(self, model: ModelRecord, version: int, failure: Failure) -> None:
        """Try a failed load again; on the timer's thread, or because memory has become free."""
        with self._changed:
            if model.failures.get(version) is failure and not self._is_closed:
                failure.forget_retry()
                failure.is_due = True
                self._proceed(model)

    # -- making way for a load --------------------------------------------------------------------------------------

    def _make_way(self, model: ModelRecord, action: Load, generation: int, resolved: Resolved, slot: LoadSlot) -> bool:
        """Unload what must go before the version is opened. False when it is not to be opened after all.

        Raises OutOfMemory.
        """
        if resolved.spec.ensemble is not None:
            return True
        is_replaced = self._limits.reload_policy_of(resolved.spec) is ReloadPolicy.REPLACE
        if is_replaced and not self._replace_old(model, action, slot):
            return False
        if not self._find_place(model, action, generation, resolved, slot):
            return False
        self._check_room(resolved, slot)
        return True

    def _replace_old(self, model: ModelRecord, action: Load, slot: LoadSlot) -> bool:
        """Retire what the version replaces, and wait until it is gone. False when something else is wished by then."""
        while True:
            with self._changed:
                if not self._is_wanted(model, action):
                    return False
                snapshots = [item.snapshot() for item in model.living]
                step = next_action(model.to_serve(), snapshots, model.failed(), ReloadPolicy.REPLACE)
                if isinstance(step, Load):
                    return step == action
                if isinstance(step, Retire):
                    model.is_replacing = True
                    self._start_retire(model, _generation(model, step))
                    continue
                living = len(model.living)
            self._tell_news()
            self._wait(slot, lambda: len(model.living) < living or not self._is_wanted(model, action))  # noqa: B023

    def _find_place(
        self, model: ModelRecord, action: Load, generation: int, resolved: Resolved, slot: LoadSlot
    ) -> bool:
        """Evict others until one more model may be in memory. False when it must rest until somebody asks for it."""
        limit = self._limits.max_resident_models
        until = time.monotonic() + _ROOM_PATIENCE_S
        while True:
            with self._changed:
                if not self._is_wanted(model, action):
                    return False
                others = [item for item in self._models.values() if item is not model and item.is_resident]
                if not limit or model.living or len(others) < limit:
                    model.is_opening = True
                    return True
                if not model.is_demanded:
                    model.failures.pop(action.version, None)
                    model.cold[action.version] = ColdVersion(
                        action.fingerprint, resolved.spec, UNLOADED_FOR_ROOM, generation, time.time()
                    )
                    return False
                for victim in to_evict([item for item in others if item.stays], limit):
                    self._evict(victim, UNLOADED_FOR_ROOM)
            self._tell_news()
            if time.monotonic() > until:
                raise OutOfMemory(f"all {limit} models that --max-resident-models allows are in use")
            self._wait(slot, lambda: self._is_closed, _LOOK_AGAIN_S)

    def _check_room(self, resolved: Resolved, slot: LoadSlot) -> None:
        """Raise OutOfMemory when the machine has no room for it, not even once what is being unloaded is gone."""
        count = sum(group.count * max(1, len(group.gpus)) for group in resolved.spec.instance_groups)
        refusal = self._ask_room(resolved.file, count)
        if refusal is not None and self._is_unloading():
            self._wait(slot, lambda: self._is_closed or not self._is_unloading(), _ROOM_PATIENCE_S)
            refusal = self._ask_room(resolved.file, count)
        if refusal is not None:
            raise OutOfMemory(f"model '{resolved.spec.name}' version {resolved.file.version}: {refusal}")

    def _is_unloading(self) -> bool:
        with self._changed:
            living = [item for model in self._models.values() for item in model.living]
        return any(item.state in (VersionState.DRAINING, VersionState.CLOSING) for item in living)

    def _wait(self, slot: LoadSlot, is_so: Callable[[], bool], timeout_s: float | None = None) -> None:
        with slot.given_back(), self._changed:
            self._changed.wait_for(is_so, timeout_s)

    # -- unloading, on a thread of its own --------------------------------------------------------------------------

    def _retire(self, model: ModelRecord, version: ServedVersion) -> None:
        self._tell_news()
        version.drain()
        version.close()
        log.info("model '%s' version %d is unloaded", version.name, version.version)
        with self._changed:
            model.living.remove(version)
            if not any(item.version == version.version for item in model.living):
                report = version.version_report(0.0)
                model.retired[version.version] = Retired(report.generation, report.since_s, report.served_count)
            self._tell(MODEL_UNLOADED, model, version.version, version.generation)
            self._proceed(model)
            for name in {member for member, _ in steps_of(version)} & self._models.keys():
                self._proceed(self._models[name])
            if self._is_closed:
                self._retire_unused()
            for other in self._models.values():
                for number, failure in list(other.failures.items()):
                    if failure.lacks_memory and not failure.is_due:
                        self._retry(other, number, failure)
        self._tell_news()

    def _retire_unused(self) -> None:
        """Retire what serves and no ensemble needs any more: the end has come."""
        for model in self._models.values():
            for version in [item for item in model.living if item.state is VersionState.READY]:
                if not is_used(version, self._models.values()):
                    self._start_retire(model, version)

    def _on_canary_failed(self, trial: Trial, reason: str) -> None:
        with self._changed:
            model = self._models[trial.canary.spec.name]
            routes = self._routes.get(model.name)
            if routes is not None and routes.trial is trial:
                fallen = FallenCanary(trial.canary.generation, reason)
                log.error("model '%s' version %d is no canary any more: %s", model.name, trial.canary.version, reason)
                self._routes = {**self._routes, model.name: Routes(routes.ready, routes.first)}
                trial.end()
                model.fallen = fallen
                self._tell(
                    MODEL_CANARY_FAILED, model, trial.canary.version, trial.canary.generation, reason=fallen.reason
                )
        self._tell_news()

    # -- requests that wait for a load ------------------------------------------------------------------------------

    def _sort_parked(self, model: ModelRecord) -> tuple[list[ParkedRequest], list[ParkedRequest]]:
        """Return the parked requests that can be submitted now, and those that wait in vain; others go on waiting."""
        routes = self._routes.get(model.name)
        found, lost = [], []
        for parked in model.parked:
            version = parked.request.version
            if routes is not None and (version is None or version in routes.ready):
                found.append(parked)
            elif not model.may_wait_for(version):
                lost.append(parked)
        if model.loading is None and len(found) + len(lost) < len(model.parked):
            # What is left waits for versions that rest: their turn has come.
            model.is_demanded = True
            self._proceed(model)
        return found, lost

    def _answer_parked(self, model: ModelRecord, found: list[ParkedRequest], lost: list[ParkedRequest]) -> None:
        """Submit, or refuse. Until then they stay parked, so that the model is not evicted before they are served."""
        for parked in found:
            parked.resume()
        for parked in lost:
            with self._changed:
                rows = model.index_rows()
            number = max(rows) if parked.request.version is None and rows else parked.request.version
            words = rows.get(number or 0, ("UNAVAILABLE", ""))[1]
            parked.fail(NotReady(f"model '{model.name}' could not be loaded for the request: {words or 'unloaded'}"))
        with self._changed:
            model.parked.difference_update(found, lost)

    def _tell_news(self) -> None:
        """Announce what happened, in order and outside the manager's lock. Returns when all of it was announced."""
        with self._announcing:
            while self._news:
                kind, fields = self._news.popleft()
                self._announce(kind, **fields)


def _generation(model: ModelRecord, action: Retire) -> ServedVersion:
    return next(item for item in model.living if item.generation == action.generation)
