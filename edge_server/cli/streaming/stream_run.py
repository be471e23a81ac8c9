"""One run of `edge-server stream`: a source, its streams, the display, and the summary."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edge_server.cli.sources.source_interface import Source
from edge_server.cli.streaming.frame_counts import FrameCounts, StreamFigures
from edge_server.cli.streaming.json_lines import JsonLines
from edge_server.cli.streaming.live_table import TableView, draw, plain_line, summary
from edge_server.cli.streaming.result_text import REASONS, result_in_words
from edge_server.cli.streaming.source_thread import SourceSettings, SourceThread
from edge_server.cli.streaming.stream_sender import StreamSender
from edge_server.cli.streaming.terminal import Screen

_REDRAW_S = 0.2
_PLAIN_S = 2.0
_DRAIN_S = 20.0
"""How long the last results are waited for once the source has ended."""
_HASTY_DRAIN_S = 3.0
"""The same after the first Ctrl-C. The second one ends everything at once."""
_SOURCE_END_S = 1.0
_WORTH_TELLING = 0.02
"""Share of late pictures from which on the source is said to be slow."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What does not change while a run goes on."""

    model: str
    address: str
    source: Source
    feeding: SourceSettings


class StreamRun:
    """Goes on until the source ends, every stream has failed, or `interrupt` is called."""

    def __init__(
        self, setting: RunSettings, cameras: Sequence[StreamSender], screen: Screen, lines: JsonLines | None
    ) -> None:
        self._setting = setting
        self._cameras = cameras
        self._screen = screen
        self._lines = lines
        self._began = time.monotonic()
        self._next_plain = self._began + _PLAIN_S
        self._interrupts = 0
        self._feeder = SourceThread(setting.source, cameras, setting.feeding)

    def interrupt(self) -> None:
        """End the source; called again, end everything. Safe in a signal handler."""
        self._interrupts += 1

    def run(self) -> int:
        """Show figures until it is over, then say the summary; return the exit code."""
        try:
            self._watch()
        finally:
            self._feeder.stop()
            for camera in self._cameras:
                camera.finish()
            self._drain()
            for camera in self._cameras:
                camera.close()
            # A camera that gives no picture any more keeps its reader; the process ends without it.
            if self._feeder.join(_SOURCE_END_S):
                self._setting.source.close()
            self._screen.erase()
        return self._conclude()

    def _watch(self) -> None:
        while not self._feeder.is_done and not self._is_told_to_end() and self._is_any_alive():
            self._show()
            time.sleep(_REDRAW_S)

    def _is_any_alive(self) -> bool:
        return any(camera.is_alive for camera in self._cameras)

    def _is_told_to_end(self) -> bool:
        has_left = self._screen.is_broken or (self._lines is not None and self._lines.is_broken)
        return self._interrupts > 0 or has_left

    def _drain(self) -> None:
        """Wait for results under way."""
        began = time.monotonic()
        while self._is_any_alive() and self._interrupts < 2:
            if time.monotonic() - began > (_HASTY_DRAIN_S if self._is_told_to_end() else _DRAIN_S):
                return
            self._show()
            for camera in self._cameras:
                camera.join(_REDRAW_S / len(self._cameras))

    def _show(self) -> None:
        if self._screen.is_terminal:
            width, height = self._screen.size()
            self._screen.draw(draw(self._view(), width, height))
        elif time.monotonic() >= self._next_plain:
            self._next_plain += _PLAIN_S
            now = time.monotonic()
            for camera, figures in zip(self._cameras, self._recent(now), strict=False):
                self._screen.say(plain_line(figures, _latest(camera), now - self._began))

    def _view(self) -> TableView:
        now = time.monotonic()
        feeding, source = self._setting.feeding, self._setting.source
        limits = (0 if feeding.has_loop else source.length, feeding.most_frames)
        length = min((limit for limit in limits if limit), default=0)
        given, passed_s = self._feeder.given, now - self._began
        eta_s = passed_s * (length - given) / given if length and given else math.nan
        return TableView(
            title=self._title(),
            rows=self._recent(now),
            latest=[(camera.name, _latest(camera)) for camera in self._cameras],
            governor=self._governor(),
            notes=self._notes(),
            done=given,
            length=length,
            passed_s=passed_s,
            eta_s=eta_s,
        )

    def _title(self) -> str:
        opened = next((camera.opened for camera in self._cameras if camera.opened is not None), None)
        what = f"{self._setting.model} at {self._setting.address}"
        if opened is not None:
            what = f"{opened.model} version {opened.version} on {opened.runtime} at {self._setting.address}"
        fps = self._setting.feeding.fps
        return f"{what}; {self._setting.source.title}" + (f", {fps:g} fps" if fps else "")

    def _recent(self, now: float) -> list[StreamFigures]:
        return self._figures(
            lambda tally: tally.recent(now), lambda tallies: FrameCounts.recent_of_all(tallies, "all", now)
        )

    def _figures(
        self, one: Callable[[FrameCounts], StreamFigures], several: Callable[[Sequence[FrameCounts]], StreamFigures]
    ) -> list[StreamFigures]:
        """Return the figures of each stream, and those of all last where there are several."""
        with contextlib.ExitStack() as locks:
            for camera in self._cameras:
                locks.enter_context(camera.lock)
            tallies = [camera.tally() for camera in self._cameras]
            rows = [one(tally) for tally in tallies]
            return [*rows, several(tallies)] if len(rows) > 1 else rows

    def _governor(self) -> str:
        latest = next((camera.latest for camera in self._cameras if camera.latest is not None), None)
        if latest is None or not latest.governor:
            return ""
        return latest.governor + (f", {latest.governor_detail}" if latest.governor_detail else "")

    def _notes(self) -> list[str]:
        notes = [f"{camera.name}: {camera.trouble}; trying again" for camera in self._cameras if camera.trouble]
        # A single late picture is a busy moment of the machine, and no trait of the source.
        if self._feeder.slips > max(self._feeder.given * _WORTH_TELLING, 3):
            notes.append(
                f"the source does not keep {self._setting.feeding.fps:g} fps: {self._feeder.slips} pictures came late"
            )
        return notes

    def _conclude(self) -> int:
        rows = self._figures(FrameCounts.whole, lambda tallies: FrameCounts.whole_of_all(tallies, "all"))
        if self._lines is not None:
            self._lines.write(_summary_as_json(rows))
        say = self._screen.say
        if any(camera.opened is not None for camera in self._cameras):
            for line in [self._title(), *summary(rows)]:
                say(line)
        if self._feeder.has_reached_end and self._feeder.given < self._setting.source.length:
            say(f"the file tells of {self._setting.source.length} pictures, {self._feeder.given} could be read")
        problems = self._problems(rows[-1])
        for line in problems:
            say(line)
        return 1 if problems else 0

    def _problems(self, figures: StreamFigures) -> list[str]:
        """Return in words what did not go well."""
        found = [f"{camera.name}: {camera.failure}" for camera in self._cameras if camera.failure is not None]
        found += [str(self._feeder.error)] if self._feeder.error is not None else []
        for camera in self._cameras:
            if camera.writer is not None and camera.writer.error is not None:
                found.append(f"{camera.writer.error}; {camera.writer.written} pictures were written")
        if figures.lost:
            found.append(f"{figures.lost} of the frames that were offered are not accounted for: connections broke")
        if figures.failed:
            found.append(f"{figures.failed} frames were answered with errors, the last: {self._last_error()}")
        if figures.offered and not figures.answered and not found:
            found.append("no frame was answered" + self._why_unopened())
        return found

    def _why_unopened(self) -> str:
        if any(camera.opened is not None for camera in self._cameras):
            return ""
        return f": {self._setting.address} did not open the stream; is it the gRPC port of an edge-server?"

    def _last_error(self) -> str:
        errors = [camera.last_error for camera in self._cameras if camera.last_error]
        return errors[-1] if errors else ""


