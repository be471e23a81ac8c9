"""Progress display: a bar with the estimated remaining time on a terminal, else one line per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from edge_server.cli.table import clean, clip, terminal_width

_WIDTH = 24
_LEAST_SHARE, _LEAST_S = 0.02, 1.0
"""Minimum progress before the remaining time is estimated."""


class Progress:
    """Writes progress to `out`. A bar is redrawn in place until `close`."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._is_bar = out.isatty()
        self._clock = clock
        self._began_s = clock()
        self._last = ""

    def show(self, share: float, text: str) -> None:
        if self._is_bar:
            line = progress_line(share, self._clock() - self._began_s, text)
            self._out.write(f"\r\x1b[K{clip(line, (terminal_width(self._out) or 80) - 1)}")
        elif clean(text) != self._last:
            self._out.write(f"{share:4.0%} {clean(text)}\n")
        self._last = clean(text)
        self._out.flush()

    def close(self) -> None:
        """Erase the bar."""
        if self._is_bar:
            self._out.write("\r\x1b[K")
            self._out.flush()


def progress_line(share: float, passed_s: float, text: str) -> str:
    """Return "[######......]  50%, 0:12 left text". `share` is the finished fraction, `passed_s` the elapsed time."""
    return f"{bar(share, _WIDTH)} {share:4.0%}{estimate(share, passed_s)} {text}"


def bar(share: float, width: int) -> str:
    full = round(min(share, 1.0) * width)
    return f"[{'#' * full}{'.' * (width - full)}]"


def estimate(share: float, passed_s: float) -> str:
    """Return ", 0:12 left", or "" if it is too early for an estimate."""
    if share < _LEAST_SHARE or passed_s < _LEAST_S:
        return ""
    return f", {minutes(passed_s * (1 - min(share, 1.0)) / share)} left"


def minutes(seconds: float) -> str:
    """Return "1:05", or "1:02:05" from an hour on."""
    whole, rest = divmod(int(seconds), 60)
    hours, whole = divmod(whole, 60)
    return f"{hours}:{whole:02}:{rest:02}" if hours else f"{whole}:{rest:02}"
