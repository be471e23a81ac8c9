"""Main loop of `edge-server stream`: starts the thread that feeds the server's streams, draws the figures, and prints a
summary at the end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from edge_server.cli.console import LiveView
from edge_server.config.setting import nearest
from edge_server.errors import SUGGESTION
from edge_server.plugins.cameras.commands.result_lines import JsonLines, result_in_words
from edge_server.plugins.cameras.commands.sent_frame_counts import FrameCounts, StreamFigures
from edge_server.plugins.cameras.commands.source_thread import SourceSettings, SourceThread
from edge_server.plugins.cameras.commands.stream_display import TableView, draw_table, plain_line, summary
from edge_server.plugins.cameras.commands.stream_sender import StreamSender
from edge_server.plugins.cameras.sinks.result_json import REASONS
from edge_server.plugins.cameras.sources.source_interface import Source

_REDRAW_S = 0.2
_PLAIN_S = 2.0
_DRAIN_S = 20.0
"""Time limit for the last results after the end of the source."""
_INTERRUPTED_DRAIN_S = 3.0
"""The same after the first Ctrl-C. A second Ctrl-C ends the run at once."""
_SOURCE_END_S = 1.0
_SLOW_SOURCE_SHARE = 0.02
"""Fraction of late pictures above which the source is reported as slow."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Constant settings of a run. `model_names` asks the server for the names of its models."""

    model: str
    address: str
    source: Source
    source_settings: SourceSettings
    model_names: Callable[[], Collection[str]]


