"""Rule of a question: finds the objects in the results of a camera that were not there before."""

from __future__ import annotations

from typing import NamedTuple

from edge_server.plugins.cameras.questions.question import QuestionEntry
from edge_server.plugins.cameras.sinks.result_json import best_class
from edge_server.plugins.cameras.zones.zone_monitor import counted_detections
from edge_server.protocol.frame_messages import Detection, FrameResult

ABSENT_S = 5.0
"""After this long without it, an object that appears is a new one. As of the pictures of objects."""

MAX_OBJECTS = 1024
"""Objects that are remembered; the one that was not seen for longest is forgotten first."""


class NewObject(NamedTuple):
    """An object to ask about. `detection` is None for the class of a picture. `zones`: see QuestionAnswer."""

    label: str
    track_id: int = 0
    zones: tuple[str, ...] = ()
    detection: Detection | None = None


class NewObjects:
    """Objects of one source that a question applies to. One thread at a time uses it.

    With tracking each track is an object; without it, all detections of a class are one.
    """

    def __init__(self, entry: QuestionEntry) -> None:
        self._entry = entry
        self._seen_s: dict[str | int, float] = {}
        """Track id or class -> when the object was last seen, in the order of these times."""

    def find(self, result: FrameResult, now_s: float, *, is_tracked: bool) -> NewObject | None:
        """Return the new object with the best score, or None. Each is returned once, until it was away for ABSENT_S.

        A picture that shows the whole frame shows all new objects: the others do not come later.
        """
        for key, seen_s in list(self._seen_s.items()):
            if now_s - seen_s < ABSENT_S and len(self._seen_s) <= MAX_OBJECTS:
                break
            del self._seen_s[key]
        found = None
        for key, one in self._objects(result, is_tracked=is_tracked).items():
            is_new = self._seen_s.pop(key, None) is None
            if is_new and found is None:
                found = one
            elif is_new and self._entry.crop:
                continue
            self._seen_s[key] = now_s
        return found

    def _objects(self, result: FrameResult, *, is_tracked: bool) -> dict[str | int, NewObject]:
        """Return the objects of a result that the question applies to, the best first."""
        entry, objects = self._entry, dict[str | int, NewObject]()
        required = entry.required_zones
        detections = counted_detections(result, required) if required else result.detections
        for one in sorted(detections, key=lambda detection: -detection.score):
            label = one.class_name
            if entry.classes and label not in entry.classes:
                continue
            key = one.track_id if is_tracked else label
            if key and key not in objects:
                zones = tuple(each.zone for each in one.zones if not required or each.zone in required)
                objects[key] = NewObject(label, one.track_id, zones, one)
        label = best_class(result)
        if label and not result.detections and not required and (not entry.classes or label in entry.classes):
            objects[label] = NewObject(label)
        return objects
