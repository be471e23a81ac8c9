"""Loader of a model's modules under private names, so that models, versions and instances do not share modules.

Triton runs each instance in a process, and appends the version's and the model's folder to `sys.path`. Here each opened
model gets a package `_edge_model_<number>`, which contains `model` and the modules that it imports from these two
folders. `import helper` in them imports the file beside them: the modules of the package have their own `__import__`,
which searches the two folders first. Their `importlib.import_module` does the same. The standard library and
`triton_python_backend_utils` are never replaced.

Libraries that import by name for a model (hydra, for example) and unpickling find these modules only in a child process
(`isolation: process`). Both use the plain name in `sys.modules`, which all code of a process shares: another model with
a file of the same name, or a library that checks for an installed package of that name, would get the wrong module.

No byte code is cached beside the models, so that a change is always seen.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

PREFIX = "_edge_model_"

_NEVER_OF_A_MODEL = frozenset(("triton_python_backend_utils", "c_python_backend_utils"))
_SUFFIXES = importlib.machinery.EXTENSION_SUFFIXES
_numbers = itertools.count(1)


class ModelModules:
    """The package of one opened model, from `load` to `unload`. Not thread-safe, except for imports in the model."""

    def __init__(self, path: Path, model_dir: Path, *, is_alone: bool = False) -> None:
        """`is_alone`: this process runs no other model, so the modules have their plain names too."""
        self.folders = tuple(dict.fromkeys((path.parent, model_dir)))
        self.package = f"{PREFIX}{next(_numbers)}"
        self._path = path
        self._builtins = {**vars(builtins), "__import__": self._import}
        self._known: dict[str, bool] = {}
        self._plain_names = _PlainNames(self) if is_alone else None
        self._importlib = importlib if is_alone else _Importlib(self)

    def load(self) -> ModuleType:
        """Execute the model's file and return its module. Exceptions of the file pass through."""
        _finder.add(self)
        if self._plain_names is not None:
            sys.meta_path.append(self._plain_names)
        package = ModuleType(self.package)
        package.__path__ = [str(folder) for folder in self.folders]
        sys.modules[self.package] = package
        try:
            # Not by `import`: the file's name need not be an identifier.
            name = f"{self.package}.{re.sub(r'[^0-9A-Za-z_]', '_', self._path.stem)}"
            spec = self._spec(name, self._path, None)
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot load {self._path}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return module
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Remove the modules from `sys.modules`. May be called more than once."""
        _finder.remove(self)
        if self._plain_names is not None:
            self._plain_names.remove()
        for name in [name for name in list(sys.modules) if name == self.package or name.startswith(f"{self.package}.")]:
            module = sys.modules.pop(name)
            # Its names are not cleared: threads that the model left running may use them.
            del module

    def has(self, name: str) -> bool:
        """Return whether `import name` imports a file of the model."""
        known = self._known.get(name)
        if known is None:
            is_foreign = name in _NEVER_OF_A_MODEL or name in sys.stdlib_module_names
            known = not is_foreign and self.find_module(name, [str(folder) for folder in self.folders]) is not None
            self._known[name] = known
        return known

    def find_module(self, name: str, folders: Sequence[str]) -> ModuleSpec | None:
        """Return the spec of the module from the first folder that has its last name, None if no folder has it."""
        tail = name.rpartition(".")[2]
        namespace: list[str] = []
        for folder in map(Path, folders):
            inner = folder / tail
            if (inner / "__init__.py").is_file():
                return self._spec(name, inner / "__init__.py", [str(inner)])
            if (file := inner.with_name(f"{tail}.py")).is_file():
                return self._spec(name, file, None)
            for suffix in _SUFFIXES:
                if (file := inner.with_name(tail + suffix)).is_file():
                    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
                    return importlib.util.spec_from_file_location(name, file, loader=loader)
            if inner.is_dir() and any(inner.glob("*.py")):
                namespace.append(str(inner))
        if not namespace:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = namespace
        return spec

    def _spec(self, name: str, file: Path, package_path: list[str] | None) -> ModuleSpec | None:
        loader = _Loader(name, str(file), self._builtins)
        return importlib.util.spec_from_file_location(
            name, file, loader=loader, submodule_search_locations=package_path
        )

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import a module: `__import__` of the model's modules."""
        first = name.partition(".")[0]
        if level == 0 and self.has(first):
            found = builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist or (), 0)
            return found if fromlist else sys.modules[f"{self.package}.{first}"]
        found = builtins.__import__(name, globals, locals, fromlist or (), level)
        return self._importlib if found is importlib else found

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """Import a module by name: `importlib.import_module` of the model's modules."""
        first = name.partition(".")[0]
        return importlib.import_module(f"{self.package}.{name}" if first and self.has(first) else name, package)


