"""Rules of zones and lines: who is in a zone, for how long, and what counts as a crossing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.cameras.sources_file_tables import MAX_CLASSES
from edge_server.plugins.cameras.zones.zone_monitor import ZoneMonitor
from edge_server.plugins.cameras.zones.zone_settings import MAX_WINDOW, LineEntry, ZoneEntry
from edge_server.protocol.frame_messages import Detection, LineCounts

SIZE = (200, 100)
LEFT_HALF = ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.0, 1.0))
LINE = LineEntry("gate", ((0.0, 0.5), (1.0, 0.5)))
IN, OUT = (0.2, 0.5), (0.8, 0.5)


def at(place: tuple[float, float], label: str = "person", score: float = 0.9, height: float = 0.1) -> Detection:
    """Return an object whose box stands on a place, in fractions of the picture."""
    x, y = place[0] * SIZE[0], place[1] * SIZE[1]
    return Detection(x - 4, y - height * SIZE[1], x + 4, y, score, 0, label)


class Camera:
    """A monitor that is given frames a tenth of a second apart."""

    def __init__(self, *entries: ZoneEntry | LineEntry) -> None:
        zones = [one for one in entries if isinstance(one, ZoneEntry)]
        self.monitor = ZoneMonitor(zones, [one for one in entries if isinstance(one, LineEntry)])
        self.events: list[tuple[str, str, int]] = []
        self.alive: set[int] = set()

    def see(self, *objects: Detection, ids=None, step_s: float = 0.1, gone: tuple[int, ...] = ()):
        """Add a frame. The objects have the ids 1, 2, ...; those seen before stay alive unless `gone`."""
        ids = list(range(1, len(objects) + 1)) if ids is None else ids
        self.alive = (self.alive | set(ids)) - {0} - set(gone)
        zones = self.monitor.update(objects, ids, self.alive, step_s, SIZE)
        report = self.monitor.report
        self.events += [(event.kind, event.name, event.track_id) for event in report.events]
        return zones

    @property
    def counts(self) -> dict[str, int]:
        return {label: count for label, count in self.monitor.report.zones[0].counts.items() if count}

    @property
    def line(self) -> LineCounts:
        return self.monitor.report.lines[0]


def test_an_object_enters_after_inertia_frames_and_leaves_after_as_many():
    camera = Camera(ZoneEntry("yard", LEFT_HALF))
    seen = [len(camera.see(at(place))[0]) for place in (IN, IN, IN, IN, OUT, OUT, OUT, OUT)]
    assert seen == [0, 0, 1, 1, 1, 1, 0, 0]
    assert camera.events == [("zone.entered", "yard", 1), ("zone.left", "yard", 1)]
    assert camera.monitor.report.zones[0].entered == 1


def test_a_glimpse_or_a_flicker_at_the_edge_is_no_visit():
    camera = Camera(ZoneEntry("yard", LEFT_HALF))
    for _ in range(10):
        for place in (IN, OUT, IN, IN, OUT):
            camera.see(at(place))
    assert (camera.events, camera.counts) == ([], {})
    for _ in range(3):
        camera.see(at(IN))
    for _ in range(10):
        for place in (OUT, IN, OUT, OUT, IN):
            camera.see(at(place))
    assert camera.events == [("zone.entered", "yard", 1)]


def test_n_of_m_frames_let_an_object_in_that_is_seen_now_and_then():
    camera = Camera(ZoneEntry("yard", LEFT_HALF, inertia=3, window=5))
    entered = []
    for is_seen in (True, False, True, False, True):
        camera.see(*([at(IN)] if is_seen else []))
        entered.append(camera.counts)
    assert entered == [{}, {}, {}, {}, {"person": 1}]
    rare = Camera(ZoneEntry("yard", LEFT_HALF, inertia=3, window=5))
    for _ in range(9):
        rare.see(at(IN))
        rare.see()
        rare.see()
    assert rare.events == []


def test_inertia_1_lets_an_object_in_at_once():
    camera = Camera(ZoneEntry("yard", LEFT_HALF, inertia=1))
    assert [len(camera.see(at(place))[0]) for place in (IN, OUT, IN)] == [1, 0, 1]


def test_a_hidden_object_stays_until_its_track_ends():
    camera = Camera(ZoneEntry("yard", LEFT_HALF))
    for _ in range(3):
        camera.see(at(IN))
    for _ in range(8):
        camera.see()
        assert camera.counts == {"person": 1}
    camera.see(gone=(1,))
    assert camera.counts == {}
    assert camera.events == [("zone.entered", "yard", 1), ("zone.left", "yard", 1)]
    # It was there from the first frame to the third.
    assert camera.monitor.report.events[0].seconds == pytest.approx(0.2)


def test_classes_and_scores_decide_who_enters_but_a_weak_detection_sends_nobody_out():
    camera = Camera(ZoneEntry("yard", LEFT_HALF, classes=("person",), min_score=0.6))
    for _ in range(5):
        camera.see(at(IN), at(IN, "dog"), at(IN, score=0.5))
    assert camera.events == [("zone.entered", "yard", 1)]
    for _ in range(5):
        camera.see(at(IN, score=0.2), at(IN, "dog"))
    assert camera.counts == {"person": 1}
    # Another class is as good as gone, but not for a frame or two.
    for _ in range(2):
        camera.see(at(IN, "dog"))
    assert camera.counts == {"person": 1}
    camera.see(at(IN, "dog"))
    assert camera.counts == {}


def test_an_object_without_a_track_does_not_count():
    camera = Camera(ZoneEntry("yard", inertia=1), LINE)
    assert camera.see(at(IN), at(IN), ids=[0, 7])[0] == ()
    assert camera.counts == {"person": 1}


def test_loitering_is_told_once_and_counted_while_it_lasts():
    camera = Camera(ZoneEntry("yard", LEFT_HALF, loitering_s=1.0))
    for _ in range(10):
        camera.see(at(IN))
    assert camera.monitor.report.zones[0].loitering == {}
    for _ in range(5):
        (presences,) = camera.see(at(IN))
    assert presences[0].is_loitering
    assert presences[0].seconds == pytest.approx(1.4)
    assert camera.monitor.report.zones[0].loitering == {"person": 1}
    for _ in range(3):
        camera.see(at(OUT))
    assert camera.monitor.report.zones[0].loitering == {}
    kinds = [kind for kind, _, _ in camera.events]
    assert kinds == ["zone.entered", "zone.loitering", "zone.left"]


def test_the_time_in_a_zone_follows_the_stamps_over_dropped_frames():
    camera = Camera(ZoneEntry("yard", LEFT_HALF))
    for step_s in (0.1, 0.1, 0.1, 5.0, 0.3):
        (presences,) = camera.see(at(IN), step_s=step_s)
    assert presences[0].seconds == pytest.approx(5.5)


def test_each_class_and_each_zone_has_its_own_count():
    camera = Camera(ZoneEntry("yard", LEFT_HALF, inertia=1), ZoneEntry("all", inertia=1))
    zones = camera.see(at(IN), at(IN), at(OUT, "car"))
    assert [[one.zone for one in found] for found in zones] == [["yard", "all"], ["yard", "all"], ["all"]]
    assert [zone.counts for zone in camera.monitor.report.zones] == [{"person": 2}, {"person": 2, "car": 1}]


ABOVE, BELOW = (0.5, 0.3), (0.5, 0.7)


def test_a_crossing_counts_in_its_direction():
    camera = Camera(LINE)
    for place in (ABOVE, BELOW, ABOVE, BELOW):
        camera.see(at(place))
    assert camera.line == ("gate", 2, 1)
    assert camera.events == [("line.crossed", "gate", 1)] * 3


def test_who_trembles_on_the_line_crosses_it_once_or_not_at_all():
    camera = Camera(LINE)
    camera.see(at(ABOVE))
    for _ in range(20):
        camera.see(at((0.5, 0.497)))
        camera.see(at((0.5, 0.503)))
    assert camera.line == ("gate", 0, 0)
    camera.see(at(BELOW))
    assert camera.line == ("gate", 1, 0)
    for _ in range(20):
        camera.see(at((0.5, 0.497)))
        camera.see(at((0.5, 0.503)))
    camera.see(at(BELOW))
    assert camera.line == ("gate", 1, 0)


def test_a_large_box_must_go_further_than_a_small_one():
    for height, expected in ((0.1, 1), (0.48, 0)):
        camera = Camera(LINE)
        camera.see(at((0.5, 0.49), height=height))
        camera.see(at((0.5, 0.515), height=height))
        assert camera.line.in_count == expected


def test_who_goes_round_the_end_of_a_line_does_not_cross_it():
    camera = Camera(LineEntry("gate", ((0.3, 0.5), (0.7, 0.5))))
    for place in (ABOVE, (0.1, 0.3), (0.1, 0.7), BELOW):
        camera.see(at(place))
    assert camera.line == ("gate", 0, 0)


def test_a_crossing_is_seen_over_frames_that_were_dropped_or_hide_the_object_but_not_over_the_end_of_its_track():
    camera = Camera(LINE)
    camera.see(at(ABOVE))
    for _ in range(5):
        camera.see()
    camera.see(at(BELOW), step_s=3.0)
    assert camera.line == ("gate", 1, 0)
    camera.see(gone=(1,))
    camera.see(at(ABOVE), ids=[2])
    assert camera.line == ("gate", 1, 0)


def test_only_the_classes_of_a_line_cross_it():
    camera = Camera(LineEntry("gate", LINE.points, classes=("car",)))
    for place in (ABOVE, BELOW):
        camera.see(at(place), at(place, "car"))
    assert camera.line == ("gate", 1, 0)


def test_a_change_of_the_zones_keeps_what_stays_the_same():
    yard, gate = ZoneEntry("yard", LEFT_HALF), LINE
    camera = Camera(yard, gate)
    for place in (ABOVE, BELOW):
        camera.see(at(place))
    for _ in range(3):
        camera.see(at(IN))
    camera.monitor.replace([ZoneEntry("other", inertia=1), yard], [gate, LineEntry("new", LINE.points)])
    camera.see(at(IN))
    report = camera.monitor.report
    assert [(zone.zone, zone.counts, zone.entered) for zone in report.zones] == [
        ("other", {"person": 1}, 1), ("yard", {"person": 1}, 1)
    ]  # fmt: skip
    assert report.lines == (("gate", 1, 0), ("new", 0, 0))


steps = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([IN, OUT]), st.sampled_from(["person", "dog"])), max_size=4,
             unique_by=lambda one: one[0]),
    max_size=40,
)  # fmt: skip


@given(steps, st.integers(1, 4), st.integers(0, 3))
def test_whatever_moves_the_counts_are_the_entries_without_the_exits(frames, inertia, more):
    zone = ZoneEntry("yard", LEFT_HALF, inertia=inertia, window=inertia + more, loitering_s=0.25)
    monitor = ZoneMonitor([zone], [])
    inside: Counter[int] = Counter()
    entered = 0
    for frame in frames:
        objects, ids = [at(place, label) for _, place, label in frame], [one[0] for one in frame]
        # Track 4 may not be hidden.
        presences = monitor.update(objects, ids, {1, 2, 3} | ({4} & set(ids)), 0.1, SIZE)
        (report,) = monitor.report.zones
        for event in monitor.report.events:
            if event.kind == "zone.loitering":
                assert inside[event.track_id] == 1
                continue
            inside[event.track_id] += 1 if event.kind == "zone.entered" else -1
            entered += event.kind == "zone.entered"
        assert set(inside.values()) <= {0, 1}
        assert sum(report.counts.values()) == sum(inside.values())
        assert report.entered == entered
        assert sum(report.loitering.values()) <= sum(report.counts.values())
        assert [bool(found) for found in presences] == [inside[track] == 1 for track in ids]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60))
def test_crossings_of_one_object_alternate(path):
    monitor = ZoneMonitor([], [LINE])
    directions = []
    for place in path:
        monitor.update([at(place)], [1], {1}, 0.1, SIZE)
        directions += [event.direction for event in monitor.report.events]
    assert all(first != second for first, second in pairwise(directions))
    (line,) = monitor.report.lines
    assert (line.in_count, line.out_count) == (directions.count("in"), directions.count("out"))
    if path and abs(path[0][1] - 0.5) > 0.02 and abs(path[-1][1] - 0.5) > 0.02:
        assert line.in_count - line.out_count == int(path[-1][1] > 0.5) - int(path[0][1] > 0.5)


def test_a_class_that_was_there_is_reported_with_0_and_too_many_classes_are_counted_together():
    camera = Camera(ZoneEntry("yard", inertia=1))
    camera.see(at(IN))
    camera.see(gone=(1,))
    assert camera.monitor.report.zones[0].counts == {"person": 0}
    for number in range(MAX_CLASSES + 5):
        camera.see(at(IN, f"kind {number}"), ids=[number + 2])
    counts = camera.monitor.report.zones[0].counts
    assert len(counts) == MAX_CLASSES + 1
    assert (counts["person"], counts["kind 0"], counts["other"]) == (0, 1, 6)


def test_memory_is_bounded_by_the_tracks_that_are_alive():
    monitor = ZoneMonitor([ZoneEntry("yard", inertia=1, window=MAX_WINDOW)], [LINE])
    for number in range(1, 50):
        monitor.update([at((0.5, 0.5))], [number], {number}, 0.1, SIZE)
    assert len(monitor._positions) == 1
    assert len(monitor._zones[0].stays) == 1
    assert len(monitor._lines[0].balances) <= 1
