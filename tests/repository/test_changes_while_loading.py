"""A load uses the files that were scanned, or fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import BadModelConfig, ChangedWhileLoading
from edge_server.repository.desired_state import RepositorySource
from edge_server.repository.disk import scan
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions

CONFIG = """
backend: "identity" version_policy { all { } }
input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }
"""


@pytest.fixture
def source(root: Path, described: Any) -> RepositorySource:
    described("identity", "")
    return RepositorySource(Scanner([root]), ResolveOptions())


@pytest.fixture
def followed(source: RepositorySource) -> Callable[[], DesiredModel]:
    """The desired state of `m` as the watcher publishes it."""
    return lambda: source.desired_models_for(source.scanner.scan_changed().models)["m"]


@pytest.fixture
def path(add_model: Any) -> Path:
    made: Path = add_model("m", CONFIG, files={"1/weights": b"1", "2/weights": b"2"}, versions=(1, 2))
    return made


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("the configuration is corrected", lambda path: (path / "config.pbtxt").write_text(CONFIG + "max_batch_size: 4")),
    ("the file is written anew", lambda path: (path / "1" / "weights").write_bytes(b"x")),
    ("the file is replaced", lambda path: shutil.copy(path / "2" / "weights", path / "1" / "weights")),
    ("the file is gone", lambda path: (path / "1" / "weights").unlink()),
    ("the version is gone", lambda path: shutil.rmtree(path / "1")),
    ("the model is gone", shutil.rmtree),
]


@pytest.mark.parametrize("change", [row[1] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_files_that_changed_after_the_look_are_not_loaded_in_its_name(
    path: Path, followed: Any, change: Callable[[Path], object]
) -> None:
    desired_model = followed().versions[1]
    assert desired_model.resolve({}).spec.name == "m"
    change(path)
    with pytest.raises(ChangedWhileLoading, match="'m' version 1"):
        desired_model.resolve({})


@pytest.mark.parametrize("change", [row[1] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_files_that_change_while_a_version_is_opened_fail_it(
    path: Path, followed: Any, change: Callable[[Path], object]
) -> None:
    resolved = followed().versions[1].resolve({})
    resolved.confirm()
    change(path)
    with pytest.raises(ChangedWhileLoading, match="changed"):
        resolved.confirm()


def test_what_else_happens_beside_a_version_does_not_matter_to_it(path: Path, followed: Any) -> None:
    resolved = followed().versions[1].resolve({})
    (path / "1" / "compiled.cache").write_bytes(b"made by the model while it was opened")
    (path / "2" / "weights").write_bytes(b"other")
    (path / "3").mkdir()
    resolved.confirm()


def test_files_that_are_again_what_they_were_can_be_loaded(path: Path, followed: Any, tmp_path: Path) -> None:
    desired_model = followed().versions[1]
    os.rename(path / "1", tmp_path / "aside")
    with pytest.raises(ChangedWhileLoading):
        desired_model.resolve({})
    os.rename(tmp_path / "aside", path / "1")
    desired_model.resolve({}).confirm()


def test_half_a_file_has_no_error_of_its_own(path: Path, followed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desired_model = followed().versions[1]

    def read_half(*_: object) -> None:
        (path / "config.pbtxt").write_text(CONFIG[:20])
        raise BadModelConfig("expected a quote")

    monkeypatch.setattr("edge_server.repository.resolve_version._read", read_half)
    with pytest.raises(ChangedWhileLoading, match=r"config\.pbtxt' changed while it was loaded"):
        desired_model.resolve({})


def test_without_a_watcher_a_load_takes_the_files_that_are_there(path: Path, source: RepositorySource) -> None:
    desired_model = source.desired_models()[0]["m"].versions[1]
    (path / "1" / "weights").write_bytes(b"other")
    desired_model.resolve({}).confirm()


def test_a_look_has_no_policy_that_is_newer_than_its_fingerprint(
    path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the versions that an unsettled configuration leaves out would go at once: its file seems to be the old."""
    scanner = Scanner([root])
    before = scanner.scan_changed().models["m"]
    plain = scan.read_entries

    def written_meanwhile(folder: Path) -> Any:
        entries = plain(folder)
        (path / "config.pbtxt").write_text("")
        return entries

    with monkeypatch.context() as patched:
        patched.setattr(scan, "read_entries", written_meanwhile)
        during = scanner.scan_changed().models["m"]
    after = scanner.scan_changed().models["m"]
    assert (before.desired_versions, after.desired_versions) == ((1, 2), (2,))
    assert during.fingerprint == after.fingerprint != before.fingerprint
    assert during.desired_versions == before.desired_versions
