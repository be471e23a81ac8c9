"""Tables of zones and lines in the sources file: what they mean, and what is refused with its reason."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.config import ConfigError
from edge_server.plugins.cameras.source_and_sink_settings import (
    SourceEntry,
    check_required_zones,
    parse_entry,
    read_entries,
)
from edge_server.plugins.cameras.zones.zone_settings import (
    WHOLE_PICTURE,
    LineEntry,
    ZoneEntry,
    entries_as_plain,
    parse_lines,
    parse_zones,
)

TRIANGLE = [[0, 0], [1, 0], [0.5, 1]]
KEYS = ["name", "points", "classes", "min_score", "inertia", "window", "loitering_s"]


def test_the_file_gives_a_source_zones_and_lines(tmp_path):
    path = tmp_path / "cameras.toml"
    path.write_text(
        """
        [[sources]]
        name = "door"
        url = "demo"
        model = "faces"

        [[sources.zones]]
        name = "yard"
        points = [[0.1, 0.2], [0.9, 0.2], [0.5, 1]]
        classes = ["person", "sports ball"]
        min_score = 0.6
        inertia = 2
        window = 5
        loitering_s = 4

        [[sources.zones]]
        name = "all"

        [[sources.lines]]
        name = "gate"
        points = [[0, 0.5], [1, 0.5]]

        [[sources]]
        name = "plain"
        url = "demo"
        model = "faces"
        """
    )
    sources, _ = read_entries(str(path))
    points = ((0.1, 0.2), (0.9, 0.2), (0.5, 1.0))
    assert sources["door"].zones == (
        ZoneEntry("yard", points, ("person", "sports ball"), 0.6, 2, 5, 4.0),
        ZoneEntry("all", WHOLE_PICTURE, (), 0.0, 3, 0, 0.0),
    )
    assert sources["door"].lines == (LineEntry("gate", ((0.0, 0.5), (1.0, 0.5))),)
    assert sources["plain"] == SourceEntry("plain", "demo", "faces")


REFUSED = [
    ({"points": TRIANGLE}, "zone 1: needs name"),
    ({"name": "a/b"}, "zone 1: name: expected 1 to 64 letters"),
    ({"name": "a", "point": TRIANGLE}, "zone 'a': unknown key point, did you mean 'points'?"),
    ({"name": "a", "loit": 10}, "zone 'a': unknown key loit, did you mean 'loitering_s'?"),
    ({"name": "a", "points": TRIANGLE[:2]}, "zone 'a': points: expected at least 3 points that enclose an area"),
    ({"name": "a", "points": []}, "that enclose an area"),
    ({"name": "a", "points": [[0, 0], [0.5, 0.5], [1, 1]]}, "that enclose an area"),
    ({"name": "a", "points": [[0, 0], [0, 0], [1, 1]]}, "that enclose an area"),
    ({"name": "a", "points": [[0, 0], [320, 0], [0, 240]]}, "in fractions of the picture, 0 to 1 each"),
    ({"name": "a", "points": [[0, 0], [float("nan"), 0], [0, 1]]}, "given [nan, 0]"),
    ({"name": "a", "points": [[0, 0], [0.5], [0, 1]]}, "given [0.5]"),
    ({"name": "a", "points": [[0, 0], [True, 0], [0, 1]]}, "given [True, 0]"),
    ({"name": "a", "points": "0,0,1,1"}, "such as [[0.1, 0.5], [0.9, 0.5], [0.5, 1.0]], given '0,0,1,1'"),
    ({"name": "a", "points": TRIANGLE * 22}, "expected an array of at most 64 points [x, y] in fractions"),
    ({"name": "a", "classes": "person"}, "classes: expected an array of names"),
    ({"name": "a", "classes": ["x"] * 65}, "classes: expected at most 64 classes, given 65"),
    ({"name": "a", "classes": ["\n"]}, "classes: expected an array of names"),
    ({"name": "a", "min_score": 1.1}, "min_score: expected a number from 0 to 1"),
    ({"name": "a", "loitering_s": float("inf")}, "loitering_s: expected a number from 0 to 86400"),
    ({"name": "a", "inertia": 0}, "inertia: expected a number of frames from 1 to 255"),
    ({"name": "a", "inertia": 2.0}, "inertia: expected a number of frames"),
    ({"name": "a", "window": 2}, "window: expected at least inertia (3) frames, given 2"),
]


@pytest.mark.parametrize(("table", "reason"), REFUSED)
def test_a_wrong_zone_is_refused_with_its_name_its_key_and_what_is_expected(table, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_zones([table])


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ([{"name": "g"}], "line 'g': needs points"),
        ([{"name": "g", "points": [[0, 0]]}], "at least 2 points, each apart"),
        ([{"name": "g", "points": [[0, 0], [0, 0]]}], "at least 2 points, each apart"),
        ([{"name": "g", "points": [[0, 0], [1, 1]]}] * 2, "two lines have the name 'g'"),
        ([{"name": f"g{number}", "points": [[0, 0], [1, 1]]} for number in range(33)], "at most 32 lines, given 33"),
        ({"name": "g"}, "expected tables [[sources.lines]]"),
        ([3], "expected tables [[sources.lines]]"),
    ],
)
def test_wrong_lines_are_refused(tables, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_lines(tables)


def test_the_file_s_error_names_the_source(tmp_path):
    path = tmp_path / "cameras.toml"
    path.write_text("[[sources]]\nname='door'\nurl='demo'\nmodel='m'\n[[sources.zones]]\nname='yard'\npoints=[]")
    with pytest.raises(ConfigError, match="source 'door': zones: zone 'yard': points: expected at least 3 points"):
        read_entries(str(path))


def test_a_flag_has_no_zones():
    with pytest.raises(ValueError, match="zones: expected in the file of --sources-file, as tables"):
        parse_entry(SourceEntry, "name=a,url=demo,model=m,zones=x")


def test_a_polygon_that_crosses_itself_is_taken():
    (zone,) = parse_zones([{"name": "tie", "points": [[0, 0], [1, 1], [1, 0], [0, 1]]}])
    assert len(zone.points) == 4


def test_entries_become_the_same_tables_again():
    zones = [
        {"name": "yard", "points": TRIANGLE, "classes": ["person"], "min_score": 0.5, "inertia": 2, "window": 4,
         "loitering_s": 3.5},
        {"name": "all"},
    ]  # fmt: skip
    assert entries_as_plain(parse_zones(zones)) == zones
    lines = [{"name": "gate", "points": [[0, 0], [1, 1]]}]
    assert entries_as_plain(parse_lines(lines)) == lines


def test_a_zone_that_a_sink_requires_must_exist(tmp_path):
    path = tmp_path / "cameras.toml"
    path.write_text(
        "[[sources]]\nname='door'\nurl='demo'\nmodel='m'\n[[sources.zones]]\nname='yard'\n"
        "[[sinks]]\nname='log'\nurl='/tmp/log'\nrequired_zones=['yrad']"
    )
    with pytest.raises(ConfigError, match="sink 'log': no source has the zone 'yrad', did you mean 'yard'"):
        check_required_zones(*read_entries(str(path)))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("yard"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner),
    max_leaves=20,
)


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), values), max_size=3) | values)
def test_whatever_comes_over_http_is_taken_or_refused(value):
    for parse in (parse_zones, parse_lines):
        try:
            entries = parse(value)
        except ValueError:
            continue
        assert parse(entries_as_plain(entries)) == entries
