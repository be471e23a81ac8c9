"""`edge-server sign` as a process: its files, its messages and its exit codes."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Sign = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sign(edge: Callable[..., subprocess.CompletedProcess[str]]) -> Sign:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        done = edge("sign", *map(str, arguments))
        assert "No module named" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "detector"
    for version in (1, 2):
        (path / str(version)).mkdir(parents=True)
        (path / str(version) / "model.onnx").write_bytes(b"%d" % version)
    (path / "config.pbtxt").write_text("")
    (path / ".hidden").write_text("")
    return path


def test_checksums_and_a_signature_are_written_for_the_model_and_each_version(
    sign: Sign, model: Path, tmp_path: Path
) -> None:
    done = sign("--new-key", tmp_path / "key", model)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"--signature-public-key={tmp_path / 'key.pub'}" in done.stdout
    assert f"a server that serves '{model}' now loads it again" in done.stdout
    for folder, subject, name in (
        (model, "model=detector", "config.pbtxt"),
        (model / "2", "model=detector version=2", "model.onnx"),
    ):
        first, *entries = (folder / "SHA256SUMS").read_text().splitlines()
        assert first == f"# edge-server {subject}"
        assert [line.split("  ")[1] for line in entries] == [name]
        assert len((folder / "SHA256SUMS.sig").read_bytes()) == 64
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_signing_twice_writes_the_same(sign: Sign, model: Path, tmp_path: Path) -> None:
    sign("--new-key", tmp_path / "key", model)
    before = (model / "1/SHA256SUMS").read_bytes(), (model / "1/SHA256SUMS.sig").read_bytes()
    assert sign("--key", tmp_path / "key", model).returncode == 0
    assert ((model / "1/SHA256SUMS").read_bytes(), (model / "1/SHA256SUMS.sig").read_bytes()) == before
    assert sorted(path.name for path in model.iterdir() if path.name.startswith(".")) == [".hidden"]


def test_without_a_key_an_old_signature_is_deleted(sign: Sign, model: Path, tmp_path: Path) -> None:
    sign("--new-key", tmp_path / "key", model)
    assert sign(model).returncode == 0
    assert not (model / "1/SHA256SUMS.sig").exists()


def test_a_key_is_never_overwritten(sign: Sign, model: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("precious")
    done = sign("--new-key", tmp_path / "key", model)
    assert done.returncode == 2
    assert "cannot be written: File exists" in done.stderr
    assert (tmp_path / "key").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "name the directory"),
        (("{tmp}/absent",), 1, "is not the directory of a model"),
        (("{tmp}",), 1, "has no version directories"),
        (("--key", "{tmp}/absent", "{model}"), 2, "cannot be read"),
        (("--key", "{model}/config.pbtxt", "{model}"), 2, "not an Ed25519 private key in PEM"),
    ],
)
def test_a_model_that_cannot_be_signed_is_one_line_and_an_exit_code(
    sign: Sign, model: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = sign(*[item.format(tmp=tmp_path, model=model) for item in arguments])
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_half_a_key_pair_is_not_left_behind(sign: Sign, tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_text("of another one")
    done = sign("--new-key", tmp_path / "key")
    assert done.returncode != 0
    assert "cannot be written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["key.pub"]
    assert (tmp_path / "key.pub").read_text() == "of another one"


def test_a_checksum_file_that_cannot_be_written_leaves_no_file(sign: Sign, model: Path) -> None:
    (model / "1" / "SHA256SUMS").mkdir()
    done = sign(model)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert sorted(path.name for path in (model / "1").iterdir()) == ["SHA256SUMS", "model.onnx"]
