"""Thread safety of a Python model: whether it may run on the request thread or needs its own.

A thread of its own costs each request two switches of threads, which is most of what a small model costs. But code may
count on it: a connection of sqlite3, torch's grad mode, the current CUDA device or an event loop belong to the thread
that made them, and Triton, too, executes a model on the thread that initialized it. And who waits within `execute`, for
another model or for a program that asks this very server, must not do so on the thread of a front end.

The parameter `execution_thread` says which: "own"; "caller", the model's author having seen to it that it keeps nothing
for a thread and waits for nobody; or "auto", the default: the caller's where nothing in the model's file could be
otherwise, going by all that it imports and by the few names below. What is not known is not trusted.

`initialize` and `finalize` always run on the instance's own thread, and `execute` on one thread at a time.
"""

from __future__ import annotations

import ast
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BadModelConfig

PARAMETER = "execution_thread"

_PATHS = frozenset({"path", "sep", "linesep", "environ", "getenv", "getcwd", "getpid", "listdir", "makedirs", "fspath"})
_SYSTEM = frozenset(
    {"version", "version_info", "byteorder", "maxsize", "float_info", "platform", "stderr", "stdout", "getsizeof"}
)

_KNOWN: Mapping[str, frozenset[str] | None] = {
    **dict.fromkeys(
        (
            "__future__", "abc", "array", "base64", "binascii", "bisect", "calendar", "cmath", "collections", "copy",
            "csv", "dataclasses", "datetime", "enum", "fractions", "functools", "hashlib", "heapq", "html", "io",
            "itertools", "json", "logging", "math", "numbers", "numpy", "operator", "pathlib", "random", "re",
            "statistics", "string", "struct", "textwrap", "time", "traceback", "triton_python_backend_utils", "typing",
            "unicodedata", "uuid", "zlib",
        )
    ),
    "os": _PATHS,
    "sys": _SYSTEM,
}  # fmt: skip
"""Modules that keep nothing for a thread and wait for nobody; of some, only what is named."""

_DOUBTFUL = frozenset(
    {
        # What runs code that is not there to be read.
        "__import__", "import_module",
        # What waits: for other models (`exec` is a request's method, and a builtin like those below), or for a time.
        "InferenceRequest", "async_exec", "exec", "is_model_ready", "load_model", "sleep", "unload_model",
        # What numpy keeps: for a thread, before its version 2. What loads libraries that may keep anything.
        "ctypeslib", "f2py", "seterr", "seterrcall", "seterrobj", "setbufsize",
    }
)  # fmt: skip

_BUILTINS = frozenset({"breakpoint", "compile", "eval", "globals", "input"})
"""The same of builtins, whose names are harmless as those of methods, as in `re.compile`."""


class ExecutionThread(enum.Enum):
    """Values of the parameter."""

    OWN = "own"
    CALLER = "caller"
    AUTO = "auto"


def execution_thread(model: str, parameters: Mapping[str, str]) -> ExecutionThread:
    """Return the `execution_thread` of the model's configuration. Raises BadModelConfig for an unknown value."""
    word = parameters.get(PARAMETER, ExecutionThread.AUTO.value).strip().lower()
    try:
        return ExecutionThread(word)
    except ValueError:
        words = f"model '{model}': parameter {PARAMETER} must be own, caller or auto, got '{word[:80]}'"
        raise BadModelConfig(words) from None


def needs_own_thread(spec: ModelSpec, execute: Callable[..., Any], path: Path, is_own: Callable[[str], bool]) -> str:
    """Return why the model executes on a thread of its own, "" where it does not.

    `execute` is the model's, `path` its file; `is_own` tells whether `import name` would mean another file of the
    model's. Raises BadModelConfig for a model that cannot do as its configuration says.
    """
    wish = execution_thread(spec.name, spec.parameters)
    if wish is ExecutionThread.OWN:
        return "its configuration says so"
    reason = ""
    if spec.is_decoupled:
        reason = "it is decoupled"
    elif inspect.iscoroutinefunction(execute):
        reason = "its execute is a coroutine"
    if wish is ExecutionThread.AUTO:
        return reason or _doubt(path, is_own)
    if reason:
        raise BadModelConfig(
            f"model '{spec.name}': parameter {PARAMETER} is caller, but {reason}, and such models have a thread of "
            "their own"
        )
    return ""


def _doubt(path: Path, is_own: Callable[[str], bool]) -> str:
    """Return the code in the model's file that may need its own thread; "" if there is none."""
    try:
        tree = ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError, RecursionError):
        # It was loaded all the same: what its loader made of it cannot be told from the file.
        return "its file cannot be read as a program"
    restricted: dict[str, frozenset[str]] = {}
    allowed: set[int] = set()
    for node in ast.walk(tree):
        for name, names in _imports(node):
            known = name in _KNOWN and not is_own(name)
            allowed_names = _KNOWN.get(name)
            if not known or (allowed_names is not None and not names <= allowed_names):
                return f"it imports {name or 'files of its own'}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                names_of_module = _KNOWN[alias.name.partition(".")[0]]
                if names_of_module is not None:
                    restricted[(alias.asname or alias.name).partition(".")[0]] = names_of_module
    for node in ast.walk(tree):
        used = _name(node)
        if used in _DOUBTFUL or (used in _BUILTINS and isinstance(node, ast.Name)):
            return f"it uses {used}"
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            return "it has coroutines"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names_of_module = restricted.get(node.value.id)
            if names_of_module is not None and node.attr in names_of_module:
                allowed.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in restricted and id(node) not in allowed:
            return f"it uses {node.id} in a way that is not known"
    return ""


def _imports(node: ast.AST) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the top names of the modules that a statement imports, "" for one relative to the file, each with what it
    takes from there by name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first, _, rest = alias.name.partition(".")
            yield first, frozenset({rest.partition(".")[0]} if rest else ())
    elif isinstance(node, ast.ImportFrom):
        names = frozenset(alias.name for alias in node.names)
        first, _, rest = ("" if node.level else node.module or "").partition(".")
        yield ("" if "*" in names else first), frozenset({rest.partition(".")[0]} if rest else names)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.name if isinstance(node, ast.alias) else ""
