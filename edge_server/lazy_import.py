"""Deferred import of large libraries, such as numpy: a library's code runs when the program first uses a name of it,
which saves memory in an idle server.

A server without a model needs no numpy, one without a gRPC client no hpack, and one that only listens no HTTP client of
aiohttp. But modules of the front ends import these libraries. After `defer_import("numpy")`, `import numpy` finds an
empty module. It executes the library's code at the first access to an attribute, and is an ordinary module from then
on, without any cost. An idle server without models has 35 MB resident with the three libraries deferred, and 63 MB
otherwise (Python 3.11, x86-64).

Where several threads run, only a thread that called `run_deferred_import` may import a submodule (`numpy.typing`) or a
library that does so. Otherwise both threads can wait for ever: one executes the library's code and needs the import
lock of the submodule, and the other one holds that lock and waits for the library. tests/test_architecture.py checks
this for the modules of a server.

`importlib.util.LazyLoader` cannot do this: it loads the whole package as soon as a submodule is imported
(`aiohttp.web`), and before Python 3.12 two threads that use the module at the same time can fail.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_VERSION = re.compile(r"""^__version__ = ["']([^"'\n]+)["']$""", re.MULTILINE)

_lock = threading.RLock()
_executed: set[str] = set()
"""Names of the libraries whose code runs, or has run. Protected by the lock."""


def defer_import(library: str, *, has_free_parts: bool = False) -> bool:
    """Defer the execution of a library's code. Return False if it is imported already, or is not installed.

    `has_free_parts`: submodules and `__version__` do not need the package's own code, because that only collects names
    from its submodules. Without it the import of a submodule executes the package. Call this before threads start.
    """
    if library in sys.modules:
        return False
    spec = importlib.util.find_spec(library)
    if spec is None or spec.loader is None or spec.origin is None:
        return False
    sys.modules[library] = (_DeferredPackage if has_free_parts else _DeferredModule)(spec)
    return True


def run_deferred_import(library: str) -> None:
    """Execute a library's code now, if it is deferred, so that no request has to wait for it."""
    module = sys.modules.get(library)
    if isinstance(module, _DeferredModule):
        _execute(module)


class _DeferredModule(ModuleType):
    """A module whose code has not run. The first access to an attribute executes it."""

    __spec__: ModuleSpec

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__, self.__package__ = spec, spec.loader, spec.origin, spec.name

    def __getattr__(self, name: str) -> Any:
        if not _execute(self):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        return getattr(self, name)


class _DeferredPackage(_DeferredModule):
    """A package whose submodules can be imported before its own code has run."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec)
        self.__path__ = list(spec.submodule_search_locations or ())

    def __getattr__(self, name: str) -> Any:
        if self.__name__ not in _executed:
            if PathFinder.find_spec(f"{self.__name__}.{name}", self.__path__) is not None:
                # `from package import part` looks for an attribute first. Without one it imports the submodule.
                raise AttributeError(f"'{self.__name__}.{name}' is not imported yet")
            if name == "__version__" and (found := _VERSION.search(Path(str(self.__file__)).read_text("utf-8"))):
                self.__version__ = found[1]
                return found[1]
        return super().__getattr__(name)


def _execute(module: _DeferredModule) -> bool:
    """Execute a module's code; other threads wait. Return False to the thread that executes it at this moment."""
    with _lock:
        if type(module) is ModuleType:
            return True  # another thread has executed it meanwhile
        spec = module.__spec__
        if spec.name in _executed:
            return False
        _executed.add(spec.name)
        module.__path__ = list(spec.submodule_search_locations or ())
        try:
            assert spec.loader is not None
            spec.loader.exec_module(module)
        except BaseException:
            _executed.discard(spec.name)
            raise
        # From here on it is an ordinary module: an attribute costs no detour through this file.
        module.__class__ = ModuleType  # type: ignore[assignment]
        return True
