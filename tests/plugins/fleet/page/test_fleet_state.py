"""The boxes of the page: what changed after a revision, since when, and how a box differs from most others."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.plugins.fleet.page import fleet_state
from edge_server.plugins.fleet.page.box_record import read_record
from edge_server.plugins.fleet.page.fleet_state import FleetState
from edge_server.plugins.fleet.reports.box_report import BoxReport
from tests.plugins.fleet.page.stand_in_boxes import StandIn, followed
from tests.plugins.fleet.page.test_box_record import report_of


class Fleet:
    def __init__(self, count: int = 3) -> None:
        self.clock = SimpleNamespace(now_s=1_795_000_000.0)
        self.state = FleetState(lambda: self.clock.now_s)
        self.boxes = {f"http://box-{number}:8000": StandIn(f"box-{number}") for number in range(count)}
        self.state.set_boxes(self.boxes)

    def report(self, *keys: str) -> None:
        for key in keys or self.boxes:
            self.state.set_report(BoxReport(key, "", report_of(self.boxes[key])))

    def look(self, after: int = 0) -> tuple[int, dict[str, Any]]:
        found: Any = self.state.snapshot(after)
        return found["revision"], {box["key"]: box for box in found["boxes"]}


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_only_boxes_that_changed_are_sent_again(fleet: Fleet) -> None:
    revision, found = fleet.look()
    assert {box["state"] for box in found.values()} == {"asking"}
    fleet.report()
    revision, found = fleet.look(revision)
    assert {box["name"]: box["state"] for box in found.values()} == {"box-0": "ok", "box-1": "ok", "box-2": "ok"}
    fleet.report()
    assert fleet.look(revision) == (revision, {})
    fleet.boxes["http://box-1:8000"].heat = ("HOT", 99.0, 0.5)
    fleet.report()
    after, found = fleet.look(revision)
    assert list(found) == ["http://box-1:8000"]
    assert after > revision
    assert len(fleet.look(0)[1]) == 3


def test_a_trouble_has_the_time_since_when_it_is_seen(fleet: Fleet) -> None:
    fleet.report()
    fleet.look()
    key = "http://box-1:8000"
    fleet.clock.now_s += 100
    fleet.state.set_report(BoxReport(key, "no complete answer within 5 s", None))
    _, found = fleet.look()
    assert (found[key]["state"], found[key]["since_s"], found[key]["seen_s"]) == (
        "silent",
        1_795_000_100.0,
        1_795_000_000.0,
    )
    assert found[key]["is_since_known"]
    assert found[key]["name"] == "box-1", "the name is that of its last report"
    fleet.clock.now_s += 100
    fleet.state.set_report(BoxReport(key, "connection refused: nothing listens there", None))
    assert fleet.look()[1][key]["since_s"] == 1_795_000_100.0
    fleet.report()
    assert fleet.look()[1][key]["state"] == "ok"


def test_a_trouble_of_the_first_answer_is_older_than_the_page_knows(fleet: Fleet) -> None:
    fleet.state.set_report(BoxReport("http://box-1:8000", "no complete answer within 5 s", None))
    assert not fleet.look()[1]["http://box-1:8000"]["is_since_known"]


def test_the_time_of_a_failed_release_is_that_of_its_box_unless_its_clock_is_wrong(fleet: Fleet) -> None:
    key = "http://box-1:8000"
    failed = followed("detector", 3, state="failed", reason="too slow", installed=2)
    fleet.boxes[key].models["detector"] = failed
    for since_s, shown_s in (
        (1_794_999_000.0, 1_794_999_000.0),
        (12.0, 1_795_000_000.0),
        (1_999_999_999.0, 1_795_000_000.0),
    ):
        failed["since_s"] = since_s
        fleet.report()
        assert fleet.look()[1][key]["since_s"] == shown_s


def test_servers_of_another_version_and_models_without_releases_are_behind() -> None:
    fleet = Fleet(4)
    old, other, *_ = fleet.boxes
    fleet.boxes[old].version = "0.9"
    for key in fleet.boxes:
        fleet.boxes[key].follows = key == old
    fleet.boxes[other].models = {}
    fleet.report()
    _, found = fleet.look()
    assert found[old]["problems"] == ("edge-server: version 0.9, most others: version 1.0",)
    assert found[other]["problems"] == ("detector: not served, most others: version 1 (00000000)",)
    assert [box["state"] for box in found.values()] == ["behind", "behind", "ok", "ok"]


def test_boxes_with_files_that_cannot_be_compared_are_unknown(fleet: Fleet) -> None:
    follower, server, _ = fleet.boxes
    for key, box in fleet.boxes.items():
        box.follows = key == follower
        # A long list of versions is compared whole.
        box.index = [
            {"name": "many", "version": str(number), "state": "READY", "digest": f"sha256:{number:064x}"}
            for number in range(1, 10)
        ]
    fleet.boxes[follower].knows_files = fleet.boxes[server].knows_files = False
    fleet.report()
    _, found = fleet.look()
    problem = "not known to be equal: detector: version 1, without the SHA-256 of its files"
    assert [(box["state"], box["problems"]) for box in found.values()] == [
        ("unknown", (problem,)), ("unknown", (problem,)), ("ok", ()),
    ]  # fmt: skip
    fleet.boxes[follower].knows_files = fleet.boxes[server].knows_files = True
    fleet.report()
    assert {box["state"] for box in fleet.look()[1].values()} == {"ok"}


def test_boxes_of_the_first_wave_are_not_behind(fleet: Fleet) -> None:
    fleet.boxes["http://box-1:8000"].models["detector"] = followed("detector", 3)
    fleet.report()
    assert {box["state"] for box in fleet.look()[1].values()} == {"ok"}


def test_a_removed_box_begins_a_new_run(fleet: Fleet) -> None:
    fleet.report()
    revision, _ = fleet.look()
    run = fleet.state.run_id
    fleet.state.set_boxes([*fleet.boxes, "http://box-9:8000"])
    assert list(fleet.look(revision)[1]) == ["http://box-9:8000"]
    assert fleet.state.run_id == run
    fleet.state.set_boxes(["http://box-0:8000", "http://box-9:8000"])
    assert fleet.state.run_id != run
    fleet.state.set_report(BoxReport("http://box-1:8000", "", None))
    assert list(fleet.look()[1]) == ["http://box-0:8000", "http://box-9:8000"]


def test_many_boxes_are_sent_in_pages_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_state, "PAGE_BYTES", 5_000)
    fleet = Fleet(40)
    fleet.report()
    revision, pages, keys = 0, 0, []
    while True:
        found: Any = fleet.state.snapshot(revision)
        revision, pages = found["revision"], pages + 1
        keys += [box["key"] for box in found["boxes"]]
        assert len(json.dumps(found["boxes"])) < 6_000
        if found["is_complete"]:
            break
        if pages == 2:  # a box of the first page changes: it comes once more, at the end
            fleet.boxes["http://box-0:8000"].is_ready = False
            fleet.report("http://box-0:8000")
    assert pages > 4
    assert keys == [*fleet.boxes, "http://box-0:8000"]
    assert fleet.state.snapshot(revision)["boxes"] == []


def test_a_report_of_a_broker_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = FleetState()
    state.set_boxes(["box-1"])
    read: list[Any] = []
    monkeypatch.setattr(fleet_state, "read_record", lambda *given: read.append(given) or read_record(*given))
    report = report_of(StandIn("box-1")) | {"reported_s": 1_795_000_000.0}
    for error in ("", "offline", ""):
        state.set_report(BoxReport("box-1", error, report))
        found: Any = state.snapshot(0)
        assert found["boxes"][0]["state"] == ("silent" if error else "ok")
    state.set_report(BoxReport("box-1", "", {"version": 1}))
    state.set_report(BoxReport("box-1", "", report))
    assert [len(given) for given in read] == [2, 2]


@pytest.mark.parametrize("report", [{}, {"models": 3}, {"version": 1, "models": []}, {"models": [{"state": "READY"}]}])
def test_a_report_of_another_form_is_a_reason(fleet: Fleet, report: Any) -> None:
    fleet.state.set_report(BoxReport("http://box-1:8000", "", report))
    found = fleet.look()[1]["http://box-1:8000"]
    assert found["state"] == "silent"
    assert "not understood" in found["problems"][0]
