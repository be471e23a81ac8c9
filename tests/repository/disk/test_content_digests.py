"""SHA-256 of a version's files: the files that it covers, when it is known, and which files are read again."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_server.repository.disk.scan import Scanner
from edge_server.repository.disk.served_version_digests import CACHE_NAME, ContentDigests
from tests.kit.eventually import eventually


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
        assert eventually(lambda: digests.is_idle)
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


def await_tick() -> None:
    """Wait until a change of a file gets a change time that no earlier one has: the kernel's clock for files advances
    every few ms."""
    with tempfile.TemporaryFile() as probe:
        before_ns = os.fstat(probe.fileno()).st_ctime_ns
        while os.fstat(probe.fileno()).st_ctime_ns == before_ns:
            os.fchmod(probe.fileno(), 0o600)


def rewrite(file: Path, content: bytes) -> None:
    """Write a file in place, and set the time that it had."""
    await_tick()
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat()[:8] == before[:8]


class TestContentMarks:
    """Fingerprints of a scanner that asks for the content of files whose change time alone is new."""

    @pytest.fixture
    def digests(self, root: Path) -> ContentDigests:
        scanner = Scanner([root])
        digests = ContentDigests(scanner.find)
        scanner.has_changed_content = digests.has_changed
        return digests

    @pytest.fixture
    def fingerprint(self, digests: ContentDigests, model: Path) -> Callable[[], str]:
        def scan() -> str:
            found = digests._find("m")
            assert found is not None
            return found.fingerprint_of(1)

        return scan

    @pytest.fixture
    def loaded(self, digests: ContentDigests, fingerprint: Callable[[], str]) -> str:
        """The fingerprint of version 1, of which the digest is known."""
        found = fingerprint()
        digests.compute("m", 1)
        assert eventually(lambda: digests.is_idle)
        assert digests.get("m", 1, found)
        return found

    def test_a_file_rewritten_in_place_with_its_old_time_changes_the_fingerprint(
        self, model: Path, digests: ContentDigests, fingerprint: Callable[[], str], loaded: str
    ) -> None:
        rewrite(model / "1/model.onnx", b"X")
        changed = fingerprint()
        assert changed != loaded
        assert fingerprint() == changed
        # The digest of the former content is not that of the new one.
        assert digests.get("m", 1, changed) == ""
        digests.compute("m", 1)
        assert eventually(lambda: digests.is_idle)
        assert digests.get("m", 1, changed) == sha256sum(model, 1)
        rewrite(model / "1/model.onnx", b"Y")
        assert fingerprint() not in (loaded, changed)

    def test_a_file_outside_the_versions_changes_the_fingerprint_too(
        self, model: Path, fingerprint: Callable[[], str], loaded: str
    ) -> None:
        rewrite(model / "labels.txt", b"cap")
        assert fingerprint() != loaded

    def test_modes_links_and_copies_do_not_change_the_fingerprint(
        self, root: Path, model: Path, fingerprint: Callable[[], str], loaded: str
    ) -> None:
        for name in ("1/model.onnx", "1/weights/a.bin", "config.pbtxt"):
            (model / name).chmod(0o644 if (model / name).stat().st_mode & 0o77 == 0 else 0o600)
            assert fingerprint() == loaded
            os.link(model / name, root.parent / name.replace("/", "_"))
            assert fingerprint() == loaded
        rewrite(model / "1/model.onnx", (model / "1/model.onnx").read_bytes())
        assert fingerprint() == loaded

    def test_a_change_is_seen_behind_a_scan_in_the_middle_of_the_write(
        self, model: Path, fingerprint: Callable[[], str], loaded: str
    ) -> None:
        file = model / "1/model.onnx"
        before = file.stat()
        file.write_bytes(b"")
        middle = fingerprint()
        file.write_bytes(b"X")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert len({loaded, middle, fingerprint()}) == 3

    def test_a_change_before_the_content_is_known_changes_the_fingerprint(
        self, model: Path, fingerprint: Callable[[], str]
    ) -> None:
        before = fingerprint()
        rewrite(model / "1/model.onnx", b"X")
        assert fingerprint() != before

    def test_content_that_was_read_after_the_change_is_not_taken_for_the_loaded_one(
        self, model: Path, digests: ContentDigests, fingerprint: Callable[[], str]
    ) -> None:
        before = fingerprint()
        rewrite(model / "1/model.onnx", b"X")
        digests.compute("m", 1)
        assert eventually(lambda: digests.is_idle)
        assert fingerprint() != before

    def test_the_content_is_asked_for_once_if_two_threads_scan_at_the_same_time(self, root: Path, model: Path) -> None:
        asked: list[int] = []
        is_asked_again = threading.Event()

        def has_changed_content(model: object, version: int, since_ns: int) -> bool:
            asked.append(version)
            if len(asked) > 1:
                is_asked_again.set()
            # Time for the other thread, which would ask as well.
            is_asked_again.wait(0.3)
            return False

        scanner = Scanner([root])
        scanner.has_changed_content = has_changed_content
        scanner.scan()
        await_tick()
        (model / "1/model.onnx").chmod(0o600)
        with ThreadPoolExecutor(2) as pool:
            for scan in [pool.submit(scanner.scan) for _ in range(2)]:
                scan.result()
        assert asked == [1]
