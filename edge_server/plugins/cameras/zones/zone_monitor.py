"""Monitor of the zones and lines of one camera: gets the tracked objects of each frame, and counts.

Pure: time is the sum of the steps between frames, so frames that were dropped and clocks that jump change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.cameras.sources_file_tables import MAX_CLASSES
from edge_server.plugins.cameras.zones.zone_geometry import Polygons, Polylines
from edge_server.plugins.cameras.zones.zone_settings import LineEntry, ZoneEntry
from edge_server.plugins.vision.perception_decoder import Overlay
from edge_server.protocol.frame_messages import (
    LINE_CROSSED,
    ZONE_ENTERED,
    ZONE_LEFT,
    ZONE_LOITERING,
    Detection,
    FrameResult,
    LineCounts,
    ZoneCounts,
    ZoneEvent,
    ZonePresence,
    ZoneReport,
)

if TYPE_CHECKING:
    from edge_server.plugins.cameras.zones.zone_geometry import Floats

LINE_MARGIN = 0.01
"""A crossing counts once the object is at least this far from the line, in heights of the picture: boxes tremble."""

BOX_MARGIN = 0.05
"""The same in heights of the object's box: large boxes tremble more."""

OTHER_CLASSES = "other"
"""Counts the classes beyond the MAX_CLASSES of a zone."""


@dataclass(slots=True)
class _Stay:
    """What is known about an object that was seen in a zone. `history`: a bit per frame, the newest last, whether it
    was seen there. `since_s` is the time of the first one, `last_s` that of the last one."""

    since_s: float
    last_s: float
    label: str = ""
    history: int = 0
    frame: int = 0
    is_in: bool = False
    is_loitering: bool = False


@dataclass(slots=True)
class _Zone:
    entry: ZoneEntry
    stays: dict[int, _Stay] = field(default_factory=dict)
    """By track id."""
    entered: int = 0
    labels: dict[str, None] = field(default_factory=dict)
    """Classes that were in the zone, at most MAX_CLASSES. They are reported also with 0 objects."""


@dataclass(slots=True)
class _Line:
    entry: LineEntry
    balances: dict[int, int] = field(default_factory=dict)
    """Track id -> crossings from left to right minus those back, of objects near the line."""
    in_count: int = 0
    out_count: int = 0


