"""The right to build an engine, between processes: one has it, and it ends with whoever has it, however they end."""

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


def test_another_process_has_it_and_is_named_until_it_is_killed(
    path: Path, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    other = begin(HOLDER, path)
    assert heard(other) == "mine"
    assert claim(path) is None
    assert holder(path).startswith(f"process {other.pid} on ")
    other.kill()
    other.wait()
    # What a crash leaves is a file that nobody has locked.
    assert path.exists()
    with granted(path):
        assert holder(path).startswith(f"process {os.getpid()} on ")
    assert not path.exists()


def test_a_program_that_is_started_meanwhile_does_not_have_it(
    path: Path, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    mine = granted(path)
    begin("input()")
    # Closed, not unlocked: as where this process is killed.
    os.close(mine._descriptor)  # type: ignore[arg-type]
    mine._descriptor = None
    granted(path).release()


def test_within_one_process_it_is_given_once_and_may_be_let_go_of_twice(path: Path) -> None:
    first = claim(path)
    assert first is not None
    assert claim(path) is None
    first.release()
    first.release()
    second = claim(path)
    assert second is not None
    second.release()


def test_a_child_that_was_forked_meanwhile_does_not_keep_what_was_let_go_of(path: Path) -> None:
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


def test_many_processes_that_take_and_delete_it_are_never_inside_together(
    path: Path, tmp_path: Path, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    rivals = [begin(RIVAL, path, tmp_path / "book") for _ in range(4)]
    assert [rival.wait(60) for rival in rivals] == [0, 0, 0, 0]
    assert (tmp_path / "book").read_text()
    assert not path.exists()


def test_a_file_that_was_deleted_between_opening_and_locking_is_not_taken_for_the_right(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_file_system_without_locks_costs_the_guarantee_not_the_engine(
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
def test_what_a_damaged_file_says_of_its_holder_is_not_believed_blindly(said: bytes, path: Path) -> None:
    path.write_bytes(said)
    words = holder(path)
    assert words
    assert words.isprintable()
    assert len(words) <= 300


def test_a_link_in_the_place_of_the_file_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        claim(path)
    assert not (tmp_path / "victim").exists()


def old(path: Path) -> None:
    os.utime(path, (1, 1))


def test_a_cache_tidies_up_what_crashes_left_long_ago_but_nothing_that_is_being_built(tmp_path: Path) -> None:
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


def test_throwing_away_a_verified_engine_leaves_what_another_process_builds_in_its_place(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    cache.open()
    plan = cache.work_folder(KEY) / "engine.plan"
    plan.write_bytes(b"being built")
    cache.drop(KEY)
    assert plan.exists()
    cache.discard(KEY)
    assert not plan.exists()
