"""Pins: what they do to desired, and the file that keeps them."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import ServingFault
from edge_server.repository.desired_state import RepositorySource
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions
from edge_server.repository.version_pins import FILE_NAME, VersionPins

ALL = 'backend: "identity" version_policy { all { } }'
CONFIG_JSON = '{"backend": "identity", "version_policy": {"all": {}}}'


@pytest.fixture
def source(root: Path, tmp_path: Path) -> Any:
    made = RepositorySource(Scanner([root]), ResolveOptions(), None, VersionPins(tmp_path / "state"))
    yield made
    made.close()


def test_a_folder_that_cannot_be_written_is_reported_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    # Not even root can make a file there.
    with caplog.at_level(logging.WARNING):
        assert VersionPins(Path("/proc/self")).all() == {}
    assert "the state directory '/proc/self' cannot be written: " in caplog.text


@pytest.mark.parametrize(
    "policy", ["all { }", "latest { num_versions: 2 }", "specific { versions: [3] }", "specific { versions: [9] }"]
)
def test_a_pinned_model_is_wished_for_in_that_version_whatever_the_policy_says(
    source: Any, add_model: Any, policy: str
) -> None:
    add_model("m", f'backend: "identity" version_policy {{ {policy} }}', versions=(1, 2, 3))
    assert source.pin("m", 1) is None
    desired_model = source.desired_models()[0]["m"]
    assert (list(desired_model.versions), desired_model.pin, desired_model.reason) == ([1], 1, "")
    assert source.desired_model("m", None, {}) == desired_model
    assert source.pin("m", 2) == 1
    assert list(source.desired_models()[0]["m"].versions) == [2]
    assert source.pins() == {"m": 2}
    assert source.unpin("m") == 2
    assert source.unpin("m") is None
    assert source.desired_models()[0]["m"].pin is None


def test_the_wished_version_is_the_same_one_with_and_without_a_pin(source: Any, add_model: Any) -> None:
    add_model("m", ALL, versions=(1, 2))
    before = source.desired_models()[0]["m"].versions[2]
    source.pin("m", 2)
    assert source.desired_models()[0]["m"].versions[2] == before


def test_a_pin_to_a_missing_version_is_reported_and_no_other_serves(source: Any, add_model: Any) -> None:
    add_model("m", ALL, versions=(1, 2))
    source.pin("m", 7)
    desired_model = source.desired_models()[0]["m"]
    assert (dict(desired_model.versions), desired_model.reason) == (
        {},
        "model 'm' is pinned to version 7, which is not there",
    )


def test_a_problem_of_the_whole_model_is_reported_before_the_pin(source: Any, add_model: Any) -> None:
    add_model("m", "nonsense", versions=(1, 2))
    source.pin("m", 1)
    desired_model = source.desired_models()[0]["m"]
    assert dict(desired_model.versions) == {}
    assert "line 1" in desired_model.reason


def test_a_load_with_a_configuration_or_files_keeps_to_the_pin(source: Any, add_model: Any) -> None:
    add_model("m", ALL, versions=(1, 2))
    source.pin("m", 1)
    assert list(source.desired_model("m", CONFIG_JSON, {}).versions) == [1]
    sent = source.desired_model("m", CONFIG_JSON, {"5/model.bin": b""})
    assert "pinned to version 1" in sent.reason


def test_a_desired_state_from_before_a_pin_is_updated(source: Any, add_model: Any) -> None:
    for name in ("m", "n"):
        add_model(name, ALL, versions=(1, 2))
    before, _ = source.desired_models()
    source.pin("m", 1)
    now = source.with_pins(before)
    assert list(now["m"].versions) == [1]
    assert now["n"] is before["n"]
    source.unpin("m")
    assert source.with_pins(now) == before


def test_a_load_call_uses_only_settled_files_while_a_watcher_runs(source: Any, add_model: Any, root: Path) -> None:
    add_model("m", ALL, versions=(1, 2))
    at_rest = source.scanner.scan().models
    (root / "m" / "3").mkdir()
    assert source.versions("m") == (1, 2, 3)
    source.desired_models_for(at_rest)
    assert source.versions("m") == (1, 2)
    assert list(source.desired_model("m", None, {}).versions) == [1, 2]
    source.pin("m", 3)
    assert "which is not there" in source.desired_model("m", None, {}).reason
    source.desired_models_for(source.scanner.scan().models)
    assert list(source.desired_model("m", None, {}).versions) == [3]


def test_the_versions_on_disk_are_listed_without_regard_to_the_policy(source: Any, add_model: Any) -> None:
    add_model("m", 'backend: "identity"', versions=(1, 12, 3))
    assert source.versions("m") == (1, 3, 12)
    assert source.versions("nobody") == ()
    assert source.versions("../m") == ()


def test_pins_are_kept_and_read_again(tmp_path: Path) -> None:
    first = VersionPins(tmp_path)
    first.put("a", 3)
    first.put("b", 2**63 - 1)
    first.put("a", None)
    assert VersionPins(tmp_path).all() == {"b": 2**63 - 1}
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert first.is_durable
    assert not VersionPins().is_durable


def test_what_a_killed_server_left_of_a_pin_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    killed = (
        "import os, pathlib, signal, sys\n"
        "from edge_server.repository.version_pins import VersionPins\n"
        "pins = VersionPins(pathlib.Path(sys.argv[1]))\n"
        "pins.put('m', 1)\n"
        "os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)\n"
        "pins.put('m', 2)\n"
    )
    assert subprocess.run([sys.executable, "-c", killed, str(tmp_path)]).returncode == -signal.SIGKILL
    (tmp_path / "another.json").touch()
    assert len(list(tmp_path.iterdir())) == 3
    assert VersionPins(tmp_path).all() == {"m": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another.json", FILE_NAME]


def test_pins_from_many_threads_are_all_kept(tmp_path: Path) -> None:
    pins = VersionPins(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: pins.put(f"m{number}", number), range(40)))
    assert VersionPins(tmp_path).all() == {f"m{number}": number for number in range(40)}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"pins": 1}', '{"pins": {"m": true}}', '{"pins": {"m": -1}}', '{"pins": {"a/b": 1}}',
     '{"pins": {"m": 9223372036854775808}}', '{"pins": {"m": "1"}}', '{"pins": {"../m": 1}}', "[" * 100_000, "\0",
     "\xff" * 50],
)  # fmt: skip
def test_a_damaged_file_counts_as_none_with_a_warning(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        pins = VersionPins(tmp_path)
    assert pins.all() == {}
    assert "cannot be read" in caplog.text
    pins.put("m", 1)
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {"pins": {"m": 1}}


def test_a_pin_that_cannot_be_kept_is_not_put(tmp_path: Path) -> None:
    pins = VersionPins(tmp_path)
    pins.put("m", 1)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ServingFault, match="the pin cannot be kept"):
        pins.put("m", 2)
    assert pins.all() == {"m": 1}
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_a_state_directory_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServingFault, match="state directory"):
        VersionPins(tmp_path / "file")


def test_a_pin_is_put_where_the_folder_itself_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return plain(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    pins = VersionPins(tmp_path)
    assert pins.put("m", 3) is None
    assert pins.all() == VersionPins(tmp_path).all() == {"m": 3}, "what a restart finds is what holds"
