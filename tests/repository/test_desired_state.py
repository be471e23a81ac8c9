"""Wishes for the serving core, and load calls that bring a configuration or files along."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import BadModelConfig, InvalidRequest, LoadError, ServingFault
from edge_server.repository.desired_state import RepositorySource
from edge_server.repository.disk.load_call_files import OverriddenModel
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions

CONFIG = """
backend: "identity" version_policy { all { } }
input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }
"""
CONFIG_JSON = """{"backend": "identity", "max_batch_size": 2,
"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}]}"""


@pytest.fixture
def source(root: Path, tmp_path: Path, described: Any) -> Any:
    described("identity", "")
    (tmp_path / "scratch").mkdir()
    made = RepositorySource(Scanner([root]), ResolveOptions(), tmp_path / "scratch")
    yield made
    made.close()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_desired_state_of_a_repository_covers_every_model_and_its_versions(source: Any, add_model: Any) -> None:
    add_model("a", CONFIG, versions=(1, 2))
    add_model("b")
    add_model("broken", "nonsense")
    desired, warnings = source.desired_models()
    assert warnings == ()
    assert sorted(desired) == ["a", "b", "broken"] == list(source.names())
    assert sorted(desired["a"].versions) == [1, 2]
    assert desired["a"].versions[2].resolve().spec.name == "a"
    assert desired["broken"].versions == {}
    assert "line 1" in desired["broken"].reason
    with pytest.raises(BadModelConfig, match="no backend"):
        desired["b"].versions[1].resolve()


def test_an_unchanged_model_is_wished_for_with_the_same_fingerprint(source: Any, add_model: Any) -> None:
    add_model("m", CONFIG)
    assert source.desired_model("m", None, {}) == source.desired_models()[0]["m"]


def test_an_absent_model_has_no_desired_state(source: Any) -> None:
    assert source.desired_model("m", None, {}) is None
    assert source.desired_model("../m", "{}", {}) is None


def test_a_configuration_given_with_a_load_replaces_the_one_on_disk(source: Any, add_model: Any) -> None:
    add_model("m", CONFIG, versions=(1, 2))
    desired_model = source.desired_model("m", CONFIG_JSON, {})
    assert list(desired_model.versions) == [2]
    assert desired_model.versions[2].resolve().spec.max_batch_size == 2
    plain = source.desired_model("m", None, {})
    assert sorted(plain.versions) == [1, 2]
    assert plain.versions[2].fingerprint != desired_model.versions[2].fingerprint
    with pytest.raises(BadModelConfig, match="no_such_field"):
        source.desired_model("m", '{"no_such_field": 1}', {})


def test_files_given_with_a_load_stand_in_for_the_disk_until_the_next_load(
    source: Any, add_model: Any, tmp_path: Path
) -> None:
    add_model("m", CONFIG)
    desired_model = source.desired_model("m", CONFIG_JSON, {"7/model.bin": b"abc", "7/sub/more.bin": b""})
    found = desired_model.versions[7].resolve()
    assert (found.file.version_dir / "model.bin").read_bytes() == b"abc"
    (folder,) = (tmp_path / "scratch").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(source.desired_model("m", None, {}).versions) == [1]
    assert not folder.exists()
    with pytest.raises(LoadError, match="'m'"):
        desired_model.versions[7].resolve()


def test_files_make_a_model_that_is_in_no_repository(source: Any) -> None:
    assert source.desired_model("new", CONFIG_JSON, {"1/model.bin": b""}).versions[1].resolve().spec.name == "new"


def test_files_without_a_configuration_are_refused(source: Any) -> None:
    with pytest.raises(InvalidRequest, match="'config'"):
        source.desired_model("m", None, {"1/model.bin": b""})


@pytest.mark.parametrize(
    "key",
    ["", "1", "1/", "/1/a", "../a", "1/../../a", "1/..", "01/a", "x/a", "a", "config.pbtxt", "-1/a", "1/a\0b", "1\\a",
     "1/" + "a" * 2000, "./a", "1/a/../b"],
)  # fmt: skip
def test_a_path_that_is_not_inside_a_version_directory_is_refused_and_nothing_is_left(tmp_path: Path, key: str) -> None:
    with pytest.raises(BadModelConfig, match="model 'm'"):
        OverriddenModel("m", {key: b"x"}, CONFIG_JSON, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "files",
    [{"1/a": b"", "1/a/b": b""}, {"1/a/b": b"", "1/a": b""}, {"1/a": b"", "1//a": b""}, {}],
)
def test_paths_that_contradict_each_other_are_refused_and_nothing_is_left(tmp_path: Path, files: Any) -> None:
    with pytest.raises(BadModelConfig, match="files"):
        OverriddenModel("m", files, CONFIG_JSON, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["", "..", "../m", "a/b", "/tmp/m", "m\0"])
def test_a_model_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadModelConfig, match="name"):
        OverriddenModel(name, {"1/a": b""}, CONFIG_JSON, tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(st.text(st.sampled_from(list("1a./\\\0~ é")), max_size=12))
def test_no_path_ever_writes_outside_the_new_folder(tmp_path_factory: pytest.TempPathFactory, key: str) -> None:
    folder = tmp_path_factory.mktemp("box")
    try:
        written = OverriddenModel("m", {key: b"x"}, CONFIG_JSON, folder)
    except BadModelConfig:
        pass
    else:
        (made,) = folder.iterdir()
        assert [version.number for version in written.model.versions] == [int(PurePosixPath(key).parts[0])]
        assert written.model.path == made / "m"
        written.close()
        written.close()
    assert list(folder.iterdir()) == []


def test_loads_of_one_model_from_many_threads_leave_one_set_of_files(source: Any, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        desired = list(pool.map(lambda n: source.desired_model("m", CONFIG_JSON, {f"{n}/a": b"x"}), range(1, 25)))
    assert all(len(desired_model.versions) == 1 for desired_model in desired)
    assert len(list((tmp_path / "scratch").iterdir())) == 1


def test_a_load_of_a_model_in_no_repository_leaves_the_files_that_serve(source: Any) -> None:
    serving = source.desired_model("new", CONFIG_JSON, {"1/model.bin": b""})
    assert source.desired_model("new", None, {}) is None
    assert serving.versions[1].resolve({}).file.model_dir.is_dir(), "it may have to be loaded again from them"
    assert serving.versions[1].resolve({}).spec.name == "new"


def test_a_folder_that_cannot_be_locked_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ServingFault, match="no folder can be made"):
        OverriddenModel("m", {"1/model.bin": b""}, CONFIG_JSON, tmp_path)
    assert list(tmp_path.iterdir()) == []
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another test's, freed meanwhile
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    assert [link for link in links if link.startswith(str(tmp_path))] == []


def test_a_file_name_that_is_too_long_for_the_disk_is_the_clients_mistake(source: Any, add_model: Any) -> None:
    add_model("m", CONFIG)
    with pytest.raises(BadModelConfig, match="at most 255 bytes, given one of 300"):
        source.desired_model("m", CONFIG_JSON, {"1/" + "x" * 300: b""})
