"""The lock of an engine's build, between processes: one holds it, and it is released when that one ends, in any way."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_server.plugins.tensorrt.builds import engine_cache as claims
from edge_server.plugins.tensorrt.builds.engine_cache import BuildLock, EngineCache, claim, holder
from edge_server.plugins.tensorrt.builds.engine_key import EngineKey

KEY = EngineKey({}, "0123456789abcdef0123456789abcdef")

HOLDER = """
import sys
from pathlib import Path
from edge_server.plugins.tensorrt.builds.engine_cache import claim
mine = claim(Path(sys.argv[1]))
assert mine is not None
print("mine", flush=True)
sys.stdin.read()
"""

RIVAL = """
import sys, time
from pathlib import Path
from edge_server.plugins.tensorrt.builds.engine_cache import claim
path, book = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(200):
    mine = claim(path)
    if mine is None:
        continue
    with mine:
        inside = book.with_name("inside")
        inside.touch(exist_ok=False)
        with open(book, "a") as file:
            file.write("x")
        inside.unlink()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.lock"


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def start(program: str, *words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, words)]
        begun.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def granted(path: Path) -> BuildLock:
    end_s = time.monotonic() + 30
    while True:
        found = claim(path)
        if found is not None:
            return found
        assert time.monotonic() < end_s, f"{holder(path)} has it for ever"
        time.sleep(0.01)


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_lock_holder_is_named_until_it_is_killed(path: Path, begin: Callable[..., subprocess.Popen[str]]) -> None:
    other = begin(HOLDER, path)
    assert heard(other) == "mine"
    assert claim(path) is None
    assert holder(path).startswith(f"process {other.pid} on ")
    other.kill()
    other.wait()
    # A crash leaves a file that is not locked.
    assert path.exists()
    with granted(path):
        assert holder(path).startswith(f"process {os.getpid()} on ")
    assert not path.exists()


def test_a_program_started_meanwhile_does_not_inherit_the_lock(
    path: Path, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    mine = granted(path)
    begin("input()")
    # Closed, not unlocked: as where this process is killed.
    os.close(mine._descriptor)  # type: ignore[arg-type]
    mine._descriptor = None
    granted(path).release()


def test_within_one_process_the_lock_is_given_once_and_may_be_released_twice(path: Path) -> None:
    first = claim(path)
    assert first is not None
    assert claim(path) is None
    first.release()
    first.release()
    second = claim(path)
    assert second is not None
    second.release()


def test_a_forked_child_does_not_keep_a_released_lock(path: Path) -> None:
    mine = granted(path)
    end, other_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(other_end)
        os.read(end, 1)
        os._exit(0)
    os.close(end)
    try:
        mine.release()
        again = claim(path)
        assert again is not None
        again.release()
    finally:
        os.close(other_end)
        os.waitpid(pid, 0)


def test_many_processes_that_lock_and_delete_the_file_exclude_each_other(
    path: Path, tmp_path: Path, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    rivals = [begin(RIVAL, path, tmp_path / "book") for _ in range(4)]
    assert [rival.wait(60) for rival in rivals] == [0, 0, 0, 0]
    assert (tmp_path / "book").read_text()
    assert not path.exists()


def test_a_file_deleted_between_opening_and_locking_gives_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_lock, tries = fcntl.flock, []

    def lock(descriptor: int, how: int) -> None:
        if not tries:
            path.unlink()
        tries.append(how)
        true_lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock)
    mine = claim(path)
    assert mine is not None
    assert len(tries) == 2
    monkeypatch.undo()
    assert claim(path) is None
    mine.release()


def test_without_file_locks_engines_are_still_built(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(claims.fcntl, "flock", lock)
    mine = claim(path)
    assert mine is not None
    assert claim(path) is not None
    mine.release()
    assert "cannot be locked: another server may build the same engine" in caplog.text


@pytest.mark.parametrize("said", [b"", b"\x1b[2J", b"\xff\xfe", b"x" * 10_000])
def test_the_holder_in_a_damaged_lock_file_is_verified(said: bytes, path: Path) -> None:
    path.write_bytes(said)
    words = holder(path)
    assert words
    assert words.isprintable()
    assert len(words) <= 300


def test_a_symlink_in_place_of_the_lock_file_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        claim(path)
    assert not (tmp_path / "victim").exists()


def old(path: Path) -> None:
    os.utime(path, (1, 1))


def test_old_leftovers_of_crashes_are_deleted_but_no_running_build(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    cache.open()
    other = EngineKey({}, "f" * 32)
    for key in (KEY, other):
        (cache.work_folder(key) / "engine.plan").write_bytes(b"half")
    mine = cache.claim(KEY)
    assert mine is not None
    left = tmp_path / "work" / f"{'a' * 32}.lock"
    left.touch()
    for path in (tmp_path / "work").iterdir():
        old(path)
    EngineCache(tmp_path).open()
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [KEY.digest, f"{KEY.digest}.lock"]
    assert cache.claim(KEY) is None
    mine.release()


def test_deleting_a_verified_engine_keeps_another_processs_build(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    cache.open()
    plan = cache.work_folder(KEY) / "engine.plan"
    plan.write_bytes(b"being built")
    cache.drop(KEY)
    assert plan.exists()
    cache.discard(KEY)
    assert not plan.exists()
