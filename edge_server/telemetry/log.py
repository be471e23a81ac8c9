"""Formats and settings of the log, based on the standard module `logging`.

Four formats: Triton's "default" and "ISO8601", "text" (level and logger in words) and "json" (one object per line).
A record is one line. Its traceback, if any, follows in lines of its own, which begin with TRACEBACK_MARK; with "json"
it is a member of the object. Each line is escaped, so a client's text can make neither a record nor a line of one.
Loggers are named after modules. `setup_logging` puts one handler on the root logger; LogSettings controls it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edge_server.config import LOG_FORMATS, ConfigError, LogConfig, LogFormat
from edge_server.errors import InvalidRequest, Refusal, Unsupported

SERVER_LOGGER = "edge_server"
MAX_VERBOSE_LEVEL = 2**31 - 1

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROL |= {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r", 0x2028: "\\u2028", 0x2029: "\\u2029"}
# Unicode marks that reorder the displayed text could make a line look like another one.
_CONTROL |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}

_JOURNAL_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""syslog(3) priorities, which systemd reads from a "<N>" at the start of a line (sd-daemon(3))."""

TRACEBACK_MARK = "  | "
"""Begins each line of a traceback: with any text behind it, the line is no record."""

_MAX_TRACEBACK_LINES = 400
"""The last of them holds all that is left, escaped: an exception's message may be a client's text of any length."""

LogSettingValue = bool | int | str

RELOADED = ("log.verbose_level", "log.shows_info", "log.shows_warning", "log.shows_error", "log.format")
"""The configuration keys that `LogSettings.reload` applies."""


class _LogValues(NamedTuple):
    """Values of LogSettings, replaced as a whole: a handler on another thread sees the old or the new values."""

    verbose_level: int
    shows_info: bool
    shows_warning: bool
    shows_error: bool
    format: LogFormat

    def shows(self, level: int) -> bool:
        if level < logging.INFO:
            return self.verbose_level > 0
        if level < logging.WARNING:
            return self.shows_info
        if level < logging.ERROR:
            return self.shows_warning
        return self.shows_error


