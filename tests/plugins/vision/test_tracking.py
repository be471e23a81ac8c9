"""Track ids of the objects in a stream: the filter, the assignment, and agreement with another implementation."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from edge_server.errors import BadModelConfig
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.plugins.vision.tracking import LOST_S, MAX_BOXES, MIN_IOU, ByteTracker, assign, intersection_over_union

SCENES = dict(np.load(Path(__file__).parents[2] / "data" / "tracks.npz"))
"""Made by record_tracks.py, which describes the fields."""

RUNS = sorted(set(zip(SCENES["scene"].tolist(), SCENES["kept_share"].tolist(), strict=True)))

FRAME_S = 1 / 30


def tracker(threshold: float = 0.5) -> ByteTracker:
    return ByteTracker(itertools.count(1).__next__, threshold)


def box(x: float, y: float = 100.0, side: float = 40.0) -> list[float]:
    return [x, y, x + side, y + side]


def update(tracks: ByteTracker, *boxes: list[float], scores: list[float] | None = None, step_s: float = FRAME_S):
    given = np.array(boxes, float).reshape(-1, 4)
    return tracks.update(given, np.array(scores or [0.9] * len(given)), step_s)


def track_scene(run: tuple[int, float]) -> tuple[list[int], list[int], list[int]]:
    """Return the tracks found by this server, those of the other implementation (0: none), and the objects."""
    of_run = (SCENES["scene"] == run[0]) & (SCENES["kept_share"] == run[1])
    found, last_s, tracks = [], 0.0, tracker()
    for at_s in np.unique(SCENES["at_s"][of_run]):
        of_frame = of_run & (SCENES["at_s"] == at_s)
        boxes, scores = SCENES["box"][of_frame].astype(float), SCENES["score"][of_frame].astype(float)
        found += tracks.update(boxes, scores, at_s - last_s)
        last_s = at_s
    return found, (SCENES["reference"][of_run] + 1).tolist(), SCENES["truth"][of_run].tolist()


def switch_count(found: list[int], truth: list[int]) -> int:
    """Return how often the number of an object changes."""
    last: dict[int, int] = {}
    count = 0
    for number, thing in zip(found, truth, strict=True):
        if number and thing >= 0:
            count += last.setdefault(thing, number) != number
            last[thing] = number
    return count


@pytest.mark.parametrize("run", RUNS)
def test_an_object_keeps_its_track_id_with_100_70_and_40_percent_of_frames(run) -> None:
    found, reference, truth = track_scene(run)
    assert switch_count(found, truth) == 0
    assert switch_count(found, truth) <= switch_count(reference, truth)
    numbers = {(number, thing) for number, thing in zip(found, truth, strict=True) if number}
    assert len(numbers) == len({number for number, _ in numbers}), "no number belongs to two objects"


@pytest.mark.parametrize("run", RUNS)
def test_tracks_equal_those_of_the_trackers_package_where_it_separates_objects(run) -> None:
    found, reference, truth = track_scene(run)
    if switch_count(reference, truth):
        assert run == (3, 0.4), "it mistakes one person of a crowd of which 60 of 100 frames are missing"
        return
    pairs = set(zip(found, reference, strict=True))
    assert len(pairs) == len({number for number, _ in pairs}) == len({number for _, number in pairs})


def test_a_track_gets_its_id_in_its_second_consecutive_frame() -> None:
    tracks = tracker()
    assert update(tracks, box(10)) == [0]
    assert update(tracks, box(12), box(300)) == [1, 0]
    assert update(tracks, box(14)) == [1]
    assert update(tracks, box(16), box(300)) == [1, 0]
    assert update(tracks, box(18), box(300)) == [1, 2]


def test_a_low_scoring_box_continues_a_track_but_starts_none() -> None:
    tracks = tracker()
    for x in (10, 12):
        update(tracks, box(x))
    assert update(tracks, box(14), box(200), scores=[0.3, 0.2]) == [1, 0]
    assert update(tracks, box(16), box(200), scores=[0.3, 0.2]) == [1, 0]


def test_a_track_survives_dropped_frames_because_its_speed_is_per_second() -> None:
    tracks = tracker()
    for frame in range(10):
        update(tracks, box(10 + 8 * frame))
    # Fifteen frames later the object is three of its widths farther on.
    assert update(tracks, box(10 + 8 * 24), step_s=15 * FRAME_S) == [1]


def test_a_track_ends_a_second_after_it_was_first_missed_and_its_id_is_not_reused() -> None:
    for missing_s, expected in ((LOST_S, 1), (LOST_S + 0.1, 2)):
        tracks = tracker()
        for _ in range(3):
            update(tracks, box(10))
        update(tracks)
        update(tracks, step_s=missing_s)
        for _ in range(2):
            found = update(tracks, box(10))
        assert found == [expected]


def test_a_pause_of_the_camera_ends_no_track_of_still_objects() -> None:
    tracks = tracker()
    for _ in range(30):
        update(tracks, box(10))
    assert update(tracks, box(10), step_s=3600.0) == [1]


def test_the_number_of_tracks_is_bounded() -> None:
    tracks = tracker()
    many = [box(60 * (index % 40), 60 * (index // 40)) for index in range(1000)]
    for _ in range(3):
        found = update(tracks, *many)
        assert len(tracks) == MAX_BOXES
    assert sorted(found, reverse=True)[:MAX_BOXES] == [*range(MAX_BOXES, 0, -1)]
    assert set(found[MAX_BOXES:]) == {0}


def test_track_ids_are_unique_in_a_frame_and_increasing_for_any_boxes() -> None:
    rng = np.random.default_rng(8)
    tracks, known = tracker(), list[int]()
    with np.errstate(all="raise"):
        for _ in range(300):
            corners = rng.integers(0, 200, (int(rng.integers(0, 30)), 2)).astype(float)
            boxes = np.concatenate((corners, corners + rng.integers(0, 120, corners.shape)), axis=1)
            scores = np.sort(rng.random(len(boxes)))[::-1]
            numbers = [one for one in tracks.update(boxes, scores, float(rng.choice([0.0, 0.03, 0.5, 3.0]))) if one]
            assert len(numbers) == len(set(numbers))
            known += sorted(set(numbers) - set(known))
            assert known == [*range(1, len(known) + 1)]
    assert len(known) > 20


def test_boxes_without_an_area_and_large_time_steps_are_no_error() -> None:
    tracks = tracker()
    with np.errstate(all="raise"):
        for step_s in (0.0, 1e9, 0.0, 1e9, 1.0):
            update(tracks, box(5, side=0.0), box(0, side=1e6), box(30, side=1e-3), step_s=step_s)


def test_the_overlap_of_boxes_is_their_iou() -> None:
    first, second = np.array([box(0.0), box(0.0, side=0.0)]), np.array([box(20.0), box(100.0), box(0.0)])
    assert intersection_over_union(first, second).ravel().tolist() == pytest.approx([1 / 3, 0, 1, 0, 0, 0])


def test_the_assignment_maximises_the_sum_of_overlaps() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        rows, columns = rng.integers(0, 6, 2).tolist()
        overlap = rng.random((rows, columns)) * (rng.random((rows, columns)) < 0.6)
        allowed = np.where(overlap >= MIN_IOU, overlap, 0.0)
        wide = allowed if rows <= columns else allowed.T
        orders = itertools.permutations(range(wide.shape[1]), len(wide))
        best = max(wide[np.arange(len(wide)), list(order)].sum() for order in orders)
        found_rows, found_columns = assign(overlap)
        assert len(set(found_rows.tolist())) == len(set(found_columns.tolist())) == len(found_rows)
        assert (overlap[found_rows, found_columns] >= MIN_IOU).all()
        assert overlap[found_rows, found_columns].sum() == pytest.approx(best)


HEAD = {"detection_head": "yolov10"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"track": "sort", **HEAD}, "parameter 'track': expected bytetrack, given 'sort'"),
        ({"track": "bytetrack"}, "parameter 'track': expected detection_head beside it"),
        ({"detection_track_threshold": "0.5", **HEAD}, "'detection_track_threshold': expected track beside it"),
        ({"track": "bytetrack", "detection_track_threshold": "2", **HEAD}, "a number from 0 to 1"),
        ({"track": "bytetrack", "detection_track_treshold": "0.6", **HEAD}, "did you mean 'detection_track_threshold'"),
    ],
)
def test_invalid_tracking_parameters_are_refused_with_the_expected_values(make_model, parameters, message) -> None:
    with pytest.raises(BadModelConfig, match=message):
        make_perception_decoder(make_model(parameters, {"out": (20, 6)}))


def test_a_model_that_declares_tracking_sets_the_minimum_score_of_a_new_track(make_model) -> None:
    def threshold(**parameters: str) -> float | None:
        return make_perception_decoder(make_model({**HEAD, **parameters}, {"out": (20, 6)})).track_threshold

    assert threshold() is None
    assert threshold(track="bytetrack") == 0.5
    assert threshold(track="ByteTrack", detection_track_threshold="0.3") == 0.3


@pytest.mark.parametrize("degrees_per_frame", [3, 12])
def test_turning_objects_keep_their_track_ids_by_the_upright_boxes_around_them(degrees_per_frame: int) -> None:
    """Three long objects beside each other that turn and move: their upright boxes change and overlap."""
    tracks = tracker()
    found = []
    for frame in range(90):
        angle = math.radians(frame * degrees_per_frame)
        half_x, half_y = (
            (160 * abs(along) + 30 * abs(across)) / 2
            for along, across in ((math.cos(angle), math.sin(angle)), (math.sin(angle), math.cos(angle)))
        )
        centres = [(200 + 60 * index + frame, 300 + 10 * index) for index in range(3)]
        boxes = [[x - half_x, y - half_y, x + half_x, y + half_y] for x, y in centres]
        found.append(update(tracks, *boxes))
    assert found[1:] == [[1, 2, 3]] * 89
