"""Questions to Python models in a serving core: one at a time, the newest first, and what a failing model costs."""

from __future__ import annotations

import json
import logging
import threading

import numpy as np
import pytest

from edge_server.plugins.cameras.questions import question_set
from edge_server.plugins.cameras.questions.question import QuestionEntry
from edge_server.plugins.governor.control_policy import PolicyDecision, ThermalLevel


def question(name: str, model: str = "vlm", **keys) -> QuestionEntry:
    return QuestionEntry(name, model, f"{name}?", **{"interval_s": 0.0, **keys})


def test_a_new_object_is_asked_about_once_with_the_picture_and_the_prompt(open_door, control, eventually) -> None:
    door = open_door(max_tokens=40)
    for _ in range(5):
        door.see("face", 7)
    assert eventually(lambda: len(door.answers) == 1)
    (answer,) = door.answers
    assert (answer.source, answer.question, answer.model, answer.clock) == ("door", "who", "vlm", "camera")
    assert (answer.label, answer.track_id, answer.zones, answer.header.seq) == ("face", 7, (), 1)
    assert answer.text == "100x80: Who is the face at door?"
    ((given, pixels),) = control.asked
    assert json.loads(given["sampling_parameters"].item()) == {"max_tokens": 40}
    assert given["exclude_input_in_output"].item() is True
    assert (pixels == 7).all()
    report = door.report
    assert (report.asked, report.answered, report.waiting, report.reason) == (1, 1, 0, "")
    assert report.seconds == answer.seconds > 0
    assert door.questions.answers("door") == [answer]
    assert door.questions.answers("gate") == []


@pytest.mark.parametrize(
    ("box", "size"), [((10, 20, 30, 60), "30x60"), ((0, 0, 100, 80), "100x80"), ((98, 70, 100, 80), "3x13")]
)
def test_the_picture_of_an_object_has_a_margin(open_door, eventually, box, size) -> None:
    door = open_door(crop=True)
    door.see("face", 7, box)
    assert eventually(lambda: len(door.answers) == 1)
    assert door.answers[0].text.startswith(f"{size}: ")


def test_a_large_picture_is_reduced(open_door, eventually, control) -> None:
    door = open_door()
    pixels = np.zeros((1080, 1920, 3), np.uint8)
    original = door.questions.on_result

    def enlarged(entry, result, clock, picture, **more):
        original(entry, result, clock, lambda: pixels, **more)

    door.questions.on_result = enlarged
    door.see("face", 1)
    assert eventually(lambda: len(door.answers) == 1)
    assert door.answers[0].text.startswith("1280x720: ")


def test_a_question_that_waits_is_replaced_by_a_newer_one(open_door, control, eventually) -> None:
    door = open_door()
    control.goes_on.clear()
    door.see("face", 1)
    assert control.is_asked.wait(20)
    for track in (2, 3, 4):
        door.see("face", track)
    assert (door.report.asked, door.report.replaced, door.report.waiting) == (4, 2, 2)
    control.goes_on.set()
    assert eventually(lambda: door.report.answered == 2)
    assert [answer.track_id for answer in door.answers] == [1, 4]
    assert [int(pixels.mean()) for _, pixels in control.asked] == [1, 4]


def test_a_model_answers_one_question_at_a_time_and_the_rules_take_turns(open_door, control, eventually) -> None:
    door = open_door(question("a"), question("b"), question("c", "other"))
    control.goes_on.clear()
    door.see("face", 1)
    # The other model is asked beside it.
    assert eventually(lambda: len(control.asked) == 2)
    door.see("face", 2)
    assert [one.waiting for one in door.questions.reports()] == [2, 1, 2]
    control.goes_on.set()
    assert eventually(lambda: sum(one.waiting for one in door.questions.reports()) == 0)
    answered = [(answer.question, answer.track_id) for answer in door.answers if answer.model == "vlm"]
    assert answered == [("a", 1), ("b", 2), ("a", 2)]


def test_two_questions_of_a_rule_are_an_interval_apart(open_door, eventually) -> None:
    door = open_door(interval_s=0.3)
    door.see("face", 1)
    assert eventually(lambda: door.report.answered == 1)
    door.see("face", 2)
    door.see("face", 3)
    assert (door.report.waiting, door.report.replaced) == (1, 1)
    assert eventually(lambda: door.report.answered == 2)
    first, second = door.answers
    assert second.time_s - first.time_s >= 0.25
    assert second.track_id == 3


def test_a_question_that_waited_too_long_is_not_asked(open_door, eventually, monkeypatch) -> None:
    door = open_door(interval_s=1000.0)
    door.see("face", 1)
    assert eventually(lambda: door.report.answered == 1)
    # Not before: on a busy machine the first one waits as long.
    monkeypatch.setattr(question_set, "MAX_WAIT_S", 0.05)
    door.see("face", 2)
    assert eventually(lambda: door.report.expired == 1)
    assert len(door.answers) == 1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            "chat",
            "model 'chat' has no input 'image' of texts or bytes; it takes no pictures; its inputs are 'text_input'",
        ),
        ("absent", "Request for unknown model: 'absent' is not found"),
    ],
)
def test_a_model_that_cannot_be_asked_is_counted_and_logged_once(
    open_door, control, eventually, caplog, model, reason
) -> None:
    caplog.set_level(logging.INFO)
    door = open_door(question("who", model))
    # It is known before the first question.
    assert door.report.reason == reason
    for track in (1, 2, 3):
        door.see("face", track)
        assert eventually(lambda track=track: door.report.failed == track)
    assert door.report.reason == reason
    messages = [record.getMessage() for record in caplog.records if "question" in record.getMessage()]
    assert messages == [f"source 'door', question 'who': {reason}"]
    assert control.asked == []


