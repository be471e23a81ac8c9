"""Table of the states of all models: decides which version is loaded or unloaded next, and holds the lock over them.

It is the only owner of the states and of the lock over them. It decides under the lock; the `Reconciler` takes the
actions and carries them out, and enters their results. The published map of routes is read without the lock: it is
replaced, never changed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

from edge_server.core.ensemble_graph import topological_order
from edge_server.core.gpu_fault import GpuFault, find_gpu_number
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request
from edge_server.core.version_lifecycle import (
    DesiredModel,
    DesiredVersion,
    LoadAction,
    ReloadPolicy,
    RetireAction,
    VersionState,
    next_action,
    retry_delay_s,
)
from edge_server.errors import (
    ChangedWhileLoading,
    Draining,
    EdgeServerError,
    NotReady,
    OutOfMemory,
    QueueFull,
    SessionLost,
)
from edge_server.record import record
from edge_server.serving.execution.gpu_state import Gpus, gpus_of
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.lifecycle.canary import CanaryTrial
from edge_server.serving.lifecycle.ensemble_dependencies import (
    EnsembleDependencies,
    own_fingerprint,
    steps_of,
)
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.model_state import (
    UNLOADED_FOR_LIMIT,
    UNLOADED_IDLE,
    EvictedVersion,
    Failure,
    ModelState,
    RetiredVersion,
    to_evict,
)
from edge_server.serving.lifecycle.pending_requests import PendingRequest
from edge_server.serving.lifecycle.version_routes import RejectedCanary, Routes, plan_routes, ready_versions
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import (
    GPU_LOST,
    MODEL_CANARY_FAILED,
    MODEL_DRAINING,
    MODEL_EVICTED,
    MODEL_FAILED,
    MODEL_HUNG,
    MODEL_LOADING,
    MODEL_READY,
    MODEL_UNLOADED,
    EventQueue,
    EventValue,
)

log = logging.getLogger(__name__)

_MAX_PENDING = 1000
"""Most requests that may wait for the load of one model; each holds its inputs in memory."""


@record(frozen=True, slots=True, eq=False)
class Load:
    """Action: load a version, as this generation of its model."""

    name: str
    action: LoadAction
    generation: int


@record(frozen=True, slots=True, eq=False)
class Unload:
    """Action: close a version after its last request. It has no route and accepts no requests any more.

    `has_failed`: it failed while it served. Closing it may never end: its runtime hangs, or its GPU is lost.
    """

    version: ServedVersion
    has_failed: bool = False


class PublishEvents:
    """Action: publish the waiting events. The thread that caused them may be one of requests or of the timer."""


Action: TypeAlias = Load | Unload | PublishEvents


class ModelTable:
    """Thread-safe. The lock is never held during a load, a close, an event or a response.

    When the server loses a GPU, each version with an instance on it fails, and is loaded again on another device if
    possible. `on_no_fallback` is then called, under the lock, with the reason of a model that cannot be.
    """

    def __init__(
        self,
        timer: Timer,
        lifecycle: LifecycleSettings,
        events: EventQueue,
        gpus: Gpus,
        on_no_fallback: Callable[[str], None],
    ) -> None:
        self._timer = timer
        self._lifecycle = lifecycle
        self._events = events
        self._gpus = gpus
        self._on_no_fallback = on_no_fallback
        self._changed = threading.Condition()
        """The lock of all states, notified after each change."""
        self._models: dict[str, ModelState] = {}
        self._dependencies = EnsembleDependencies(self._models)
        self._updating: set[str] = set()
        """Models whose next actions are being decided."""
        self._lacking_memory: set[str] = set()
        """Models whose load failed for lack of memory; may contain others too."""
        self._actions: deque[Action] = deque()
        self._unfinished: set[Action] = set()
        """Loads and unloads that were decided and whose results are not complete."""
        self._is_closed = False
        self.on_actions: Callable[[], None] = lambda: None
        """Called after a change, by any thread, when there may be actions to carry out. Must return at once."""
        self.routes: Mapping[str, Routes] = {}
        """The routes of each model with a serving version. Replaced as a whole."""

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Hold the lock for a change of states; afterwards have the actions carried out that it needs."""
        with self._changed:
            yield
        self.on_actions()

    # -- the desired state --------------------------------------------------------------------------------------------

    def set_desired(self, desired: DesiredModel, *, retry: bool = False) -> None:
        """Replace the desired state of one model. `retry` forgets earlier failures, so that loads are tried again, and
        loads evicted versions.

        Raises Draining once `close` was called.
        """
        with self._change():
            if self._is_closed:
                raise Draining(f"Server is stopping, model '{desired.name}' can be neither loaded nor unloaded")
            self._replace_desired(desired, retry=retry)
        self._events.publish()

    def set_desired_state(self, desired: Iterable[DesiredModel], kept: Collection[str] = ()) -> None:
        """Replace the whole desired state, except for the models in `kept`. Models left out are unloaded. Does nothing
        after `close`.

        Models with the same object as before cost little; the watcher reuses the object for unchanged files.
        """
        by_name = {desired.name: desired for desired in desired if desired.name not in kept}
        with self._change():
            if self._is_closed:
                return
            stated = {name: model.stated for name, model in self._models.items()}
            # An ensemble may have to change although its own desired state has not.
            changed = {name: item for name, item in by_name.items() if item.members or stated.get(name) is not item}
            for name in stated.keys() - by_name.keys() - set(kept):
                if stated[name] != DesiredModel(name):
                    changed[name] = DesiredModel(name)
            order = topological_order({name: [member for member, _ in item.members] for name, item in changed.items()})
            # Ensembles must see the desired state of all their members before any action starts.
            self._updating.update(order)
            for name in order:
                self._replace_desired(changed[name])
            self._updating.difference_update(order)
            for name in order:
                self._update_actions(self._models[name])
        self._events.publish()

    def renew(self, name: str, version: int, mark: str) -> bool:
        """Load a version again although its files have not changed, because something else that it depends on has:
        `mark` names it. Returns at once; False if the version is not desired. Later reloads keep the mark."""
        with self._change():
            model = self._models.get(name)
            desired = None if model is None else model.stated.versions.get(version)
            if model is None or desired is None or self._is_closed:
                return False
            model.renewals[version] = desired.fingerprint, mark
            self._update_actions(model)
        self._events.publish()
        return True

    def _replace_desired(self, desired: DesiredModel, *, retry: bool = False) -> None:
        model = self._models.setdefault(desired.name, ModelState(desired))
        model.stated = desired
        self._dependencies.add_members(desired.name, desired.members)
        model.desired = desired = self._dependencies.with_member_fingerprints(desired)
        if not desired.versions and not desired.reason:
            model.evicted.clear()
            model.has_served = False
        for version, failure in list(model.failures.items()):
            wanted = desired.versions.get(version)
            if retry or wanted is None or wanted.fingerprint != failure.fingerprint:
                failure.forget_retry()
                # There is no retry to come. If the same files become desired again, that is a new attempt.
                failure.is_due = failure.is_transient
            if retry or not (desired.versions or desired.reason):
                # The second: the model was removed. The index names it no longer.
                del model.failures[version]
        if retry and model.evicted:
            model.is_demanded = True
        self._update_actions(model)

    # -- decisions, under the lock ------------------------------------------------------------------------------------

    def _update_actions(self, model: ModelState) -> None:
        """Decide the next actions of the model, unless a load is in progress, and those of its ensembles."""
        if model.name in self._updating:
            return
        self._updating.add(model.name)
        self._decide_next_actions(model)
        for ensemble in self._dependencies.ensembles_with_member(model.name):
            self._update_actions(ensemble)
        self._updating.discard(model.name)
        self._changed.notify_all()

    def _decide_next_actions(self, model: ModelState) -> None:
        model.desired = self._dependencies.with_member_fingerprints(model.stated)
        model.awaits = ""
        while model.loading is None and not self._is_closed:
            to_serve = model.to_serve()
            if model.desired.reason and not to_serve:
                break
            # The model's own policy is known after its configuration was read; `replace_old` decides again with it.
            action = next_action(to_serve, [item.snapshot() for item in model.loaded], model.failed())
            if action is None:
                break
            if isinstance(action, LoadAction):
                model.awaits = self._dependencies.find_loading_member(model)
                if not model.awaits:
                    model.generation += 1
                    model.begin_load(action)
                    self._add_action(Load(model.name, action, model.generation))
                break
            version = model.of_generation(action.generation)
            users = self._dependencies.ensembles_using(model, version)
            for other, item in users:
                if item.state is VersionState.READY:
                    self._retire(other, item)
            if users:
                # It may be retired after the ensembles that need it.
                break
            self._retire(model, version)

    def _retire(self, model: ModelState, version: ServedVersion) -> None:
        # Removed from the routes first, so that a refused request finds the successor there.
        self._publish_routes(model, without=version)
        version.stop_accepting()
        self._add_event(MODEL_DRAINING, version)
        if version.in_flight:
            self._actions.append(PublishEvents())
        self._add_action(Unload(version))

    def _fail(self, model: ModelState, version: ServedVersion, reason: str) -> bool:
        """Take a serving version out of service for good. False if it was not serving."""
        if version.state is not VersionState.READY or self._is_closed:
            return False
        self._publish_routes(model, without=version)
        version.stop_for_good(reason)
        # Not among the unfinished: `close` would wait for it.
        self._actions.append(Unload(version, has_failed=True))
        return True

    def _load_evicted(self, model: ModelState) -> None:
        """Load the evicted versions of a model, because a request needs them."""
        model.is_demanded = True
        self._update_actions(model)

    def _evict(self, model: ModelState, reason: str) -> None:
        """Unload a model that stays desired; the next request loads it again."""
        # An earlier demand is satisfied; it may have come when nothing was evicted.
        model.is_demanded = False
        model.keep_alive_s = None
        for item in model.loaded:
            if item.state is VersionState.READY:
                model.evicted[item.version] = EvictedVersion(
                    item.fingerprint, item.spec, reason, item.generation, time.time()
                )
                self._add_event(MODEL_EVICTED, item, reason=reason)
        self._update_actions(model)

    def _retire_unused(self, names: Iterable[str]) -> None:
        """Retire the serving versions of these models that no ensemble needs, at the end of the server."""
        for model in [self._models[name] for name in names if name in self._models]:
            for version in [item for item in model.loaded if item.state is VersionState.READY]:
                if not self._dependencies.is_used(version):
                    self._retire(model, version)

    def _is_wanted(self, model: ModelState, action: LoadAction) -> bool:
        desired = model.desired.versions.get(action.version)
        return not self._is_closed and desired is not None and desired.fingerprint == action.fingerprint

    def _add_event(self, kind: str, version: ServedVersion, **fields: EventValue) -> None:
        self._events.add(kind, model=version.name, version=version.version, generation=version.generation, **fields)

    def _add_action(self, action: Load | Unload) -> None:
        self._actions.append(action)
        self._unfinished.add(action)

    # -- actions, for the reconciler ----------------------------------------------------------------------------------

    def next_action(self) -> Action | None:
        """Return the next action to carry out, None if there is none. Each is returned once, and needs `finish`."""
        with self._changed:
            return self._actions.popleft() if self._actions else None

    def begin(self, load: Load) -> DesiredVersion | None:
        """Return the version to open for a load, None if it is not desired any more. Raises BadModelConfig."""
        with self._changed:
            model = self._models[load.name]
            # Both under one lock: a version that is no longer desired has no entry.
            if not self._is_wanted(model, load.action):
                return None
            self._events.add(MODEL_LOADING, model=load.name, version=load.action.version, generation=load.generation)
            if model.stated.members:
                self._dependencies.check_cycle(load.name)
            return model.desired.versions[load.action.version]

    def replace_old(self, load: Load) -> bool | None:
        """Retire the versions that a load replaces. Return True after they are unloaded, None before that, and False if
        the load is not desired any more."""
        with self._change():
            model = self._models[load.name]
            while self._is_wanted(model, load.action):
                snapshots = [item.snapshot() for item in model.loaded]
                step = next_action(model.to_serve(), snapshots, model.failed(), ReloadPolicy.REPLACE)
                if not isinstance(step, RetireAction):
                    return None if step is None else step == load.action
                model.is_replacing = True
                self._retire(model, model.of_generation(step.generation))
            return False

    def reserve_resident_slot(self, load: Load, spec: ModelSpec) -> bool | None:
        """Let the load take memory if the limit of models in memory allows it. Return None after others were evicted
        for it, or if all are in use, and False if the version must not be opened: it is not desired any more, or stays
        unloaded until a request needs it."""
        with self._change():
            model, limit = self._models[load.name], self._lifecycle.max_resident_models
            if not self._is_wanted(model, load.action):
                return False
            others = []
            if limit and not model.loaded:
                others = [item for item in self._models.values() if item is not model and item.is_resident]
            if not limit or len(others) < limit:
                model.is_opening = True
                return True
            if not model.is_demanded:
                model.failures.pop(load.action.version, None)
                model.evicted[load.action.version] = EvictedVersion(
                    load.action.fingerprint, spec, UNLOADED_FOR_LIMIT, load.generation, time.time()
                )
                return False
            for victim in to_evict([item for item in others if item.remains_resident], limit):
                self._evict(victim, UNLOADED_FOR_LIMIT)
            return None

    def serves_generated_inputs(self, name: str) -> bool:
        """Return whether a version of the model serves that answered the generated inputs of its load."""
        with self._changed:
            model = self._models.get(name)
            return model is not None and any(
                item.state is VersionState.READY and item.answers_generated_inputs for item in model.loaded
            )

    def is_unloading(self) -> bool:
        """Return whether a version is being unloaded."""
        return any(item.state in (VersionState.DRAINING, VersionState.CLOSING) for item in self.loaded_versions())

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until `is_so`, which is called under the lock after each change, or until `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_so(), timeout_s)

    def finish(self, action: Load | Unload, result: ServedVersion | EdgeServerError | None = None) -> None:
        """Enter the result of an action: of a load its version, READY, or the error, or None if it was not opened.

        Answers the pending requests that a load decides, on this thread.
        """
        answers: list[tuple[PendingRequest, EdgeServerError | None]] = []
        with self._change():
            if isinstance(action, Load):
                model = self._models[action.name]
                self._finish_load(model, action, result)
                answers = self._pending_answers(model)
            else:
                model = self._models[action.version.name]
                model.loaded.remove(action.version)
                if action.has_failed:
                    self._update_actions(model)
                else:
                    self._finish_unload(model, action.version)
        for pending, error in answers:
            if error is None:
                pending.resume()
            else:
                pending.fail(error)
        self._events.publish()
        with self._changed:
            # Until now they were pending, so that the model was not evicted before they were submitted.
            model.pending.difference_update(pending for pending, _ in answers)
            if not (model.loaded or model.loading or model.pending):
                # It holds until the model is unloaded, or until the load that its request waits for has failed.
                model.keep_alive_s = None
            self._unfinished.discard(action)
            self._changed.notify_all()

    def _finish_load(self, model: ModelState, load: Load, result: ServedVersion | EdgeServerError | None) -> None:
        if isinstance(result, ChangedWhileLoading) and not self._is_wanted(model, load.action):
            # The desired state for the changed files is already set: nothing failed.
            result = None
        if isinstance(result, EdgeServerError) and not (model.desired.versions or model.desired.reason):
            # A model that was removed meanwhile has not failed, and its entry would stay in the index.
            result = None
        if isinstance(result, EdgeServerError):
            self._record_failure(model, load, result)
            if model.stated.members and not isinstance(result, ChangedWhileLoading):
                # An ensemble whose reload failed because its members changed must not go on serving.
                for item in list(model.loaded):
                    is_same = item.version == load.action.version and item.state is VersionState.READY
                    if is_same and own_fingerprint(item.fingerprint) == own_fingerprint(load.action.fingerprint):
                        item.reason = result.message
                        self._retire(model, item)
        elif result is not None:
            self._add_loaded(model, result)
        model.end_load()
        self._update_actions(model)
        if model.loading is None:
            model.is_demanded = False

    def _add_loaded(self, model: ModelState, version: ServedVersion) -> None:
        failure = model.failures.pop(version.version, None)
        if failure is not None:
            failure.forget_retry()
        model.retired.pop(version.version, None)
        model.evicted.pop(version.version, None)
        model.loaded.append(version)
        self._dependencies.add_members(model.name, steps_of(version))
        if self._is_closed:
            self._retire(model, version)
            return
        model.has_served = True
        self._publish_routes(model)
        self._add_event(MODEL_READY, version)
        # It serves again: a later failure, for example of new files, is not the GPU's.
        model.lost_gpu = (model.lost_gpu & model.desired.versions.keys()) - {version.version}
        lost = self._gpus.lost_gpus()
        device_id = next((gpu for gpu in gpus_of(version.spec) if gpu in lost), None)
        # Lost while the version was opened: `mark_gpu_lost` did not see it among the loaded versions.
        if device_id is not None and self._fail(model, version, _gpu_lost(device_id, lost[device_id])):
            model.lost_gpu.add(version.version)

    def _record_failure(self, model: ModelState, load: Load, cause: EdgeServerError) -> None:
        action = load.action
        before = model.failures.pop(action.version, None)
        failure = Failure(action.fingerprint, cause, load.generation)
        is_known = False
        if before is not None:
            before.forget_retry()
            if before.fingerprint == action.fingerprint:
                failure.count += before.count
                is_known = before.cause.message == cause.message
        model.evicted.pop(action.version, None)
        model.failures[action.version] = failure
        if failure.lacks_memory:
            self._lacking_memory.add(model.name)
        delay_s: float | None = None
        if failure.is_transient and not self._is_closed:
            delay_s = retry_delay_s(failure.count)
            failure.retry_at_s = time.time() + delay_s
            when_ns = time.monotonic_ns() + int(delay_s * 1e9)
            failure.alarm = self._timer.call_at(when_ns, lambda: self._retry_later(model, action.version, failure))
        # Logging the same cause at every retry would fill the log.
        level = logging.DEBUG if is_known else logging.ERROR
        log.log(level, "model '%s' version %d failed to load: %s", model.name, action.version, failure.reason)
        self._events.add(
            MODEL_FAILED,
            model=model.name, version=action.version, generation=load.generation,
            reason=failure.reason, failed_count=failure.count, retry_in_s=delay_s,
        )  # fmt: skip
        if model.lost_gpu:
            self._on_no_fallback(f"model '{model.name}' version {action.version}: {cause.message}")

    def _finish_unload(self, model: ModelState, version: ServedVersion) -> None:
        if not any(item.version == version.version for item in model.loaded):
            report = version.version_report(0.0)
            model.retired[version.version] = RetiredVersion(report.generation, report.since_s, report.served_count)
        self._add_event(MODEL_UNLOADED, version)
        self._update_actions(model)
        members = {member for member, _ in steps_of(version)} & self._models.keys()
        for name in members:
            self._update_actions(self._models[name])
        if self._is_closed:
            self._retire_unused(members)
        lacking, self._lacking_memory = self._lacking_memory, set()
        for name in sorted(lacking):
            other = self._models[name]
            for number, failure in list(other.failures.items()):
                if failure.lacks_memory and not failure.is_due:
                    self._retry(other, number, failure)

    def _retry_later(self, model: ModelState, version: int, failure: Failure) -> None:
        """Retry a failed load, on the timer's thread."""
        with self._change():
            self._retry(model, version, failure)

    def _retry(self, model: ModelState, version: int, failure: Failure) -> None:
        if model.failures.get(version) is failure and not self._is_closed:
            failure.forget_retry()
            failure.is_due = True
            self._update_actions(model)

    # -- versions that fail while they serve --------------------------------------------------------------------------

    def fail_hung(self, version: ServedVersion, reason: str) -> None:
        """Fail a version that hangs. It is not loaded again: the server is not ready from now on, and systemd should
        restart it."""
        with self._change():
            model = self._models[version.name]
            if not self._fail(model, version, reason):
                return
            log.error("%s", reason)
            self._add_event(MODEL_HUNG, version, reason=reason)
            model.failures[version.version] = Failure(version.fingerprint, SessionLost(reason), version.generation)
            self._update_actions(model)

    def handle_gpu_fault(self, version: ServedVersion, fault: GpuFault, error: EdgeServerError) -> None:
        """Handle the error of a run or load that says something about the version's GPU: it is lost, or it refused
        memory so often that the version must be loaded again later."""
        if fault.is_device_unusable:
            named = find_gpu_number(error)
            devices = gpus_of(version.spec)
            for device_id in [named] if named in devices else devices:
                assert device_id is not None
                self.mark_gpu_lost(device_id, error.message)
            return
        message = (
            f"model '{version.name}' version {version.version} finds no memory on its GPU, again and again: "
            f"{error.message}"
        )
        with self._change():
            model = self._models[version.name]
            if self._fail(model, version, message):
                action = LoadAction(version.version, version.fingerprint)
                self._record_failure(model, Load(model.name, action, version.generation), OutOfMemory(message))
                self._update_actions(model)

    def mark_gpu_lost(self, device_id: int, reason: str) -> None:
        """Fail every version with an instance on a lost GPU. Lost GPUs are not opened again: a model whose runtime was
        chosen from several gets the next one, a model with KIND_AUTO goes to the CPU, and one that requires a GPU stays
        FAILED. A second call does nothing."""
        if not self._gpus.mark_lost(device_id, reason):
            return
        message = _gpu_lost(device_id, reason)
        log.error("%s", message)
        with self._change():
            self._events.add(GPU_LOST, gpu=device_id, reason=reason)
            for model in self._models.values():
                for version in list(model.loaded):
                    if device_id in gpus_of(version.spec) and self._fail(model, version, message):
                        model.lost_gpu.add(version.version)
                        self._update_actions(model)
            self._actions.append(PublishEvents())

    # -- idle models --------------------------------------------------------------------------------------------------

    def unload_idle(self) -> None:
        """Unload the models that no request used for their time."""
        with self._change():
            for model in self._models.values():
                idle_s = model.idle_unload_s(self._lifecycle)
                is_idle = idle_s is not None and time.monotonic_ns() - model.last_used_ns() >= idle_s * 1e9
                if is_idle and model.can_be_evicted():
                    self._evict(model, UNLOADED_IDLE)

    def set_keep_alive(self, name: str, seconds: float) -> None:
        """Set how long a model stays loaded without requests; math.inf: for ever. Holds until it is unloaded. Does
        nothing for a model that neither serves nor is awaited by a request."""
        with self._changed:
            model = self._models.get(name)
            if model is not None and (model.pending or any(item.state is VersionState.READY for item in model.loaded)):
                model.keep_alive_s = seconds

    # -- routes -------------------------------------------------------------------------------------------------------

    def _publish_routes(self, model: ModelState, without: ServedVersion | None = None) -> None:
        """Replace the routes of a model by those of its ready versions, except `without`."""
        name, rejected = model.name, model.rejected
        routes = dict(self.routes)
        ready = ready_versions(model.loaded, without)
        planned, model.rejected = plan_routes(ready, routes.pop(name, None), rejected, self._end_trial)
        if planned is not None:
            routes[name] = planned
        self.routes = routes
        if model.rejected is not None and model.rejected is not rejected:
            canary = next(item for item in ready.values() if item.generation == model.rejected.generation)
            self._add_event(MODEL_CANARY_FAILED, canary, reason=model.rejected.reason)

    def _end_trial(self, trial: CanaryTrial, reason: str) -> None:
        """Send no more requests without a version to the canary of a trial. From any thread."""
        name = trial.canary.spec.name
        with self._changed:
            routes = self.routes.get(name)
            if routes is not None and routes.canary is not None and routes.trial is trial:
                canary = routes.canary
                log.error("model '%s' version %d is no canary any more: %s", name, canary.version, reason)
                self.routes = {**self.routes, name: routes._replace(canary=None, trial=None)}
                trial.end()
                self._models[name].rejected = RejectedCanary(canary.generation, reason)
                self._add_event(MODEL_CANARY_FAILED, canary, reason=reason)
        self._events.publish()

    # -- requests that wait for a load --------------------------------------------------------------------------------

    def add_pending(self, pending: PendingRequest) -> bool | None:
        """Let a request wait for its evicted model, and load the model. Return False if it serves by now, and None if
        waiting would not help. Raises QueueFull if too many wait already."""
        request, lifecycle = pending.request, self._lifecycle
        with self._change():
            model = self._models.get(request.model)
            if model is None or self._is_closed:
                return None
            if not (lifecycle.max_resident_models or lifecycle.idle_unload_s or model.is_demanded or model.on_demand()):
                # It was not evicted, and will not be: requests do not load it.
                return None
            if self._has_route(request):
                return False
            if not model.may_wait_for(request.version):
                return None
            if len(model.pending) >= _MAX_PENDING:
                raise QueueFull(f"{_MAX_PENDING} requests wait for model '{model.name}' to be loaded already")
            model.pending.add(pending)
            self._load_evicted(model)
            return True

    def remove_pending(self, pending: PendingRequest) -> None:
        with self._changed:
            model = self._models.get(pending.request.model)
            if model is not None:
                model.pending.discard(pending)

    def _has_route(self, request: Request) -> bool:
        routes = self.routes.get(request.model)
        return routes is not None and (request.version is None or request.version in routes.ready)

    def _pending_answers(self, model: ModelState) -> list[tuple[PendingRequest, EdgeServerError | None]]:
        """Return the pending requests that can be submitted now, and with an error those that cannot succeed; others
        keep waiting. Called after a load."""
        answers: list[tuple[PendingRequest, EdgeServerError | None]] = []
        for pending in model.pending:
            version = pending.request.version
            if self._has_route(pending.request):
                answers.append((pending, None))
            elif not model.may_wait_for(version):
                rows = model.index_rows()
                number = max(rows) if version is None and rows else version
                message = rows.get(number or 0, ("UNAVAILABLE", ""))[1]
                why = f"model '{model.name}' could not be loaded for the request: {message or 'unloaded'}"
                answers.append((pending, NotReady(why, retry_after_s=model.retry_after_s(version))))
        if model.loading is None and len(answers) < len(model.pending):
            # The rest waits for evicted versions: load them.
            self._load_evicted(model)
        return answers

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait_settled(self, names: Iterable[str] | None = None, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to load for these models (None: all) and undesired versions accept no more
        requests.

        Does not wait for later retries. Returns False on time-out or if the table is closed first.
        """
        chosen = None if names is None else list(names)
        left: ModelState | None = None

        def is_settled() -> bool:
            nonlocal left
            # Called after every step of every model: most often the same model is still not settled.
            if left is None or not left.is_unsettled:
                # Loads start in order, so that the last model is likely to be one.
                models = reversed(self._models.values()) if chosen is None else map(self._models.get, chosen)
                left = next((model for model in models if model is not None and model.is_unsettled), None)
            return left is None

        with self._changed:
            self._changed.wait_for(lambda: is_settled() or self._is_closed, timeout_s)
            has_settled = is_settled()
        self._events.publish()
        return has_settled

    def wait_engine_builds(self) -> None:
        """Wait until the only models left to load are those whose load builds an engine, and ensembles of them; or
        until the table is closed."""
        with self._changed:
            desired = {name: model.desired for name, model in self._models.items()}
        members = {name: [member for member, _ in model.members] for name, model in desired.items()}
        building: set[str] = set()
        for name in topological_order(members):
            if desired[name].builds_engine or building.intersection(members[name]):
                building.add(name)
        self.wait_settled(desired.keys() - building)

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> list[PendingRequest]:
        """Begin nothing more, and retire everything. Return the pending requests."""
        with self._change():
            self._is_closed = True
            for model in self._models.values():
                for failure in model.failures.values():
                    failure.forget_retry()
            self._retire_unused(self._models)
            self._changed.notify_all()
            return [item for model in self._models.values() for item in model.pending]

    def wait_finished(self, timeout_s: float) -> None:
        """Wait for the end of all loads and unloads, including those that start meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished, timeout_s)

    # -- questions ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[Mapping[str, ModelState]]:
        """Hold the lock to read the states. They are neither changed nor kept."""
        with self._changed:
            yield self._models

    def loaded_versions(self) -> list[ServedVersion]:
        """Return all loaded versions, whatever their state."""
        with self._changed:
            return [item for model in self._models.values() for item in model.loaded]

    def is_member(self, name: str) -> bool:
        """Return whether a desired ensemble has the model as a member."""
        with self._changed:
            return bool(self._dependencies.ensembles_with_member(name))

    def member_problem(self, name: str, version: int | None) -> str:
        """Return why a model cannot be a member of an ensemble now, "" if it can."""
        with self._changed:
            return self._dependencies.member_problem(name, version)


def _gpu_lost(device_id: int, reason: str) -> str:
    return f"GPU {device_id} is lost to this process: {reason}"
