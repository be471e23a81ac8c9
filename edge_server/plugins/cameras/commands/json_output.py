"""Writer of the lines of `edge-server stream --json` on standard output: one JSON object per line, from several
threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, TextIO


class JsonLines:
    """Writes JSON lines. If the reader closes the output, sets `is_broken` and writes nothing more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.is_broken = False

    def write(self, document: Mapping[str, Any]) -> None:
        line = json.dumps(document, allow_nan=False)
        with self._lock:
            if self.is_broken:
                return
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except BrokenPipeError:
                self.is_broken = True
