"""Backends, the adapters to the libraries that run models: their interface (`base`), their loader, and those for ONNX
Runtime and OpenVINO.

The other runtimes are in plugins of this package (`Plugin.backends`). Other packages add backends as entry points; see
`backends.base`. Each is imported at its first use, because the imports are heavy. The rest of the server
uses `load_backend`, `open_session` and `backends.base`. May import core and errors.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping

from edge_server.backends.base import Backend, OpenJob, RequestSession, Session
from edge_server.backends.option_parsers import is_isolated
from edge_server.backends.runtime_errors import message_line
from edge_server.errors import BackendMissing
from edge_server.lazy_import import run_deferred_import
from edge_server.own_plugins import plugin_objects

_MODULES = {
    "onnxruntime": "edge_server.backends.onnxruntime.backend",
    "openvino": "edge_server.backends.openvino.backend",
    "identity": "edge_server.backends.builtin_models",
    "repeat": "edge_server.backends.builtin_models",
    "square": "edge_server.backends.builtin_models",
    "stub": "edge_server.backends.builtin_models",
}
"""Backend name -> module with a function `make(name) -> Backend`."""

_TEST_DOUBLE = "stub"
"""Backend that only tests want: no list for users names it."""

_DATA_BACKENDS = ("onnxruntime", "openvino", "identity", "repeat", "square", "stub")
"""Those of `_MODULES` whose model files are data; see `Plugin.data_backends`."""

ONNX_ORDER = ("onnxruntime", "openvino")
"""Runtimes for an ONNX file whose configuration names no backend, in this order. ONNX Runtime computes what the file
says; OpenVINO does not always, so it goes first only for a file for which both were measured and compared."""

ENTRY_POINTS = "edge_server.backends"
"""Group of entry points under which other packages register backends."""

_lock = threading.Lock()
_made: dict[str, Backend] = {}


def _modules() -> Mapping[str, str]:
    """Return the module of each backend of this package, those of its plugins included."""
    modules = dict(_MODULES)
    for plugin in plugin_objects():
        modules.update(plugin.backends)
    return modules


def engine_backends() -> tuple[str, ...]:
    """Return the backends that serve an ONNX file through an engine, which is built first."""
    return tuple(name for plugin in plugin_objects() for name in plugin.engine_backends)


def data_backends() -> frozenset[str]:
    """Return the backends whose model files are data: opening or running one runs no code of its author."""
    return frozenset(_DATA_BACKENDS).union(*(plugin.data_backends for plugin in plugin_objects()))


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends: the server's own, installed or not, then those of other packages."""
    import importlib.metadata  # here, because it needs a megabyte that an idle server has no use for

    others = sorted({entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)} - _modules().keys())
    return (*_modules(), *others)


def list_backends(unknown: str) -> str:
    """Return the end of an error about an unknown name: the nearest name, if any is near, and all names."""
    import difflib

    names = sorted(set(backend_names()) - {_TEST_DOUBLE})
    near = difflib.get_close_matches(unknown[:200], names, n=1)
    near = near or [name for name in names if unknown and name.startswith(unknown)]
    return (f", did you mean '{near[0]}'?" if near else ";") + f" there are {', '.join(names)}"


def load_backend(name: str) -> Backend:
    """Return the backend of that name. The first call imports its runtime.

    Raises BackendMissing for an unknown name, or if the runtime does not import, with the `pip install` line. A failed
    import is tried again by the next call, because the runtime may have been installed meanwhile.
    """
    run_deferred_import("numpy")  # first of all, because runtimes import submodules of it: see lazy_import
    with _lock:
        if name in _made:
            return _made[name]
        backend: Backend
        module = _MODULES.get(name) or _modules().get(name)
        if module is not None:
            backend = importlib.import_module(module).make(name)
        else:
            backend = _load_foreign_backend(name)
        _made[name] = backend
        return backend


def open_session(job: OpenJob) -> Session | RequestSession:
    """Open one instance of a model, in a child process if its parameter `isolation` says so. Raises LoadError."""
    backend = load_backend(job.spec.backend)
    if not is_isolated(job.spec.name, job.spec.parameters) or backend.isolates_itself:
        return backend.open(job)
    # Imported by the first model that needs it.
    from edge_server.backends.isolation.isolated_session import IsolatedSession

    return IsolatedSession(job, open_alone)


def open_alone(job: OpenJob) -> RequestSession:
    """Open a model in this process, which is its own. For the child process."""
    from edge_server.backends.isolation.batch_session import BatchSession

    session = load_backend(job.spec.backend).open(job)
    return session if isinstance(session, RequestSession) else BatchSession(job.spec, session)


def _load_foreign_backend(name: str) -> Backend:
    """Return the backend that another package registers under that name. Raises BackendMissing."""
    import importlib.metadata

    found = tuple(importlib.metadata.entry_points(group=ENTRY_POINTS, name=name))
    if not found:
        raise BackendMissing(
            f"no backend is called '{name}'{list_backends(name)}; a package may add one under the entry points "
            f"'{ENTRY_POINTS}'"
        )
    packages = sorted(
        {f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "of unknown name" for entry in found}
    )
    if len({entry.value for entry in found}) > 1:
        raise BackendMissing(f"backend '{name}' is registered by several packages: {', '.join(packages)}")
    title = f"backend '{name}' of package {packages[0]} ({found[0].value})"
    try:
        made = found[0].load()(name)
    except BackendMissing as error:
        said = error.message
    except Exception as error:  # noqa: BLE001 - code of another package may raise any exception at import
        said = f"{type(error).__name__}: {message_line(error)}"
    else:
        if isinstance(made, Backend):
            return made
        said = f"it makes a {type(made).__name__}, not an edge_server.backends.base.Backend"
    raise BackendMissing(f"{title} does not load: {said}")