def _latest(camera: StreamSender) -> str:
    if camera.failure is not None:
        return f"ended: {camera.failure}"
    if camera.opened is None:
        return "the server has not opened the stream yet"
    return result_in_words(camera.latest) if camera.latest is not None else "no result yet"


def _summary_as_json(rows: Sequence[StreamFigures]) -> dict[str, Any]:
    streams = rows[:-1] if len(rows) > 1 else rows
    return {
        "kind": "summary",
        **_figures_as_json(rows[-1]),
        "streams": {figures.name: _figures_as_json(figures) for figures in streams},
    }


def _figures_as_json(figures: StreamFigures) -> dict[str, Any]:
    ages = {"p50": figures.age_p50_s, "p99": figures.age_p99_s, "max": figures.age_largest_s}
    return {
        "offered": figures.offered,
        "answered": figures.answered,
        "failed": figures.failed,
        "dropped": figures.dropped,
        "lost": figures.lost,
        "never_sent": figures.here,
        "dropped_by_server": {REASONS[reason]: count for reason, count in figures.there.items()},
        "fps_in": round(figures.fps_in, 3),
        "fps_out": round(figures.fps_out, 3),
        "age_ms": {name: round(age * 1000, 3) if math.isfinite(age) else None for name, age in ages.items()},
    }
