"""Loaded models that several instances share: each file is opened once and closed after its last instance."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

from edge_server.file_stamp import file_stamp

Loaded = TypeVar("Loaded")


def fingerprint(path: Path) -> Hashable:
    """Return a value that changes when a file in the folder of `path`, or below, changes: also when another of the same
    size and time takes its place.

    The whole folder, because weights may lie beside the model (IR's .bin, ONNX external data, a SavedModel's).
    """
    files = [Path(folder, name) for folder, _, names in os.walk(path.parent) for name in names]
    return str(path), tuple(sorted((str(one), file_stamp(one.stat())) for one in files if one.is_file()))


class SharedModels(Generic[Loaded]):
    """Loaded models, each shared by all instances with the same key.

    Weights and thread pools are the largest part of a model's memory. A second instance adds only the memory of a
    request. Several threads may take and give back at the same time. If several take the same key, one loads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry[Loaded]] = {}

    def take(self, key: Hashable, load: Callable[[], Loaded]) -> Loaded:
        """Return the model of that key, and load it if no instance holds it. Exceptions of `load` pass through."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            entry.holders += 1
        try:
            with entry.lock:
                if not entry.loaded:
                    entry.loaded.append(load())
                return entry.loaded[0]
        except BaseException:
            self.give_back(key)
            raise

    def holder_count(self, key: Hashable) -> int:
        """Return the number of shares that are taken."""
        with self._lock:
            return self._entries[key].holders if key in self._entries else 0

    def give_back(self, key: Hashable) -> None:
        """Release one share. After the last release the model is dropped, on this thread."""
        with self._lock:
            entry = self._entries[key]
            entry.holders -= 1
            if entry.holders == 0:
                del self._entries[key]


class _Entry(Generic[Loaded]):
    """One shared model. `loaded` is empty until the first holder has loaded it."""

    __slots__ = ("holders", "loaded", "lock")

    def __init__(self) -> None:
        self.holders = 0
        self.loaded: list[Loaded] = []
        self.lock = threading.Lock()
