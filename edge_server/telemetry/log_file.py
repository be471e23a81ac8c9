"""Log file of `--log-file`: opened again after a rotation, and reported once while it cannot be written."""

from __future__ import annotations

import contextlib
import logging
import sys
from logging.handlers import WatchedFileHandler

_log = logging.getLogger(__name__)


class LogFile(WatchedFileHandler):
    """Handler that appends records to a file. A record that cannot be written is counted as lost. A few of these are
    still written later, from the buffer of the file.

    The standard handler prints a traceback for each such record, and raises where the file cannot be opened again.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._path = path
        self._lost = 0
        self._reason = ""

    def problem(self) -> str:
        """Return why records are lost, and how many; "" while they are written."""
        lost = self._lost
        return f"'{self._path}' cannot be written: {self._reason}; up to {lost} record(s) were lost" if lost else ""

    def emit(self, record: logging.LogRecord) -> None:
        before = self._lost
        try:
            super().emit(record)
        except OSError:
            # After a rotation: the old file has no room for its buffer, or the new one cannot be opened.
            self.handleError(record)
            stream, self.stream = self.stream, None
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if before and self._lost == before:
            self._lost = 0
            _log.warning("up to %d record(s) were lost while '%s' could not be written", before, self._path)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._reason = error.strerror or str(error)
        self._lost += 1
        if self._lost == 1:
            # sys.stderr is None without a terminal, and may be a file on the same disk.
            with contextlib.suppress(OSError, AttributeError):
                sys.stderr.write(
                    f"edge-server: records are lost until --log-file={self._path} can be written: {self._reason}\n"
                )
