"""Measurement at one load: repeats time windows until their results are stable."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edge_server.plugins.tuning.clients.client_interface import RequestRefused, ServerCounts
from edge_server.plugins.tuning.load.measurement_results import (
    STEADY_WINDOWS,
    Answer,
    MeasuredPoint,
    MeasurementWindow,
    are_steady,
    joined,
)
from edge_server.plugins.tuning.load.process_usage import Usage

_POLL_S = 0.1
_MAX_EXTENSION = 10
"""A window with too few answers is extended up to this many times its length."""


class RunningLoad(Protocol):
    """A load that is running. See `RequestLoad` and `FrameLoad`."""

    def take_answers(self) -> list[Answer]: ...

    def dropped(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class MeasurementTimes:
    """Duration of a measurement. `tolerance` is how far windows may differ from their mean; 0.1 means 10 %."""

    window_s: float = 2.0
    min_answers: int = 20
    tolerance: float = 0.1
    max_windows: int = 10


@dataclass(frozen=True, slots=True)
class ServerProbes:
    """Values read during a measurement: `counts` and `usage` around each window, `power_w` throughout.

    None means that the value is not available.
    """

    counts: Callable[[], ServerCounts] | None = None
    usage: Callable[[], Usage | None] | None = None
    power_w: Callable[[], float | None] | None = None


@dataclass(frozen=True, slots=True)
class _Edge:
    """Readings at the start or end of a window. `client_s` is the CPU time of this process."""

    time_s: float
    client_s: float
    counts: ServerCounts | None
    usage: Usage | None
    dropped: dict[str, int]


class Measurement:
    """Measures one load. Calls `on_window` after each window with all windows so far."""

    def __init__(
        self,
        load: RunningLoad,
        probes: ServerProbes,
        times: MeasurementTimes,
        on_window: Callable[[list[MeasurementWindow]], None] | None = None,
    ) -> None:
        self._load = load
        self._probes = probes
        self._times = times
        self._on_window = on_window
        self._power_w: list[list[float]] = []
        """Readings of each window."""

    def run(self, mode: str, level: float, batch: int, late_s: float = 0.1) -> MeasuredPoint:
        """Measure until three windows agree, and return their results. Raises RequestRefused if no request succeeds.

        `late_s` is the delay after which a request counts as sent late.
        """
        windows: list[MeasurementWindow] = []
        # Warm up: until the first requests are answered, by a success or a failure.
        end_s = time.perf_counter() + _MAX_EXTENSION * self._times.window_s
        while time.perf_counter() < end_s and not self._load.take_answers():
            time.sleep(min(_POLL_S, self._times.window_s / 4))
        while len(windows) < max(self._times.max_windows, 1):
            window = self._measure_window()
            windows.append(window)
            # What follows takes processor time of this client, so it is between two windows.
            if self._on_window is not None:
                self._on_window(windows)
            if not window.good:
                raise _no_success_error(windows)
            if are_steady(windows, self._times.tolerance):
                break
        is_steady = are_steady(windows, self._times.tolerance)
        last = joined(windows[-STEADY_WINDOWS:])
        read = [watts for window in self._power_w[-STEADY_WINDOWS:] for watts in window]
        watts = sum(read) / len(read) if read else None
        return MeasuredPoint.of(mode, level, batch, last, is_steady=is_steady, late_s=late_s, power_w=watts)

    def _measure_window(self) -> MeasurementWindow:
        first = self._read_edge()
        self._load.take_answers()
        end_s = first.time_s + self._times.window_s
        last_s = first.time_s + _MAX_EXTENSION * self._times.window_s
        answers: list[Answer] = []
        self._power_w.append([])
        while (now := time.perf_counter()) < end_s or (
            len(answers) < self._times.min_answers and now < last_s
        ):  # fmt: skip
            time.sleep(max(0.0, min(_POLL_S, end_s - now)) or _POLL_S / 4)
            answers += self._load.take_answers()
            watts = self._probes.power_w() if self._probes.power_w is not None else None
            if watts is not None:
                self._power_w[-1].append(watts)
        last = self._read_edge()
        answers += self._load.take_answers()
        return _window_between(first, last, answers)

    def _read_edge(self) -> _Edge:
        counts = self._probes.counts() if self._probes.counts is not None else None
        usage = self._probes.usage() if self._probes.usage is not None else None
        return _Edge(time.perf_counter(), time.process_time(), counts, usage, self._load.dropped())


def _window_between(first: _Edge, last: _Edge, answers: list[Answer]) -> MeasurementWindow:
    seconds = last.time_s - first.time_s
    cores = memory = server = None
    # A counter that decreased was reset by a restart or reload within the window, so its difference is invalid.
    if first.usage is not None and last.usage is not None and last.usage.cpu_s >= first.usage.cpu_s:
        cores, memory = (last.usage.cpu_s - first.usage.cpu_s) / seconds, last.usage.resident_bytes
    if first.counts is not None and last.counts is not None and not last.counts.is_less(first.counts):
        server = last.counts - first.counts
    dropped = Counter(last.dropped)
    dropped.subtract(first.dropped)
    return MeasurementWindow(
        seconds=seconds,
        answers=answers,
        server=server,
        server_cpu=cores,
        server_bytes=memory,
        client_cpu=(last.client_s - first.client_s) / seconds,
        dropped={reason: count for reason, count in dropped.items() if count > 0},
    )


def _no_success_error(windows: list[MeasurementWindow]) -> RequestRefused:
    failed = [answer for window in windows for answer in window.answers if answer.reason]
    if not failed:
        return RequestRefused(f"no request was answered within {windows[-1].seconds:.1f} s")
    reason, count = Counter(answer.reason for answer in failed).most_common(1)[0]
    message = next(answer.message for answer in failed if answer.reason == reason)
    return RequestRefused(f"no request was answered well: {count} of {len(failed)} failed with {reason}: {message}")
