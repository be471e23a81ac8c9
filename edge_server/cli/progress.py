"""Progress display: a bar with the estimated remaining time on a terminal, else one line per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from edge_server.cli.table import clean, clip, terminal_width

_WIDTH = 24
_MIN_FRACTION, _MIN_ELAPSED_S = 0.02, 1.0
"""Minimum progress before the remaining time is estimated."""


class Progress:
    """Writes progress to `out`. A bar is redrawn in place until `close`."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._is_bar = out.isatty()
        self._clock = clock
        self._began_s = clock()
        self._last = ""

    def show(self, fraction: float, text: str) -> None:
        if self._is_bar:
            line = format_progress(fraction, self._clock() - self._began_s, text)
            self._out.write(f"\r\x1b[K{clip(line, (terminal_width(self._out) or 80) - 1)}")
        elif clean(text) != self._last:
            self._out.write(f"{fraction:4.0%} {clean(text)}\n")
        self._last = clean(text)
        self._out.flush()

    def close(self) -> None:
        """Erase the bar."""
        if self._is_bar:
            self._out.write("\r\x1b[K")
            self._out.flush()


def format_progress(fraction: float, elapsed_s: float, text: str) -> str:
    """Return "[######......]  50%, 0:12 left text". `fraction` is the finished fraction, `elapsed_s` the elapsed
    time."""
    return f"{format_bar(fraction, _WIDTH)} {fraction:4.0%}{format_remaining(fraction, elapsed_s)} {text}"


def format_bar(fraction: float, width: int) -> str:
    full = round(min(fraction, 1.0) * width)
    return f"[{'#' * full}{'.' * (width - full)}]"


def format_remaining(fraction: float, elapsed_s: float) -> str:
    """Return ", 0:12 left", or "" if it is too early for an estimate."""
    if fraction < _MIN_FRACTION or elapsed_s < _MIN_ELAPSED_S:
        return ""
    return f", {format_duration(elapsed_s * (1 - min(fraction, 1.0)) / fraction)} left"


def format_duration(seconds: float) -> str:
    """Return "1:05", or "1:02:05" from an hour on."""
    whole, rest = divmod(int(seconds), 60)
    hours, whole = divmod(whole, 60)
    return f"{hours}:{whole:02}:{rest:02}" if hours else f"{whole}:{rest:02}"
