"""Load admission: frees memory for a version before it is loaded, by unloading the old version or evicting idle
models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_server.core.model_spec import ModelFile
from edge_server.core.version_lifecycle import (
    LoadAction,
    ReloadPolicy,
    Resolved,
    RetireAction,
    VersionState,
    next_action,
)
from edge_server.errors import OutOfMemory
from edge_server.serving.execution.version_interface import ServedVersion
from edge_server.serving.lifecycle.event_queue import ModelEventQueue
from edge_server.serving.lifecycle.eviction import to_evict
from edge_server.serving.lifecycle.limits import ManagerLimits
from edge_server.serving.lifecycle.loader import LoadSlot
from edge_server.serving.lifecycle.model_state import UNLOADED_FOR_ROOM, EvictedVersion, ModelState

_ROOM_PATIENCE_S = 5.0
"""How long a load without enough memory waits for models that are being unloaded, or for a model in use to become
idle."""

_LOOK_AGAIN_S = 0.05
"""Interval at which a load checks whether a model in use has become idle: the end of a request is not reported."""

AskRoom = Callable[[ModelFile, int], str | None]
"""Returns why there is no memory for so many instances of a model's file; None if there is."""


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load whose turn has come. `slot`, its right to load, is given back while it waits for others to unload."""

    model: ModelState
    action: LoadAction
    generation: int
    slot: LoadSlot


@dataclass(frozen=True, slots=True)
class Unloading:
    """Functions of the manager for a load, all called under its lock: whether the load is still desired; whether the
    server stops; begin to retire a version; evict a model that stays desired."""

    is_wanted: Callable[[ModelState, LoadAction], bool]
    is_closed: Callable[[], bool]
    start_retire: Callable[[ModelState, ServedVersion], None]
    evict: Callable[[ModelState, str], None]


class LoadAdmission:
    """Runs on the loading threads, and waits there without their slots. `changed` is the manager's lock, and is
    notified of every unloaded version. `ask_room` None: there is always enough memory."""

    def __init__(
        self,
        changed: threading.Condition,
        models: Mapping[str, ModelState],
        limits: ManagerLimits,
        ask_room: AskRoom | None,
        events: ModelEventQueue,
        unloading: Unloading,
    ) -> None:
        self.ask_room: AskRoom = ask_room or (lambda file, instance_count: None)
        self._changed = changed
        self._models = models
        self._limits = limits
        self._events = events
        self._unloading = unloading

    def free_memory(self, load: PendingLoad, resolved: Resolved) -> bool:
        """Unload what must be unloaded before the version is opened. Return False if the version must not be opened any
        more.

        Raises OutOfMemory.
        """
        if resolved.spec.ensemble is not None:
            return True
        is_replaced = self._limits.reload_policy_of(resolved.spec) is ReloadPolicy.REPLACE
        if is_replaced and not self._replace_old(load):
            return False
        if not self._find_place(load, resolved):
            return False
        self._check_room(load, resolved)
        return True

    def is_unloading(self) -> bool:
        """Return whether a version is being unloaded."""
        with self._changed:
            loaded = [item for model in self._models.values() for item in model.loaded]
        return any(item.state in (VersionState.DRAINING, VersionState.CLOSING) for item in loaded)

    def _replace_old(self, load: PendingLoad) -> bool:
        """Retire the version that is replaced, and wait until it is closed. Return False if the load is not desired any
        more."""
        model, unloading = load.model, self._unloading
        while True:
            with self._changed:
                if not unloading.is_wanted(model, load.action):
                    return False
                snapshots = [item.snapshot() for item in model.loaded]
                step = next_action(model.to_serve(), snapshots, model.failed(), ReloadPolicy.REPLACE)
                if isinstance(step, LoadAction):
                    return step == load.action
                if isinstance(step, RetireAction):
                    model.is_replacing = True
                    unloading.start_retire(model, model.of_generation(step.generation))
                    continue
                loaded = len(model.loaded)
            self._events.publish()
            self._wait(load, lambda: len(model.loaded) < loaded or not unloading.is_wanted(model, load.action))  # noqa: B023

    def _find_place(self, load: PendingLoad, resolved: Resolved) -> bool:
        """Evict others until one more model may be loaded. Return False if the model must stay unloaded until a request
        needs it."""
        model, action, limit = load.model, load.action, self._limits.max_resident_models
        until = time.monotonic() + _ROOM_PATIENCE_S
        while True:
            with self._changed:
                if not self._unloading.is_wanted(model, action):
                    return False
                others = []
                if limit and not model.loaded:
                    others = [item for item in self._models.values() if item is not model and item.is_resident]
                if not limit or model.loaded or len(others) < limit:
                    model.is_opening = True
                    return True
                if not model.is_demanded:
                    model.failures.pop(action.version, None)
                    model.evicted[action.version] = EvictedVersion(
                        action.fingerprint, resolved.spec, UNLOADED_FOR_ROOM, load.generation, time.time()
                    )
                    return False
                for victim in to_evict([item for item in others if item.stays], limit):
                    self._unloading.evict(victim, UNLOADED_FOR_ROOM)
            self._events.publish()
            if time.monotonic() > until:
                raise OutOfMemory(f"all {limit} models that --max-resident-models allows are in use")
            self._wait(load, self._unloading.is_closed, _LOOK_AGAIN_S)

    def _check_room(self, load: PendingLoad, resolved: Resolved) -> None:
        """Raise OutOfMemory if the machine has not enough memory, even after the models that are being unloaded are
        gone."""
        count = sum(group.count * max(1, len(group.gpus)) for group in resolved.spec.instance_groups)
        refusal = self.ask_room(resolved.file, count)
        if refusal is not None and self.is_unloading():
            self._wait(load, lambda: self._unloading.is_closed() or not self.is_unloading(), _ROOM_PATIENCE_S)
            refusal = self.ask_room(resolved.file, count)
        if refusal is not None:
            raise OutOfMemory(f"model '{resolved.spec.name}' version {resolved.file.version}: {refusal}")

    def _wait(self, load: PendingLoad, is_so: Callable[[], bool], timeout_s: float | None = None) -> None:
        with load.slot.given_back(), self._changed:
            self._changed.wait_for(is_so, timeout_s)
