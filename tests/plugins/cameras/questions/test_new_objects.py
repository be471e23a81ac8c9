"""When a question applies: once for each object, and again after it was away."""

from __future__ import annotations

import pytest

from edge_server.plugins.cameras.questions.new_objects import ABSENT_S, MAX_OBJECTS, NewObjects
from edge_server.plugins.cameras.questions.question import QuestionEntry
from edge_server.protocol.frame_messages import (
    ClassScore,
    Detection,
    FrameHeader,
    FrameResult,
    ZoneCounts,
    ZonePresence,
    ZoneReport,
)


class Rule:
    """A question, and the frames of its camera: `see` returns the label and the track of the new object."""

    def __init__(self, *, is_tracked: bool = True, **keys: object) -> None:
        self._objects = NewObjects(QuestionEntry("who", "vlm", "Who?", **keys))  # type: ignore[arg-type]
        self._is_tracked = is_tracked
        self.now_s = 100.0

    def see(self, *detections: Detection, zones: ZoneReport | None = None, classes=()) -> tuple[str, int] | None:
        self.now_s += 0.1
        result = FrameResult(FrameHeader(), detections=detections, zones=zones, classes=classes)
        found = self._objects.find(result, self.now_s, is_tracked=self._is_tracked)
        return None if found is None else (found.label, found.track_id)


def seen(label: str = "person", track: int = 0, score: float = 0.9, zones=()) -> Detection:
    return Detection(0, 0, 1, 1, score, 0, label, track_id=track, zones=zones)


def test_a_tracked_object_is_new_once_and_again_after_it_was_away() -> None:
    rule = Rule()
    assert rule.see() is None
    assert rule.see(seen(track=1)) == ("person", 1)
    assert [rule.see(seen(track=1)) for _ in range(100)] == [None] * 100
    rule.now_s += ABSENT_S - 1
    assert rule.see(seen(track=1)) is None
    rule.now_s += ABSENT_S
    assert rule.see(seen(track=1)) == ("person", 1)
    assert rule.see(seen(track=1), seen(track=2)) == ("person", 2)


def test_a_tracked_object_without_a_number_does_not_count_yet() -> None:
    rule = Rule()
    assert rule.see(seen(track=0)) is None
    assert rule.see(seen(track=1)) == ("person", 1)


def test_without_tracking_all_objects_of_a_class_are_one() -> None:
    rule = Rule(is_tracked=False)
    assert rule.see(seen("person")) == ("person", 0)
    assert rule.see(seen("person"), seen("person")) is None
    assert rule.see(seen("person"), seen("dog")) == ("dog", 0)


def test_only_objects_of_the_classes_count() -> None:
    rule = Rule(classes=("dog", "cat"))
    assert rule.see(seen("person", 1)) is None
    assert rule.see(seen("person", 1), seen("cat", 2)) == ("cat", 2)


def test_an_object_is_new_when_it_enters_a_required_zone() -> None:
    rule = Rule(required_zones=("yard",))
    assert rule.see(seen(track=1, zones=(ZonePresence("street", 3.0),))) is None
    assert rule.see(seen(track=1, zones=(ZonePresence("street", 3.0), ZonePresence("yard", 0.1)))) == ("person", 1)
    assert rule.see(seen(track=1, zones=(ZonePresence("yard", 0.2),))) is None
    # At the edge of the zone.
    assert rule.see(seen(track=1)) is None
    assert rule.see(seen(track=1, zones=(ZonePresence("yard", 0.1),))) is None
    rule.now_s += ABSENT_S
    assert rule.see(seen(track=1)) is None
    assert rule.see(seen(track=1, zones=(ZonePresence("yard", 0.1),))) == ("person", 1)


def test_in_a_zone_that_watches_loitering_only_objects_that_loiter_count() -> None:
    rule = Rule(required_zones=("yard",))
    report = ZoneReport((ZoneCounts("yard", {"person": 1}, 1, {}),))
    assert rule.see(seen(track=1, zones=(ZonePresence("yard", 1.0),)), zones=report) is None
    loitering = seen(track=1, zones=(ZonePresence("yard", 9.0, is_loitering=True),))
    assert rule.see(loitering, zones=report) == ("person", 1)


def test_of_a_frame_the_best_object_is_asked_about_and_a_whole_picture_shows_the_others() -> None:
    pair = seen(track=1, score=0.5), seen(track=2, score=0.8)
    rule = Rule()
    assert rule.see(*pair) == ("person", 2)
    assert rule.see(*pair) is None


def test_of_a_frame_each_object_is_asked_about_if_the_picture_shows_one() -> None:
    pair = seen(track=1, score=0.5), seen(track=2, score=0.8)
    rule = Rule(crop=True)
    assert [rule.see(*pair) for _ in range(3)] == [("person", 2), ("person", 1), None]


def test_the_class_of_a_picture_is_an_object() -> None:
    rule = Rule(is_tracked=False, classes=("fire",))
    assert rule.see(classes=(ClassScore(0, 0.9, "day"), ClassScore(1, 0.1, "fire"))) is None
    assert rule.see(classes=(ClassScore(0, 0.2, "day"), ClassScore(1, 0.8, "fire"))) == ("fire", 0)
    assert rule.see(classes=(ClassScore(0, 0.2, "day"), ClassScore(1, 0.8, "fire"))) is None


@pytest.mark.parametrize("per_frame", [1, 300])
def test_objects_are_forgotten_by_time_and_by_number(per_frame: int) -> None:
    rule = Rule()
    for first in range(1, 10_000, per_frame):
        rule.see(*[seen(track=track) for track in range(first, first + per_frame)])
    assert len(rule._objects._seen_s) <= MAX_OBJECTS + per_frame
    rule.now_s += ABSENT_S
    rule.see()
    assert rule._objects._seen_s == {}
