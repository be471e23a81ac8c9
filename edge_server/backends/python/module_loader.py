"""Module loader: imports a model's modules under private names, separate for each model, version and instance.

Triton gives each instance a process and appends the version's and the model's folder to `sys.path`. Here each opened
model gets a package of its own, `_edge_model_<number>`, which holds `model` and whatever that imports from these two
folders. `import helper` in one of them means the file beside it: the modules of the package carry an `__import__` of
their own, which looks into the two folders first, and so does the `import_module` of the `importlib` that they see. The
standard library and `triton_python_backend_utils` always mean themselves.

A library that imports by name for a model (hydra, say), and unpickling, look there only in a process of the model's own
(`isolation: process`). Both take a module from `sys.modules` by its plain name, where it would be everybody's: another
model's file of that name, and a library that tries whether something of that name is installed, would meet it.

Nothing is written beside the models: their byte code is not cached, so that a change is always seen.
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

_NEVER_THERE = frozenset(("triton_python_backend_utils", "c_python_backend_utils"))
_SUFFIXES = importlib.machinery.EXTENSION_SUFFIXES
_numbers = itertools.count(1)


class ModelModules:
    """One package of modules, from `load` to `unload`. Not thread-safe, apart from the imports of the model itself."""

    def __init__(self, path: Path, model_dir: Path, *, is_alone: bool = False) -> None:
        """`is_alone`: this process runs no other model, so the modules go by their plain names as well."""
        self.folders = tuple(dict.fromkeys((path.parent, model_dir)))
        self.package = f"{PREFIX}{next(_numbers)}"
        self._path = path
        self._builtins = {**vars(builtins), "__import__": self._import}
        self._known: dict[str, bool] = {}
        self._plain_names = _PlainNames(self) if is_alone else None
        self._importlib = importlib if is_alone else _Importlib(self)

    def load(self) -> ModuleType:
        """Run the model's file and return its module. Whatever the file raises passes through."""
        _finder.enter(self)
        if self._plain_names is not None:
            sys.meta_path.append(self._plain_names)
        package = ModuleType(self.package)
        package.__path__ = [str(folder) for folder in self.folders]
        sys.modules[self.package] = package
        try:
            return self._run(self._path.stem)
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Forget the modules. May be called more than once."""
        _finder.leave(self)
        if self._plain_names is not None:
            self._plain_names.leave()
        for name in [name for name in list(sys.modules) if name == self.package or name.startswith(f"{self.package}.")]:
            module = sys.modules.pop(name)
            # Threads that a model left behind may run on: its names are not taken from under them.
            del module

    def has(self, name: str) -> bool:
        """Return whether `import name` means a file of the model's own."""
        known = self._known.get(name)
        if known is None:
            is_foreign = name in _NEVER_THERE or name in sys.stdlib_module_names
            known = not is_foreign and self.find(name, [str(folder) for folder in self.folders]) is not None
            self._known[name] = known
        return known

    def find(self, name: str, folders: Sequence[str]) -> ModuleSpec | None:
        """Return where the module's last name lies in one of the folders."""
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

    def _run(self, stem: str) -> ModuleType:
        """Import the model's file as the package's module, also where its name is none that `import` would take."""
        name = f"{self.package}.{re.sub(r'[^0-9A-Za-z_]', '_', stem)}"
        spec = self._spec(name, self._path, None)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {self._path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What `import` does in the model's modules."""
        first = name.partition(".")[0]
        if level == 0 and self.has(first):
            found = builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist or (), 0)
            return found if fromlist else sys.modules[f"{self.package}.{first}"]
        found = builtins.__import__(name, globals, locals, fromlist or (), level)
        return self._importlib if found is importlib else found

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """What `importlib.import_module` does in the model's modules."""
        first = name.partition(".")[0]
        return importlib.import_module(f"{self.package}.{name}" if first and self.has(first) else name, package)


class _Importlib(ModuleType):
    """The standard library's, as a model's modules see it: by plain names it imports what their `import` would."""

    def __init__(self, source: ModelModules) -> None:
        super().__init__(importlib.__name__, importlib.__doc__)
        self.__dict__.update(vars(importlib), import_module=source.import_module)

    def __getattr__(self, name: str) -> Any:
        # Submodules come later, when somebody imports them.
        return getattr(importlib, name)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the source each time, and runs it with the package's own `__import__`."""

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
    """Finds the modules of all packages that are loaded.

    Stands in `sys.meta_path` from the first of them on, and stays: a thread that imports walks that very list, and
    would miss the entry that finds its file if one before it were taken out meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, ModelModules] = {}

    def enter(self, source: ModelModules) -> None:
        with self._lock:
            self._sources[source.package] = source
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def leave(self, source: ModelModules) -> None:
        with self._lock:
            self._sources.pop(source.package, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        source = self._sources.get(fullname.partition(".")[0])
        return None if source is None or path is None else source.find(fullname, path)


_finder = _Finder()


class _PlainNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers `import_module("helper")` with the very module that `import helper` in the model's code means. Stands
    last in `sys.meta_path`: what is installed goes before."""

    def __init__(self, source: ModelModules) -> None:
        self._source = source
        self._own: dict[str, ModuleSpec | None] = {}

    def leave(self) -> None:
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
        # It ran under its own name already; the machinery has just put the other name's spec into it.
        module.__spec__ = self._own[module.__name__.partition(".")[2]]


def package_of(frame: FrameType | None) -> str:
    """Return the package of the innermost frame that runs a model's own code; "" when there is none."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if isinstance(name, str) and name.startswith(PREFIX):
            return name.partition(".")[0]
        frame = frame.f_back
    return ""


def threads_of(package: str) -> list[threading.Thread]:
    """Return the other living threads whose class, or whose function, is the package's own.

    A thread is known by what it was started with. Its frames would show more (a pool's worker in the middle of the
    model's code), but frames of a thread that runs on are not safe to walk in CPython 3.11: `f_back` has been seen to
    answer an object that is no frame.
    """
    me = threading.current_thread()
    return [thread for thread in threading.enumerate() if thread is not me and _is_started_by(thread, package)]


def _is_started_by(thread: threading.Thread, package: str) -> bool:
    entry = getattr(thread, "_target", None)  # nothing public tells it; forgotten when the thread ends
    while isinstance(entry, functools.partial):
        entry = entry.func
    owner = getattr(entry, "__self__", None)  # of a bound method, also one inherited from another module
    homes = (type(thread), entry, type(owner))
    return any(_is_in(getattr(home, "__module__", None), package) for home in homes)


def _is_in(module: object, package: str) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == package
