"""Search for the Python model that calls a function of pb_utils, so that a log line or a call of another model is made
in its name; contains `pb_utils.Logger`.

The caller is known by context variables on its instance's thread and in its coroutines, else by the code on the stack.
"""

from __future__ import annotations

import contextvars
import enum
import logging
import os
import sys
import weakref
from dataclasses import dataclass, field

from edge_server.backends.base import ServerCalls
from edge_server.backends.deadlock_check import WaitGraph
from edge_server.plugins.python_models.error_translation import TritonModelException
from edge_server.plugins.python_models.module_loader import package_of

log = logging.getLogger("edge_server.model")


@dataclass(eq=False)
class CallingModel:
    """One opened model, as the functions of pb_utils see it.

    `package` is the package of its modules. `wait_graph` is None in the process of an isolated model, where the server
    detects deadlocks. `may_call_models` is False for a model that runs on request threads (see
    `execution_thread_choice`). `folder` holds the model's file.
    """

    model: str
    package: str
    server: ServerCalls | None
    wait_graph: WaitGraph | None = None
    may_call_models: bool = True
    folder: str = ""
    process_id: int = field(default_factory=os.getpid)
    """The process in which the model was opened. In a process that the model forks, nothing would answer its calls."""

    def find_server(self, action: str) -> ServerCalls:
        """Return the server's functions. Raises TritonModelException, with `action`, where there is no server."""
        if self.server is None:
            raise TritonModelException(f"{action} from a model that a server runs, nowhere else")
        if self.process_id != os.getpid():
            raise TritonModelException(
                f"model '{self.model}' runs in process {self.process_id}, from which this process {os.getpid()} was "
                f"forked: {action} only from the process of the model"
            )
        return self.server


current_model: contextvars.ContextVar[CallingModel | None] = contextvars.ContextVar("edge_python_model", default=None)

_models: weakref.WeakValueDictionary[str, CallingModel] = weakref.WeakValueDictionary()


def register_model(model: CallingModel) -> None:
    """Make the model known to the code of its package. The entry ends with the last reference to `model`."""
    _models[model.package] = model


def find_calling_model() -> CallingModel | None:
    """Return the model whose code calls, by context or else by the stack; None outside of models."""
    model = current_model.get()
    return model if model is not None else _models.get(package_of(sys._getframe(1)))


def get_model_dir() -> str:
    """Return the folder of the model's version. Raises TritonModelException outside of models."""
    model = find_calling_model()
    if model is None or not model.folder:
        raise TritonModelException("get_model_dir: called by no model that a server runs")
    return model.folder


class LogLevel(enum.IntEnum):
    """Triton's levels. VERBOSE is logged from --log-verbose=1 on."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_PYTHON_LEVELS = {
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.VERBOSE: logging.DEBUG,
}

_Levels = LogLevel


class Logger:
    """pb_utils.Logger: writes lines with the model's name to the server's log. All methods are static, as in Triton."""

    LogLevel = _Levels
    INFO = _Levels.INFO
    WARNING = _Levels.WARNING
    ERROR = _Levels.ERROR
    VERBOSE = _Levels.VERBOSE

    @staticmethod
    def log(message: str, level: int = _Levels.INFO) -> None:
        model = find_calling_model()
        name = "a model" if model is None else f"model '{model.model}'"
        log.log(_PYTHON_LEVELS[_Levels(level)], "%s: %s", name, message)

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, _Levels.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, _Levels.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, _Levels.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, _Levels.VERBOSE)
