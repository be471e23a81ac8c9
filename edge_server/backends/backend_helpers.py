"""Functions that several backends share: import of a library, its exceptions as errors of the server, parsers of
options, and `SharedModels`, which opens a file once for several instances.

Used by the backends only.
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

from edge_server.backends.base import MAX_METADATA_TEXT, Array, ModelFile
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BackendMissing, InvalidRequest, LoadError, OutOfMemory, install_hint

_LONGEST_QUOTE = 600
"""Largest length of a quoted message. Some runtimes print the whole file into theirs."""

_MEMORY_WORDS = ("bad_alloc", "bad allocation", "out of memory", "failed to allocate memory")

Loaded = TypeVar("Loaded")


def import_runtime(module: str, needs: str, extra: str = "") -> ModuleType:
    """Import a runtime's library. `needs` is a name that a working installation has. `extra` is the extra of this
    package that installs it, if it has another name.

    Raises BackendMissing with the `pip install` line for every exception of the import: a broken wheel may raise
    anything from OSError to RuntimeError, and must not stop other models.
    """
    extra = extra or module.partition(".")[0]
    try:
        library = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - foreign code may raise any exception at import
        reason = f"{type(error).__name__}: {message_line(error)}"
    else:
        if hasattr(library, needs):
            return library
        reason = f"it has no {needs}; the installation is incomplete"
    raise BackendMissing(f"runtime {module} does not import ({reason}); {install_hint(extra)}")


def message_line(error: BaseException) -> str:
    """Return the message of an exception as one line of bounded length."""
    line = " ".join(str(error).split())
    return line if len(line) <= _LONGEST_QUOTE else line[:_LONGEST_QUOTE] + " ..."


def load_error(file: ModelFile, runtime: str, error: BaseException) -> LoadError:
    """Return the LoadError for a runtime's exception about a file; OutOfMemory if that is the cause."""
    said = message_line(error)
    kind = LoadError
    if isinstance(error, MemoryError) or any(sign in said.lower() for sign in _MEMORY_WORDS):
        kind = OutOfMemory
    return kind(f"{file_title(file)}: {runtime} cannot load it: {said or type(error).__name__}")


def run_error(
    model: str, runtime: str, message: str, inputs: Mapping[str, Array], accepted: Mapping[str, tuple[int, ...]]
) -> BackendError | InvalidRequest:
    """Return the error of a failed run: the requests' if an input's shape is none that the file accepts (-1: any size).

    A configuration may declare dims of any size where the file has fixed ones, so that only the run shows it.
    """
    for name, array in inputs.items():
        dims = accepted.get(name)
        # Runtimes also report no dims for an input with any number of them.
        if dims and not (
            len(dims) == array.ndim and all(dim in (-1, size) for dim, size in zip(dims, array.shape, strict=True))
        ):
            return InvalidRequest(
                f"input '{name}' of model '{model}' has the shape {list(array.shape)}, but {runtime} accepts only "
                f"{list(dims)}"
            )
    return BackendError(f"model '{model}': {runtime} failed: {message}")


def file_title(file: ModelFile) -> str:
    """Return the name of a model's file in messages."""
    return f"model '{file.model_dir.name}' version {file.version}, file '{file.path.name}'"


def existing_file(file: ModelFile, inner_name: str) -> Path:
    """Return the file to read: `file.path`, or `inner_name` inside it when the model is a directory.

    Raises LoadError if there is no such regular file, or if it is empty.
    """
    path = file.path / inner_name if file.path.is_dir() else file.path
    if not path.is_file():
        raise LoadError(f"{file_title(file)}: there is no such file")
    if path.stat().st_size == 0:
        raise LoadError(f"{file_title(file)}: the file is empty")
    return path


def fingerprint(path: Path) -> Hashable:
    """Return a value that changes when a file in the folder of `path`, or below, changes.

    The whole folder, because weights may lie beside the model (IR's .bin, ONNX external data, a SavedModel's).
    """
    files = [Path(folder, name) for folder, _, names in os.walk(path.parent) for name in names]
    stats = [(str(one), one.stat()) for one in files if one.is_file()]
    return (str(path), tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)))


def is_batchable(inputs: Iterable[InputSpec], outputs: Iterable[OutputSpec]) -> bool:
    """Return whether every tensor has a leading dimension of any size in the file."""
    dims = [one.dims for one in inputs] + [one.dims for one in outputs]
    return all(shape[:1] == (-1,) for shape in dims)


def bounded_metadata(texts: Mapping[str, str] | Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Return the texts of a file's metadata without those that are too long."""
    return {key: text for key, text in dict(texts).items() if len(text) <= MAX_METADATA_TEXT}


_FLOATS = {DType.FP16: "f16", DType.BF16: "bf16", DType.FP32: "f32", DType.FP64: "f64"}


def precision_of_tensors(spec: ModelSpec) -> str:
    """Return the arithmetic of a model by its inputs and outputs, for a model whose weights cannot be read.

    It is their only floating-point type, "int" if they have none, or "mixed" if they have several.
    """
    types = {item.dtype for item in spec.inputs} | {item.dtype for item in spec.outputs}
    floats = {_FLOATS[dtype] for dtype in types if dtype in _FLOATS}
    return floats.pop() if len(floats) == 1 else "mixed" if floats else "int"


def instance_count(spec: ModelSpec) -> int:
    """Return the total number of instances of a CPU model (at least 1)."""
    return max(1, sum(group.count for group in spec.instance_groups))


def whole_number(model: str, options: Mapping[str, str], key: str, default: int, least: int = 0) -> int:
    """Return an integer option, `default` if it is unset. Raises LoadError unless it is a number >= `least`."""
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
    """Return the array if a runtime can read it in place, else an aligned, contiguous copy."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.array(array, order="C")


def writable(array: Array) -> Array:
    """Return a writable array over the same memory, for a binding that refuses read-only inputs but only reads them.

    The result keeps the memory alive, because a model may keep its input for the next run.
    """
    ready = readable(array)
    return ready if ready.flags.writeable else np.asarray(_WritableView(ready))


class _WritableView:
    """Presents an array's memory to numpy as writable."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: Array) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._array = array


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
