"""Terminal output: a table redrawn in place, or plain lines if it is not a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TextIO

from edge_server.cli.table import cell_width

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CLEAR_LINE, _CLEAR_BELOW = "\x1b[K", "\x1b[J"


class Screen:
    """Redraws its lines where they were drawn before. What is printed between drawings must go through `say`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: list[str] = []
        self.is_terminal = stream.isatty()
        self.is_broken = False
        """Whoever read it has left; nothing more is written."""

    def size(self) -> tuple[int, int]:
        """Return columns and rows that may be written on, (80, 24) where the terminal does not tell."""
        try:
            found = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return 80, 24
        # The last column stays free, for some terminals wrap when it is filled, and the last row for the cursor.
        return max((found.columns or 80) - 1, 1), max((found.lines or 24) - 1, 1)

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines, none wider than the terminal, in place of those drawn before."""
        first = "" if self._drawn else _HIDE_CURSOR
        self._write(first + self._back() + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW)
        self._drawn = list(lines)

    def say(self, line: str) -> None:
        """Print a line that stays, above the table."""
        drawn, before = self._drawn, self._back()
        self._drawn = []
        self._write(before + (_CLEAR_BELOW if drawn else "") + line + "\n")
        if drawn:
            self.draw(drawn)

    def erase(self) -> None:
        """Take the table away and give the cursor back."""
        if self._drawn:
            self._write(self._back() + _CLEAR_BELOW + _SHOW_CURSOR)
            self._drawn = []

    def _back(self) -> str:
        """Return the escape codes to the start of the last drawing, also for a terminal that became narrower."""
        if not self._drawn:
            return ""
        width = self.size()[0] + 1
        rows = sum(max(-(-cell_width(_COLOUR.sub("", line)) // width), 1) for line in self._drawn)
        return f"\x1b[{rows}F"

    def _write(self, text: str) -> None:
        if self.is_broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            self.is_broken = True
