"""Detection of deadlocks between models that call each other: a call that no instance could ever answer fails at once.

A model that calls another model waits for the answer, and its instance is busy meanwhile. If every instance of the
called model waits, directly or through other models, for a model in the same state, the call can never be answered.
Models that call others register their instances here. An instance that is registered and does not wait will answer
some day.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Sequence

from edge_server.backends.base import ServerCalls
from edge_server.core.model_spec import ModelSpec
from edge_server.errors import EdgeServerError


class WaitGraph:
    """The instances of all models in this process, and the models that each one waits for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._instances: dict[str, set[Hashable]] = {}
        self._waits: dict[Hashable, list[str]] = {}

    def add_instance(self, model: str, instance: Hashable) -> None:
        with self._lock:
            self._instances.setdefault(model, set()).add(instance)

    def remove_instance(self, model: str, instance: Hashable) -> None:
        with self._lock:
            left = self._instances.get(model, set())
            left.discard(instance)
            if not left:
                self._instances.pop(model, None)
            self._waits.pop(instance, None)

    def add_wait(self, instance: Hashable, model: str) -> None:
        """Record that the instance waits for a response of the model."""
        with self._lock:
            self._waits.setdefault(instance, []).append(model)

    def remove_wait(self, instance: Hashable, model: str) -> None:
        """Record that the response arrived. Call it before the answering instance is free again."""
        with self._lock:
            waits = self._waits.get(instance, [])
            if model in waits:
                waits.remove(model)
            if not waits:
                self._waits.pop(instance, None)

    def is_deadlocked(self, model: str) -> bool:
        """Return whether no instance of the model can ever answer."""
        with self._lock:
            stuck = set(self._instances)
            while True:
                free = {
                    name
                    for name in stuck
                    if not all(
                        any(model in stuck for model in self._waits.get(instance, ()))
                        for instance in self._instances[name]
                    )
                }
                if not free:
                    return model in stuck
                stuck -= free


WAIT_GRAPH = WaitGraph()
"""The waits of all models that this server runs, in this process or in their own."""


def deadlock_message(model: str, called: str, waits_for: Sequence[str]) -> str:
    """Return the error for a call that can never be answered. `waits_for` lists the models that it waits for."""
    if called not in waits_for:
        names = ", ".join(f"'{name}'" for name in waits_for)
        return (
            f"model '{model}' called ensemble '{called}', which is made of {names}, but every instance of one of these "
            f"is waiting, by way of such calls, for itself; nobody is left to answer. More instances of it "
            "(instance_group count) help"
        )
    return (
        f"model '{model}' called model '{called}', but every instance of '{called}' is waiting, by way of such calls, "
        f"for '{called}' itself; nobody is left to answer. More instances of '{called}' (instance_group count) help"
    )


def models_to_wait_for(server: ServerCalls, spec: ModelSpec, outputs: Collection[str]) -> tuple[str, ...]:
    """Return the names of the models that run for a request for `outputs`: the model itself, or an ensemble's members.

    Ensembles are replaced by their members. No outputs means all outputs.
    """
    if spec.ensemble is None:
        return (spec.name,)
    # The steps that produce a wanted tensor or an input of such a step. Steps whose output nothing uses run always
    # (see core.ensemble).
    steps = spec.ensemble.steps
    known = {item.name for item in spec.outputs}
    consumed = {tensor for step in steps for tensor in step.input_map.values()}
    produced = {tensor for step in steps for tensor in step.output_map.values()}
    wanted = [*(outputs or known), *(produced - consumed - known)]
    running = []
    while wanted:
        tensor = wanted.pop()
        for step in steps:
            if tensor in step.output_map.values() and step not in running:
                running.append(step)
                wanted += step.input_map.values()
    found: dict[str, None] = {}
    for step in running:
        try:
            member = server.find(step.model, step.version).spec
        except EdgeServerError:
            # The call itself reports this error.
            continue
        member_outputs = step.output_map if member.ensemble is not None else ()
        found.update(dict.fromkeys(models_to_wait_for(server, member, member_outputs)))
    return tuple(found)
