"""Sink that writes results to a file, one JSON object per line, with a limit on its size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from edge_server.plugins.cameras.sinks.sink_interface import Sink, SinkError, SinkMessage, write_failure_reason


class JsonLinesFile(Sink):
    """Appends to a file. At `max_bytes` it is renamed to NAME.1, which replaces the older one: at most twice the bound
    is on disk."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None

    def open(self) -> None:
        try:
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise self._failure(error) from None

    def send(self, message: SinkMessage) -> bool:
        assert self._file is not None
        line = message.json_text().encode() + b"\n"
        try:
            if not self._has_name():
                # Somebody deleted or renamed it, as programs that rotate logs do.
                self.close()
                self.open()
            size = self._file.tell()
            if size and size + len(line) > self._max_bytes:
                self._path.replace(f"{self._path}.1")
                self.close()
                self.open()
            if self._file.write(line) != len(line):
                raise SinkError(f"{self._path}: only a part of a line could be written")
        except OSError as error:
            raise self._failure(error) from None
        return True

    def _has_name(self) -> bool:
        """Return whether the path still leads to the file that is open."""
        assert self._file is not None
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _failure(self, error: OSError) -> SinkError:
        return SinkError(f"{self._path}: cannot be written: {write_failure_reason(self._path, error)}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