class LogSettings:
    """Log levels and log format, changed by /v2/logging while the server runs. Thread-safe.

    `sets_levels`: set the levels of the root logger and the server's logger. An embedded server leaves both to its
    program, and changes have no effect.
    """

    problem: Callable[[], str] = staticmethod(str)
    """Returns why records are lost, "" while they are written."""

    def __init__(self, config: LogConfig, *, sets_levels: bool = True) -> None:
        self._sets_levels = sets_levels
        self._lock = threading.Lock()
        self._file = config.file
        self._now: _LogValues
        self.reload(config)

    def get(self) -> dict[str, LogSettingValue]:
        """Return log_file, log_info, log_warning, log_error, log_verbose_level and log_format."""
        now = self._now
        return {"log_file": self._file, **{key: getattr(now, field) for key, (field, _) in _UPDATES.items()}}

    def update(self, settings: Mapping[str, object]) -> dict[str, LogSettingValue]:
        """Apply all the given settings, or none, and return the complete settings.

        Unknown keys and None values are ignored, as in Triton.

        Raises InvalidRequest for a value of the wrong type, Refusal (UNAVAILABLE) for an unknown format,
        Unsupported for log_file: a client must not choose the file that the server writes.
        """
        if settings.get("log_file") is not None:
            raise Unsupported("log file location can not be updated through network protocol")
        changes: dict[str, Any] = {
            field: check(key, settings[key])
            for key, (field, check) in _UPDATES.items()
            if settings.get(key) is not None
        }
        with self._lock:
            self._now = self._now._replace(**changes)
            self._set_logger_levels()
        return self.get()

    def reload(self, config: LogConfig) -> None:
        """Apply a new configuration, except its log file."""
        with self._lock:
            self._now = _LogValues(
                config.verbose_level, config.shows_info, config.shows_warning, config.shows_error, config.format
            )
            self._set_logger_levels()

    def shows(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        return self._now.shows(record.levelno)

    def render(self, record: logging.LogRecord) -> str:
        """Return the record in the current format, without a line end."""
        return _FORMATS[self._now.format](record)

    def _set_logger_levels(self) -> None:
        """Set the levels of the loggers, so that most unwanted records are dropped at little cost."""
        if not self._sets_levels:
            return
        level = self._now.verbose_level
        logging.getLogger(SERVER_LOGGER).setLevel(logging.DEBUG if level > 0 else logging.INFO)
        logging.getLogger().setLevel(logging.DEBUG if level > 1 else logging.WARNING)


def setup_logging(config: LogConfig) -> LogSettings:
    """Send all records of the process to standard error or `config.file`, and return their settings.

    Lines are appended to the file. It is opened again after a log rotation. A second call replaces the handler of the
    first.

    Raises ConfigError when the file cannot be opened.
    """
    settings = LogSettings(config)
    handler: logging.Handler
    if config.file:
        from edge_server.telemetry.log_file import LogFile

        try:
            handler = LogFile(config.file)
        except OSError as error:
            raise ConfigError(f"--log-file: cannot write to '{config.file}': {error.strerror}") from error
        settings.problem = handler.problem
    else:
        handler = logging.StreamHandler(sys.stderr)
    has_priority = not config.file and _stderr_is_journal(config.journal_stream)
    handler.addFilter(settings.shows)
    handler.setFormatter(_LineFormatter(settings, has_priority=has_priority))
    handler.set_name(SERVER_LOGGER)
    root = logging.getLogger()
    for old in [old for old in root.handlers if old.get_name() == SERVER_LOGGER]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    return settings


class _LineFormatter(logging.Formatter):
    """Formatter that follows LogSettings; adds syslog priorities for the journal."""

    def __init__(self, settings: LogSettings, *, has_priority: bool) -> None:
        super().__init__()
        self._settings = settings
        self._has_priority = has_priority

    def format(self, record: logging.LogRecord) -> str:
        line = self._settings.render(record)
        if self._has_priority:
            priority = f"<{_JOURNAL_PRIORITY.get(record.levelno, 6)}>"
            return priority + line.replace("\n", f"\n{priority}")
        return line


def _stderr_is_journal(journal_stream: str) -> bool:
    """Return whether standard error is systemd's journal stream (systemd.exec(5), $JOURNAL_STREAM)."""
    if not journal_stream:
        return False
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # no standard error, or one without a file descriptor
        return False
    return journal_stream == f"{status.st_dev}:{status.st_ino}"


def escape(text: str) -> str:
    """Return `text` with control characters escaped: it can neither break a line nor control a terminal."""
    return text.translate(_CONTROL)


def _traceback(record: logging.LogRecord) -> str:
    """Return the traceback and the stack, not escaped; "" if there is neither."""
    text = record.exc_text or ""
    if not text and record.exc_info and record.exc_info[0] is not None:
        text = logging.Formatter().formatException(record.exc_info)
    return "\n".join(part for part in (text, record.stack_info) if part)


def _traceback_lines(record: logging.LogRecord) -> str:
    """Return the lines that follow the record's own, escaped, each behind a line end."""
    text = _traceback(record)
    lines = text.split("\n", _MAX_TRACEBACK_LINES - 1) if text else []
    return "".join(f"\n{TRACEBACK_MARK}{escape(line)}" for line in lines)


def _triton_line(record: logging.LogRecord, stamp: str) -> str:
    quoted = json.dumps(record.getMessage(), ensure_ascii=False).translate(_CONTROL)
    line = f"{stamp} {record.process} {escape(_part(record.name))}] {quoted}"
    return line + _traceback_lines(record)


def _part(logger: str) -> str:
    """Return the part of the server that a logger belongs to, in words, such as "cameras sources"; other loggers' own
    name. The file and line are in the JSON format."""
    first, *words = logger.split(".")
    if first != SERVER_LOGGER or not words:
        return logger
    return " ".join(word for word in words[:-1] or words if word != "plugins").replace("_", " ")


def _default_line(record: logging.LogRecord) -> str:
    """`I0131 23:59:59.123456 4711 serving lifecycle] "message"`, the time in UTC as in Triton."""
    micros = int(record.created * 1e6) % 1_000_000
    clock = time.strftime("%m%d %H:%M:%S", time.gmtime(record.created))
    return _triton_line(record, f"{record.levelname[:1]}{clock}.{micros:06d}")


def _iso8601_line(record: logging.LogRecord) -> str:
    """`2026-01-31T23:59:59Z I 4711 serving lifecycle] "message"`."""
    clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
    return _triton_line(record, f"{clock} {record.levelname[:1]}")


def _utc_ms(record: logging.LogRecord) -> str:
    millis = int(record.created * 1e3) % 1_000
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{millis:03d}Z"


def _text_line(record: logging.LogRecord) -> str:
    line = f"{_utc_ms(record)} {record.levelname} {escape(record.name)}: {escape(record.getMessage())}"
    return line + _traceback_lines(record)


def _json_line(record: logging.LogRecord) -> str:
    # ASCII only: the escapes of JSON then cover each control character except DEL.
    fields = {
        "time": _utc_ms(record),
        "level": record.levelname,
        "logger": record.name,
        "message": record.getMessage(),
        "process": record.process,
        "thread": record.threadName,
        "location": f"{record.filename}:{record.lineno}",
    }
    if text := _traceback(record):
        fields["exception"] = text
    return json.dumps(fields).replace("\x7f", "\\u007f")


_FORMATS: Mapping[str, Callable[[logging.LogRecord], str]] = {
    "default": _default_line,
    "ISO8601": _iso8601_line,
    "text": _text_line,
    "json": _json_line,
}


def _bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{key}: expected a boolean, got {value!r:.80}")
    return value


def _level(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_VERBOSE_LEVEL:
        raise InvalidRequest(f"{key}: expected an integer of 0 or more, got {value!r:.80}")
    return value


def _format(key: str, value: object) -> LogFormat:
    if not isinstance(value, str):
        raise InvalidRequest(f"{key}: expected a string, got {value!r:.80}")
    for known in LOG_FORMATS:
        if value == known:
            return known
    raise Refusal(f"{key}: unknown format '{value:.80}', there are {', '.join(LOG_FORMATS)}", retry_after_s=None)


_UPDATES: Mapping[str, tuple[str, Callable[[str, object], LogSettingValue]]] = {
    "log_info": ("shows_info", _bool),
    "log_warning": ("shows_warning", _bool),
    "log_error": ("shows_error", _bool),
    "log_verbose_level": ("verbose_level", _level),
    "log_format": ("format", _format),
}
"""Setting of a client -> the field of _LogValues, and the check of a new value."""
