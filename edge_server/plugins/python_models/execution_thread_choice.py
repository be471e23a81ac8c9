"""Choice of the thread that runs a Python model, by its configuration and source code: the request's thread, or one of
its own.

A thread of the instance's own costs each request two thread switches, which is most of the cost of a small model. But
some code depends on it: an sqlite3 connection, torch's grad mode, the current CUDA device and an event loop belong to
the thread that created them, and Triton also executes a model on the thread that initialized it. A model that waits
within `execute`, for another model or for a client of this server, must not block a request thread.

The parameter `execution_thread` decides: "own"; "caller", if the model's author knows that the model keeps no state per
thread and does not wait; or "auto", the default. With "auto" the model executes on request threads only if its file
imports and uses nothing but the modules and names listed below as safe.

`initialize` and `finalize` always run on the instance's own thread, and `execute` runs on one thread at a time.
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

_OS_NAMES = frozenset(
    {"path", "sep", "linesep", "environ", "getenv", "getcwd", "getpid", "listdir", "makedirs", "fspath"}
)
_SYS_NAMES = frozenset(
    {"version", "version_info", "byteorder", "maxsize", "float_info", "platform", "stderr", "stdout", "getsizeof"}
)

_SAFE_MODULES: Mapping[str, frozenset[str] | None] = {
    **dict.fromkeys(
        (
            "__future__", "abc", "array", "base64", "binascii", "bisect", "calendar", "cmath", "collections", "copy",
            "csv", "dataclasses", "datetime", "enum", "fractions", "functools", "hashlib", "heapq", "html", "io",
            "itertools", "json", "logging", "math", "numbers", "numpy", "operator", "pathlib", "random", "re",
            "statistics", "string", "struct", "textwrap", "time", "traceback", "triton_python_backend_utils", "typing",
            "unicodedata", "uuid", "zlib",
        )
    ),
    "os": _OS_NAMES,
    "sys": _SYS_NAMES,
}  # fmt: skip
"""Modules that keep no state per thread and do not wait. Of some modules only the listed names are safe."""

_UNSAFE_NAMES = frozenset(
    {
        # They run code that is not in the file.
        "__import__", "import_module",
        # They wait: for other models (`exec` is a method of requests, and also a builtin), or for a time.
        "InferenceRequest", "async_exec", "exec", "is_model_ready", "load_model", "sleep", "unload_model",
        # numpy keeps their state per thread (before version 2), or they load other libraries.
        "ctypeslib", "f2py", "seterr", "seterrcall", "seterrobj", "setbufsize",
    }
)  # fmt: skip

_UNSAFE_BUILTINS = frozenset({"breakpoint", "compile", "eval", "globals", "input"})
"""Unsafe as builtins, but safe as names of methods, as in `re.compile`."""


class ExecutionThread(enum.Enum):
    """Values of the parameter `execution_thread`."""

    OWN = "own"
    CALLER = "caller"
    AUTO = "auto"


def execution_thread(model: str, parameters: Mapping[str, str]) -> ExecutionThread:
    """Return the configured value. Raises BadModelConfig for an unknown one."""
    word = parameters.get(PARAMETER, ExecutionThread.AUTO.value).strip().lower()
    try:
        return ExecutionThread(word)
    except ValueError:
        words = f"model '{model}': parameter {PARAMETER} must be own, caller or auto, got '{word[:80]}'"
        raise BadModelConfig(words) from None


def needs_own_thread(spec: ModelSpec, execute: Callable[..., Any], path: Path, is_own: Callable[[str], bool]) -> str:
    """Return the reason why the model executes on a thread of its own, "" if it executes on request threads.

    `path` is the model's file, `execute` its method. `is_own` returns whether `import name` imports another file of the
    model. Raises BadModelConfig for a model that cannot execute as configured.
    """
    configured = execution_thread(spec.name, spec.parameters)
    if configured is ExecutionThread.OWN:
        return "its configuration says so"
    reason = ""
    if spec.is_decoupled:
        reason = "it is decoupled"
    elif inspect.iscoroutinefunction(execute):
        reason = "its execute is a coroutine"
    if configured is ExecutionThread.AUTO:
        return reason or _unsafe_code(path, is_own)
    if reason:
        raise BadModelConfig(
            f"model '{spec.name}': parameter {PARAMETER} is caller, but {reason}, and such models have a thread of "
            "their own"
        )
    return ""


def _unsafe_code(path: Path, is_own: Callable[[str], bool]) -> str:
    """Return the first reason in the model's file against request threads; "" if there is none."""
    try:
        tree = ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError, RecursionError):
        # The model was loaded all the same, by a loader of its own.
        return "its file cannot be read as a program"
    restricted: dict[str, frozenset[str]] = {}
    allowed: set[int] = set()
    for node in ast.walk(tree):
        for name, names in _imports(node):
            known = name in _SAFE_MODULES and not is_own(name)
            allowed_names = _SAFE_MODULES.get(name)
            if not known or (allowed_names is not None and not names <= allowed_names):
                return f"it imports {name or 'files of its own'}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                names_of_module = _SAFE_MODULES[alias.name.partition(".")[0]]
                if names_of_module is not None:
                    restricted[(alias.asname or alias.name).partition(".")[0]] = names_of_module
    for node in ast.walk(tree):
        used = _name(node)
        if used in _UNSAFE_NAMES or (used in _UNSAFE_BUILTINS and isinstance(node, ast.Name)):
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
    """Yield for each import of a statement the top-level module, "" for a relative one, and the imported names."""
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
