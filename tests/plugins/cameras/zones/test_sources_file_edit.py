"""Edit of zones in the text of a sources file: only they change, and what cannot be edited safely is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.config.toml_file import parse_toml
from edge_server.plugins.cameras.zones.sources_file_edit import CannotEdit, edit_zones
from edge_server.plugins.cameras.zones.zone_settings import LineEntry, ZoneEntry, parse_lines, parse_zones

TRIANGLE = ((0.0, 0.0), (1.0, 0.0), (0.5, 1.0))
YARD, GATE = ZoneEntry("yard", TRIANGLE, loitering_s=4.0), LineEntry("gate", ((0.0, 0.5), (1.0, 0.25)))

TEXT = """# Cameras of the house. The password is in the safe.
[[sources]]
name = "door"   # the front
url = "rtsp://me:secret@192.168.1.20/stream1"
model = "people"

# The lawn; the street does not count.
[[sources.zones]]  # by hand
name = "yard"
# Measured in May.
points = [[0.1, 0.5], [0.9, 0.5],
          [1.0, 1.0], [0.0, 1.0]]   # clockwise
inertia = 2

[[sources.zones]]
name = "street"

# The back.
[[sources]]
name = "back"
url = "demo"
model = "people"

[[sinks]]  # where it goes
name = "log"
url = "results.jsonl"
"""


def read(text: str, source: str = "door"):
    (table,) = [one for one in parse_toml(text)["sources"] if one["name"] == source]
    return parse_zones(table.get("zones", [])), parse_lines(table.get("lines", []))


def test_the_same_zones_change_nothing():
    assert edit_zones(TEXT, "door", *read(TEXT)) == TEXT


def test_a_changed_zone_keeps_the_comments_and_the_other_tables():
    street = ZoneEntry("street")
    edited = edit_zones(TEXT, "door", [YARD, street], [])
    old = TEXT[TEXT.index('name = "yard"') : TEXT.index('[[sources.zones]]\nname = "street"')]
    new = """# Measured in May.
name = "yard"
points = [[0.0, 0.0], [1.0, 0.0], [0.5, 1.0]]
loitering_s = 4.0

"""
    assert edited == TEXT.replace(old, new)


def test_new_zones_and_lines_stand_below_their_source_and_above_the_comment_of_the_next():
    zones, _ = read(TEXT)
    edited = edit_zones(TEXT, "door", zones, [GATE])
    line = '\n[[sources.lines]]\nname = "gate"\npoints = [[0.0, 0.5], [1.0, 0.25]]\n'
    assert edited == TEXT.replace('name = "street"\n', f'name = "street"\n{line}')
    assert read(edit_zones(TEXT, "back", [YARD], [GATE]), "back") == ((YARD,), (GATE,))


def test_zones_that_are_gone_leave_the_comments_above_the_next_table():
    edited = edit_zones(TEXT, "door", [], [])
    assert read(edited) == ((), ())
    assert "# The back.\n[[sources]]" in edited
    assert "# Cameras of the house." in edited


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_line_ends_and_a_missing_last_one_are_kept(ending):
    text = ending.join(['[[sources]]', 'name = "a"', 'url = "demo"', 'model = "m"']) if ending else (
        '[[sources]]\nname = "a"\nurl = "demo"\nmodel = "m"'
    )  # fmt: skip
    edited = edit_zones(text, "a", [YARD], [])
    assert edited.startswith(text)
    assert read(edited, "a") == ((YARD,), ())
    assert edited.count("\r") == (edited.count("\n") if ending == "\r\n" else 0)


HEAD = "name = 'a'\nurl = 'demo'\nmodel = 'm'\n"


@pytest.mark.parametrize(
    "text",
    [
        f"[[sources]]\n{HEAD}zones = [{{ name = 'yard' }}]\n",
        "sources = [{ name = 'a', url = 'demo', model = 'm' }]\n",
        f"[[sources]]\nname = 'b'\nurl = 'demo'\nmodel = '''\n[[sources]]\n'''\n[[sources]]\n{HEAD}",
        f"[[sources]]\n{HEAD}x = [\n'''\n[[sources.zones]]\n'''\n]\n[[sources.zones]]\nname = 'yard'\n",
        "[[sources]]\nname = 'b'\nurl = 'demo'\nmodel = 'm'\n",
        f"[sources]\n{HEAD}",
        "sources = ['a']\n",
        f"[[sources]]\n{HEAD}[sources.zones]\nname = 'yard'\n",
    ],
)
def test_what_is_written_in_another_way_is_refused(text):
    with pytest.raises(CannotEdit):
        edit_zones(text, "a", [YARD], [])


def test_a_comment_with_a_line_separator_of_unicode_stays_whole():
    text = f"[[sources]]\n{HEAD}[[sources.zones]]\n# the\u2028lawn\nname = 'yard'\n"
    assert "# the\u2028lawn\n" in edit_zones(text, "a", [YARD], [])


def test_a_text_that_is_not_toml_is_an_error():
    with pytest.raises(ValueError, match=r"at end of|Expected"):
        edit_zones("[[sources", "a", [YARD], [])


names = st.sampled_from(["yard", "street", "b.c", "d-e"])
places = st.tuples(st.floats(0, 1), st.floats(0, 1))
labels = st.lists(st.sampled_from(["person", 'a"b\\c', "# no comment", "[[sources]]", "Überweg"]), max_size=3).map(
    tuple
)
zones = st.lists(
    st.builds(ZoneEntry, names, st.just(TRIANGLE) | places.map(lambda place: (*TRIANGLE, place)), labels,
              st.floats(0, 1), st.integers(1, 5), st.just(0), st.floats(0, 60)),
    max_size=4, unique_by=lambda zone: zone.name,
).map(tuple)  # fmt: skip
lines = st.lists(
    st.builds(LineEntry, names, st.just(GATE.points), labels), max_size=3, unique_by=lambda line: line.name
)
lines = lines.map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["door", "back"]), zones, lines), min_size=1, max_size=4))
def test_after_any_edits_the_file_says_what_was_wanted_and_nothing_else_changed(edits):
    text, wanted = TEXT, {"door": read(TEXT), "back": ((), ())}
    for source, some_zones, some_lines in edits:
        text = edit_zones(text, source, some_zones, some_lines)
        wanted[source] = (some_zones, some_lines)
    for source, (some_zones, some_lines) in wanted.items():
        found = read(text, source)
        assert sorted(found[0], key=repr) == sorted(some_zones, key=repr)
        assert sorted(found[1], key=repr) == sorted(some_lines, key=repr)
    for kept in ("# Cameras of the house.", 'name = "door"   # the front', "# The back.", "[[sinks]]  # where it goes"):
        assert kept in text
    document = parse_toml(text)
    assert [table["url"] for table in document["sources"]] == ["rtsp://me:secret@192.168.1.20/stream1", "demo"]
    assert document["sinks"] == parse_toml(TEXT)["sinks"]
