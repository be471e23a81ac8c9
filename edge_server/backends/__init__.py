"""Backends: one file per runtime, found by name and imported at first use. All heavy imports are here.

May import core and errors. `serving` opens sessions through `load_backend` and `base` only; `repository` asks a
backend to inspect a file. A new runtime is one new file and one line in `_MODULES`; a runtime of somebody else's is a
package of its own, which registers it as `base` says.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading

from edge_server.backends.base import Backend
from edge_server.backends.runtime_library import words
from edge_server.errors import BackendMissing
from edge_server.late import use

_MODULES = {
    "c_abi": "edge_server.backends.c_library",
    "fil": "edge_server.backends.tree_forest",
    "forest": "edge_server.backends.tree_forest",
    "jax": "edge_server.backends.jax_export",
    "litert": "edge_server.backends.litert",
    "onnxruntime": "edge_server.backends.onnxruntime",
    "openvino": "edge_server.backends.openvino",
    "identity": "edge_server.backends.builtin_models",
    "python": "edge_server.backends.python.backend",
    "pytorch": "edge_server.backends.pytorch",
    "repeat": "edge_server.backends.builtin_models",
    "square": "edge_server.backends.builtin_models",
    "stub": "edge_server.backends.builtin_models",
    "tensorflow": "edge_server.backends.tensorflow",
    "tensorrt": "edge_server.backends.tensorrt.backend",
    "tensorrt_rtx": "edge_server.backends.tensorrt.backend",
    "tflite": "edge_server.backends.litert",
}
"""Backend name -> module with a function `make(name) -> Backend`."""

TENSORRT_LIBRARIES = ("tensorrt", "tensorrt_rtx")
"""The modules that backends/tensorrt has an adapter for, which name its backends too; the preferred one first."""

ONNX_ORDER = ("openvino", "onnxruntime")
"""Runtimes tried, in this order, for an ONNX file whose configuration names no backend."""

ENTRY_POINTS = "edge_server.backends"
"""Group of entry points under which installed packages register backends."""

_lock = threading.Lock()
_made: dict[str, Backend] = {}


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends: those that ship, runtimes installed or not, then those of other packages."""
    others = sorted({entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)} - _MODULES.keys())
    return (*_MODULES, *others)


def load_backend(name: str) -> Backend:
    """Return the backend of that name, importing its runtime the first time.

    Raises BackendMissing for an unknown name, or when the runtime does not import, with what to install. A failed
    import is tried again on the next call: the runtime may have been installed meanwhile.
    """
    use("numpy")
    with _lock:
        if name in _made:
            return _made[name]
        backend: Backend
        if name in _MODULES:
            backend = importlib.import_module(_MODULES[name]).make(name)
        else:
            backend = _of_other_package(name)
        _made[name] = backend
        return backend


def _of_other_package(name: str) -> Backend:
    """Return the backend that an installed package registers under that name. Raises BackendMissing."""
    found = tuple(importlib.metadata.entry_points(group=ENTRY_POINTS, name=name))
    if not found:
        raise BackendMissing(
            f"no backend is called '{name}'; there are {', '.join(sorted(backend_names()))}; a package may add one "
            f"under the entry points '{ENTRY_POINTS}'"
        )
    packages = sorted({_package(entry) for entry in found})
    if len({entry.value for entry in found}) > 1:
        raise BackendMissing(f"backend '{name}' is registered by several packages: {', '.join(packages)}")
    title = f"backend '{name}' of package {packages[0]} ({found[0].value})"
    try:
        made = found[0].load()(name)
    except BackendMissing as error:
        said = error.message
    except Exception as error:  # noqa: BLE001 - foreign code at import time raises what it likes
        said = f"{type(error).__name__}: {words(error)}"
    else:
        if isinstance(made, Backend):
            return made
        said = f"it makes a {type(made).__name__}, not an edge_server.backends.base.Backend"
    raise BackendMissing(f"{title} does not load: {said}")


def _package(entry: importlib.metadata.EntryPoint) -> str:
    """Return the package that registers an entry point, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "of unknown name"