class ZoneMonitor:
    """Zones and lines of one camera. One thread at a time calls `update`; the rest is thread-safe."""

    def __init__(self, zones: Sequence[ZoneEntry], lines: Sequence[LineEntry]) -> None:
        self._frame, self._now_s = 0, 0.0
        self._zones: list[_Zone] = []
        self._lines: list[_Line] = []
        self._positions: dict[int, tuple[float, float]] = {}
        self._used = self._wanted = (zones, lines)
        """Replaced, never changed: another thread sets what is wanted."""
        self.report = ZoneReport()
        """The report on the newest frame."""
        self._use_entries(zones, lines)

    def replace(self, zones: Sequence[ZoneEntry], lines: Sequence[LineEntry]) -> None:
        """Use these zones and lines from the next frame on. Those that stay the same keep their objects and counts."""
        self._wanted = zones, lines

    def _use_entries(self, zones: Sequence[ZoneEntry], lines: Sequence[LineEntry]) -> None:
        old_zones = {zone.entry: zone for zone in self._zones}
        old_lines = {line.entry: line for line in self._lines}
        self._zones = [old_zones.get(entry) or _Zone(entry) for entry in zones]
        self._lines = [old_lines.get(entry) or _Line(entry) for entry in lines]
        self._polygons = Polygons([entry.points for entry in zones]) if zones else None
        self._polylines = Polylines([entry.points for entry in lines]) if lines else None
        self.report = self._make_report(())

    def overlays(self) -> tuple[Overlay, ...]:
        """Return the outlines and texts to draw over a picture. Only for the thread that calls `update`."""
        overlays = []
        for zone, counts in zip(self._zones, self.report.zones, strict=True):
            count = sum(counts.counts.values())
            text = f"{zone.entry.name} {count}" if count else zone.entry.name
            if counts.loitering and (loitering := sum(counts.loitering.values())):
                text += f", {loitering} loitering"
            overlays.append(Overlay(text, zone.entry.points, is_closed=True, is_active=count > 0))
        for line, crossings in zip(self._lines, self.report.lines, strict=True):
            text = f"{line.entry.name} in {crossings.in_count} out {crossings.out_count}"
            overlays.append(Overlay(text, line.entry.points, is_closed=False))
        return tuple(overlays)

    def update(
        self,
        detections: Sequence[Detection],
        ids: Sequence[int],
        alive: Collection[int],
        step_s: float,
        size: tuple[int, int],
    ) -> list[tuple[ZonePresence, ...]]:
        """Add a frame of `size` (width, height) pixels. Return the zones of each detection, and set `report`.

        `ids` are the track ids of the detections, 0 for one without. `alive` are the ids of all tracks that may come
        back. `step_s` is the time since the frame before, 0 or more.
        """
        if self._used is not self._wanted:
            self._used = self._wanted
            self._use_entries(*self._used)
        self._frame += 1
        self._now_s += step_s
        tracked = [(index, track) for index, track in enumerate(ids) if track]
        width, height = size
        seen = [detections[index] for index, _ in tracked]
        # An object is where the middle of its box's lower edge is.
        feet = [((one.x_min + one.x_max) / 2, one.y_max, one.y_max - one.y_min) for one in seen]
        boxes = np.array(feet, float).reshape(-1, 3)
        points = boxes[:, :2] / (width, height)
        events: list[ZoneEvent] = []
        present: list[tuple[ZonePresence, ...]] = [()] * len(detections)
        if self._polygons is not None:
            for zone, inside in zip(self._zones, self._polygons.contain(points).T.tolist(), strict=True):
                self._update_zone(zone, detections, tracked, inside, alive, events)
                for index, track in tracked:
                    stay = zone.stays.get(track)
                    if stay is not None and stay.is_in:
                        seconds = self._now_s - stay.since_s
                        present[index] += (ZonePresence(zone.entry.name, seconds, stay.is_loitering),)
        if self._polylines is not None:
            margins = np.maximum(LINE_MARGIN, BOX_MARGIN * boxes[:, 2] / height)
            self._update_lines(detections, tracked, points, margins, alive, width / height, events)
        self.report = self._make_report(events)
        return present

    def _update_zone(
        self,
        zone: _Zone,
        detections: Sequence[Detection],
        tracked: Sequence[tuple[int, int]],
        inside: Sequence[bool],
        alive: Collection[int],
        events: list[ZoneEvent],
    ) -> None:
        entry, stays = zone.entry, zone.stays
        bits = (1 << (entry.window or entry.inertia)) - 1
        for (index, track), is_there in zip(tracked, inside, strict=True):
            stay = stays.get(track)
            if stay is None and not is_there:
                continue
            detection = detections[index]
            label = detection.class_name
            is_seen = (
                is_there
                and (not entry.classes or label in entry.classes)
                and (detection.score >= entry.min_score or (stay is not None and stay.is_in))
            )
            if stay is None:
                if not is_seen:
                    continue
                stay = stays[track] = _Stay(self._now_s, self._now_s)
            if is_seen:
                stay.label, stay.last_s = label, self._now_s
            stay.history = (stay.history << 1 | is_seen) & bits
            stay.frame = self._frame
        for track, stay in list(stays.items()):
            if stay.frame != self._frame and not stay.is_in:
                stay.history = (stay.history << 1) & bits  # not seen
            # An object in the zone that is hidden for a moment stays there, until its track ends.
            self._move_object(zone, track, stay, is_alive=track in alive, events=events)

    def _move_object(self, zone: _Zone, track: int, stay: _Stay, *, is_alive: bool, events: list[ZoneEvent]) -> None:
        """Let an object enter, loiter or leave, and forget one that was not seen in the zone for a window."""
        entry = zone.entry
        seen = stay.history.bit_count()
        is_out = seen < entry.inertia and (entry.window or entry.inertia) - seen >= entry.inertia
        if stay.is_in and (is_out or not is_alive):
            stay.is_in = False
            events.append(ZoneEvent(ZONE_LEFT, entry.name, stay.label, track, stay.last_s - stay.since_s))
            stay.history = 0
        elif not stay.is_in and seen >= entry.inertia:
            stay.is_in = True
            zone.entered += 1
            events.append(ZoneEvent(ZONE_ENTERED, entry.name, stay.label, track))
        if not stay.history or not is_alive:
            del zone.stays[track]
        elif stay.is_in and not stay.is_loitering and 0 < entry.loitering_s <= self._now_s - stay.since_s:
            stay.is_loitering = True
            events.append(ZoneEvent(ZONE_LOITERING, entry.name, stay.label, track, self._now_s - stay.since_s))

    def _update_lines(
        self,
        detections: Sequence[Detection],
        tracked: Sequence[tuple[int, int]],
        points: Floats,
        margins: Floats,
        alive: Collection[int],
        aspect: float,
        events: list[ZoneEvent],
    ) -> None:
        assert self._polylines is not None
        after = [(x, y) for x, y in points.tolist()]
        before = [self._positions.get(track, at) for (_, track), at in zip(tracked, after, strict=True)]
        crossed = self._polylines.crossings(np.array(before, float).reshape(-1, 2), points)
        # Objects that are near a line are looked at in each frame, the others when they cross it.
        for row, column in zip(*(found.tolist() for found in np.nonzero(crossed)), strict=True):
            balances, track = self._lines[column].balances, tracked[row][1]
            balances[track] = balances.get(track, 0) + int(crossed[row, column])
        rows = {track: row for row, (_, track) in enumerate(tracked)}
        for column, line in enumerate(self._lines):
            for track, balance in list(line.balances.items()):
                row = rows.get(track)
                if not balance or track not in alive:
                    del line.balances[track]
                elif row is not None and self._polylines.distance(column, after[row], aspect) >= margins[row]:
                    del line.balances[track]
                    self._count_crossing(line, balance, detections[tracked[row][0]].class_name, track, events)
        positions = {track: self._positions[track] for track in self._positions if track in alive}
        self._positions = positions | {track: after[row] for track, row in rows.items()}

    def _count_crossing(self, line: _Line, balance: int, label: str, track: int, events: list[ZoneEvent]) -> None:
        if line.entry.classes and label not in line.entry.classes:
            return
        if balance > 0:
            line.in_count += 1
        else:
            line.out_count += 1
        direction = "in" if balance > 0 else "out"
        events.append(ZoneEvent(LINE_CROSSED, line.entry.name, label, track, direction=direction))

    def _make_report(self, events: Sequence[ZoneEvent]) -> ZoneReport:
        zones = []
        for zone in self._zones:
            stays = [stay for stay in zone.stays.values() if stay.is_in]
            loitering: Mapping[str, int] | None = None
            if zone.entry.loitering_s:
                loitering = Counter(stay.label for stay in stays if stay.is_loitering)
            counts = dict.fromkeys(zone.labels, 0)
            for stay in stays:
                label = stay.label if stay.label in counts or len(counts) < MAX_CLASSES else OTHER_CLASSES
                counts[label] = counts.get(label, 0) + 1
            zone.labels |= dict.fromkeys(counts)
            zones.append(ZoneCounts(zone.entry.name, counts, zone.entered, loitering))
        lines = [LineCounts(line.entry.name, line.in_count, line.out_count) for line in self._lines]
        return ZoneReport(tuple(zones), tuple(lines), tuple(events))


def counted_detections(result: FrameResult, required: Collection[str]) -> tuple[Detection, ...]:
    """Return the detections in one of the `required` zones, by the rule of sinks and questions. In a zone with
    `loitering_s` they must loiter.

    A result without such a detection does not count.
    """
    report = result.zones
    waits = {zone.zone for zone in report.zones if zone.loitering is not None} if report is not None else set()
    return tuple(
        detection
        for detection in result.detections
        if any(one.zone in required and (one.is_loitering or one.zone not in waits) for one in detection.zones)
    )
