"""What a look at the repositories finds: models, versions, desired, fingerprints, and what it passes over."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.model_spec import VersionPolicy
from edge_server.errors import BadModelConfig, ServingFault
from edge_server.repository.disk import scan
from edge_server.repository.disk.file_fingerprint import MAX_FILES
from edge_server.repository.disk.scan import (
    ModelDirectory,
    Scanner,
    is_model_name,
    parse_version,
    select_versions,
    with_config,
)
from edge_server.repository.model_config import pbtxt


def _only(root: Path, config_name: str = "") -> ModelDirectory:
    (model,) = Scanner([root], config_name).scan().models.values()
    return model


def test_numeric_directories_are_versions_and_all_else_is_not(root: Path, add_model: Any) -> None:
    path = add_model("m", None, versions=(0, 1, 10, 2))
    for other in ("01", "00", "-1", "1.0", "warmup", "initial_state", "configs", "²", "99999999999999999999"):
        (path / other).mkdir()
    (path / "7").write_text("a file, not a version")
    snapshot = Scanner([root]).scan()
    model = snapshot.models["m"]
    assert [version.number for version in model.versions] == [0, 1, 2, 10]
    assert model.desired_versions == (10,)
    assert sum("leading zeros" in warning for warning in snapshot.warnings) == 4


@pytest.mark.parametrize(
    ("policy", "desired_versions"),
    [
        ("", (3,)),
        ("version_policy { }", (3,)),
        ("version_policy { latest { } }", (3,)),
        ("version_policy { latest { num_versions: 2 } }", (2, 3)),
        ("version_policy { latest { num_versions: 4000000000 } }", (1, 2, 3)),
        ("version_policy { all { } }", (1, 2, 3)),
        ("version_policy { specific { versions: [ 3, 1, 9 ] } }", (1, 3)),
    ],
)
def test_the_version_policy_chooses_the_desired_versions(
    root: Path, add_model: Any, policy: str, desired_versions: Any
) -> None:
    add_model("m", policy, versions=(1, 2, 3))
    assert _only(root).desired_versions == desired_versions


def test_specific_versions_that_are_absent_are_a_warning_and_none_at_all_is_a_problem(
    root: Path, add_model: Any
) -> None:
    add_model("some", "version_policy { specific { versions: [ 1, 9 ] } }")
    add_model("none", "version_policy { specific { versions: [ 8 ] } }")
    snapshot = Scanner([root]).scan()
    assert any("'some'" in warning and "[9]" in warning for warning in snapshot.warnings)
    assert snapshot.models["none"].desired_versions == ()
    assert "[8]" in snapshot.models["none"].problem


@given(st.sets(st.integers(0, 2**63 - 1), max_size=6), st.integers(1, 8), st.sets(st.integers(0, 9), max_size=4))
def test_the_desired_versions_are_always_a_sorted_subset_of_the_present_ones(
    present: set[int], latest: int, specific: set[int]
) -> None:
    for policy in (VersionPolicy(latest), VersionPolicy(None), VersionPolicy(None, tuple(specific))):
        desired_versions = select_versions(policy, present)
        assert set(desired_versions) <= present
        assert list(desired_versions) == sorted(desired_versions)
    assert len(select_versions(VersionPolicy(latest), present)) == min(latest, len(present))


def test_a_version_is_a_plain_decimal_number_of_63_bits() -> None:
    table = [
        ("0", 0),
        ("12", 12),
        ("01", None),
        ("", None),
        ("+1", None),
        ("1_0", None),
        ("٣", None),
        (str(2**63 - 1), 2**63 - 1),
        (str(2**63), None),
        ("9" * 5000, None),
    ]
    assert [(name, parse_version(name)) for name, _ in table] == table


def test_a_named_configuration_is_preferred_where_it_is_there(root: Path, add_model: Any) -> None:
    path = add_model("m", "", {"configs/orin.pbtxt": b"version_policy { all { } }"}, versions=(1, 2))
    assert _only(root).config_path == path / "config.pbtxt"
    assert _only(root, "orin").config_path == path / "configs" / "orin.pbtxt"
    assert _only(root, "orin").desired_versions == (1, 2)
    assert _only(root, "nuc").config_path == path / "config.pbtxt"


def test_a_model_in_two_repositories_cannot_be_served(tmp_path: Path, root: Path, add_model: Any) -> None:
    second = tmp_path / "second"
    add_model("m")
    add_model("m", at=second)
    add_model("fine", at=second)
    snapshot = Scanner([root, second]).scan()
    assert snapshot.models["m"].desired_versions == ()
    for folder in (root, second):
        assert str(folder / "m") in snapshot.models["m"].problem
    assert snapshot.models["fine"].desired_versions == (1,)
    assert Scanner([root, second]).find("m") == snapshot.models["m"]


def test_one_repository_given_twice_is_one_repository(tmp_path: Path, root: Path, add_model: Any) -> None:
    add_model("m")
    (tmp_path / "link").symlink_to(root)
    model = Scanner([root, root, tmp_path / "link"]).scan().models["m"]
    assert (model.problem, model.desired_versions) == ("", (1,))


@pytest.mark.parametrize("kind", ["absent", "file"])
def test_a_repository_that_cannot_be_read_is_an_error_not_an_empty_desired_state(
    tmp_path: Path, root: Path, kind: str
) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_text("")
    with pytest.raises(ServingFault, match=r"model repository '.*' cannot be read"):
        Scanner([root, path]).scan()


def test_hidden_and_unfit_directories_are_passed_over(root: Path, add_model: Any) -> None:
    for name in (
        ".git",
        "..data",
        "__pycache__",
        "lost+found",
        "has space",
        "a%20b",
        "a?b",
        "a#b",
        "tab\tname",
        "back\\slash",
    ):
        (root / name / "1").mkdir(parents=True)
    os.mkdir(os.fsencode(root) + b"/\xff\xfe")
    (root / "README.md").write_text("not a model")
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root / "loop")
    add_model("größe-1.0_b")
    snapshot = Scanner([root]).scan()
    assert list(snapshot.models) == ["größe-1.0_b"]
    assert len([warning for warning in snapshot.warnings if "does not fit" in warning]) == 7
    assert Scanner([root]).names() == ("größe-1.0_b",)
    passed_over = Scanner([root]).passed_over()
    assert sorted(passed_over.values()) == sorted(snapshot.warnings)
    assert all(name.isprintable() and name.encode() for name in passed_over)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["", ".", "..", "../m", "m/1", "/m", "m\0", "a b", "x" * 256, ".hidden", "m\n"])
def test_a_name_that_could_leave_the_repository_finds_nothing(root: Path, add_model: Any, name: str) -> None:
    add_model("m")
    assert not is_model_name(name)
    assert Scanner([root]).find(name) is None


def test_a_directory_without_versions_is_a_model_with_a_problem(root: Path) -> None:
    (root / "empty").mkdir()
    model = _only(root)
    assert "no version directories" in model.problem
    assert model.desired_versions == ()


def test_a_broken_configuration_is_the_models_problem_and_an_override_may_cure_it(root: Path, add_model: Any) -> None:
    add_model("m", "version_policy { lates { } }", versions=(1, 2))
    add_model("fine")
    model = Scanner([root]).scan().models["m"]
    assert "line 1" in model.problem
    assert Scanner([root]).scan().models["fine"].desired_versions == (1,)
    cured = with_config(model, '{"version_policy": {"all": {}}}')
    assert (cured.desired_versions, cured.problem) == ((1, 2), "")
    with pytest.raises(BadModelConfig):
        with_config(model, "{")


def _change(path: Path, how: str) -> None:
    weights, config = path / "1" / "sub" / "weights", path / "config.pbtxt"
    match how:
        case "weights grow":
            weights.write_bytes(b"more")
        case "same size, new time":
            os.utime(weights, ns=(1, 1))
        case "replaced, same size and time":
            found = weights.stat()
            fresh = path / "1" / "sub" / "new"
            fresh.write_bytes(b"x")
            os.utime(fresh, ns=(found.st_atime_ns, found.st_mtime_ns))
            fresh.rename(weights)
        case "file added":
            (path / "1" / "sub" / "more").write_bytes(b"")
        case "file removed":
            weights.unlink()
        case "config":
            config.write_text("max_batch_size: 2")
        case "warmup file":
            (path / "warmup").mkdir()
            (path / "warmup" / "x").write_bytes(b"x")


@pytest.mark.parametrize(
    "how",
    ["weights grow", "same size, new time", "replaced, same size and time", "file added", "file removed", "config",
     "warmup file"],
)  # fmt: skip
def test_any_change_below_a_model_changes_its_fingerprint(root: Path, add_model: Any, how: str) -> None:
    path = add_model("m", "", {"1/sub/weights": b"x"})
    scanner = Scanner([root])
    before = scanner.scan().models["m"].fingerprint_of(1)
    assert scanner.scan().models["m"].fingerprint_of(1) == before
    _change(path, how)
    assert scanner.scan().models["m"].fingerprint_of(1) != before


def test_a_change_of_one_version_leaves_the_others_as_they_are(root: Path, add_model: Any) -> None:
    path = add_model("m", "version_policy { all { } }", versions=(1, 2))
    before = _only(root)
    (path / "2" / "weights").write_bytes(b"x")
    (path / "3").mkdir()
    after = _only(root)
    assert after.fingerprint_of(1) == before.fingerprint_of(1)
    assert after.fingerprint_of(2) != before.fingerprint_of(2)
    with pytest.raises(KeyError):
        after.fingerprint_of(4)


def test_what_python_and_editors_leave_behind_changes_nothing(root: Path, add_model: Any) -> None:
    path = add_model("m", "")
    before = _only(root)
    (path / "1" / "__pycache__").mkdir()
    (path / "1" / "__pycache__" / "model.pyc").write_bytes(b"x")
    (path / ".config.pbtxt.swp").write_bytes(b"x")
    assert _only(root) == before


def test_links_in_a_circle_and_links_to_nowhere_do_not_stop_the_look(root: Path, add_model: Any) -> None:
    path = add_model("m", "")
    (path / "1" / "up").symlink_to(path)
    (path / "1" / "self").symlink_to("self")
    (path / "1" / "gone").symlink_to("nowhere")
    assert _only(root).desired_versions == (1,)


def test_a_link_to_a_vast_directory_is_the_models_problem(
    root: Path, add_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_FILES >= 10_000
    monkeypatch.setattr("edge_server.repository.disk.file_fingerprint.MAX_FILES", 10)
    add_model("m", "", {f"1/{number}": b"" for number in range(20)})
    assert "more than 10 files" in _only(root).problem


def test_what_goes_wrong_at_one_model_is_the_problem_of_that_model_alone(
    root: Path, add_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model("good", "")
    add_model("huge", "input { data_type: 99999999999 }")
    add_model("strange", "")
    stated = scan.read_file

    def read_file(path: Path, model: str) -> Any:
        if model == "strange":
            raise KeyError("nobody foresaw this")
        return stated(path, model)

    monkeypatch.setattr(scan, "read_file", read_file)
    scanner = Scanner([root])
    models = scanner.scan().models
    assert models["good"].desired_versions == (1,)
    assert "99999999999" in models["huge"].problem
    assert "KeyError: 'nobody foresaw this'" in models["strange"].problem
    assert scanner.find("strange") == models["strange"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_model_that_may_not_be_read_is_its_own_problem(root: Path, add_model: Any) -> None:
    path = add_model("m", "")
    add_model("fine")
    path.chmod(0)
    try:
        snapshot = Scanner([root]).scan()
    finally:
        path.chmod(0o700)
    assert "cannot be read" in snapshot.models["m"].problem
    assert snapshot.models["fine"].desired_versions == (1,)


def test_a_configuration_is_read_again_only_when_it_changed(
    root: Path, add_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_model("m", "version_policy { all { } }", versions=(1, 2))
    read: list[Path] = []
    original = pbtxt.read_file
    monkeypatch.setattr(
        "edge_server.repository.disk.scan.read_file", lambda at, model: (read.append(at), original(at, model))[1]
    )
    scanner = Scanner([root])
    for _ in range(5):
        assert scanner.scan().models["m"].desired_versions == (1, 2)
    assert len(read) == 1
    (path / "config.pbtxt").write_text("version_policy { latest { } }  # changed")
    assert scanner.scan().models["m"].desired_versions == (2,)
    assert len(read) == 2


def test_a_model_that_disappears_is_gone_from_the_next_snapshot(root: Path, add_model: Any) -> None:
    path = add_model("m", "")
    scanner = Scanner([root])
    assert scanner.find("m") == scanner.scan().models["m"]
    shutil.rmtree(path)
    assert scanner.scan().models == {}
    assert scanner.find("m") is None


def test_an_empty_repository_is_an_empty_snapshot(root: Path) -> None:
    assert Scanner([root]).scan().models == {}


def test_the_message_about_a_model_file_outside_of_any_folder_says_where_it_belongs(root: Path, add_model: Any) -> None:
    add_model("m", None, versions=(1,))
    (root / "yolov8n.onnx").write_bytes(b"")
    (root / "README.md").write_text("no model")
    snapshot = Scanner([root]).scan()
    assert sorted(snapshot.models) == ["m"]
    (warning,) = snapshot.warnings
    assert f"'{root}/yolov8n.onnx' was skipped" in warning
    assert f"move it to '{root}/yolov8n/1/model.onnx'" in warning


def test_the_message_about_a_model_without_versions_says_where_its_files_belong(root: Path) -> None:
    (root / "flat").mkdir()
    (root / "flat" / "flat.onnx").write_bytes(b"")
    assert _only(root).problem.endswith(f"move 'flat.onnx' to '{root}/flat/1/model.onnx'")


def test_a_model_looked_up_in_the_middle_of_a_scan_does_not_disturb_it(root: Path, add_model: Any) -> None:
    add_model("a", "max_batch_size: 1")
    add_model("b")
    scanner = Scanner([root])
    scanner.scan()
    known = next(iter(scanner._policies.values()))
    numbers = itertools.count()

    class Busy(type(root)):  # type: ignore[misc]
        """A path that another thread remembers one more configuration during the comparison of."""

        def __hash__(self) -> int:
            scanner._policies[root / f"other{next(numbers)}"] = known
            return super().__hash__()

    scanner._policies[Busy(root / "gone" / "config.pbtxt")] = known
    assert sorted(scanner.scan().models) == ["a", "b"]


def test_a_model_whose_files_did_not_change_is_the_same_object_in_the_next_scan(root: Path, add_model: Any) -> None:
    paths = {
        name: add_model(name, "max_batch_size: 1", files={"1/weights": b"1"})
        for name in ("same", "file", "mode", "beside")
    }
    scanner = Scanner([root])
    before = scanner.scan_changed()
    (paths["file"] / "1" / "weights").write_bytes(b"22")
    (paths["mode"] / "config.pbtxt").chmod(0o600)
    (paths["beside"] / "1" / "weights.part").write_bytes(b"")
    after = scanner.scan_changed(before)
    assert [name for name in sorted(paths) if after.models[name] is before.models[name]] == ["same"]
