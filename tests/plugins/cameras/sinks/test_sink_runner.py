"""Pacing of messages, and slow or absent receivers: only their own messages are lost, and all are counted."""

from __future__ import annotations

import dataclasses
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from edge_server.core.back_off import BackOff
from edge_server.plugins.cameras.questions.question import QuestionAnswer
from edge_server.plugins.cameras.sinks import sink_interface, sink_runner
from edge_server.plugins.cameras.sinks.result_json import result_as_json
from edge_server.plugins.cameras.sinks.sink_interface import SinkMessage
from edge_server.plugins.cameras.sinks.sink_runner import MAX_WAITING, SinkRunner
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry
from edge_server.protocol.frame_messages import (
    LINE_CROSSED,
    ZONE_ENTERED,
    Detection,
    FrameHeader,
    FrameResult,
    LineCounts,
    ZoneCounts,
    ZoneEvent,
    ZonePresence,
    ZoneReport,
)

PATIENCE_S = 60.0


@pytest.fixture
def start(sink, monkeypatch):
    monkeypatch.setattr(sink_runner, "BACK_OFF", BackOff(0.001, 0.01))
    made = []

    def make(**fields):
        entry = SinkEntry(**{"name": "s", "url": "http://me:geheim@host/x", "interval_s": 0.0, **fields})
        made.append(SinkRunner(entry, lambda runner: runner, sink))
        return made[-1]

    yield make
    sink.goes_on.set()
    for runner in made:
        runner.close(PATIENCE_S)
        report = runner.report()
        assert report.received == report.delivered + report.suppressed + report.dropped
        assert report.waiting == 0


def labels(sink):
    return [[item.label for item in message.result.detections] for message in sink.sent if message.result]


def test_only_results_whose_classes_or_counts_differ_are_sent(start, sink, message):
    runner = start()
    for seen in (["cat"], ["cat"], ["cat", "dog"], ["dog", "cat"], ["cat", "cat"], [], []):
        runner.put(message("door", *seen))
    runner.close(PATIENCE_S)
    assert labels(sink) == [["cat"], ["cat", "dog"], ["cat", "cat"], []]
    assert runner.report().suppressed == 3


def test_with_classes_only_these_are_known_counted_and_sent(start, sink, message):
    runner = start(classes=("cat", "class 0"))
    runner.put(SinkMessage("door", state="RUNNING", labels=("cat", "dog")))
    for seen in (["cat", "dog"], ["cat"], ["dog", "dog", ""], ["dog"]):
        runner.put(message("door", *seen))
    runner.close(PATIENCE_S)
    assert sink.sent[0].labels == ("cat",)
    assert labels(sink) == [["cat"], [""], []]


def test_a_class_that_the_model_of_a_source_does_not_have_is_named_once_for_all_sources(start, caplog):
    runner = start(classes=("cat", "zebar"))
    for source, labels in (("door", ()), ("door", ("cat", "zebra")), ("door", ("cat", "zebra")), ("yard", ("cat",))):
        runner.put(SinkMessage(source, state="RUNNING", labels=labels))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "sink 's': the model of source 'door' has no class 'zebar', did you mean 'zebra'?"
    ]


def test_a_class_that_no_source_has_is_in_the_report_until_one_has_it(start):
    runner = start(classes=("cat", "zebar"))
    assert runner.report().reason == ""
    runner.put(SinkMessage("door", state="RUNNING", labels=("cat", "zebra")))
    assert runner.report().reason == "no source's model has class 'zebar', did you mean 'zebra'?"
    runner.put(SinkMessage("yard", state="RUNNING", labels=("zebar",)))
    assert runner.report().reason == ""
    runner.put(SinkMessage("yard", state="REMOVED"))
    assert "zebar" in runner.report().reason


def test_the_classes_that_there_are_stand_in_the_report_where_none_is_near(start):
    runner = start(classes=("person",))
    runner.put(SinkMessage("door", state="RUNNING", labels=("cat", "x" * 99)))
    assert runner.report().reason == f"no source's model has class 'person'; the classes are 'cat', '{'x' * 40}'"
    runner.put(SinkMessage("yard", state="RUNNING", labels=tuple(f"{number}" for number in range(1000))))
    assert runner.report().reason.endswith(", '6', '7' and 992 more")


