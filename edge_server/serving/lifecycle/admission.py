"""Load admission: frees memory for a version before it is loaded, by unloading the old version or evicting idle
models."""

from __future__ import annotations

import time
from collections.abc import Callable

from edge_server.core.model_spec import ModelFile
from edge_server.core.version_lifecycle import ReloadPolicy, Resolved
from edge_server.errors import OutOfMemory
from edge_server.serving.lifecycle.event_queue import ModelEventQueue
from edge_server.serving.lifecycle.limits import ManagerLimits
from edge_server.serving.lifecycle.loader import LoadSlot
from edge_server.serving.lifecycle.model_table import Load, ModelTable

_ROOM_PATIENCE_S = 5.0
"""How long a load without enough memory waits for models that are being unloaded, or for a model in use to become
idle."""

_LOOK_AGAIN_S = 0.05
"""Interval at which a load checks whether a model in use has become idle: the end of a request is not reported."""

AskRoom = Callable[[ModelFile, int], str | None]
"""Returns why there is no memory for so many instances of a model's file; None if there is."""


class LoadAdmission:
    """Runs on the loading threads, and waits there without their slots. `ask_room` None: there is always enough
    memory."""

    def __init__(
        self, table: ModelTable, limits: ManagerLimits, ask_room: AskRoom | None, events: ModelEventQueue
    ) -> None:
        self.ask_room: AskRoom = ask_room or (lambda file, instance_count: None)
        self._table = table
        self._limits = limits
        self._events = events

    def free_memory(self, load: Load, slot: LoadSlot, resolved: Resolved) -> bool:
        """Unload what must be unloaded before the version is opened. Return False if the version must not be opened any
        more.

        Raises OutOfMemory.
        """
        if resolved.spec.ensemble is not None:
            return True
        if self._limits.reload_policy_of(resolved.spec) is ReloadPolicy.REPLACE and not self._replace_old(load, slot):
            return False
        if not self._find_place(load, slot, resolved):
            return False
        self._check_room(slot, resolved)
        return True

    def _replace_old(self, load: Load, slot: LoadSlot) -> bool:
        """Retire the versions that are replaced, and wait until they are closed. Return False if the load is not
        desired any more."""
        while (answer := self._table.replace_old(load)) is None:
            self._events.publish()
            with slot.given_back():
                self._table.wait_until(lambda: self._table.replace_old(load) is not None)
        return answer

    def _find_place(self, load: Load, slot: LoadSlot, resolved: Resolved) -> bool:
        """Evict others until one more model may be loaded. Return False if the model must stay unloaded until a request
        needs it."""
        until = time.monotonic() + _ROOM_PATIENCE_S
        while (answer := self._table.claim_place(load, resolved.spec)) is None:
            self._events.publish()
            if time.monotonic() > until:
                limit = self._limits.max_resident_models
                raise OutOfMemory(f"all {limit} models that --max-resident-models allows are in use")
            with slot.given_back():
                self._table.wait_until(lambda: False, _LOOK_AGAIN_S)
        return answer

    def _check_room(self, slot: LoadSlot, resolved: Resolved) -> None:
        """Raise OutOfMemory if the machine has not enough memory, even after the models that are being unloaded are
        gone."""
        count = sum(group.count * max(1, len(group.gpus)) for group in resolved.spec.instance_groups)
        refusal = self.ask_room(resolved.file, count)
        if refusal is not None and self._table.is_unloading():
            with slot.given_back():
                self._table.wait_until(lambda: not self._table.is_unloading(), _ROOM_PATIENCE_S)
            refusal = self.ask_room(resolved.file, count)
        if refusal is not None:
            raise OutOfMemory(f"model '{resolved.spec.name}' version {resolved.file.version}: {refusal}")
