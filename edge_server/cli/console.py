"""Output of the commands in the terminal: tables, progress bars and lines that are redrawn in place, by the library
rich. A server never imports this.

A pipe gets plain text: no colours, no wrapped cells, nothing that is drawn in place.
"""

from __future__ import annotations

import io
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Line = RenderableType
"""A line of a live view: text, or a bar."""

_GAP = 2
_MAX_LAST_RULE = 24
_BAR_WIDTH = 24
_MIN_FRACTION, _MIN_ELAPSED_S = 0.02, 1.0
"""Minimum progress before the remaining time is estimated."""

_LINES_BELOW = "\ue000"
"""Stands in a table for the lines below a row. Of a private area of Unicode, which `clean` removes from cells."""

_STYLES = {"READY": "green", "UNAVAILABLE": "red", "LOADING": "yellow", "UNLOADING": "yellow"}
"""State of a model -> its colour."""


def clean(text: str) -> str:
    """Return text without control characters, because labels and messages come from other programs."""
    return "".join(char if char.isprintable() else " " for char in text)


def render(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    output: TextIO | None = None,
    *,
    optional: Sequence[str] = (),
    stacked: Sequence[str] = (),
    names_omitted: bool = True,
    justify: Literal["left", "right"] = "left",
) -> str:
    """Return a table for `output`, or for a pipe. A cell may have several lines. `justify` is for all columns but the
    first.

    On a terminal, the columns in `optional` are removed, the first one first, until the table fits, and cells that
    still do not fit are wrapped. Those in `stacked` come as lines below each row then, the others are omitted, and with
    `names_omitted` a line below the table has their names. On a pipe, the rule below the last column is limited in
    length, because this column may contain sentences.
    """
    console = _console(output or io.StringIO())
    columns = [
        (title, ["\n".join(map(clean, cell.split("\n"))) for cell in cells])
        for title, *cells in zip(titles, *rows, strict=True)
    ]
    every_column = columns
    if console.is_terminal:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
        for title in optional:
            if sum(_GAP + _width(column) for column in columns) - _GAP > console.width:
                columns = [column for column in columns if column[0] != title]
    else:
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="")
        console.width = sum(_GAP + _width(column) for column in columns)
        *rules, last = ("-" * _width(column) for column in columns)
        rules.append(last[: max(cell_len(titles[-1]), _MAX_LAST_RULE)])
        columns = [(title, [rule, *cells]) for rule, (title, cells) in zip(rules, columns, strict=True)]
    for index, (title, _) in enumerate(columns):
        # As Text, so that rich does not interpret markup.
        table.add_column(Text(title), overflow="fold", justify=justify if index else "left")
    removed = [column for column in every_column if column[0] not in [title for title, _ in columns]]
    below = [column for column in removed if column[0] in stacked]
    for number, row in enumerate(zip(*(cells for _, cells in columns), strict=True)):
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        if any(cells[number] for _, cells in below):
            table.add_row(Text(_LINES_BELOW))
    with console.capture() as drawn:
        console.print(table)
    lines = []
    blocks = (_stack(below, number, console.width) for number in range(len(rows)) if any(c[number] for _, c in below))
    for line in drawn.get().rstrip("\n").split("\n"):
        lines += next(blocks) if line.startswith(_LINES_BELOW) else [line.rstrip()]
    if names_omitted and (omitted := [title for title, _ in removed if title not in stacked]):
        lines.append(f"columns that do not fit: {', '.join(omitted)}")
    return "\n".join(lines)


def _stack(columns: Sequence[tuple[str, Sequence[str]]], number: int, width: int) -> list[str]:
    """Return the cells of one row as lines of "  TITLE  text", wrapped to a width."""
    indent = max(len(title) for title, _ in columns) + 4
    lines: list[str] = []
    for title, cells in columns:
        first = f"  {title}".ljust(indent)
        for text in cells[number].splitlines():
            lines += textwrap.wrap(
                text, max(width, indent + 20), initial_indent=first, subsequent_indent=" " * indent,
                break_on_hyphens=False,
            )  # fmt: skip
            first = " " * indent
    return lines


