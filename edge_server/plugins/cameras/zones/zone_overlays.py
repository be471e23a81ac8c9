"""Zones and lines as overlays of an annotated picture: their outlines, names and counts."""

from __future__ import annotations

from collections.abc import Sequence

from edge_server.plugins.cameras.zones.zone_settings import LineEntry, ZoneEntry
from edge_server.plugins.vision.perception import Overlay
from edge_server.protocol.frame_messages import ZoneReport


def make_overlays(zones: Sequence[ZoneEntry], lines: Sequence[LineEntry], report: ZoneReport) -> tuple[Overlay, ...]:
    """Return outlines and texts of zones and lines. `report` has them in the same order."""
    overlays = []
    for zone, counts in zip(zones, report.zones, strict=True):
        count = sum(counts.counts.values())
        text = f"{zone.name} {count}" if count else zone.name
        if counts.loitering and (loitering := sum(counts.loitering.values())):
            text += f", {loitering} loitering"
        overlays.append(Overlay(text, zone.points, is_closed=True, is_active=count > 0))
    for line, crossings in zip(lines, report.lines, strict=True):
        text = f"{line.name} in {crossings.in_count} out {crossings.out_count}"
        overlays.append(Overlay(text, line.points, is_closed=False))
    return tuple(overlays)