def test_a_failing_model_is_reported_until_it_answers_again(open_door, control, eventually, caplog) -> None:
    caplog.set_level(logging.INFO)
    door = open_door()
    control.error = "no memory"
    for track in (1, 2):
        door.see("face", track)
        assert eventually(lambda track=track: door.report.failed == track)
    assert "no memory" in door.report.reason
    control.error = ""
    door.see("face", 3)
    assert eventually(lambda: door.report.answered == 1)
    assert door.report.reason == ""
    messages = [record.getMessage() for record in caplog.records if "question 'who'" in record.getMessage()]
    assert len(messages) == 2
    assert messages[1] == "source 'door', question 'who' is answered again"


def test_an_empty_answer_is_a_failure_and_a_long_one_is_cut(open_door, control, eventually) -> None:
    door = open_door()
    control.text = " \n"
    door.see("face", 1)
    assert eventually(lambda: door.report.failed == 1)
    assert door.report.reason == "model 'vlm' answered without a text"
    control.text = "x" * 20_000
    door.see("face", 2)
    assert eventually(lambda: len(door.answers) == 1)
    assert len(door.answers[0].text) == question_set.MAX_TEXT_CHARACTERS


def test_an_answer_that_takes_too_long_is_cancelled(open_door, control, eventually, monkeypatch) -> None:
    monkeypatch.setattr(question_set, "MAX_ANSWER_S", 0.05)
    door = open_door()
    control.goes_on.clear()
    door.see("face", 1)
    assert eventually(lambda: door.report.failed == 1)
    assert door.report.reason == "no answer within 0.05 s"


def test_a_model_that_is_unloaded_meanwhile_fails_the_questions_only(core, open_door, control, eventually) -> None:
    door = open_door()
    door.see("face", 1)
    assert eventually(lambda: door.report.answered == 1)
    core.service.unload_model("vlm")
    door.see("face", 2)
    assert eventually(lambda: door.report.failed == 1)
    assert "vlm" in door.report.reason
    core.service.load_model("vlm")
    door.see("face", 3)
    assert eventually(lambda: door.report.answered == 2)


def test_objects_that_are_there_before_the_model_is_loaded_are_asked_about_after_it(
    core, open_door, control, eventually
) -> None:
    door = open_door(question("who", "late"))
    control.goes_on.clear()
    load = threading.Thread(target=core.service.load_model, args=("late",))
    load.start()
    assert eventually(lambda: door.report.reason.startswith("waiting for model 'late': "))
    door.see("face", 1)
    assert door.report.asked == 0
    control.goes_on.set()
    load.join(20)
    door.see("face", 1)
    assert eventually(lambda: door.report.answered == 1)
    assert door.report.reason == ""
    core.service.unload_model("late")


def test_the_governor_sheds_questions_first(core, open_door, control, eventually, caplog) -> None:
    door = open_door()
    core.admission.apply(PolicyDecision(ThermalLevel.WARM, 1.0, sheds_bulk=True, detail="little memory"), 1.0)
    try:
        door.see("face", 1)
        assert eventually(lambda: door.report.shed == 1)
    finally:
        core.admission.apply(PolicyDecision(), 1.0)
    assert (door.report.failed, door.report.reason) == (0, "")
    assert [record for record in caplog.records if "question" in record.getMessage()] == []
    assert control.asked == []
    door.see("face", 2)
    assert eventually(lambda: door.report.answered == 1)


def test_questions_end_while_a_model_answers(open_door, control) -> None:
    door = open_door()
    control.goes_on.clear()
    door.see("face", 1)
    assert control.is_asked.wait(20)
    door.see("face", 2)
    # The thread ends, although the model goes on; the fixture looks for it.
    door.questions.close(20)
    assert door.answers == []


def test_a_question_that_is_changed_or_removed_is_not_answered_any_more(open_door, control, eventually) -> None:
    door = open_door()
    control.goes_on.clear()
    door.see("face", 1)
    assert control.is_asked.wait(20)
    changed = question("who", "other")
    door.entry = type(door.entry)("door", "demo", "faces", questions=(changed,))
    door.questions.apply({"door": door.entry})
    control.goes_on.set()
    door.see("face", 1)
    assert eventually(lambda: door.report.answered == 1)
    assert [answer.model for answer in door.answers] == ["other"]
    door.questions.apply({})
    door.see("face", 2)
    assert list(door.questions.reports()) == []


def test_without_a_picture_an_object_is_asked_about_in_a_later_frame(open_door, eventually) -> None:
    door = open_door()
    original = door.questions.on_result
    door.questions.on_result = lambda entry, result, clock, picture, **more: original(
        entry, result, clock, None, **more
    )
    door.see("face", 1)
    door.questions.on_result = original
    assert door.report.asked == 0
    door.see("face", 1)
    assert eventually(lambda: door.report.answered == 1)


def test_metrics_count_what_became_of_the_questions(open_door, eventually) -> None:
    door = open_door()
    door.see("face", 1)
    assert eventually(lambda: door.report.answered == 1)
    questions, seconds = door.questions.families()
    labels = {"source": "door", "question": "who", "model": "vlm"}
    counted = {sample["result"]: value for _, sample, value in questions.samples()}
    assert counted == {"answered": 1, "replaced": 0, "expired": 0, "shed": 0, "failed": 0}
    assert list(seconds.samples()) == [("", labels, door.report.seconds)]
