"""Runtimes, one file each, found by name and imported on first use: the only home of heavy imports.

May import core and errors. `serving` opens sessions through `load_backend` and `base` only; `repository` asks a
backend to inspect a file. A new runtime is one new file and one line in `_MODULES`.
"""

from __future__ import annotations

import importlib
import threading

from edge_server.backends.base import Backend
from edge_server.errors import BackendMissing

_MODULES = {
    "onnxruntime": "edge_server.backends.onnxruntime",
    "openvino": "edge_server.backends.openvino",
    "identity": "edge_server.backends.stub",
    "repeat": "edge_server.backends.stub",
    "square": "edge_server.backends.stub",
    "stub": "edge_server.backends.stub",
}
"""Backend name -> module with a function `make(name) -> Backend`."""

ONNX_ORDER = ("openvino", "onnxruntime")
"""Runtimes tried, in this order, for an ONNX file whose configuration names no backend."""

_lock = threading.Lock()
_made: dict[str, Backend] = {}


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends that ship, installed runtimes or not."""
    return tuple(_MODULES)


def load_backend(name: str) -> Backend:
    """Return the backend of that name, importing its runtime the first time.

    Raises BackendMissing for an unknown name, or when the runtime does not import, with what to install. A failed
    import is tried again on the next call: the runtime may have been installed meanwhile.
    """
    with _lock:
        if name in _made:
            return _made[name]
        if name not in _MODULES:
            raise BackendMissing(f"no backend is called '{name}'; there are {', '.join(sorted(_MODULES))}")
        backend: Backend = importlib.import_module(_MODULES[name]).make(name)
        _made[name] = backend
        return backend
