"""Where changed zones are kept: in the sources file with its owner and permissions, or in the state folder."""

from __future__ import annotations

import json
import os
import stat

import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.cameras.source_and_sink_settings import read_entries
from edge_server.plugins.cameras.zones import zone_store
from edge_server.plugins.cameras.zones.zone_settings import LineEntry, ZoneEntry
from edge_server.plugins.cameras.zones.zone_store import CHANGE_FILE, SOURCES_FILE, STATE_FOLDER, Shapes, ZoneStore

TEXT = "# mine\n[[sources]]\nname = 'door'\nurl = 'demo'\nmodel = 'm'\n"
SHAPES = Shapes((ZoneEntry("yard"),), (LineEntry("gate", ((0.0, 0.0), (1.0, 1.0))),))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cameras.toml"
    path.write_text(TEXT)
    path.chmod(0o640)
    return path


def refuse_writing(monkeypatch) -> None:
    """Have the sources file read-only, also for root."""
    monkeypatch.setattr(zone_store.os, "access", lambda path, mode: False)


def test_a_writable_file_is_replaced_with_its_permissions(file, tmp_path):
    assert ZoneStore(str(file), "").save("door", SHAPES, is_in_file=True) == SOURCES_FILE
    sources, _ = read_entries(str(file))
    assert (sources["door"].zones, sources["door"].lines) == SHAPES
    assert file.read_text().startswith(TEXT)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == [file.name]


def test_a_link_stays_a_link(file, tmp_path):
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    assert ZoneStore(str(link), "").save("door", SHAPES, is_in_file=True) == SOURCES_FILE
    assert link.is_symlink()
    assert "yard" in file.read_text()


def test_a_file_that_cannot_be_written_leaves_the_change_to_the_state_folder_which_a_new_start_reads(
    file, tmp_path, monkeypatch
):
    refuse_writing(monkeypatch)
    state = tmp_path / "state"
    store = ZoneStore(str(file), str(state))
    assert store.save("door", SHAPES, is_in_file=True) == STATE_FOLDER
    assert file.read_text() == TEXT
    assert ZoneStore(str(file), str(state)).changes == {"door": SHAPES}
    monkeypatch.undo()
    # A later change of the file is the truth again.
    assert store.save("door", SHAPES, is_in_file=True) == SOURCES_FILE
    assert ZoneStore(str(file), str(state)).changes == {}


def test_zones_of_a_flag_s_source_go_to_the_state_folder(tmp_path):
    assert ZoneStore("", str(tmp_path)).save("door", SHAPES, is_in_file=False) == STATE_FOLDER


def test_without_a_place_to_keep_them_they_are_refused(file, monkeypatch):
    with pytest.raises(InvalidRequest, match=r"it is not in a sources file, and the server has no state folder"):
        ZoneStore("", "").save("door", SHAPES, is_in_file=False)
    refuse_writing(monkeypatch)
    with pytest.raises(InvalidRequest, match=r"the sources file cannot be changed: it is read-only, and .*--state-dir"):
        ZoneStore(str(file), "").save("door", SHAPES, is_in_file=True)


def test_a_file_with_a_mistake_is_not_touched(file, tmp_path):
    file.write_text("[[sources")
    with pytest.raises(InvalidRequest, match="the sources file is not TOML"):
        ZoneStore(str(file), str(tmp_path)).save("door", SHAPES, is_in_file=True)


def test_a_file_that_somebody_changes_meanwhile_is_not_overwritten(file, monkeypatch):
    edit = zone_store.edit_zones

    def edit_late(*arguments):
        file.write_text(TEXT + "# new\n")
        return edit(*arguments)

    monkeypatch.setattr(zone_store, "edit_zones", edit_late)
    with pytest.raises(InvalidRequest, match="somebody else changes it just now"):
        ZoneStore(str(file), "").save("door", SHAPES, is_in_file=True)
    assert file.read_text() == TEXT + "# new\n"


WRONG_ZONE = '{"door": {"zones": [{"name": "/"}], "lines": []}}'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"door": 3}', WRONG_ZONE, "[" * 100_000, " " * zone_store.MAX_FILE_BYTES + "{}"],
    ids=["empty", "list", "unclosed", "number", "zone", "nested", "large"],
)
def test_a_damaged_change_file_is_ignored_and_reported(tmp_path, caplog, text):
    (tmp_path / CHANGE_FILE).write_text(text)
    assert ZoneStore("", str(tmp_path)).changes == {}
    assert "is ignored" in caplog.text


def test_zones_that_a_later_start_would_not_read_are_refused(tmp_path, monkeypatch):
    store = ZoneStore("", str(tmp_path))
    store.save("door", SHAPES, is_in_file=False)
    monkeypatch.setattr(zone_store, "MAX_FILE_BYTES", 300)
    with pytest.raises(InvalidRequest, match=r"camera_zones\.json' would have over 300 bytes"):
        store.save("yard", SHAPES, is_in_file=False)
    assert ZoneStore("", str(tmp_path)).changes == store.changes == {"door": SHAPES}


def test_the_change_file_has_the_keys_of_the_sources_file(tmp_path):
    ZoneStore("", str(tmp_path)).save("door", SHAPES, is_in_file=False)
    assert json.loads((tmp_path / CHANGE_FILE).read_text()) == {
        "door": {"zones": [{"name": "yard"}], "lines": [{"name": "gate", "points": [[0.0, 0.0], [1.0, 1.0]]}]}
    }
