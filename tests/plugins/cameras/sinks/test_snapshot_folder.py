"""Folder of pictures of objects: which pictures, their names, the bound, and what other programs left there."""

from __future__ import annotations

import dataclasses

import cv2
import numpy as np
import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.cameras.sinks.sink_interface import SinkError, SinkMessage
from edge_server.plugins.cameras.sinks.sink_runner import MAX_PICTURES_WAITING, SinkRunner
from edge_server.plugins.cameras.sinks.snapshot_folder import SnapshotFolder
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry
from edge_server.protocol.frame_messages import ClassScore, Detection, FrameHeader, FrameResult, FrameTimes

START_S = 1_769_869_501.25
"""2026-01-31 14:25:01.250 UTC."""


def gray(value: int = 100):
    return np.full((60, 80, 3), value, np.uint8)


def seen(*objects, at_s: float = 0.0, source: str = "door", picture=gray, classes=(), **fields) -> SinkMessage:
    """Return a result `at_s` after the start with objects (label, score, track)."""
    detections = tuple(Detection(10, 20, 30, 50, score, 0, label, (), track) for label, score, track in objects)
    times = FrameTimes(received_unix_ns=int((START_S + at_s) * 1000) * 1_000_000)
    result = FrameResult(FrameHeader(), times, detections=detections, classes=classes, **fields)
    return SinkMessage(source, result, picture=picture)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "snapshots"


@pytest.fixture
def make_sink(folder):
    def make(*, max_bytes: int = 1_000_000, is_cropped: bool = False) -> SnapshotFolder:
        sink = SnapshotFolder(f"{folder}/", max_bytes, is_cropped=is_cropped)
        sink.open()
        return sink

    return make


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def brightness(path) -> float:
    # Below the text that is drawn in.
    return float(cv2.imread(str(path))[55:, 60:].mean())


def test_each_tracked_object_has_one_picture_the_one_of_its_best_score(make_sink, folder):
    sink = make_sink()
    sink.send(seen(("cat", 0.6, 1), at_s=0))
    sink.send(seen(("cat", 0.9, 1), ("dog", 0.5, 2), at_s=0.5, picture=lambda: gray(200)))
    sink.send(seen(("cat", 0.7, 1), at_s=1.5, picture=lambda: gray(20)))
    sink.send(seen(("cat", 0.93, 1), at_s=2, picture=lambda: gray(20)))  # hardly better
    assert names(folder) == ["20260131T142501.250Z_door_cat_1.jpg", "20260131T142501.750Z_door_dog_2.jpg"]
    assert [round(brightness(path), -1) for path in sorted(folder.iterdir())] == [200, 200]


def test_two_pictures_of_one_frame_each_show_the_box_of_their_object_alone(make_sink, folder):
    cat, dog = Detection(5, 20, 25, 50, 0.9, 0, "cat", (), 1), Detection(45, 20, 65, 50, 0.8, 1, "dog", (), 2)
    message = seen()
    assert make_sink().send(
        dataclasses.replace(message, result=dataclasses.replace(message.result, detections=(cat, dog)))
    )
    first, second = (cv2.imread(str(path)).astype(int) - 100 for path in sorted(folder.iterdir()))
    # The lower edges of the two boxes.
    assert abs(first[48:52, 7:23]).max() > 50 > abs(first[48:52, 47:63]).max()
    assert abs(second[48:52, 7:23]).max() < 50 < abs(second[48:52, 47:63]).max()


def test_only_messages_that_bring_a_picture_count_as_delivered(folder):
    runner = SinkRunner(SinkEntry("pictures", f"{folder}/"), lambda runner: None)
    runner.put(SinkMessage("door", state="RUNNING", is_tracked=True))
    for at_s in range(3):
        runner.put(seen(("cat", 0.9, 1), at_s=at_s))
    runner.close(20)
    report = runner.report()
    assert (report.received, report.delivered, report.suppressed, report.dropped) == (4, 1, 3, 0)


def test_an_object_whose_class_changes_keeps_its_picture(make_sink, folder):
    sink = make_sink()
    sink.send(seen(("cat", 0.6, 1)))
    sink.send(seen(("dog", 0.8, 1), at_s=0.5))
    assert names(folder) == ["20260131T142501.250Z_door_cat_1.jpg"]


def test_what_a_tracking_model_has_not_numbered_yet_has_no_picture(make_sink, folder):
    sink = make_sink()
    sink.send(SinkMessage("door", state="RUNNING", is_tracked=True))
    sink.send(seen(("cat", 0.6, 0)))
    assert names(folder) == []
    sink.send(SinkMessage("door", state="RUNNING", is_tracked=False))
    sink.send(seen(("cat", 0.6, 0)))
    assert names(folder) == ["20260131T142501.250Z_door_cat.jpg"]


