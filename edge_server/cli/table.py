"""Tables for the terminal: plain text, or with colours and wrapped cells if `rich` is installed."""

from __future__ import annotations

import importlib.util
import io
import os
import unicodedata
from collections.abc import Sequence
from typing import TextIO

_MAX_RULE_LENGTH = 24
_GAP = 2

_STYLES = {"READY": "green", "UNAVAILABLE": "red", "LOADING": "yellow", "UNLOADING": "yellow"}
"""State of a model -> its colour."""


def render(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    output: TextIO | None = None,
    *,
    optional: Sequence[str] = (),
) -> str:
    """Return a table whose columns are as wide as their widest cell. A cell may have several lines.

    If `output` is a terminal, the columns in `optional` are omitted, the first one first, until the table fits its
    width. With `rich`, cells that still do not fit are wrapped. The rule below the last column is limited in length,
    because this column may contain sentences.
    """
    split = [[[clean(line) for line in cell.split("\n")] for cell in row] for row in (titles, *rows)]
    widths = [max(cell_width(line) for row in split for line in row[column]) for column in range(len(titles))]
    width = terminal_width(output)
    if output is not None and width is not None:
        kept = list(range(len(titles)))
        for title in optional:
            if sum(widths[at] + _GAP for at in kept) - _GAP > width and title in titles:
                kept.remove(titles.index(title))
        split, widths = [[row[at] for at in kept] for row in split], [widths[at] for at in kept]
        if importlib.util.find_spec("rich") is not None:
            return _by_rich(split, width, output.encoding)
    lines = []
    for row in split:
        for index in range(max(len(cell) for cell in row)):
            cells = [cell[index] if index < len(cell) else "" for cell in row]
            padded = [cell + " " * (width - cell_width(cell)) for cell, width in zip(cells, widths, strict=True)]
            lines.append((" " * _GAP).join(padded).rstrip())
    widths[-1] = min(widths[-1], max(cell_width(split[0][-1][0]), _MAX_RULE_LENGTH))
    lines.insert(1, (" " * _GAP).join("-" * width for width in widths))
    return "\n".join(lines)


def _by_rich(split: Sequence[Sequence[Sequence[str]]], width: int, encoding: str) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold"
    )
    titles, *rows = split
    for (title,) in titles:
        # As Text, so that rich does not interpret markup.
        table.add_column(Text(title), overflow="fold")
    for row in rows:
        table.add_row(*(Text("\n".join(cell), style=_STYLES.get(cell[0], "")) for cell in row))
    # The console chooses colours according to TERM and NO_COLOR.
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(file=file, width=width, force_terminal=True, highlight=False)
    with console.capture() as drawn:
        console.print(table)
    return "\n".join(line.rstrip() for line in drawn.get().rstrip("\n").split("\n"))


def terminal_width(output: TextIO | None) -> int | None:
    """Return the number of columns of a terminal, or None if `output` is no terminal."""
    if output is None or not output.isatty():
        return None
    try:
        return os.get_terminal_size(output.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def clean(text: str) -> str:
    """Return text without control characters, because labels and messages come from other programs."""
    return "".join(char if char.isprintable() else " " for char in text)


def cell_width(text: str) -> int:
    """Return the width of a text in terminal cells: two per wide character, none per combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def clip(text: str, width: int) -> str:
    """Return the text without control characters, shortened to at most `width` cells."""
    text = clean(text)
    if cell_width(text) <= width:
        return text
    kept, used = [], 0
    for char in text:
        used += cell_width(char)
        if used > width - 1:
            break
        kept.append(char)
    return "".join(kept) + "…" if width > 0 else ""
