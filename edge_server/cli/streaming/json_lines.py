"""JSON lines on standard output, written by several threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, TextIO


class JsonLines:
    """Writes whole lines. Once whoever reads them has left, `is_broken` is set and nothing more is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.is_broken = False

    def write(self, told: Mapping[str, Any]) -> None:
        line = json.dumps(told, allow_nan=False)
        with self._lock:
            if self.is_broken:
                return
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except BrokenPipeError:
                self.is_broken = True
