"""Terminal output: lines that are redrawn in place, and lines printed above them."""

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
    """Redraws lines in place. Other output between two drawings must go through `print_line`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: list[str] = []
        self.is_terminal = stream.isatty()
        self.is_broken = False
        """Whether the reader has closed the output. Then nothing more is written."""

    def size(self) -> tuple[int, int]:
        """Return the usable columns and rows; (80, 24) if the size is unknown."""
        try:
            found = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return 80, 24
        # The last column stays free, because some terminals wrap a full line. The last row is for the cursor.
        return max((found.columns or 80) - 1, 1), max((found.lines or 24) - 1, 1)

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the lines drawn before. No line may be wider than the terminal."""
        first = "" if self._drawn else _HIDE_CURSOR
        self._write(first + self._back() + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW)
        self._drawn = list(lines)

    def print_line(self, line: str) -> None:
        """Print a permanent line above the drawn lines."""
        drawn, before = self._drawn, self._back()
        self._drawn = []
        self._write(before + (_CLEAR_BELOW if drawn else "") + line + "\n")
        if drawn:
            self.draw(drawn)

    def erase(self) -> None:
        """Erase the drawn lines and show the cursor again."""
        if self._drawn:
            self._write(self._back() + _CLEAR_BELOW + _SHOW_CURSOR)
            self._drawn = []

    def _back(self) -> str:
        """Return the escape code to the start of the last drawing, considering lines that now wrap after a resize."""
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