def wrap(line: str, output: TextIO) -> str:
    """Return a line wrapped to the width of a terminal, further lines indented; unchanged for a pipe."""
    console = _console(output)
    if not console.is_terminal:
        return line
    return textwrap.fill(line, max(console.width, 20), subsequent_indent="  ", break_on_hyphens=False)


def _console(stream: TextIO) -> Console:
    # Not by FORCE_COLOR, which build services set: what reads a pipe wants no colours and no wrapped cells.
    return Console(file=stream, force_terminal=stream.isatty(), highlight=False)


def _width(column: tuple[str, Sequence[str]]) -> int:
    title, cells = column
    return max(cell_len(line) for cell in (title, *cells) for line in cell.split("\n"))


def busy_line(activity: str) -> AbstractContextManager[object]:
    """Show `activity` on standard error while a block runs, if that is a terminal."""
    return _console(sys.stderr or io.StringIO()).status(f"{activity} ...")


class LiveView:
    """Lines that are redrawn in place on a terminal. Other output before `erase` must go through `print_line`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = _console(stream)
        self._live: Live | None = None
        self.is_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self.is_broken = False
        """Whether the reader of a pipe has closed it. Then nothing more is written."""

    @property
    def height(self) -> int:
        """Number of lines that can be drawn."""
        return self._console.height - 1  # the cursor is below them

    def draw(self, lines: Sequence[Line]) -> None:
        """Replace the lines drawn before. Each is cut at the width, and the last ones at the height."""
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop",
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start()
        texts = (
            Text.from_ansi(line, no_wrap=True, overflow="ellipsis") if isinstance(line, str) else line for line in lines
        )
        self._live.update(Group(*texts), refresh=True)

    def print_line(self, line: str) -> None:
        """Print a permanent line above the drawn lines."""
        if self.is_broken:
            return
        if self.is_terminal:
            self._console.print(Text.from_ansi(line), soft_wrap=True)
            return
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            self.is_broken = True

    def erase(self) -> None:
        """Erase the drawn lines and show the cursor again."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class Progress:
    """Writes progress to `out`: a bar until `close` on a terminal, else a line for each new text."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = LiveView(out)
        self._clock = clock
        self._began_s = clock()
        self._last = ""

    def show(self, fraction: float, text: str) -> None:
        text = clean(text)
        if self._view.is_terminal:
            self._view.draw([bar(fraction, f"{format_remaining(fraction, self._clock() - self._began_s)} {text}")])
        elif text != self._last:
            self._view.print_line(f"{fraction:4.0%} {text}")
        self._last = text

    def close(self) -> None:
        """Erase the bar."""
        self._view.erase()


def bar(fraction: float, text: str) -> Line:
    """Return a line with a bar, the finished fraction in per cent, and `text` behind it."""
    line = Table.grid(padding=(0, 1, 0, 0), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_row(ProgressBar(1.0, min(fraction, 1.0), _BAR_WIDTH), Text(f"{min(fraction, 1.0):4.0%}{text}"))
    return line


def format_remaining(fraction: float, elapsed_s: float) -> str:
    """Return ", 0:12 left", or "" if it is too early for an estimate."""
    if fraction < _MIN_FRACTION or elapsed_s < _MIN_ELAPSED_S:
        return ""
    return f", {format_duration(elapsed_s * (1 - min(fraction, 1.0)) / fraction)} left"


def format_duration(seconds: float) -> str:
    """Return "1:05", or "1:02:05" from an hour on."""
    whole, rest = divmod(int(seconds), 60)
    hours, whole = divmod(whole, 60)
    return f"{hours}:{whole:02}:{rest:02}" if hours else f"{whole}:{rest:02}"
