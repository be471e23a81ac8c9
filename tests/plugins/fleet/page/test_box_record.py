"""What the page says of a box: its troubles, the worst first, and reports of machines that are broken or hostile."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_server.cli.status import make_report
from edge_server.plugins.fleet.page.box_problems import assess
from edge_server.plugins.fleet.page.box_record import MAX_MODELS, MAX_TEXT, BadReport, BoxRecord, read_record
from edge_server.plugins.fleet.reports.version_differences import served_versions
from tests.plugins.fleet.page.stand_in_boxes import StandIn, followed


def report_of(box: StandIn) -> dict[str, Any]:
    plugins = json.loads(json.dumps(box.plugins()))
    index = box.answer("/v2/repository/index")[1]
    return make_report("http://box", box.version, is_ready=box.is_ready, models=index, plugins=plugins)


def record_of(report: dict[str, Any]) -> BoxRecord:
    return read_record(report, served_versions(report))


def test_a_box_that_serves_its_releases_is_in_no_trouble() -> None:
    record = record_of(report_of(StandIn("box-1", groups=("line-3",))))
    assert (record.name, record.groups, record.temperature_c, record.heat) == ("box-1", ("line-3",), 45, "NORMAL")
    assert record.models["detector"].startswith("version 1 (")
    assert assess("http://box", record, "", ()) == ((), (), "", 0.0)


def failed_release(box: StandIn) -> None:
    box.models["detector"] = followed(
        "detector", 3, state="failed", reason="release 'detector/3.json': too slow", installed=2
    )


def failed_model(box: StandIn) -> None:
    box.index = [{"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": "not a model"}]


def foreign_model(box: StandIn) -> None:
    box.models["detector"] = followed("detector", 3, state="foreign", reason="remove it first", installed=0)


def waiting_release(box: StandIn) -> None:
    box.models["detector"] = followed("detector", 3, state="waiting", reason="no room", installed=2)


def no_repository(box: StandIn) -> None:
    box.problem = "the site does not answer"


def not_ready(box: StandIn) -> None:
    box.is_ready = False


def hot(box: StandIn) -> None:
    box.heat = ("HOT", 99.0, 0.5)


@pytest.mark.parametrize(
    ("change", "troubles", "problem", "advice"),
    [
        (failed_release, ("failed",), "release 'detector/3.json': too slow; it serves detector/2", "does not try this"),
        (failed_model, ("failed",), "m version 2: not a model", "edge-server status --url=http://box"),
        (foreign_model, ("failed",), "detector: remove it first", "Remove the model on the box"),
        (waiting_release, ("behind",), "detector/3 is not installed yet: no room; it serves detector/2", "again"),
        (no_repository, ("behind",), "signed repository: the site does not answer", "Can it reach"),
        (not_ready, ("not_ready",), "the server is not ready", "edge-server status --url=http://box"),
        (hot, ("hot",), "the governor is HOT, models run at 50 % of their speed", "fan"),
    ],
)  # fmt: skip
def test_each_trouble_has_its_kind_its_reason_and_an_advice(
    change: Any, troubles: tuple[str, ...], problem: str, advice: str
) -> None:
    box = StandIn("box-1")
    change(box)
    found = assess("http://box", record_of(report_of(box)), "", ())
    assert found.troubles == troubles
    assert found.problems == (problem,)
    assert advice in found.advice


def test_unknown_files_are_the_mildest_trouble_and_have_an_advice() -> None:
    box = StandIn("box-1")
    unknown = ["m: version 1, without the SHA-256 of its files"]
    found = assess("http://box", record_of(report_of(box)), "", (), unknown)
    assert (found.troubles, found.problems) == (("unknown",), (f"not known to be equal: {unknown[0]}",))
    assert "load it from its folder" in found.advice
    hot(box)
    assert assess("http://box", record_of(report_of(box)), "", (), unknown).troubles == ("hot", "unknown")


def test_the_worst_trouble_is_first_and_has_the_advice() -> None:
    box = StandIn("box-1")
    for change in (hot, not_ready, failed_release):
        change(box)
    found = assess("http://box", record_of(report_of(box)), "", ["edge-server: version 1.0, most others: version 1.1"])
    assert found.troubles == ("failed", "not_ready", "behind", "hot")
    assert found.problems[0].startswith("release 'detector/3.json'")
    assert "does not try this release again" in found.advice
    assert found.since_s == 1_790_000_000.0


def test_a_box_without_an_answer_has_the_reason() -> None:
    found = assess("http://box", None, "connection refused: nothing listens there", ())
    assert (found.troubles, found.problems) == (("silent",), ("connection refused: nothing listens there",))


def test_a_model_that_is_being_loaded_is_not_named_a_failure() -> None:
    box = StandIn("box-1")
    box.is_ready, box.index = False, [{"name": "m", "version": "2", "state": "LOADING"}]
    assert assess("", record_of(report_of(box)), "", ()).problems == ("a model is being loaded",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 7}, {"version": None}, {"models": None}, {"models": 3}, {"models": ["m"]},
        {"models": [{"name": "m"}]},
        {"models": [{"name": "m", "version": "x", "state": "READY", "reason": ""}]},
        {"models": [{"name": [], "version": "1", "state": "READY", "reason": ""}]},
        {"plugins": 1}, {"plugins": [{"name": "x"}]}, {"plugins": [{"name": "x", "error": "", "rows": 5}]},
        {"plugins": [{"name": "x", "error": "", "rows": [{"state": "failed", "title": ""}]}]},
        {"follow": 5}, {"follow": {}},
        {"follow": {"box": "b", "groups": "x", "machines": [], "models": {}, "problem": ""}},
        {"governor": {"enabled": True, "state": 5}},
    ],
)  # fmt: skip
def test_a_report_of_another_form_is_refused_with_a_sentence(wrong: dict[str, Any]) -> None:
    report = report_of(StandIn("box-1")) | wrong
    with pytest.raises((BadReport, KeyError, TypeError, ValueError, AttributeError)):
        record_of(report)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), 10**400, "hot", True, None, [1]])
def test_a_temperature_that_is_no_number_is_unknown(temperature: Any) -> None:
    governor = {"enabled": True, "state": "NORMAL", "temperature_c": temperature, "share": temperature}
    record = record_of(report_of(StandIn("box-1")) | {"governor": governor})
    assert (record.temperature_c, record.load_limit_percent) == (None, None)


def test_texts_and_lists_have_bounds_and_are_utf_8() -> None:
    box = StandIn("box-1")
    box.follows = False
    box.index = [
        {"name": f"m{number}", "version": "1", "state": "UNAVAILABLE", "reason": "\ud800" + "x" * 10_000}
        for number in range(1000)
    ] + [{"name": f"r{number}", "version": "1", "state": "READY", "digest": ""} for number in range(1000)]
    record = record_of(report_of(box))
    assert len(record.models) <= MAX_MODELS
    found = assess("http://box", record, "", ["y" * 10_000])
    assert max(map(len, found.problems)) <= MAX_TEXT
    assert len("".join(found.problems).encode()) < 20_000
