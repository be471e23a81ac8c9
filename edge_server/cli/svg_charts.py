"""Drawing of SVG charts: line and bar charts of measurements, and curves over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP, _FOOT, _RIGHT = 620.0, 190.0, 70.0, 62.0, 64.0, 66.0, 24.0
_NARROW_WIDTH = 350.0
_INK, _FAINT, _GRID = "#2b2d33", "#6b7280", "#e5e7eb"
COLORS = ("#1d4e89", "#4fa3c7", "#2e8b57", "#f4b266", "#c0392b")
_LETTER, _TITLE_LETTER = 6.6, 10.5
"""Approximate width of a letter in normal text and in the title."""

_CELL_WIDTH, _CELL_HEIGHT = 300.0, 120.0
"""Size of a panel of a sheet. A column may have another width."""
_SHEET_GAP_X, _SHEET_GAP_Y, _SHEET_LEFT, _SHEET_TOP, _SHEET_FOOT = 22.0, 34.0, 52.0, 108.0, 46.0
_POINTS = 240

Join = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class ChartCurve:
    """A curve of (x, y) points. A single point is drawn as a dot."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str


@dataclass(frozen=True, slots=True)
class CurvePanel:
    """Curves with common axes. The x values are spaced evenly, by rank, or with `is_log` by their logarithms. `levels`
    are dashed lines: (value, label)."""

    title: str
    curves: Sequence[ChartCurve]
    x_title: str
    levels: Sequence[tuple[float, str]] = ()
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, with its name on the left and its label on the right."""

    name: str
    value: float
    label: str
    color: str


def draw_panels(title: str, panels: Sequence[CurvePanel], facts: str = "", *, columns: int = 1) -> str:
    """Return an SVG with the panels below each other, `columns` in a row; with more than one they are narrow. Points
    that are not finite are omitted; the axis begins at 0, on which lower values lie."""
    width = _WIDTH if columns == 1 else _NARROW_WIDTH
    height = _TOP + math.ceil(len(panels) / columns) * (_HEIGHT + _GAP) + _FOOT - _GAP
    parts = _head(title, facts, max(columns * (_LEFT + width + _RIGHT), _head_width(title, facts)), height)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        left = _LEFT + column * (_LEFT + width + _RIGHT)
        parts += _panel(panel, left, _TOP + 24 + row * (_HEIGHT + _GAP), width)
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_bars(title: str, bars: Sequence[Bar], facts: str = "", keys: Sequence[tuple[str, str]] = ()) -> str:
    """Return an SVG of horizontal bars in the given order. `keys` are the (label, color) pairs of the legend."""
    left = 16 + _LETTER * max((len(bar.name) for bar in bars), default=0)
    right = 16 + _LETTER * max((len(bar.label) for bar in bars), default=0)
    highest = max((bar.value for bar in bars if math.isfinite(bar.value)), default=0.0) or 1.0
    legend = 16 + sum(_key_width(label) for label, _ in keys)
    width = max(left + 320 + right, legend, _head_width(title, facts))
    parts = _head(title, facts, width, _TOP + 24 + 22 * len(bars) + 24)
    parts += _legend(keys, 16, _TOP)
    for index, bar in enumerate(bars):
        y = _TOP + 16 + 22 * index
        length = 320 * max(bar.value, 0.0) / highest if math.isfinite(bar.value) else 0.0
        parts += [
            f'<text x="{left - 6:.1f}" y="{y + 12:g}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect x="{left:.1f}" y="{y:g}" width="{length:.1f}" height="16" fill="{bar.color}"/>',
            f'<text x="{left + length + 6:.1f}" y="{y + 12:g}" fill="{_FAINT}">{escape(bar.label)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _head_width(title: str, facts: str) -> float:
    return 32 + max(_TITLE_LETTER * len(title), _LETTER * len(facts))


def _begin(title: str, width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-size="11" fill="{_INK}"'
        ' font-family="Helvetica, Arial, sans-serif">',
        f'<title>{escape(title)}</title><rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]


def _head(title: str, facts: str, width: float, height: float) -> list[str]:
    return [
        *_begin(title, width, height),
        f'<text x="16" y="24" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="16" y="42" fill="{_FAINT}">{escape(facts)}</text>',
    ]


def _legend(keys: Sequence[tuple[str, str]], left: float, y: float) -> list[str]:
    parts = []
    for label, color in keys:
        parts.append(f'<rect x="{left:g}" y="{y - 9:g}" width="11" height="11" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{left + 16:g}" y="{y:g}">{escape(label)}</text>')
        left += _key_width(label)
    return parts


def _key_width(label: str) -> float:
    return 34 + _LETTER * len(label)


def _panel(panel: CurvePanel, left: float, top: float, width: float) -> list[str]:
    curves = [
        ChartCurve(curve.name, [point for point in curve.points if all(map(math.isfinite, point))], curve.color)
        for curve in panel.curves
    ]
    steps = sorted({x for curve in curves for x, _ in curve.points}) or [0.0]
    values = [y for curve in curves for _, y in curve.points] + [value for value, _ in panel.levels]
    high = max([0.0, *values]) * 1.08 or 1.0

    def x(value: float) -> float:
        if panel.is_log and steps[0] < steps[-1]:
            fraction = math.log(value / steps[0]) / math.log(steps[-1] / steps[0])
            return left + width * (0.06 + 0.88 * fraction)
        return left + width * (steps.index(value) + 0.5) / len(steps)

    def y(value: float) -> float:
        return top + _HEIGHT * (1 - min(max(value, 0.0), high) / high)

    parts = [
        f'<text x="{left:g}" y="{top - 8:g}" font-weight="bold">{escape(panel.title)}</text>',
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{_HEIGHT:g}" fill="#fbfbfc" stroke="{_GRID}"/>',
    ]
    for value in _ticks(0.0, high, 5):
        parts.append(
            f'<line x1="{left:g}" x2="{left + width:g}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{_GRID}"/>'
            f'<text x="{left - 6:g}" y="{y(value) + 3.5:.1f}" text-anchor="end" fill="{_FAINT}">{value:g}</text>'
        )
    for step in steps:
        parts.append(
            f'<text x="{x(step):.1f}" y="{top + _HEIGHT + 15:g}" text-anchor="middle" fill="{_FAINT}">{step:g}</text>'
        )
    for value, label in panel.levels:
        parts.append(
            f'<line x1="{left:g}" x2="{left + width:g}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{COLORS[4]}"'
            f' stroke-dasharray="5 3"/><text x="{left + 4:g}" y="{y(value) - 4:.1f}" fill="{COLORS[4]}">'
            f"{escape(label)}</text>"
        )
    for curve in curves:
        dots = [(x(at), y(value)) for at, value in sorted(curve.points)]
        line = " ".join(f"{at:.1f},{value:.1f}" for at, value in dots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{curve.color}" stroke-width="1.6"/>')
        parts += [f'<circle cx="{at:.1f}" cy="{value:.1f}" r="2.6" fill="{curve.color}"/>' for at, value in dots]
    parts.append(
        f'<text x="{left + width:g}" y="{top + _HEIGHT + 30:g}" text-anchor="end" fill="{_FAINT}">'
        f"{escape(panel.x_title)}</text>"
    )
    return parts + _legend([(curve.name, curve.color) for curve in curves], left, top + _HEIGHT + 30)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from low to high."""
    raw = (high - low) / count or 1e-9
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{index * step:.9g}") for index in range(first, math.floor(high / step + 1e-9) + 1)]


