"""Import of the library that runs a backend's models, and conversion of its exceptions to errors of the server with
messages of limited length."""

from __future__ import annotations

import importlib
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from edge_server.backends.base import Array, ModelFile
from edge_server.errors import (
    BackendError,
    BackendMissing,
    EdgeServerError,
    InvalidRequest,
    LoadError,
    OutOfMemory,
    install_hint,
)

T = TypeVar("T")

_LONGEST_QUOTE = 600
"""Largest length of a quoted message. Some runtimes print the whole file into theirs."""

_MEMORY_WORDS = ("bad_alloc", "bad allocation", "out of memory", "failed to allocate memory", "available memory of")


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


def log_with_traceback(logger: logging.Logger, level: int, message: str, traceback_text: str) -> None:
    """Log a message with a traceback that is text, or "". A record with the exception itself, as `exc_info`, would keep
    its frames and their tensors."""
    if not logger.isEnabledFor(level):
        return
    caller = traceback.extract_stack(limit=2)[0]
    record = logger.makeRecord(
        logger.name, level, caller.filename, caller.lineno or 0, "%s", (message,), None, caller.name
    )
    record.exc_text = traceback_text or None
    logger.handle(record)


def load_error(file: ModelFile, runtime: str, error: BaseException) -> LoadError:
    """Return the LoadError for a runtime's exception about a file; OutOfMemory if that is the cause."""
    said = message_line(error)
    kind = LoadError
    if isinstance(error, MemoryError) or any(sign in said.lower() for sign in _MEMORY_WORDS):
        kind = OutOfMemory
    return kind(f"{file_title(file)}: {runtime} cannot load it: {said or type(error).__name__}")


def open_with_library(file: ModelFile, runtime: str, open_it: Callable[[], T]) -> T:
    """Return the session or engine that `open_it` opens. Errors of the server pass. Raises LoadError for all others,
    because a library may raise any exception for a file."""
    try:
        return open_it()
    except EdgeServerError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        failure = load_error(file, runtime, error)
    # Raised outside the handler: a chained traceback would keep the library's objects in memory.
    raise failure


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
