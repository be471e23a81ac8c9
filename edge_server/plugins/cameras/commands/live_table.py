"""Live table of the figures of all streams, as lines that fit the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_server.cli.progress import format_bar, format_duration
from edge_server.cli.table import cell_width, clean, clip
from edge_server.plugins.cameras.commands.frame_counts import StreamFigures
from edge_server.plugins.cameras.commands.result_text import drops_in_words

_GAP = "  "


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the table. On a narrow terminal, columns with the lowest `importance` are omitted first."""

    title: str
    importance: int
    cell: Callable[[StreamFigures], str]


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.1f}" if seconds < 0.1 else f"{seconds * 1000:.0f}"


COLUMNS = (
    TableColumn("STREAM", 10, lambda row: row.name),
    TableColumn("FPS IN", 8, lambda row: f"{row.fps_in:.1f}"),
    TableColumn("FPS OUT", 9, lambda row: f"{row.fps_out:.1f}"),
    TableColumn("AGE P50 MS", 7, lambda row: _ms(row.age_p50_s)),
    TableColumn("P99", 6, lambda row: _ms(row.age_p99_s)),
    TableColumn("MAX", 2, lambda row: _ms(row.age_largest_s)),
    TableColumn("SERVER P50", 1, lambda row: _ms(row.server_p50_s)),
    TableColumn("OFFERED", 4, lambda row: str(row.offered)),
    TableColumn("ANSWERED", 5, lambda row: str(row.answered)),
    TableColumn("FAILED", 2, lambda row: str(row.failed)),
    TableColumn("DROPPED", 5, lambda row: str(row.dropped)),
    TableColumn("LOST", 3, lambda row: str(row.lost)),
)


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


def draw_table(view: TableView, width: int, height: int) -> list[str]:
    """Return at most `height` lines, none wider than `width` cells."""
    rows, latest = list(view.rows), list(view.latest)
    has_total = len(rows) > 1
    fixed = 4 + len(view.notes) + bool(view.governor)
    room = max(height - fixed - has_total, 2)
    streams = rows[:-1] if has_total else rows
    if len(streams) + len(latest) > room:
        shown = max(room - min(len(latest), 1), 1)
        hidden = len(streams) - shown
        streams, latest = streams[:shown], latest[:1]
    else:
        hidden = 0
    lines = [view.title, *table([*streams, *rows[-1:]] if has_total else streams, width)]
    if hidden > 0:
        lines.insert(-1, f"... and {hidden} more streams, in the total")
    lines.append(f"drops: {drops_in_words(rows[-1].client_drops, rows[-1].server_drops)}")
    lines += [f"{name}: {text}" if has_total else f"latest: {text}" for name, text in latest]
    if view.governor:
        lines.append(f"governor: {view.governor}")
    lines += view.notes
    lines.append(progress(view, width))
    return [clip(line, width) for line in lines][-max(height, 1) :]


def table(rows: Sequence[StreamFigures], width: int) -> list[str]:
    """Return the title line and the rows, without the least important columns if `width` is too small."""
    cells = [[clean(column.cell(row)) for row in rows] for column in COLUMNS]
    widths = [max(cell_width(text) for text in (column.title, *cells[at])) for at, column in enumerate(COLUMNS)]
    kept = list(range(len(COLUMNS)))
    while len(kept) > 1 and sum(widths[at] + len(_GAP) for at in kept) - len(_GAP) > width:
        kept.remove(min(kept, key=lambda at: (COLUMNS[at].importance, -at)))
    lines = [_GAP.join(_aligned(COLUMNS[at].title, widths[at], at) for at in kept)]
    lines += [
        _GAP.join(_aligned(cells[at][number], widths[at], at) for at in kept).rstrip() for number in range(len(rows))
    ]
    return lines


def _aligned(text: str, width: int, column: int) -> str:
    room = " " * (width - cell_width(text))
    return text + room if column == 0 else room + text


def progress(view: TableView, width: int) -> str:
    """Return a progress bar if the length is known, otherwise the elapsed time."""
    if not view.length:
        return f"{format_duration(view.passed_s)}, {view.done} pictures; Ctrl-C ends it"
    share = min(view.done / view.length, 1.0)
    text = f" {view.done}/{view.length} {share:4.0%}"
    if math.isfinite(view.eta_s):
        text += f", {format_duration(view.eta_s)} left"
    room = min(width - len(text) - 2, 60)
    if room < 4:
        return text.strip()
    return format_bar(share, room) + text


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


def summary(rows: Sequence[StreamFigures]) -> list[str]:
    """Return the figures of the whole run: a table, and the balance of all frames."""
    last = rows[-1]
    lines = [line.rstrip() for line in table(rows, 1 << 30)]
    lines.append(
        f"offered {last.offered} = answered {last.answered} + dropped {last.dropped} + lost {last.lost}"
        + (f" + waiting {last.waiting}" if last.waiting else "")
        + (f"; {last.failed} of the answers are errors" if last.failed else "")
    )
    lines.append(f"drops: {drops_in_words(last.client_drops, last.server_drops)}")
    return lines