def test_each_source_has_its_own_last_result(start, sink, message):
    runner = start()
    for source in ("a", "b", "a", "b"):
        runner.put(message(source, "cat"))
    runner.close(PATIENCE_S)
    assert [one.source for one in sink.sent] == ["a", "b"]


def test_without_on_change_every_result_is_sent(start, sink, message):
    runner = start(on_change=False)
    for _ in range(5):
        runner.put(message("door", "cat"))
    runner.close(PATIENCE_S)
    assert len(sink.sent) == 5


def test_a_result_is_encoded_once_for_all_sinks_that_get_the_same(message, tmp_path, monkeypatch):
    encoded = []

    def encode(source: str, result: FrameResult, age_s: float) -> dict[str, object]:
        encoded.append(result)
        return result_as_json(source, result, age_s)

    monkeypatch.setattr(sink_interface, "result_as_json", encode)
    pictured = dataclasses.replace(message("door", "cat", "dog"), picture=lambda: np.zeros((2, 2, 3), np.uint8))
    found = []
    for number, wanted in enumerate(((), (), ("cat",), ("none",))):
        path = tmp_path / f"{number}.jsonl"
        sink = SinkRunner(SinkEntry(name="s", url=str(path), classes=wanted), lambda runner: None)
        sink.put(pictured)
        sink.close(PATIENCE_S)
        found.append([one["label"] for one in json.loads(path.read_text())["detections"]])
    assert found == [["cat", "dog"], ["cat", "dog"], ["cat"], []]
    assert len(encoded) == 3


def test_a_file_gets_every_result_and_a_broker_one_change_per_second(message, tmp_path):
    path = tmp_path / "x.jsonl"
    file = SinkRunner(SinkEntry(name="s", url=str(path)), lambda runner: None)
    for _ in range(5):
        file.put(message("door", "cat"))
    file.close(PATIENCE_S)
    assert len(path.read_text().splitlines()) == 5


