"""The report of a run: report.json for programs, index.html for people, with plots drawn into the page."""

from __future__ import annotations

import html
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT = 640, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 10, 26
_MAX_POINTS = 600

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .6rem 0 } td, th { padding: .2rem .7rem; text-align: left;
border-bottom: 1px solid #ddd; vertical-align: top } td.number { text-align: right; font-variant-numeric: tabular-nums }
.passed { color: #186a2c } .failed { color: #b00020; font-weight: 600 } .skipped { color: #777 }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: 12px }
.forced { background: #fff3cd; padding: .6rem }
svg text { font: 11px system-ui, sans-serif; fill: #555 }
"""


@dataclass
class Report:
    """Filled while tests run. `box` is the output of `edge-server doctor --json`. `hardware` names the
    hardware, or the reason why there is none (`has_hardware`)."""

    hardware: str = ""
    has_hardware: bool = True
    is_short: bool = False
    began_s: float = field(default_factory=time.time)
    box: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: list[dict[str, Any]] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)

    def add_outcome(self, test: str, outcome: str, reason: str, seconds: float) -> None:
        before = self.outcomes.get(test)
        if before is None or outcome == "failed":
            self.outcomes[test] = {"outcome": outcome, "reason": reason, "seconds": round(seconds, 3)}

    def add_value(self, test: str, name: str, value: float, unit: str) -> None:
        self.values.append({"test": test, "name": name, "value": _known(value), "unit": unit})

    def add_series(self, test: str, name: str, points: list[tuple[float, float]], unit: str, x: str) -> None:
        known = [(_known(at), _known(value)) for at, value in points]
        self.series.append({"test": test, "name": name, "unit": unit, "x": x, "points": known})

    def as_json(self) -> dict[str, Any]:
        counts = {
            kind: sum(item["outcome"] == kind for item in self.outcomes.values())
            for kind in ("passed", "failed", "skipped")
        }
        return {
            "hardware": self.hardware if self.has_hardware else None,
            "not_run": None if self.has_hardware else self.hardware,
            "is_proof_of_the_tests_only": self.is_short,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began_s)),
            "counts": counts,
            "tests": self.outcomes,
            "values": self.values,
            "series": self.series,
            "box": self.box,
        }

    def write(self, folder: Path) -> None:
        """Write report.json and index.html."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.as_json(), indent=1, allow_nan=False), encoding="utf-8")
        (folder / "index.html").write_text(self.as_page(), encoding="utf-8")

    def as_page(self) -> str:
        data = self.as_json()
        what = _text(self.hardware) if self.has_hardware else "hardware"
        parts = [
            "<!doctype html><html lang=en><meta charset=utf-8><title>edge_server on hardware</title>",
            f"<style>{_STYLE}</style><h1>edge_server on {what}</h1>",
            f"<p>{data['began']}: {', '.join(f'{count} {kind}' for kind, count in data['counts'].items())}</p>",
        ]
        if not self.has_hardware:
            parts.append(f"<p class=forced>Nothing was run: it {_text(self.hardware)}.</p>")
        if self.is_short:
            parts.append("<p class=forced>Shortened, on the processor: this proves the tests, not any hardware.</p>")
        parts += [self._tests(), self._values(), self._plots(), self._box()]
        return "\n".join(parts) + "</html>\n"

    def _tests(self) -> str:
        rows = "".join(
            f"<tr><td class={item['outcome']}>{item['outcome']}<td>{_text(name)}"
            f"<td class=number>{item['seconds']:.1f} s<td>{_reason(item)}"
            for name, item in self.outcomes.items()
        )
        return f"<h2>Tests</h2><table><tr><th>Outcome<th>Test<th>Took<th>Reason{rows}</table>"

    def _values(self) -> str:
        rows = "".join(
            f"<tr><td>{_text(_short(item['test']))}<td>{_text(item['name'])}<td class=number>{_figure(item['value'])}"
            f"<td>{_text(item['unit'])}"
            for item in self.values
        )
        return f"<h2>Figures</h2><table><tr><th>Test<th>What<th>Value<th>Unit{rows}</table>" if rows else ""

    def _plots(self) -> str:
        plots = "".join(
            f"<h3>{_text(_short(item['test']))}: {_text(item['name'])}</h3>{plot(item)}" for item in self.series
        )
        return f"<h2>Over time</h2>{plots}" if plots else ""

    def _box(self) -> str:
        rows = "".join(
            f"<tr><td>{_text(section)}<td>{_text(item['name'])}<td>{_text(item['text'])}<td>{_text(item['advice'])}"
            for section, items in self.box.get("sections", {}).items()
            for item in items
        )
        problem = f"<p class=failed>{_text(self.box['problem'])}</p>" if "problem" in self.box else ""
        return f"<h2>The box</h2>{problem}<table><tr><th><th>What<th>Is<th>Advice{rows}</table>"


def plot(series: dict[str, Any]) -> str:
    """Return a curve as SVG. Points that are no numbers leave gaps."""
    points = _thinned([(x, y) for x, y in series["points"] if x is not None and y is not None])
    if len(points) < 2:
        return "<p>too few points for a plot</p>"
    low_x, high_x = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = (high - low) * 0.08 or max(abs(high) * 0.1, 1e-9)
    low, high = low - margin, high + margin

    def place(x: float, y: float) -> str:
        across = _LEFT + (x - low_x) / ((high_x - low_x) or 1) * (_WIDTH - _LEFT - _RIGHT)
        down = _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    lines = []
    for share in (0.0, 0.5, 1.0):
        value = low + (high - low) * share
        y = _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    lines.append(f'<text x="{_LEFT}" y="{_HEIGHT - 8}">{low_x:.4g} {_text(series["x"])}</text>')
    lines.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{high_x:.4g}</text>')
    lines.append(f'<text x="{_LEFT + 6}" y="{_TOP + 10}">{_text(series["unit"])}</text>')
    path = " ".join(place(x, y) for x, y in points)
    lines.append(f'<polyline fill="none" stroke="#1565c0" stroke-width="1.5" points="{path}"/>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">{"".join(lines)}</svg>'


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    step = max(1, len(points) // _MAX_POINTS)
    return points[::step] if step == 1 or (len(points) - 1) % step == 0 else [*points[::step], points[-1]]


def _known(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _reason(item: dict[str, Any]) -> str:
    reason = _text(item["reason"])
    return f"<pre>{reason}</pre>" if item["outcome"] == "failed" else reason


def _short(test: str) -> str:
    return test.rpartition("::")[2]


def _text(value: object) -> str:
    return html.escape(str(value))
