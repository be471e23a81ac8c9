"""Plain-text tables for people at a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_LONGEST_RULE = 24


def render(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows in columns as wide as their widest cell. A cell may have several lines.

    The last column may hold sentences: no rule is drawn as long as these.
    """
    split = [[[clean(line) for line in cell.split("\n")] for cell in row] for row in (heads, *rows)]
    widths = [max(cell_width(line) for row in split for line in row[column]) for column in range(len(heads))]
    lines = []
    for row in split:
        for index in range(max(len(cell) for cell in row)):
            cells = [cell[index] if index < len(cell) else "" for cell in row]
            padded = [cell + " " * (width - cell_width(cell)) for cell, width in zip(cells, widths, strict=True)]
            lines.append("  ".join(padded).rstrip())
    widths[-1] = min(widths[-1], max(len(heads[-1]), _LONGEST_RULE))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def clean(text: str) -> str:
    """Return text in which nothing can steer the terminal: labels and messages come from elsewhere."""
    return "".join(char if char.isprintable() else " " for char in text)


def cell_width(text: str) -> int:
    """Return how many cells of a terminal a text takes: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
