"""SVG charts of measurements: lines and bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP, _FOOT, _RIGHT = 620.0, 190.0, 70.0, 62.0, 64.0, 66.0, 24.0
_NARROW_WIDTH = 350.0
_INK, _FAINT, _GRID = "#2b2d33", "#6b7280", "#e5e7eb"
COLORS = ("#1d4e89", "#4fa3c7", "#2e8b57", "#f4b266", "#c0392b")
_LETTER, _TITLE_LETTER = 6.6, 10.5
"""Approximate width of a letter in normal text and in the title."""


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


def _head(title: str, facts: str, width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-size="11" fill="{_INK}"'
        ' font-family="Helvetica, Arial, sans-serif">',
        f'<title>{escape(title)}</title><rect width="{width:g}" height="{height:g}" fill="white"/>',
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