class _Importlib(ModuleType):
    """`importlib` as a model's modules see it: its `import_module` finds the same modules as their `import`."""

    def __init__(self, source: ModelModules) -> None:
        super().__init__(importlib.__name__, importlib.__doc__)
        self.__dict__.update(vars(importlib), import_module=source.import_module)

    def __getattr__(self, name: str) -> Any:
        # For submodules, which are imported later.
        return getattr(importlib, name)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the source at each import, and executes it with the package's own `__import__`."""

    def __init__(self, fullname: str, path: str, names: Mapping[str, Any]) -> None:
        super().__init__(fullname, path)
        self._names = names

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = compile(self.get_data(path), path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._names
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of all loaded packages.

    It stays in `sys.meta_path` from the first package on. If it were removed, a thread that iterates over that list in
    an import could skip the next entry.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, ModelModules] = {}

    def add(self, source: ModelModules) -> None:
        with self._lock:
            self._sources[source.package] = source
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def remove(self, source: ModelModules) -> None:
        with self._lock:
            self._sources.pop(source.package, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        source = self._sources.get(fullname.partition(".")[0])
        return None if source is None or path is None else source.find_module(fullname, path)


_finder = _Finder()


class _PlainNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds for `import_module("helper")` the module that `import helper` in the model's code finds.

    It is the last entry of `sys.meta_path`, so installed packages have priority.
    """

    def __init__(self, source: ModelModules) -> None:
        self._source = source
        self._own: dict[str, ModuleSpec | None] = {}

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in self._own:
            sys.modules.pop(name, None)
        self._own.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first = fullname.partition(".")[0]
        return ModuleSpec(fullname, self) if not first.startswith(PREFIX) and self._source.has(first) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{self._source.package}.{spec.name}")
        self._own[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It was executed under its own name already. importlib has just stored the other name's spec in it.
        module.__spec__ = self._own[module.__name__.partition(".")[2]]


def package_of(frame: FrameType | None) -> str:
    """Return the package of the innermost frame that runs a model's code; "" if there is none."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if isinstance(name, str) and name.startswith(PREFIX):
            return name.partition(".")[0]
        frame = frame.f_back
    return ""


def threads_of(package: str) -> list[threading.Thread]:
    """Return the other living threads whose class or target function belongs to the package.

    The frames of a thread would show more (a pool's worker in the middle of the model's code), but frames of a running
    thread are not safe to walk in CPython 3.11: `f_back` sometimes returns an object that is no frame.
    """
    found = []
    for thread in threading.enumerate():
        if thread is threading.current_thread():
            continue
        target = getattr(thread, "_target", None)  # has no public accessor; deleted when the thread ends
        while isinstance(target, functools.partial):
            target = target.func
        owner = getattr(target, "__self__", None)  # of a bound method, also one inherited from another module
        modules = (getattr(item, "__module__", None) for item in (type(thread), target, type(owner)))
        if any(isinstance(module, str) and module.partition(".")[0] == package for module in modules):
            found.append(thread)
    return found
