"""Draw what a simulation gave: one column for each way to deal with heat, rows for temperature, power, share, answers.

The picture is one SVG file that needs nothing else to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from edge_server.governor.rates import PriorityClass
from edge_server.governor.simulate import Outcome

_WIDTH, _HEIGHT, _GAP, _LEFT, _TOP = 300, 130, 26, 64, 92
_POINTS = 300
_COLORS = {PriorityClass.CONTROL: "#b3362b", PriorityClass.NORMAL: "#d99a2b", PriorityClass.BULK: "#3f7fbf"}
_INK, _FAINT = "#333", "#ddd"


@dataclass(frozen=True, slots=True)
class _Row:
    """One quantity: its title, the range of its axis, and how to draw it for an outcome."""

    title: str
    low: float
    high: float
    draw: Callable[[Outcome, _Panel], str]


@dataclass(frozen=True, slots=True)
class _Panel:
    """Where one curve lies: its corner in the picture, and the ranges of both axes."""

    left: float
    top: float
    end_s: float
    low: float
    high: float

    def x(self, time_s: float) -> float:
        return self.left + _WIDTH * time_s / self.end_s

    def y(self, value: float) -> float:
        part = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.top + _HEIGHT * (1 - part)

    def line(self, times: Sequence[float], values: Sequence[float], color: str) -> str:
        points = " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in zip(times, values, strict=True))
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.3"/>'

    def band(self, times: Sequence[float], low: Sequence[float], high: Sequence[float], color: str) -> str:
        upper = [f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in zip(times, high, strict=True)]
        lower = [f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in zip(times, low, strict=True)]
        return f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{color}"/>'

    def level(self, value: float, text: str, color: str) -> str:
        y = self.y(value)
        return (
            f'<line x1="{self.left}" x2="{self.left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}" '
            f'stroke-dasharray="4 3"/><text x="{self.left + _WIDTH - 3}" y="{y - 3:.1f}" text-anchor="end" '
            f'font-size="10" fill="{color}">{escape(text)}</text>'
        )

    def frame(self, shows_numbers: bool) -> str:
        parts = [
            f'<rect x="{self.left}" y="{self.top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="{_FAINT}"/>'
        ]
        for part in (0.0, 0.5, 1.0):
            value = self.low + part * (self.high - self.low)
            if shows_numbers:
                parts.append(
                    f'<text x="{self.left - 6}" y="{self.y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
                )
        return "".join(parts)


def draw(outcomes: Sequence[Outcome], trip_c: float) -> str:
    """Return the SVG of outcomes of one scenario. `trip_c` is where the kernel begins to throttle."""
    rows = _rows(outcomes, trip_c)
    width = _LEFT + len(outcomes) * (_WIDTH + _GAP) + 10
    height = _TOP + len(rows) * (_HEIGHT + _GAP + 14) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11" fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">Simulated, scenario {escape(outcomes[0].scenario)}</text>',
        _legend(),
    ]
    for column, outcome in enumerate(outcomes):
        left = _LEFT + column * (_WIDTH + _GAP)
        parts += _heading(outcome, left)
        for index, row in enumerate(rows):
            panel = _Panel(left, _TOP + index * (_HEIGHT + _GAP + 14) + 14, outcome.seconds, row.low, row.high)
            parts.append(f'<text x="{left}" y="{panel.top - 4}">{escape(row.title)}</text>')
            parts.append(panel.frame(shows_numbers=column == 0))
            parts.append(row.draw(outcome, panel))
    foot = height - 12
    parts.append(f'<text x="{_LEFT}" y="{foot}">time, 0 to {outcomes[0].seconds:g} s in each panel</text></svg>')
    return "\n".join(parts) + "\n"


def _heading(outcome: Outcome, left: float) -> list[str]:
    served = ", ".join(f"{item.name.lower()} {outcome.on_time_part(item):.1%}" for item in PriorityClass)
    facts = f"hottest {outcome.hottest_c:.1f} °C, throttled {outcome.throttled_part:.0%} of the time"
    return [
        f'<text x="{left}" y="52" font-size="12" font-weight="bold">{escape(outcome.strategy.value)}</text>',
        f'<text x="{left}" y="68">{escape(facts)}</text>',
        f'<text x="{left}" y="84">in time: {escape(served)}</text>',
    ]


def _legend() -> str:
    parts = []
    for index, item in enumerate(PriorityClass):
        x = _LEFT + 330 + 90 * index
        parts.append(f'<rect x="{x}" y="13" width="10" height="10" fill="{_COLORS[item]}"/>')
        parts.append(f'<text x="{x + 14}" y="22">{item.name.lower()}</text>')
    return "".join(parts)


def _rows(outcomes: Sequence[Outcome], trip_c: float) -> list[_Row]:
    coolest_c = min(min(outcome.trace.chip_c) for outcome in outcomes)
    most_w = max(max(outcome.trace.power_w) for outcome in outcomes)
    most = max(sum(outcome.offered.values()) / outcome.seconds for outcome in outcomes)

    def temperature(outcome: Outcome, panel: _Panel) -> str:
        times, values = _thinned(outcome.trace.time_s, outcome.trace.chip_c, max)
        limits = panel.level(trip_c, "trip", "#b3362b") + panel.level(outcome.set_point_c, "", "#888")
        return limits + panel.line(times, values, _INK)

    def power(outcome: Outcome, panel: _Panel) -> str:
        return panel.line(*_thinned(outcome.trace.time_s, outcome.trace.power_w, _mean), _INK)

    def share(outcome: Outcome, panel: _Panel) -> str:
        return panel.line(*_thinned(outcome.trace.time_s, outcome.trace.share, _mean), _INK)

    return [
        _Row("chip, °C", 10 * (coolest_c // 10), 10 * (trip_c // 10 + 2), temperature),
        _Row("power, W", 0, 5 * (most_w // 5 + 1), power),
        _Row("share of full work allowed", 0, 1, share),
        _Row("answered in time, a second", 0, 20 * (most // 20 + 1), _answers),
    ]


def _answers(outcome: Outcome, panel: _Panel) -> str:
    """Stack the classes, control at the bottom."""
    trace = outcome.trace
    period_s = trace.time_s[1] - trace.time_s[0]
    parts = []
    below: list[float] = []
    for priority in PriorityClass:
        times, values = _thinned(trace.time_s, [count / period_s for count in trace.on_time[priority]], _mean)
        below = below or [0.0] * len(values)
        above = [low + value for low, value in zip(below, values, strict=True)]
        parts.append(panel.band(times, below, above, _COLORS[priority]))
        below = above
    return "".join(parts)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _thinned(
    times: Sequence[float], values: Sequence[float], join: Callable[[Sequence[float]], float]
) -> tuple[list[float], list[float]]:
    """Join neighbours until at most _POINTS are left."""
    size = -(-len(times) // _POINTS)
    starts = range(0, len(times), size)
    return [times[start] for start in starts], [join(values[start : start + size]) for start in starts]
