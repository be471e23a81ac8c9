"""pb_utils.Logger: log lines of models in the server's log, each with the model's name."""

from __future__ import annotations

import enum
import logging

from edge_server.backends.python.calling_model import find_host

log = logging.getLogger("edge_server.model")


class LogLevel(enum.IntEnum):
    """Triton's levels; VERBOSE is shown from --log-verbose=1 on."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = {
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.VERBOSE: logging.DEBUG,
}


_Levels = LogLevel


class Logger:
    """All static, as in Triton, whose name for the levels is `Logger.LogLevel`."""

    LogLevel = _Levels
    INFO = _Levels.INFO
    WARNING = _Levels.WARNING
    ERROR = _Levels.ERROR
    VERBOSE = _Levels.VERBOSE

    @staticmethod
    def log(message: str, level: int = _Levels.INFO) -> None:
        host = find_host()
        log.log(_LEVELS[_Levels(level)], "%s: %s", "a model" if host is None else f"model '{host.model}'", message)

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
