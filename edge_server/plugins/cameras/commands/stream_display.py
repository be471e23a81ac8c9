"""Terminal display of `edge-server stream`: rates, latencies and counts of all streams, live and as a summary at the
end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from edge_server.cli.console import Line, bar, clean, format_duration, render
from edge_server.plugins.cameras.commands.result_lines import drops_in_words
from edge_server.plugins.cameras.commands.sent_frame_counts import StreamFigures


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.1f}" if seconds < 0.1 else f"{seconds * 1000:.0f}"


COLUMNS: Mapping[str, Callable[[StreamFigures], str]] = {
    "STREAM": lambda row: row.name,
    "FPS IN": lambda row: f"{row.fps_in:.1f}",
    "FPS OUT": lambda row: f"{row.fps_out:.1f}",
    "AGE P50 MS": lambda row: _ms(row.age_p50_s),
    "P99": lambda row: _ms(row.age_p99_s),
    "MAX": lambda row: _ms(row.age_largest_s),
    "SERVER P50": lambda row: _ms(row.server_p50_s),
    "OFFERED": lambda row: str(row.offered),
    "ANSWERED": lambda row: str(row.answered),
    "FAILED": lambda row: str(row.failed),
    "DROPPED": lambda row: str(row.dropped),
    "LOST": lambda row: str(row.lost),
}
OPTIONAL_COLUMNS = (
    "SERVER P50", "FAILED", "MAX", "LOST", "OFFERED", "DROPPED", "ANSWERED", "P99", "AGE P50 MS", "FPS IN",
)  # fmt: skip
"""Columns that are omitted on a narrow terminal, the first one first."""


@dataclass(frozen=True, slots=True)
class TableView:
    """Content of one drawing. If there are several streams, the last of `rows` is the total.

    `done` counts the offered pictures. `length` is their expected number, or 0 if unknown.
    """

    title: str
    rows: Sequence[StreamFigures]
    latest: Sequence[tuple[str, str]]
    governor: str = ""
    notes: Sequence[str] = ()
    done: int = 0
    length: int = 0
    passed_s: float = 0.0
    eta_s: float = math.nan


def draw_table(view: TableView, output: TextIO, height: int) -> list[Line]:
    """Return at most `height` lines."""
    rows, latest = list(view.rows), list(view.latest)
    has_total = len(rows) > 1
    fixed = 5 + len(view.notes) + bool(view.governor)
    room = max(height - fixed - has_total, 2)
    streams = rows[:-1] if has_total else rows
    if len(streams) + len(latest) > room:
        shown = max(room - min(len(latest), 1), 1)
        hidden = len(streams) - shown
        streams, latest = streams[:shown], latest[:1]
    else:
        hidden = 0
    lines = [clean(view.title), *table([*streams, *rows[-1:]] if has_total else streams, output)]
    if hidden > 0:
        lines.insert(-1, f"... and {hidden} more streams, in the total")
    texts = [f"drops: {drops_in_words(rows[-1].client_drops, rows[-1].server_drops)}"]
    texts += [f"{name}: {text}" if has_total else f"latest: {text}" for name, text in latest]
    if view.governor:
        texts.append(f"governor: {view.governor}")
    return [*lines, *map(clean, [*texts, *view.notes]), progress(view)][-max(height, 1) :]


def table(rows: Sequence[StreamFigures], output: TextIO | None = None) -> list[str]:
    """Return the lines of the table."""
    cells = [[cell(row) for cell in COLUMNS.values()] for row in rows]
    table = render(tuple(COLUMNS), cells, output, optional=OPTIONAL_COLUMNS, names_omitted=False, justify="right")
    return table.splitlines()


def progress(view: TableView) -> Line:
    """Return a progress bar if the length is known, otherwise the elapsed time."""
    if not view.length:
        return f"{format_duration(view.passed_s)}, {view.done} pictures; Ctrl-C ends it"
    left = f", {format_duration(view.eta_s)} left" if math.isfinite(view.eta_s) else ""
    return bar(view.done / view.length, f", {view.done}/{view.length}{left}")


def plain_line(figures: StreamFigures, latest: str, passed_s: float) -> str:
    """Return the figures of a stream as one line for a log."""
    text = (
        f"{passed_s:6.1f} s  {figures.name}  in {figures.fps_in:.1f} fps  out {figures.fps_out:.1f} fps  "
        f"age p50 {_ms(figures.age_p50_s)} p99 {_ms(figures.age_p99_s)} ms  "
        f"dropped {figures.dropped} ({drops_in_words(figures.client_drops, figures.server_drops)})"
    )
    text += f"  lost {figures.lost}" if figures.lost else ""
    text += f"  failed {figures.failed}" if figures.failed else ""
    return clean(text + (f"  {latest}" if latest else ""))


def summary(rows: Sequence[StreamFigures], output: TextIO | None = None) -> list[str]:
    """Return the figures of the whole run: a table, and the balance of all frames."""
    last = rows[-1]
    lines = table(rows, output)
    lines.append(
        f"offered {last.offered} = answered {last.answered} + dropped {last.dropped} + lost {last.lost}"
        + (f" + waiting {last.waiting}" if last.waiting else "")
        + (f"; {last.failed} of the answers are errors" if last.failed else "")
        + (f"; {last.late} of the answers were late" if last.late else "")
    )
    lines.append(f"drops: {drops_in_words(last.client_drops, last.server_drops)}")
    return lines
