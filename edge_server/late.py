"""Lazy imports: a library's code runs at its first use, not at the import of a module that names it.

A server without a model needs no arrays, and one that only listens needs no HTTP client; but the modules of both doors
name the libraries that bring these along. `put_off` makes `import library` find an empty module that fills itself at
the first attribute asked for and is an ordinary module from then on: nothing is paid for it afterwards.
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
_begun: set[str] = set()
"""Names of the libraries whose code runs, or has run. Under the lock."""


def put_off(library: str, *, has_free_parts: bool = False) -> bool:
    """Have `import library` run none of its code until it is used. False when it is imported already, or not there.

    `has_free_parts`: its submodules, and `__version__`, can be had without it, as of a package whose own code only
    gathers names from its parts. Without that the import of a submodule is a use. Call before threads start.
    """
    if library in sys.modules:
        return False
    spec = importlib.util.find_spec(library)
    if spec is None or spec.loader is None or spec.origin is None:
        return False
    sys.modules[library] = (_Gathering if has_free_parts else _Late)(spec)
    return True


def use(library: str) -> None:
    """Run a library's code now if it was put off and has not run. So nobody's request is the first to need it."""
    module = sys.modules.get(library)
    if isinstance(module, _Late):
        _fill(module)


class _Late(ModuleType):
    """A module whose code has not run: all its attributes come with the first that is asked for."""

    __spec__: ModuleSpec

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__, self.__package__ = spec, spec.loader, spec.origin, spec.name

    def __getattr__(self, name: str) -> Any:
        if not _fill(self):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        return getattr(self, name)


class _Gathering(_Late):
    """A package whose parts are imported by themselves as long as it has not run."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec)
        self.__path__ = list(spec.submodule_search_locations or ())

    def __getattr__(self, name: str) -> Any:
        if self.__name__ not in _begun:
            if PathFinder.find_spec(f"{self.__name__}.{name}", self.__path__) is not None:
                # `from package import part` looks for an attribute first, and for the part if there is none.
                raise AttributeError(f"'{self.__name__}.{name}' is not imported yet")
            if name == "__version__" and (found := _VERSION.search(Path(str(self.__file__)).read_text("utf-8"))):
                self.__version__ = found[1]
                return found[1]
        return super().__getattr__(name)


def _fill(module: _Late) -> bool:
    """Run a module's code; other threads wait for it. False while it runs, to the thread that runs it."""
    with _lock:
        if type(module) is ModuleType:
            return True  # another thread has done it meanwhile
        spec = module.__spec__
        if spec.name in _begun:
            return False
        _begun.add(spec.name)
        module.__path__ = list(spec.submodule_search_locations or ())
        try:
            assert spec.loader is not None
            spec.loader.exec_module(module)
        except BaseException:
            _begun.discard(spec.name)
            raise
        # From here on without a way round by this file.
        module.__class__ = ModuleType  # type: ignore[assignment]
        return True
