"""SHA-256 of a version's files: the files that it covers, when it is known, and which files are read again."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_server.repository.content_digests import CACHE_NAME, ContentDigests
from edge_server.repository.scan import Scanner


@pytest.fixture
def model(root: Path) -> Path:
    folder = root / "m"
    for version in (1, 2):
        (folder / str(version) / "weights").mkdir(parents=True)
        (folder / str(version) / "model.onnx").write_bytes(b"%d" % version)
        (folder / str(version) / "weights/a.bin").write_bytes(b"weights")
    (folder / "config.pbtxt").write_text("max_batch_size: 1")
    (folder / "labels.txt").write_text("cup")
    for left_out in (".hidden", "1/SHA256SUMS", "1/SHA256SUMS.sig"):
        (folder / left_out).write_text("left out")
    return folder


@pytest.fixture
def digest_of(root: Path) -> Callable[..., str]:
    """`digest_of(digests, version)`: compute, wait until the thread has ended, and return the digest."""

    def call(digests: ContentDigests, version: int = 1) -> str:
        model = Scanner([root]).find("m")
        assert model is not None
        digests.compute("m", version)
        end = time.monotonic() + 20
        while not digests.is_idle:
            assert time.monotonic() < end
            time.sleep(0.001)
        return digests.get("m", version, model.fingerprint_of(version))

    return call


def sha256sum(model: Path, version: int) -> str:
    names = ["config.pbtxt", "labels.txt", f"{version}/model.onnx", f"{version}/weights/a.bin"]
    lines = subprocess.run(["sha256sum", *sorted(names)], cwd=model, capture_output=True, check=True).stdout
    done = subprocess.run(["sha256sum"], input=lines, capture_output=True, check=True)
    return "sha256:" + done.stdout.decode().split()[0]


def test_it_is_that_of_the_lines_of_sha256sum(root: Path, model: Path, digest_of: Callable[..., str]) -> None:
    digests = ContentDigests(Scanner([root]).find)
    for version in (1, 2):
        assert digest_of(digests, version) == sha256sum(model, version)
    digests.close()


@pytest.mark.parametrize("name", ["1/model.onnx", "1/weights/a.bin", "config.pbtxt", "labels.txt"])
def test_it_changes_with_each_file(root: Path, model: Path, name: str, digest_of: Callable[..., str]) -> None:
    digests = ContentDigests(Scanner([root]).find)
    before = digest_of(digests)
    (model / name).write_text("other")
    assert digest_of(digests) not in ("", before)
    digests.close()


def test_it_is_not_that_of_files_that_are_not_loaded(root: Path, model: Path, digest_of: Callable[..., str]) -> None:
    digests = ContentDigests(Scanner([root]).find)
    found = Scanner([root]).find("m")
    assert found is not None
    loaded = found.fingerprint_of(1)
    (model / "1/model.onnx").write_bytes(b"newer, and not loaded")
    assert digest_of(digests) != ""
    assert digests.get("m", 1, loaded) == ""
    # A renewal has the same files, a load request's configuration has not.
    now = Scanner([root]).find("m")
    assert now is not None
    assert digests.get("m", 1, now.fingerprint_of(1) + "+engine") != ""
    assert digests.get("m", 1, now.fingerprint_of(1) + ".0f") == ""
    digests.close()


def test_files_are_read_once_also_over_a_restart(
    root: Path, model: Path, tmp_path: Path, digest_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ContentDigests(Scanner([root]).find, tmp_path)
    expected = digest_of(first)
    first.close()
    stored = json.loads((tmp_path / CACHE_NAME).read_text())["files"]
    assert len(stored) == 4
    read: list[Path] = []
    monkeypatch.setattr(ContentDigests, "_read", lambda self, path: read.append(path) or "0" * 64)
    second = ContentDigests(Scanner([root]).find, tmp_path)
    assert digest_of(second) == expected
    assert read == []
    second.close()


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3}', "[" * 100_000])
def test_a_damaged_cache_is_made_again(
    root: Path,
    model: Path,
    tmp_path: Path,
    content: str,
    digest_of: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / CACHE_NAME).write_text(content)
    digests = ContentDigests(Scanner([root]).find, tmp_path)
    assert digest_of(digests) == sha256sum(model, 1)
    digests.close()
    assert "is not used" in caplog.text
    assert len(json.loads((tmp_path / CACHE_NAME).read_text())["files"]) == 4


def test_files_are_read_at_the_lowest_priority(
    root: Path, model: Path, digest_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    priorities: list[int] = []

    def read(self: ContentDigests, path: Path) -> str:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return "0" * 64

    monkeypatch.setattr(ContentDigests, "_read", read)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    digests = ContentDigests(Scanner([root]).find)
    digest_of(digests)
    digests.close()
    assert priorities == [19] * 4
    # On Linux the priority is that of a thread, and not of the threads that serve.
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_model_that_is_gone_has_none(root: Path, model: Path) -> None:
    digests = ContentDigests(Scanner([root]).find)
    digests.compute("other", 1)
    digests.compute("m", 9)
    digests.close()
    assert digests.get("m", 9, "") == ""
