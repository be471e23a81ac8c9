"""How far it has come: a bar at a terminal, a line for each step elsewhere."""

from __future__ import annotations

import os
from typing import TextIO

_WIDTH = 24
_COLUMNS = 80


class Progress:
    """Writes to `out`; a bar is drawn over itself until `close`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_bar = out.isatty()
        self._last = ""

    def show(self, share: float, text: str) -> None:
        clean = "".join(letter if letter.isprintable() else " " for letter in text)
        if self._is_bar:
            full = round(share * _WIDTH)
            line = f"[{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%} {clean}"
            self._out.write(f"\r\x1b[K{line[: self._columns() - 1]}")
        elif clean != self._last:
            self._out.write(f"{share:4.0%} {clean}\n")
        self._last = clean
        self._out.flush()

    def close(self) -> None:
        """Leave an empty line where the bar was."""
        if self._is_bar:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns or _COLUMNS
        except OSError:
            return _COLUMNS
