"""Deadlock check: finds models that would wait for each other for ever.

A model calls another and waits: its instance is taken meanwhile. When every instance of the model that is called
waits, directly or through others, for a model of which the same is true, nobody is left who could answer. Only models
in Python wait so; an instance that is known here and does not wait will answer some day.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Instance = TypeVar("Instance", bound=Hashable)


class WaitGraph(Generic[Instance]):
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._instances: dict[str, set[Instance]] = {}
        self._waits: dict[Instance, list[str]] = {}

    def enter(self, model: str, instance: Instance) -> None:
        with self._lock:
            self._instances.setdefault(model, set()).add(instance)

    def leave(self, model: str, instance: Instance) -> None:
        with self._lock:
            left = self._instances.get(model, set())
            left.discard(instance)
            if not left:
                self._instances.pop(model, None)
            self._waits.pop(instance, None)

    def begin(self, instance: Instance, model: str) -> None:
        """Say that the instance waits for an answer of the model."""
        with self._lock:
            self._waits.setdefault(instance, []).append(model)

    def end(self, instance: Instance, model: str) -> None:
        """Say that the answer is there. Must come before the answering instance is free again."""
        with self._lock:
            waits = self._waits.get(instance, [])
            if model in waits:
                waits.remove(model)
            if not waits:
                self._waits.pop(instance, None)

    @contextmanager
    def waiting(self, instance: Instance, model: str) -> Iterator[None]:
        self.begin(instance, model)
        try:
            yield
        finally:
            self.end(instance, model)

    def is_stuck(self, model: str) -> bool:
        """Return whether no instance of the model can ever answer."""
        with self._lock:
            stuck = set(self._instances)
            while True:
                free = {name for name in stuck if not all(self._is_held(one, stuck) for one in self._instances[name])}
                if not free:
                    return model in stuck
                stuck -= free

    def _is_held(self, instance: Instance, stuck: set[str]) -> bool:
        return any(model in stuck for model in self._waits.get(instance, ()))