def test_without_tracking_a_class_has_a_picture_for_each_of_its_visits(make_sink, folder):
    sink = make_sink()
    for at_s, objects in (
        (0, [("cat", 0.6, 0), ("cat", 0.8, 0)]), (1, []), (3, [("cat", 0.7, 0)]), (7, [("cat", 0.7, 0)]),
        (12.5, [("cat", 0.5, 0)]),
    ):  # fmt: skip
        sink.send(seen(*objects, at_s=at_s))
    assert names(folder) == ["20260131T142501.250Z_door_cat.jpg", "20260131T142513.750Z_door_cat.jpg"]


def test_the_class_of_a_picture_is_an_object_too_and_cameras_are_told_apart(make_sink, folder):
    sink = make_sink()
    sink.send(seen(classes=(ClassScore(3, 0.4), ClassScore(2, 0.9, "rain"))))
    sink.send(seen(classes=(ClassScore(3, 0.4),), source="gate"))
    assert names(folder) == ["20260131T142501.250Z_door_rain.jpg", "20260131T142501.250Z_gate_class3.jpg"]


def test_a_cropped_picture_shows_the_object_only(make_sink, folder):
    make_sink(is_cropped=True).send(seen(("cat", 0.6, 1)))
    assert cv2.imread(str(next(folder.iterdir()))).shape == (30, 20, 3)


def test_a_box_outside_the_picture_is_cut(make_sink, folder):
    message = seen(("cat", 0.6, 1), picture=lambda: gray()[:5, :5])
    make_sink(is_cropped=True).send(message)
    assert cv2.imread(str(next(folder.iterdir()))).shape == (1, 1, 3)


def test_a_label_cannot_leave_the_folder(make_sink, folder):
    make_sink().send(seen(("../../étc/" + "x" * 300, 0.6, 1)))
    (name,) = names(folder)
    assert name == f"20260131T142501.250Z_door_-------tc-{'x' * 54}_1.jpg"


def test_errors_and_results_without_a_picture_write_nothing(make_sink, folder):
    sink = make_sink()
    sink.send(seen(("cat", 0.6, 1), error_code="INTERNAL"))
    sink.send(seen(("cat", 0.6, 1), picture=None))
    assert names(folder) == []
    sink.send(seen(("cat", 0.6, 1), at_s=1))
    assert names(folder) == ["20260131T142501.250Z_door_cat_1.jpg"]


def test_the_oldest_pictures_are_deleted_at_the_bound_also_those_of_an_earlier_run(make_sink, folder):
    sink = make_sink()
    sink.send(seen(("cat", 0.6, 1)))
    size = next(folder.iterdir()).stat().st_size
    (folder / "mine.jpg").write_bytes(b"x" * 10 * size)
    (folder / ".20260131T142501.250Z_door_cat_9.jpg.part").write_bytes(b"x")
    sink = make_sink(max_bytes=4 * size)
    for track in range(2, 9):
        sink.send(seen(("cat", 0.6, track), at_s=track))
        assert sum(path.stat().st_size for path in folder.glob("2*")) <= 4 * size
    kept = [name for name in names(folder) if name != "mine.jpg"]
    assert len(kept) >= 3
    assert kept == [f"20260131T1425{track + 1:02}.250Z_door_cat_{track}.jpg" for track in range(9 - len(kept), 9)]
    assert (folder / "mine.jpg").exists()
    make_sink(max_bytes=1)
    assert names(folder) == ["mine.jpg"]


def test_a_picture_that_does_not_decode_is_named(make_sink, folder):
    def damaged():
        raise InvalidRequest("it is damaged")

    with pytest.raises(SinkError, match="snapshots: it is damaged"):
        make_sink().send(seen(("cat", 0.6, 1), picture=damaged))


def test_few_pictures_wait_for_a_slow_disk_and_none_for_other_receivers(sink, eventually, folder):
    pictures, others = (
        SinkRunner(SinkEntry("x", url), lambda runner: None, sink) for url in (f"{folder}/", "results.jsonl")
    )
    sink.goes_on.clear()
    pictures.put(seen())
    assert sink.is_sending.wait(20)
    for _ in range(20):
        pictures.put(seen())
    assert pictures.report().waiting == 1 + MAX_PICTURES_WAITING
    assert pictures.report().dropped == 20 - MAX_PICTURES_WAITING
    sink.goes_on.set()
    pictures.close(20)
    assert all(message.picture is gray for message in sink.sent)
    sink.sent.clear()
    others.put(seen())
    others.close(20)
    assert [message.picture for message in sink.sent] == [None]


def test_results_for_a_slow_broker_wait_without_their_pictures_but_for_the_newest(sink):
    runner = SinkRunner(SinkEntry("b", "mqtt://host", 0.0, False, pictures=True), lambda runner: None, sink)
    sink.goes_on.clear()
    runner.put(seen())
    assert sink.is_sending.wait(20)
    for _ in range(20):
        runner.put(seen())
    assert (runner.report().waiting, runner.report().dropped) == (21, 0)
    sink.goes_on.set()
    runner.close(20)
    assert [message.picture is not None for message in sink.sent[1:]] == [False] * 16 + [True] * MAX_PICTURES_WAITING
