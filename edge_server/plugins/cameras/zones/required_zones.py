"""Rule `required_zones` of sinks: only objects in these zones count."""

from __future__ import annotations

from collections.abc import Collection

from edge_server.protocol.frame_messages import Detection, FrameResult


def counted_detections(result: FrameResult, required: Collection[str]) -> tuple[Detection, ...]:
    """Return the detections in one of the `required` zones. In a zone with `loitering_s` they must loiter.

    A result without such a detection does not count.
    """
    report = result.zones
    waits = {zone.zone for zone in report.zones if zone.loitering is not None} if report is not None else set()
    return tuple(
        detection
        for detection in result.detections
        if any(one.zone in required and (one.is_loitering or one.zone not in waits) for one in detection.zones)
    )