class StreamRun:
    """Runs until the source ends, every stream has failed, or `interrupt` is called."""

    def __init__(
        self, settings: RunSettings, cameras: Sequence[StreamSender], output: TextIO, lines: JsonLines | None
    ) -> None:
        self._settings = settings
        self._cameras = cameras
        self._output = output
        self._live = LiveView(output)
        self._lines = lines
        self._began = time.monotonic()
        self._next_plain = self._began + _PLAIN_S
        self._interrupts = 0
        self._source_thread = SourceThread(settings.source, cameras, settings.source_settings)

    def interrupt(self) -> None:
        """Stop the source; a second call ends the run at once. Safe in a signal handler."""
        self._interrupts += 1

    def run(self) -> int:
        """Show live figures until the end, then print the summary. Return the exit code."""
        try:
            while not self._source_thread.is_done and not self._is_stopping() and self._is_any_alive():
                self._show()
                time.sleep(_REDRAW_S)
        finally:
            self._source_thread.stop()
            for camera in self._cameras:
                camera.finish()
            self._drain()
            for camera in self._cameras:
                camera.close()
            # A read from a stalled camera blocks. Then the source is not closed; the process ends with its thread.
            if self._source_thread.join(_SOURCE_END_S):
                self._settings.source.close()
            self._live.erase()
        return self._print_summary()

    def _is_any_alive(self) -> bool:
        return any(camera.is_alive for camera in self._cameras)

    @property
    def is_reader_gone(self) -> bool:
        """Whether the reader of the output has closed it."""
        return self._live.is_broken or (self._lines is not None and self._lines.is_broken)

    def _is_stopping(self) -> bool:
        return self._interrupts > 0 or self.is_reader_gone

    def _drain(self) -> None:
        """Wait for the results of frames in flight."""
        began = time.monotonic()
        while self._is_any_alive() and self._interrupts < 2:
            if time.monotonic() - began > (_INTERRUPTED_DRAIN_S if self._is_stopping() else _DRAIN_S):
                return
            self._show()
            for camera in self._cameras:
                camera.join(_REDRAW_S / len(self._cameras))

    def _show(self) -> None:
        if self._live.is_terminal:
            self._live.draw(draw_table(self._view(), self._output, self._live.height))
        elif time.monotonic() >= self._next_plain:
            self._next_plain += _PLAIN_S
            now = time.monotonic()
            for camera, figures in zip(self._cameras, self._recent(now), strict=False):
                self._live.print_line(plain_line(figures, _latest(camera), now - self._began))

    def _view(self) -> TableView:
        now = time.monotonic()
        source_settings, source = self._settings.source_settings, self._settings.source
        limits = (0 if source_settings.has_loop else source.length, source_settings.max_frames)
        length = min((limit for limit in limits if limit), default=0)
        picture_count, passed_s = self._source_thread.picture_count, now - self._began
        eta_s = passed_s * (length - picture_count) / picture_count if length and picture_count else math.nan
        return TableView(
            title=self._title(),
            rows=self._recent(now),
            latest=[(camera.name, _latest(camera)) for camera in self._cameras],
            governor=self._governor(),
            notes=self._notes(),
            done=picture_count,
            length=length,
            passed_s=passed_s,
            eta_s=eta_s,
        )

    def _title(self) -> str:
        opened = next((camera.opened for camera in self._cameras if camera.opened is not None), None)
        what = f"{self._settings.model} at {self._settings.address}"
        if opened is not None:
            what = f"{opened.model} version {opened.version} on {opened.runtime} at {self._settings.address}"
        fps = self._settings.source_settings.fps
        return f"{what}; {self._settings.source.title}" + (f", {fps:g} fps" if fps else "")

    def _recent(self, now: float) -> list[StreamFigures]:
        return self._figures(
            lambda counts: counts.recent(now), lambda all_counts: FrameCounts.recent_of_all(all_counts, "all", now)
        )

    def _figures(
        self, one: Callable[[FrameCounts], StreamFigures], several: Callable[[Sequence[FrameCounts]], StreamFigures]
    ) -> list[StreamFigures]:
        """Return the figures of each stream. If there are several, the last item is the total."""
        with contextlib.ExitStack() as locks:
            for camera in self._cameras:
                locks.enter_context(camera.lock)
            all_counts = [camera.counts() for camera in self._cameras]
            rows = [one(counts) for counts in all_counts]
            return [*rows, several(all_counts)] if len(rows) > 1 else rows

    def _governor(self) -> str:
        latest = next((camera.latest for camera in self._cameras if camera.latest is not None), None)
        if latest is None or not latest.governor:
            return ""
        return latest.governor + (f", {latest.governor_detail}" if latest.governor_detail else "")

    def _notes(self) -> list[str]:
        notes = [
            f"{camera.name}: {camera.connection_error}; trying again"
            for camera in self._cameras
            if camera.connection_error
        ]
        # Few late pictures may be caused by the machine's load, not by the source.
        if self._source_thread.slips > max(self._source_thread.picture_count * _SLOW_SOURCE_SHARE, 3):
            notes.append(
                f"the source does not keep {self._settings.source_settings.fps:g} fps: {self._source_thread.slips} "
                "pictures came late"
            )
        return notes

    def _print_summary(self) -> int:
        rows = self._figures(FrameCounts.whole, lambda all_counts: FrameCounts.whole_of_all(all_counts, "all"))
        if self._lines is not None:
            streams = {figures.name: _figures_as_json(figures) for figures in (rows[:-1] or rows)}
            self._lines.write({"kind": "summary", **_figures_as_json(rows[-1]), "streams": streams})
        print_line = self._live.print_line
        if any(camera.opened is not None for camera in self._cameras):
            for line in [self._title(), *summary(rows, self._output)]:
                print_line(line)
        if self._source_thread.has_reached_end and self._source_thread.picture_count < self._settings.source.length:
            print_line(
                f"the file declares {self._settings.source.length} pictures, {self._source_thread.picture_count} could"
                " be read"
            )
        problems = self._problems(rows[-1])
        for line in problems:
            print_line(line)
        return 1 if problems else 0

    def _problems(self, figures: StreamFigures) -> list[str]:
        """Return the problems of the run as sentences."""
        failures = [(camera.name, camera.failure) for camera in self._cameras if camera.failure is not None]
        guess = ""
        if any(failure.status == "NOT_FOUND" and SUGGESTION not in str(failure) for _, failure in failures):
            guess = nearest(self._settings.model, self._settings.model_names())
        found = [f"{name}: {failure}{guess}" for name, failure in failures]
        found += [str(self._source_thread.error)] if self._source_thread.error is not None else []
        for camera in self._cameras:
            if camera.writer is not None and camera.writer.error is not None:
                found.append(f"{camera.writer.error}; {camera.writer.written} pictures were written")
        if figures.lost:
            found.append(f"{figures.lost} of the frames that were offered are not accounted for: connections broke")
        if figures.failed:
            errors = ["", *(camera.last_error for camera in self._cameras if camera.last_error)]
            found.append(f"{figures.failed} frames were answered with errors, the last: {errors[-1]}")
        if figures.offered and not figures.answered and not found:
            is_open = any(camera.opened is not None for camera in self._cameras)
            hint = f": {self._settings.address} did not open the stream; is it the gRPC port of an edge-server?"
            found.append("no frame was answered" + ("" if is_open else hint))
        return found


def _latest(camera: StreamSender) -> str:
    if camera.failure is not None:
        return f"ended: {camera.failure}"
    if camera.opened is None:
        return "the server has not opened the stream yet"
    return result_in_words(camera.latest) if camera.latest is not None else "no result yet"


def _figures_as_json(figures: StreamFigures) -> dict[str, Any]:
    ages = {"p50": figures.age_p50_s, "p99": figures.age_p99_s, "max": figures.age_largest_s}
    return {
        "offered": figures.offered,
        "answered": figures.answered,
        "late": figures.late,
        "failed": figures.failed,
        "dropped": figures.dropped,
        "lost": figures.lost,
        "never_sent": figures.client_drops,
        "dropped_by_server": {REASONS[reason]: count for reason, count in figures.server_drops.items()},
        "fps_in": round(figures.fps_in, 3),
        "fps_out": round(figures.fps_out, 3),
        "age_ms": {name: round(age * 1000, 3) if math.isfinite(age) else None for name, age in ages.items()},
    }
