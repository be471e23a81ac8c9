"""Shared code of all runtimes: import of the library, its error messages, one loaded model for all instances.

Used by the backend files of this folder only.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

import numpy as np

from edge_server.backends.base import Array, ModelFile
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendMissing, LoadError, OutOfMemory

_LONGEST_QUOTE = 600
"""Characters of a runtime's message that are handed on; some runtimes print the whole file into theirs."""

_MEMORY_WORDS = ("bad_alloc", "bad allocation", "out of memory", "failed to allocate memory")

Loaded = TypeVar("Loaded")


def import_runtime(module: str, needs: str, extra: str = "") -> ModuleType:
    """Import a runtime's library; `needs` is a name that a working installation has, `extra` the one of this package
    that brings it, where that is not called like it.

    Raises BackendMissing with the pip line, whatever the import raised: a broken wheel fails with anything from
    OSError to RuntimeError, and must not take other models down.
    """
    extra = extra or module.partition(".")[0]
    try:
        library = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - foreign code at import time raises what it likes
        reason = f"{type(error).__name__}: {words(error)}"
    else:
        if hasattr(library, needs):
            return library
        reason = f"it has no {needs}; the installation is incomplete"
    raise BackendMissing(
        f"runtime {module} does not import ({reason}); install it with: pip install 'edge-server[{extra}]'"
    )


def words(error: BaseException) -> str:
    """Return the message of an exception as one line of bounded length."""
    line = " ".join(str(error).split())
    return line if len(line) <= _LONGEST_QUOTE else line[:_LONGEST_QUOTE] + " ..."


def load_error(file: ModelFile, runtime: str, error: BaseException) -> LoadError:
    """Return the LoadError (OutOfMemory where that is the cause) for a runtime's exception about a file."""
    said = words(error)
    kind = LoadError
    if isinstance(error, MemoryError) or any(sign in said.lower() for sign in _MEMORY_WORDS):
        kind = OutOfMemory
    return kind(f"{file_title(file)}: {runtime} cannot load it: {said or type(error).__name__}")


def file_title(file: ModelFile) -> str:
    """Return how messages name a model's file."""
    return f"model '{file.model_dir.name}' version {file.version}, file '{file.path.name}'"


def existing_file(file: ModelFile, inner_name: str) -> Path:
    """Return the file to read: `file.path`, or `inner_name` inside it when the model is a directory.

    Raises LoadError when there is no such regular file, or it is empty.
    """
    path = file.path / inner_name if file.path.is_dir() else file.path
    if not path.is_file():
        raise LoadError(f"{file_title(file)}: there is no such file")
    if path.stat().st_size == 0:
        raise LoadError(f"{file_title(file)}: the file is empty")
    return path


def fingerprint(path: Path) -> Hashable:
    """Return a value that changes when a file of the folder around `path`, or of a folder in it, changes.

    The folder, not the file alone: weights may lie beside the model (IR's .bin, ONNX external data, a SavedModel's).
    """
    files = [Path(folder, name) for folder, _, names in os.walk(path.parent) for name in names]
    stats = [(str(one), one.stat()) for one in files if one.is_file()]
    return (str(path), tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)))


def is_batchable(inputs: Iterable[InputSpec], outputs: Iterable[OutputSpec]) -> bool:
    """Tell whether every tensor, as the file declares it, has a leading dimension of any size."""
    dims = [one.dims for one in inputs] + [one.dims for one in outputs]
    return all(shape[:1] == (-1,) for shape in dims)


_FLOATS = {DType.FP16: "f16", DType.BF16: "bf16", DType.FP32: "f32", DType.FP64: "f64"}


def precision_of_tensors(spec: ModelSpec) -> str:
    """Return the arithmetic that a model's inputs and outputs speak of, for one whose weights do not tell.

    The only floating-point type among them, or "int" when there is none; "mixed" when there are several.
    """
    types = {item.dtype for item in spec.inputs} | {item.dtype for item in spec.outputs}
    floats = {_FLOATS[dtype] for dtype in types if dtype in _FLOATS}
    return floats.pop() if len(floats) == 1 else "mixed" if floats else "int"


def instance_count(spec: ModelSpec) -> int:
    """Return how many instances a CPU model will have in all (at least 1)."""
    return max(1, sum(group.count for group in spec.instance_groups))


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def whole_number(model: str, options: Mapping[str, str], key: str, default: int, least: int = 0) -> int:
    """Return an integer option, `default` when it is unset. Raises LoadError when it is no number >= `least`."""
    if key not in options:
        return default
    text = options[key].strip()
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise LoadError(f"model '{model}': parameter {key} must be a whole number from {least}, got '{text[:80]}'")
    return value


def yes_or_no(model: str, options: Mapping[str, str], key: str, default: bool) -> bool:
    """Return a switch: 1/0, true/false, yes/no, on/off in any case. Raises LoadError for other words."""
    if key not in options:
        return default
    text = options[key].strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise LoadError(f"model '{model}': parameter {key} must be yes or no, got '{text[:80]}'")


def readable(array: Array) -> Array:
    """Return the array itself when a runtime can read it in place, else an aligned, contiguous copy."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.array(array, order="C")


def writable(array: Array) -> Array:
    """Return the array, or an array over the same memory, for a binding that insists on writing to what it only reads.

    Either keeps the memory alive as long as it is there itself: a model may keep its input for the next run.
    """
    ready = readable(array)
    return ready if ready.flags.writeable else np.asarray(_Alias(ready))


class _Alias:
    """Presents an array's memory as writable."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: Array) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._array = array


class SharedModels(Generic[Loaded]):
    """Loaded models, each held once for all instances that ask for the same thing.

    Weights and thread pools are by far the most a model costs on a small board; a second instance of a model adds
    only what a request needs. Threads may take and give back at the same time; one loads, the others of the same key
    wait for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry[Loaded]] = {}

    def take(self, key: Hashable, load: Callable[[], Loaded]) -> Loaded:
        """Return the model of that key, loading it first when nobody holds it. What `load` raises passes through."""
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

    def give_back(self, key: Hashable) -> None:
        """End one holding; after the last one the model is dropped, on this thread."""
        with self._lock:
            entry = self._entries[key]
            entry.holders -= 1
            if entry.holders == 0:
                del self._entries[key]


class _Entry(Generic[Loaded]):
    """One shared model; `loaded` is empty until the first holder has loaded it."""

    __slots__ = ("holders", "loaded", "lock")

    def __init__(self) -> None:
        self.holders = 0
        self.loaded: list[Loaded] = []
        self.lock = threading.Lock()
