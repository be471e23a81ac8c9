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
"""How long a load that finds no room waits for what is being unloaded, or for a model in use to become free."""

_LOOK_AGAIN_S = 0.05
"""How often a load looks whether a model in use has become free: requests that end tell nobody."""

AskRoom = Callable[[ModelFile, int], str | None]
"""Says why there is no memory for a model's file in so many instances; None when there is."""


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load whose turn has come. `slot`, its right to load, is given back while it waits for others to leave."""

    model: ModelState
    action: LoadAction
    generation: int
    slot: LoadSlot


@dataclass(frozen=True, slots=True)
class Unloading:
    """What the manager does for a load, all of it called under its lock: tell whether the load is still wished for,
    and whether the server stops; begin to retire a version; take a model out of memory that stays wished for."""

    is_wanted: Callable[[ModelState, LoadAction], bool]
    is_closed: Callable[[], bool]
    start_retire: Callable[[ModelState, ServedVersion], None]
    evict: Callable[[ModelState, str], None]


class LoadAdmission:
    """Works on the threads that load, and waits there without their slots. Sees the manager's records; `changed` is
    its lock, and tells of every version that is gone. `ask_room` None: there is always memory enough."""

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
        """Unload what must go before the version is opened. False when it is not to be opened after all.

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
        """Return whether a version is on its way out of memory."""
        with self._changed:
            loaded = [item for model in self._models.values() for item in model.loaded]
        return any(item.state in (VersionState.DRAINING, VersionState.CLOSING) for item in loaded)

    def _replace_old(self, load: PendingLoad) -> bool:
        """Retire what the version replaces, and wait until it is gone. False when something else is wished by then."""
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
        """Evict others until one more model may be in memory. False when it must rest until somebody asks for it."""
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
        """Raise OutOfMemory when the machine has no room for it, not even once what is being unloaded is gone."""
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
