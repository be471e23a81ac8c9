"""SVG charts of curves over time: a sheet has columns, and each column is a stack of panels with one time axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 300.0, 120.0
"""Size of a panel in SVG units. A column may have another width."""

_GAP_X, _GAP_Y, _LEFT, _TOP, _FOOT = 22.0, 34.0, 52.0, 108.0, 46.0
_POINTS = 240
_INK, _FAINT, _GRID = "#2b2d33", "#6b7280", "#e5e7eb"

Join = Callable[[Sequence[float]], float]


class ChartPanel(NamedTuple):
    """One chart: its position in the sheet, and the ranges of both axes."""

    left: float
    top: float
    end_s: float
    low: float
    high: float
    width: float = WIDTH

    def x(self, time_s: float) -> float:
        return self.left + self.width * min(max(time_s / self.end_s, 0.0), 1.0)

    def y(self, value: float) -> float:
        part = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.top + HEIGHT * (1 - part)

    def line(self, times: Sequence[float], values: Sequence[float | None], color: str, dash: str = "") -> str:
        """Draw a curve with gaps where a value is None."""
        parts: list[str] = []
        points: list[str] = []
        for at, value in [*zip(times, values, strict=True), (0.0, None)]:
            if value is not None:
                points.append(f"{self.x(at):.1f},{self.y(value):.1f}")
            elif points:
                style = f' stroke-dasharray="{dash}"' if dash else ""
                parts.append(
                    f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="1.4"'
                    f' stroke-linejoin="round"{style}/>'
                )
                points = []
        return "".join(parts)

    def band(self, times: Sequence[float], low: Sequence[float], high: Sequence[float], color: str) -> str:
        upper = [f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in zip(times, high, strict=True)]
        lower = [f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in zip(times, low, strict=True)]
        return f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{color}"/>'

    def fill_period(self, from_s: float, to_s: float, color: str, opacity: float = 1.0) -> str:
        """Fill the panel from one time to another."""
        left = self.x(from_s)
        return (
            f'<rect x="{left:.1f}" y="{self.top:.1f}" width="{max(0.6, self.x(to_s) - left):.1f}" height="{HEIGHT:g}"'
            f' fill="{color}" fill-opacity="{opacity:g}"/>'
        )

    def level(self, value: float, text: str, color: str, *, is_below: bool = False) -> str:
        """Draw a horizontal dashed line, with its name above or below it at the right end."""
        y = self.y(value)
        return (
            f'<line x1="{self.left:g}" x2="{self.left + self.width:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}"'
            f' stroke-dasharray="5 3"/>{self.note(value, text, color, is_below=is_below)}'
        )

    def note(self, value: float, text: str, color: str, *, is_below: bool = False, at_start: bool = False) -> str:
        y = self.y(value) + (11 if is_below else -3)
        x, anchor = (self.left + 4, "start") if at_start else (self.left + self.width - 4, "end")
        return f'<text x="{x:g}" y="{y:.1f}" text-anchor="{anchor}" font-size="10" fill="{color}">{escape(text)}</text>'

    def background(self, *, shows_numbers: bool, shows_time: bool) -> str:
        parts = [
            f'<rect x="{self.left:g}" y="{self.top:g}" width="{self.width:g}" height="{HEIGHT:g}" fill="#fbfbfc"'
            f' stroke="{_GRID}"/>'
        ]
        for value in _ticks(self.low, self.high, 4):
            y = self.y(value)
            parts.append(
                f'<line x1="{self.left:g}" x2="{self.left + self.width:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>'
            )
            if shows_numbers:
                parts.append(
                    f'<text x="{self.left - 6:g}" y="{y + 3.5:.1f}" text-anchor="end" fill="{_FAINT}">{value:g}</text>'
                )
        for minute in _ticks(0.0, self.end_s / 60, 6):
            x = self.x(minute * 60)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.top:g}" y2="{self.top + HEIGHT:g}" stroke="{_GRID}"/>'
            )
            if shows_time:
                y = self.top + HEIGHT + 14
                parts.append(f'<text x="{x:.1f}" y="{y:g}" text-anchor="middle" fill="{_FAINT}">{minute:g}</text>')
        return "".join(parts)


class ChartRow(NamedTuple):
    """One quantity: its title, the range of its axis, and the function that draws it on a panel."""

    title: str
    low: float
    high: float
    draw: Callable[[ChartPanel], str]
    shows_numbers: bool = True


class ChartColumn(NamedTuple):
    """One column: a bold heading, a few lines of facts below it, and its rows."""

    heading: str
    facts: Sequence[str]
    rows: Sequence[ChartRow]
    end_s: float
    width: float = WIDTH


def draw_sheet(title: str, columns: Sequence[ChartColumn], keys: Sequence[tuple[str, str]]) -> str:
    """Return the SVG. All columns have the same rows. `keys` are (text, color) of the legend."""
    row_count = len(columns[0].rows)
    width = _LEFT + sum(column.width + _GAP_X for column in columns) + 8
    height = _TOP + row_count * (HEIGHT + _GAP_Y) + _FOOT - 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-size="11" fill="{_INK}"'
        ' font-family="Helvetica, Arial, sans-serif">',
        f'<title>{escape(title)}</title><rect width="{width:g}" height="{height:g}" fill="white"/>',
        f'<text x="{_LEFT:g}" y="26" font-size="17" font-weight="bold">{escape(title)}</text>',
        _legend(keys, _LEFT, 46.0),
    ]
    left = _LEFT
    for index, column in enumerate(columns):
        parts.append(_column(column, left, is_first=index == 0))
        left += column.width + _GAP_X
    parts.append(f'<text x="{_LEFT:g}" y="{height - 12:g}" fill="{_FAINT}">time in minutes</text></svg>')
    return "\n".join(parts) + "\n"


def reduce_points(times: Sequence[float], values: Sequence[float], join: Join) -> tuple[list[float], list[float]]:
    """Join neighbouring points until at most 240 are left."""
    size = -(-len(times) // _POINTS)
    starts = range(0, len(times), size)
    return [times[start] for start in starts], [join(values[start : start + size]) for start in starts]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _column(column: ChartColumn, left: float, *, is_first: bool) -> str:
    parts = [f'<text x="{left:g}" y="72" font-size="13" font-weight="bold">{escape(column.heading)}</text>']
    for index, fact in enumerate(column.facts):
        parts.append(f'<text x="{left:g}" y="{87 + 14 * index}" fill="{_FAINT}">{escape(fact)}</text>')
    for index, row in enumerate(column.rows):
        panel = ChartPanel(left, _TOP + 18 + index * (HEIGHT + _GAP_Y), column.end_s, row.low, row.high, column.width)
        is_last = index == len(column.rows) - 1
        parts.append(panel.background(shows_numbers=is_first and row.shows_numbers, shows_time=is_last))
        parts.append(row.draw(panel))
        if is_first:
            parts.append(f'<text x="{left:g}" y="{panel.top - 5:g}" font-weight="bold">{escape(row.title)}</text>')
    return "\n".join(parts)


def _legend(keys: Sequence[tuple[str, str]], left: float, y: float) -> str:
    parts = []
    for text, color in keys:
        parts.append(f'<rect x="{left:g}" y="{y - 9:g}" width="11" height="11" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{left + 16:g}" y="{y:g}">{escape(text)}</text>')
        left += 34 + 6.2 * len(text)
    return "".join(parts)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from low to high."""
    raw = max(1e-9, (high - low) / count)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 9) for index in range(first, math.floor(high / step + 1e-9) + 1)]
