"""Plain-text tables for people at a terminal."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_RULE = 24


def render(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows in columns as wide as their widest cell. A cell may have several lines.

    The last column may hold sentences: no rule is drawn as long as these.
    """
    split = [[cell.split("\n") for cell in row] for row in (heads, *rows)]
    widths = [max(len(line) for row in split for line in row[column]) for column in range(len(heads))]
    lines = []
    for row in split:
        for index in range(max(len(cell) for cell in row)):
            cells = [cell[index] if index < len(cell) else "" for cell in row]
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    widths[-1] = min(widths[-1], max(len(heads[-1]), _LONGEST_RULE))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