def test_within_the_interval_the_newest_result_is_kept_and_others_are_counted(
    start, sink, message, eventually, monkeypatch
):
    clock = [100.0]
    monkeypatch.setattr(sink_runner, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    runner = start(interval_s=0.3)
    for seq in range(1, 6):
        runner.put(message("door", *["cat"] * seq, seq=seq))
    assert runner.report().suppressed == 3
    # Nothing further comes, and the last change is sent all the same.
    clock.append(101.0)
    assert eventually(lambda: len(sink.sent) == 2)
    assert [one.result.header.seq for one in sink.sent] == [1, 5]


def test_a_change_that_is_undone_within_the_interval_is_not_sent(start, sink, message):
    runner = start(interval_s=60.0)
    for seen in (["cat"], ["dog"], ["cat"]):
        runner.put(message("door", *seen))
    runner.close(PATIENCE_S)
    assert labels(sink) == [["cat"]]


def test_a_result_waiting_for_its_interval_is_sent_at_the_end(start, sink, message):
    runner = start(interval_s=60.0)
    for seen in (["cat"], ["dog"]):
        runner.put(message("door", *seen))
    runner.close(PATIENCE_S)
    assert labels(sink) == [["cat"], ["dog"]]


def test_tensors_and_masks_always_count_as_changed_and_errors_once(start, sink, message):
    runner = start()
    result = message("door").result
    tensors = dataclasses.replace(result, tensors=("any",))
    for one in (tensors, tensors):
        runner.put(SinkMessage("door", one))
    for _ in range(2):
        runner.put(SinkMessage("door", FrameResult(FrameHeader(), error_code="INTERNAL", error="no")))
    runner.close(PATIENCE_S)
    assert len(sink.sent) == 3


def test_a_slow_receiver_loses_the_oldest_messages_and_delays_nothing(start, sink, message):
    sink.goes_on.clear()
    runner = start(on_change=False)
    runner.put(message(seq=0))
    assert sink.is_sending.wait(PATIENCE_S)
    for seq in range(1, 201):
        runner.put(message(seq=seq))
    report = runner.report()
    assert (report.received, report.waiting, report.dropped) == (201, MAX_WAITING + 1, 200 - MAX_WAITING)
    sink.goes_on.set()
    runner.close(PATIENCE_S)
    assert [one.result.header.seq for one in sink.sent] == [0, *range(201 - MAX_WAITING, 201)]


def test_a_failed_receiver_is_retried_and_gets_the_next_result(start, sink, message, eventually):
    runner = start()
    runner.put(message("door", "cat"))
    assert eventually(lambda: len(sink.sent) == 1)
    sink.fails = "host: no"
    runner.put(message("door", "dog"))
    assert eventually(lambda: runner.report().state == "FAILED")
    assert runner.report().reason == "host: no"
    assert runner.report().url == "http://host"
    sink.fails = ""
    runner.put(message("door", "dog"))
    assert eventually(lambda: len(sink.sent) == 2)
    assert eventually(lambda: runner.report().state == "RUNNING")
    assert runner.report().dropped == 1
    assert (sink.opened, sink.closed) == (2, 1)


def test_a_receiver_that_never_answers_does_not_delay_the_end(start, sink, message):
    sink.goes_on.clear()
    runner = start(on_change=False)
    for seq in range(10):
        runner.put(message(seq=seq))
    assert sink.is_sending.wait(PATIENCE_S)
    runner.close(0.01)
    report = runner.report()
    assert (report.dropped, report.waiting) == (9, 1)


def test_changes_of_the_state_are_always_sent(start, sink, message):
    runner = start(interval_s=60.0)
    for message_ in (message(), SinkMessage("door", state="FAILED", reason="gone"), message()):
        runner.put(message_)
    runner.close(PATIENCE_S)
    assert [one.state for one in sink.sent] == ["", "FAILED", ""]


def test_the_newest_state_of_each_camera_is_kept_for_a_slow_receiver(start, sink, message):
    sink.goes_on.clear()
    runner = start(on_change=False)
    runner.put(message(seq=0))
    assert sink.is_sending.wait(PATIENCE_S)
    for what in ("RUNNING", "FAILED"):
        runner.put(SinkMessage("gate", state=what))
    for seq in range(200):
        runner.put(message(seq=seq))
    assert runner.report().waiting == MAX_WAITING + 1
    sink.goes_on.set()
    runner.close(PATIENCE_S)
    assert [one.state for one in sink.sent if one.source == "gate"] == ["FAILED"]


def test_a_lost_connection_is_reopened_while_idle(start, sink, message, eventually):
    sink.refresh_s = 0.001
    runner = start()
    runner.put(message())
    assert eventually(lambda: sink.refreshed >= 3)
    sink.fails = "host: gone"
    assert eventually(lambda: runner.report().state == "FAILED")
    assert runner.report().reason == "host: gone"
    sink.fails = ""
    assert eventually(lambda: runner.report().state == "RUNNING")
    assert (runner.report().received, runner.report().delivered) == (1, 1)


def test_a_connected_receiver_gets_unchanged_state_periodically(start, sink, message, eventually):
    sink.refresh_s = 0.05
    runner = start()

    def put_until_sent() -> bool:
        runner.put(message("door", "cat"))
        return len(sink.sent) >= 3

    assert eventually(put_until_sent)
    assert runner.report().suppressed > 0


def test_a_sink_without_messages_has_no_thread(start):
    before = threading.active_count()
    start()
    assert threading.active_count() == before


def zoned(*objects: tuple[str, ZonePresence | None], loitering=None, crossings: int = 0) -> SinkMessage:
    """Return a result with objects, each a label and its zone."""
    found = tuple(
        Detection(1, 2, 3, 4, 0.9, 0, label, track_id=number, zones=() if zone is None else (zone,))
        for number, (label, zone) in enumerate(objects, 1)
    )
    report = ZoneReport((ZoneCounts("yard", {}, 0, loitering),), (LineCounts("gate", crossings, 0),))
    return SinkMessage("door", FrameResult(FrameHeader(), model="m", detections=found, zones=report), "camera")


YARD = ZonePresence("yard", 1.0)


def test_a_change_of_a_zone_or_line_is_a_change(start, sink):
    runner = start()
    for crossings in (0, 0, 1, 1):
        runner.put(zoned(("cat", None), crossings=crossings))
    runner.close(PATIENCE_S)
    assert len(sink.sent) == 2


@pytest.mark.parametrize("on_change", [True, False])
def test_only_objects_in_required_zones_are_sent_and_the_end_of_their_presence_once(start, sink, on_change):
    runner = start(required_zones=("yard",), on_change=on_change)
    other = ZonePresence("street", 1.0)
    for objects in ([("cat", YARD), ("dog", other)], [("dog", other)], [("dog", None)], [], [("cow", YARD)]):
        runner.put(zoned(*objects))
    runner.close(PATIENCE_S)
    assert labels(sink) == [["cat"], [], ["cow"]]


def test_in_a_required_zone_with_loitering_only_who_loiters_counts(start, sink):
    runner = start(required_zones=("yard",))
    runner.put(zoned(("cat", YARD), ("dog", ZonePresence("yard", 9.0, is_loitering=True)), loitering={"dog": 1}))
    runner.close(PATIENCE_S)
    assert labels(sink) == [["dog"]]


def event(kind: str, name: str) -> SinkMessage:
    direction = "in" if kind == LINE_CROSSED else ""
    return SinkMessage(
        "door", event=ZoneEvent(kind, name, "cat", 7, direction=direction), header=FrameHeader(5, 6, "", 9)
    )


def test_each_event_is_sent_whatever_the_pace(start, sink, message):
    runner = start(interval_s=60.0)
    runner.put(message("door", "cat"))
    for one in (event(ZONE_ENTERED, "yard"), event(LINE_CROSSED, "gate"), event(ZONE_ENTERED, "yard")):
        runner.put(one)
    runner.close(PATIENCE_S)
    assert [one.as_json() for one in sink.sent[1:3]] == [
        {"kind": "zone.entered", "source": "door", "zone": "yard", "label": "cat", "track_id": 7, "seq": 9,
         "stamp": {"sec": 5, "nanosec": 6}, "clock": ""},
        {"kind": "line.crossed", "source": "door", "line": "gate", "label": "cat", "track_id": 7, "direction": "in",
         "seq": 9, "stamp": {"sec": 5, "nanosec": 6}, "clock": ""},
    ]  # fmt: skip
    assert len(sink.sent) == 4


def answer(*zones: str) -> SinkMessage:
    found = QuestionAnswer(
        "door", "who", "vlm", "cat", 7, zones, "A cat.", 1.0, 4.25, FrameHeader(5, 6, "", 9), "camera"
    )
    return SinkMessage("door", answer=found)


def test_each_answer_is_sent_whatever_the_pace_and_a_sink_with_required_zones_gets_those_about_them(start, sink):
    runner = start(interval_s=60.0, required_zones=("yard",))
    for one in (answer(), answer("street"), answer("street", "yard"), answer("yard")):
        runner.put(one)
    pictures = start(url="/tmp/pictures/")
    pictures.put(answer("yard"))
    runner.close(PATIENCE_S)
    pictures.close(PATIENCE_S)
    assert [one.as_json() for one in sink.sent] == [
        {"kind": "question.answered", "source": "door", "question": "who", "model": "vlm", "label": "cat",
         "track_id": 7, "zone": zone, "text": "A cat.", "seconds": 4.25, "seq": 9, "stamp": {"sec": 5, "nanosec": 6},
         "clock": "camera"}
        for zone in ("street", "yard")
    ]  # fmt: skip
    assert pictures.report().received == 0


def test_a_sink_with_required_zones_gets_their_events_and_one_for_pictures_gets_none(start, sink):
    runner = start(required_zones=("yard",))
    for one in (event(ZONE_ENTERED, "street"), event(ZONE_ENTERED, "yard"), event(LINE_CROSSED, "gate")):
        runner.put(one)
    pictures = start(url="/tmp/pictures/")
    pictures.put(event(ZONE_ENTERED, "yard"))
    runner.close(PATIENCE_S)
    pictures.close(PATIENCE_S)
    assert [one.event.name for one in sink.sent] == ["yard"]
    assert pictures.report().received == 0
