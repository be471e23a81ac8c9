"""Which release a box wants, and what a release's metadata may say. Needs no TUF."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.follow.follow_loop import are_in, read_hours
from edge_server.plugins.fleet.release import (
    Box,
    choose,
    custom_of,
    read_files,
    read_release,
    render_files,
    version_digests,
)

BOX = Box("box-1", frozenset({"line-3", "test"}), frozenset({"aarch64", "jetson", "orin"}))


def release(number: int = 1, **custom: Any) -> Any:
    return read_release(f"m/{number}.json", custom)


@pytest.mark.parametrize(
    ("custom", "is_chosen"),
    [
        ({}, True),
        ({"groups": ["line-3"]}, True),
        ({"groups": ["line-4"]}, False),
        ({"groups": []}, False),
        ({"machines": ["x86_64", "orin"]}, True),
        ({"machines": ["x86_64"]}, False),
        ({"ids": ["box-1"]}, True),
        ({"ids": ["box-2"]}, False),
        ({"groups": ["line-3"], "ids": ["box-2"]}, False),
        ({"stopped_at": ["box-1"]}, True),
        ({"stopped_at": []}, False),
        ({"percent": "100"}, True),
        ({"percent": "0"}, False),
        ({"not_before": "1000"}, True),
        ({"not_before": "1000.5"}, False),
    ],
)
def test_a_release_is_for_the_boxes_that_all_its_conditions_name(custom: Any, is_chosen: bool) -> None:
    assert list(choose([release(**custom)], BOX, 1000.0)) == (["m"] if is_chosen else [])


@pytest.mark.parametrize("custom", [{"stopped_at": []}, {"stopped_at": ["box-2"], "groups": ["line-3"]}])
def test_a_box_that_has_a_release_keeps_it_when_its_rollout_stops(custom: Any) -> None:
    one, two = release(1), release(2, **custom)
    assert choose([one, two], BOX, 0.0, {"m/2.json"}) == {"m": [two, one]}
    assert choose([one, two], BOX, 0.0, {"m/1.json"}) == {"m": [one]}
    other = two._replace(groups=frozenset({"line-4"}))
    assert choose([one, other], BOX, 0.0, {"m/2.json"}) == {"m": [one]}, "the other conditions apply as before"


def test_the_highest_number_comes_first_and_what_does_not_concern_the_box_is_left_out() -> None:
    found = choose([release(9), release(10), release(11, ids=["x"]), release(2)], BOX, 0.0)
    assert [item.number for item in found["m"]] == [10, 9, 2]


@given(st.floats(0, 100), st.floats(0, 100))
def test_more_per_cent_only_add_boxes(low: float, high: float) -> None:
    low, high = sorted((low, high))
    boxes = [BOX._replace(id=f"box-{number}") for number in range(50)]
    few = {box.id for box in boxes if release(percent=str(low)).concerns(box, 0.0)}
    many = {box.id for box in boxes if release(percent=str(high)).concerns(box, 0.0)}
    assert few <= many


def test_per_cent_choose_about_so_many_boxes_and_others_for_each_release() -> None:
    boxes = [BOX._replace(id=f"box-{number}") for number in range(4000)]
    first, second = ({box.id for box in boxes if release(number, percent="10").concerns(box, 0.0)} for number in (1, 2))
    assert 300 < len(first) < 500
    assert len(first & second) < 100


@pytest.mark.parametrize(
    ("wave", "chosen"),
    [(0, {"box-1"}), (1, {"box-1", "box-2", "box-3"}), (2, None), (3, {f"box-{n}" for n in range(50)})],
)
def test_a_wave_adds_its_boxes_to_those_before(wave: int, chosen: set[str] | None) -> None:
    waves = ["box-1", "box-2, box-3", "20 %", "all"]
    boxes = [BOX._replace(id=f"box-{number}") for number in range(50)]
    found = {box.id for box in boxes if release(waves=waves, wave=str(wave)).concerns(box, 0.0)}
    if chosen is not None:
        assert found == chosen
    else:
        assert {"box-1", "box-2", "box-3"} < found
        assert 5 < len(found) < 20


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        (None, "expected custom metadata"),
        ({"groups": "line-3"}, "groups: expected a list of texts, given 'line-3'"),
        ({"ids": [1]}, "ids: expected a list of texts"),
        ({"percent": "101"}, "percent: expected a number from 0 to 100, given '101'"),
        ({"percent": "nan"}, "percent: expected a number"),
        ({"percent": True}, "percent: expected a number"),
        ({"tolerance": []}, "tolerance: expected a number"),
        ({"max_slowdown": "0.5"}, "max_slowdown: expected a number from 1 to 1000"),
        ({"waves": "all"}, "waves: expected a list of texts"),
        ({"waves": ["110 %"]}, "waves: expected names of boxes, N % or all, given '110 %'"),
        ({"onlyfor": ["box-1"]}, "unknown keys onlyfor"),
    ],
)
def test_custom_metadata_that_cannot_be_understood_are_refused(custom: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_release("m/1.json", custom)


@pytest.mark.parametrize(
    "path", ["m/0.json", "m/01.json", "m.json", "a/m/1.json", "m/1.jsn", "m/x", "m/9999999999.json"]
)
def test_other_targets_are_no_releases(path: str) -> None:
    assert read_release(path, {}) is None


@pytest.mark.parametrize("model", ["..", ".hidden", " "])
def test_a_release_cannot_name_a_folder_that_is_no_model(model: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the name of a model"):
        read_release(f"{model}/1.json", {})


def test_custom_metadata_are_read_as_they_were_written_and_have_no_fractions() -> None:
    given = release(
        3,
        stopped_at=["x"],
        groups=["b", "a"],
        percent=12.5,
        waves=["x", "all"],
        wave=1,
        wave_since=5,
        not_before=7,
        tolerance=1e-3,
        max_slowdown=1.5,
    )
    written = custom_of(given)
    assert not any(isinstance(value, float) for value in written.values())
    assert read_release("m/3.json", written) == given
    assert math.isclose(given.tolerance, 1e-3)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "1/../../x", "a//b", ".release.json", "1/.hidden", "a\\b", "a\nb", "x" * 256]
)
def test_a_list_of_files_cannot_lead_out_of_the_models_folder(name: str) -> None:
    with pytest.raises(InvalidRequest):
        read_files("m/1.json", render_files({name: "0" * 64}))


@pytest.mark.parametrize("content", [b"", b"[]", b'{"files": {}}', b'{"files": {"a": "1"}}', b"[" * 100_000])
def test_a_list_of_files_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"release 'm/1\.json'"):
        read_files("m/1.json", content)


def test_the_digest_of_a_version_leaves_other_versions_out() -> None:
    files = {"1/model.onnx": "a", "2/model.onnx": "b", "config.pbtxt": "c", "SHA256SUMS": "d"}
    found = version_digests(files)
    assert set(found) == {1, 2}
    assert found[1] != found[2]
    assert version_digests({**files, "2/model.onnx": "x"})[1] == found[1]
    assert version_digests({**files, "config.pbtxt": "x"})[1] != found[1]
    assert version_digests({**files, "SHA256SUMS": "x"}) == found


@pytest.mark.parametrize(
    ("hours", "minute", "are"),
    [
        ("", 5, True),
        ("22:00-05:30", 21 * 60 + 59, False),
        ("22:00-05:30", 22 * 60, True),
        ("22:00-05:30", 5 * 60 + 29, True),
        ("22:00-05:30", 5 * 60 + 30, False),
        ("01:00-02:00", 90, True),
        ("01:00-02:00", 120, False),
    ],
)
def test_hours_may_go_over_midnight(hours: str, minute: int, are: bool) -> None:
    assert are_in(read_hours(hours), minute) == are


@pytest.mark.parametrize("hours", ["22-05", "24:00-05:00", "22:00-05:60", "22:00"])
def test_hours_that_are_none_are_refused(hours: str) -> None:
    with pytest.raises(InvalidRequest, match="expected HH:MM-HH:MM"):
        read_hours(hours)