class ChartPanel(NamedTuple):
    """One chart: its position in the sheet, and the ranges of both axes."""

    left: float
    top: float
    end_s: float
    low: float
    high: float
    width: float = _CELL_WIDTH

    def x(self, time_s: float) -> float:
        return self.left + self.width * min(max(time_s / self.end_s, 0.0), 1.0)

    def y(self, value: float) -> float:
        part = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.top + _CELL_HEIGHT * (1 - part)

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
        width = max(0.6, self.x(to_s) - left)
        return (
            f'<rect x="{left:.1f}" y="{self.top:.1f}" width="{width:.1f}" height="{_CELL_HEIGHT:g}"'
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
            f'<rect x="{self.left:g}" y="{self.top:g}" width="{self.width:g}" height="{_CELL_HEIGHT:g}" fill="#fbfbfc"'
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
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.top:g}" y2="{self.top + _CELL_HEIGHT:g}" stroke="{_GRID}"/>'
            )
            if shows_time:
                y = self.top + _CELL_HEIGHT + 14
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
    width: float = _CELL_WIDTH


def draw_sheet(title: str, columns: Sequence[ChartColumn], keys: Sequence[tuple[str, str]]) -> str:
    """Return the SVG. All columns have the same rows. `keys` are (text, color) of the legend."""
    row_count = len(columns[0].rows)
    width = _SHEET_LEFT + sum(column.width + _SHEET_GAP_X for column in columns) + 8
    height = _SHEET_TOP + row_count * (_CELL_HEIGHT + _SHEET_GAP_Y) + _SHEET_FOOT - 14
    parts = [
        *_begin(title, width, height),
        f'<text x="{_SHEET_LEFT:g}" y="26" font-size="17" font-weight="bold">{escape(title)}</text>',
        *_legend(keys, _SHEET_LEFT, 46.0),
    ]
    left = _SHEET_LEFT
    for index, column in enumerate(columns):
        parts.append(_column(column, left, is_first=index == 0))
        left += column.width + _SHEET_GAP_X
    parts.append(f'<text x="{_SHEET_LEFT:g}" y="{height - 12:g}" fill="{_FAINT}">time in minutes</text></svg>')
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
        panel = ChartPanel(
            left, _SHEET_TOP + 18 + index * (_CELL_HEIGHT + _SHEET_GAP_Y), column.end_s, row.low, row.high, column.width
        )
        is_last = index == len(column.rows) - 1
        parts.append(panel.background(shows_numbers=is_first and row.shows_numbers, shows_time=is_last))
        parts.append(row.draw(panel))
        if is_first:
            parts.append(f'<text x="{left:g}" y="{panel.top - 5:g}" font-weight="bold">{escape(row.title)}</text>')
    return "\n".join(parts)
