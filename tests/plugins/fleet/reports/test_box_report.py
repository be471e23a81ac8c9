"""The form of reports: what a box sends, what a reader takes, and the metrics that say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.follow.follower import Report
from edge_server.plugins.fleet.release import Box
from edge_server.plugins.fleet.reports.box_report import (
    RELEASE_STATES,
    FollowedModel,
    find_release_failures,
    parse_report,
)
from edge_server.plugins.fleet.reports.report_publisher import encode_report

ROOT = Path(__file__).parents[4]


def report_of(**more: Any) -> dict[str, Any]:
    box = Box("box-1", frozenset({"line-3"}), frozenset({"x86_64"}))
    failed = FollowedModel("m/2.json", "failed", "too slow", "m/1.json", "0" * 64, "1 of 2", 1.0)
    follow = Report(box, "https://site", {"m": failed}, "", 1.0).as_json()
    governor = {"enabled": True, "state": "CALM", "share": 1.0, "temperature_c": None}
    model = {"name": "m", "version": "1", "state": "READY", "reason": "", "digest": "sha256:00",
             "runtime": "openvino 2026.4.1"}  # fmt: skip
    return {"version": "1.0", "ready": True, "models": [model], "follow": follow, "governor": governor, **more}


def test_what_a_box_sends_is_what_a_reader_gets() -> None:
    found = parse_report(encode_report(report_of()).encode())
    assert found.pop("reported_s") > 0
    assert found == report_of()
    assert find_release_failures(found["follow"]) == ["m: too slow; installed: m/1.json"]


def test_keys_of_a_later_version_are_ignored_and_texts_are_cleaned_and_cut() -> None:
    given = report_of(version="1\x1b[31m" + "x" * 1000, later={"a": 1})
    found = parse_report(encode_report(given).encode())
    assert "later" not in found
    assert found["version"].startswith("1 [31mx")
    assert len(found["version"]) == 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
PLACES = (
    (), ("reported_s",), ("version",), ("ready",), ("models",), ("models", 0), ("models", 0, "reason"), ("follow",),
    ("follow", "box"), ("follow", "groups"), ("follow", "checked_s"), ("follow", "models"), ("follow", "models", "m"),
    ("follow", "models", "m", "state"), ("follow", "models", "m", "since_s"), ("governor",), ("governor", "share"),
)  # fmt: skip


@given(st.sampled_from(PLACES), JSON)
def test_any_json_at_any_place_is_taken_or_refused(place: tuple[str | int, ...], value: Any) -> None:
    document = json.loads(encode_report(report_of()))
    if place:
        inner = document
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    else:
        document = value
    try:
        text = parse_report(json.dumps(document).encode())["follow"]["box"]
    except InvalidRequest as error:
        text = error.message
    assert text.isprintable()


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest, match="its report"):
        parse_report(payload)


def test_a_report_that_is_too_long_loses_its_models_and_says_so() -> None:
    models = [{"name": "m" * 100, "version": "1", "state": "READY", "reason": "x" * 100, "digest": ""}] * 1000
    text = encode_report(report_of(models=models))
    assert len(text) < 1000
    assert "only 131072 can be sent" in json.loads(text)["follow"]["problem"]


def test_the_documented_queries_name_metrics_of_a_follower() -> None:
    text = (ROOT / "docs/fleet.md").read_text().partition("```promql")[2].partition("```")[0]
    running = ROOT / "edge_server/plugins/fleet/follow/running.py"
    declared = set(re.findall(r'Family\("(edge_follow_\w+)"', running.read_text()))
    assert set(re.findall(r"edge_\w+", text)) == declared
    states = re.findall(r'state=~"([^"]+)"', text)
    assert set(states[0].split("|")) == set(RELEASE_STATES) - {"installed"}
