"""What `edge-server status` shows of an update of the Debian package's program."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.config import ServerConfig
from edge_server.plugins.fleet.plugin import PLUGIN
from edge_server.plugins.fleet.settings import UPDATE_HOME_VARIABLE


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installation whose version 1.0 starts."""
    monkeypatch.setenv(UPDATE_HOME_VARIABLE, str(tmp_path))
    (tmp_path / "current").symlink_to("versions/1.0")
    return tmp_path


def status() -> list[tuple[object, ...]]:
    running = PLUGIN.prepare(ServerConfig())
    assert running is not None
    return [tuple(row) for row in running.status()]


def test_a_server_of_no_debian_package_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UPDATE_HOME_VARIABLE, raising=False)
    assert PLUGIN.prepare(ServerConfig()) is None


def test_nothing_is_shown_of_a_version_that_was_accepted(home: Path) -> None:
    assert status() == []


def test_a_version_on_trial_is_shown_with_the_one_before(home: Path) -> None:
    (home / "trial").write_text("1.0 0.9 1 0\n")
    assert status() == [("program", "ok", "version 1.0 is on trial; 0.9 starts again if it fails")]


def test_a_version_that_was_taken_back_is_a_failure_with_its_reason(home: Path) -> None:
    (home / "failed").write_text("1.1 it ended with exit code 1\n")
    (home / "trial").write_text("1.1 1.0 1 0\n")
    text = "version 1.1 was taken back, 1.0 starts instead: it ended with exit code 1"
    assert status() == [("program", "failed", text)]
