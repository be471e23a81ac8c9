"""The watcher on a real file system: the desired state after files came, changed, moved and went."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from watchdog.observers.api import EventQueue, ObservedWatch
from watchdog.observers.inotify import InotifyEmitter

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import BadModelConfig, ServingFault
from edge_server.repository.desired_state import RepositorySource
from edge_server.repository.disk import file_events, scan
from edge_server.repository.disk.file_events import FileObservation
from edge_server.repository.disk.files_being_written import is_open_for_writing
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.disk.watch import PollIntervals, Watcher
from edge_server.repository.resolve_version import ResolveOptions

PACE = PollIntervals(settle_s=0.15, remote_settle_s=0.15, gap_s=0.01)
NEVER_S = 3600.0


class Followed:
    """A running watcher, and every desired state that it published."""

    def __init__(self, *roots: Path, fallback_s: float, wants_inotify: bool, links: bool, pace: PollIntervals) -> None:
        self.changed = threading.Condition()
        self.stated: list[dict[str, tuple[int, ...]]] = []
        self.reasons: dict[str, str] = {}
        self.prints: dict[tuple[str, int], str] = {}
        source = RepositorySource(Scanner(roots, allows_external_links=links), ResolveOptions())
        observation = FileObservation(roots, wants_inotify=wants_inotify)
        self.watcher = Watcher(source, self._take, fallback_s, pace=pace, observation=observation)
        self._take(self.watcher.scan_first())
        self.watcher.start()

    def _take(self, desired: Mapping[str, DesiredModel]) -> None:
        with self.changed:
            self.stated.append({name: tuple(sorted(desired_model.versions)) for name, desired_model in desired.items()})
            self.reasons = {name: desired_model.reason for name, desired_model in desired.items()}
            self.prints = {
                (name, number): version.fingerprint
                for name, desired_model in desired.items()
                for number, version in desired_model.versions.items()
            }
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
        with self.changed:
            return self.changed.wait_for(condition, timeout_s)

    def becomes(self, desired_model: Mapping[str, tuple[int, ...]]) -> bool:
        return self.wait(lambda: self.stated[-1] == desired_model)


@pytest.fixture
def modes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations without the right to read them cannot be read, for root neither."""
    stated = scan.read_file

    def read_file(path: Path, model: str) -> Any:
        if not path.stat().st_mode & 0o444:
            raise BadModelConfig(f"model '{model}': '{path}' cannot be read: Permission denied")
        return stated(path, model)

    monkeypatch.setattr(scan, "read_file", read_file)


@pytest.fixture
def follow(root: Path) -> Iterator[Callable[..., Followed]]:
    """`follow(*roots, fallback_s=..., wants_inotify=True, links=False)`; no root: the one of the test."""
    with contextlib.ExitStack() as stack:

        def make(
            *roots: Path,
            fallback_s: float = NEVER_S,
            wants_inotify: bool = True,
            links: bool = False,
            pace: PollIntervals = PACE,
        ) -> Followed:
            made = Followed(
                *(roots or (root,)), fallback_s=fallback_s, wants_inotify=wants_inotify, links=links, pace=pace
            )
            stack.callback(made.watcher.close)
            return made

        yield make
    assert not [thread.name for thread in threading.enumerate() if thread.name == "edge-watch"]


@pytest.mark.parametrize("wants_inotify", [True, False], ids=["inotify", "polling"])
def test_models_and_versions_come_and_go(root: Path, add_model: Any, follow: Any, wants_inotify: bool) -> None:
    add_model("first", files={"1/weights": b"1"})
    followed = follow(wants_inotify=wants_inotify)
    assert followed.stated == [{"first": (1,)}]
    add_model("second", files={"1/weights": b"1"})
    assert followed.becomes({"first": (1,), "second": (1,)})
    add_model("second", files={"2/weights": b"2"}, versions=(2,))
    assert followed.becomes({"first": (1,), "second": (2,)})
    shutil.rmtree(root / "first")
    assert followed.becomes({"second": (2,)})
    shutil.rmtree(root / "second" / "2")
    assert followed.becomes({"second": (1,)})


@pytest.mark.parametrize("wants_inotify", [True, False], ids=["inotify", "polling"])
def test_a_file_changed_in_place_is_a_new_generation(
    root: Path, add_model: Any, follow: Any, wants_inotify: bool
) -> None:
    path = add_model("m", "", files={"1/weights": b"one"})
    followed = follow(wants_inotify=wants_inotify)
    for change in (path / "1" / "weights", path / "config.pbtxt"):
        before = followed.prints["m", 1]
        change.write_bytes(b"# changed ")
        assert followed.wait(lambda before=before: followed.prints["m", 1] != before)


def test_a_change_without_an_event_is_found_by_the_fallback_scan(
    add_model: Any, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileObservation, "on_event", lambda *_, **__: None)
    followed = follow(fallback_s=0.05)
    add_model("m", files={"1/weights": b"1"})
    assert followed.becomes({"m": (1,)})


def test_models_that_are_being_written_at_the_start_are_left_for_later(root: Path, add_model: Any, follow: Any) -> None:
    path = add_model("m", files={"1/weights": b"1"})
    add_model("m", files={"2/weights.part": b"2"}, versions=(2,))
    followed = follow()
    assert followed.stated == [{"m": (1,)}]
    (path / "2" / "weights.part").rename(path / "2" / "weights")
    assert followed.becomes({"m": (2,)})


def _linux_only() -> None:
    limit = file_events.WatchLimit()
    problem = limit.problem()
    limit.close()
    if problem:
        pytest.skip("this machine has no inotify watch left")


def test_an_upload_that_pauses_for_long_is_not_wished_for_until_its_file_is_closed(
    root: Path, add_model: Any, follow: Any
) -> None:
    _linux_only()
    path = add_model("m", files={"1/weights": b"1"})
    followed = follow()
    (path / "2").mkdir()
    with open(path / "2" / "weights", "wb", buffering=0) as upload:
        for _ in range(4):
            upload.write(b"x" * 100)
            time.sleep(PACE.settle_s * 3)  # the pause that must not be taken for the end
        assert followed.stated == [{"m": (1,)}]
    assert followed.becomes({"m": (2,)})
    assert followed.stated == [{"m": (1,)}, {"m": (2,)}]


@pytest.mark.parametrize("handler", ["nothing", "by polling"])
def test_a_paused_upload_is_waited_for_though_no_event_reported_its_opening(
    root: Path, add_model: Any, follow: Any, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    path = add_model("m", files={"1/weights": b"1"})
    if is_open_for_writing(str(path / "1" / "weights")) is None:
        pytest.skip("the file system of the temporary folder knows no leases")
    if handler == "nothing":
        monkeypatch.setattr(FileObservation, "on_event", lambda *_, **__: None)
    followed = follow(fallback_s=0.05, wants_inotify=handler == "nothing")
    (path / "2").mkdir()
    with open(path / "2" / "weights", "wb", buffering=0) as upload:
        for _ in range(3):
            upload.write(b"x" * 100)
            time.sleep(PACE.settle_s * 3)  # the pause that must not be taken for the end
        assert followed.stated == [{"m": (1,)}]
    assert followed.becomes({"m": (2,)})
    assert followed.stated == [{"m": (1,)}, {"m": (2,)}]


def test_where_the_kernel_does_not_say_who_writes_a_new_file_is_held_back_for_a_while_and_not_for_ever(
    root: Path, tmp_path: Path, add_model: Any, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _linux_only()
    monkeypatch.setattr(file_events, "is_open_for_writing", lambda path: None)
    path = add_model("m", files={"1/weights": b"1"})
    (tmp_path / "weights").write_bytes(b"2")
    followed = follow(fallback_s=0.05)
    (path / "2").mkdir()
    os.link(tmp_path / "weights", path / "2" / "weights")  # told of as made, as is one that is opened unheard
    assert followed.becomes({"m": (2,)})


@pytest.mark.parametrize("staging", ["outside", "models/.staging"])
def test_a_directory_renamed_into_place_is_distinguished_from_one_that_is_filled_there(
    root: Path, tmp_path: Path, add_model: Any, staging: str
) -> None:
    _linux_only()
    add_model("m", files={"1/weights": b"1"})
    ready = tmp_path / staging / "2"
    ready.mkdir(parents=True)
    (ready / "weights").write_bytes(b"2")
    observation = FileObservation([root])
    try:
        observation.watch({file_events.WatchedFolder(os.path.realpath(root)): False})
        shutil.copytree(ready, root / "m" / "3")
        ready.rename(root / "m" / "2")
        published: set[str] = set()
        end = time.monotonic() + 20
        while str(root / "m" / "2") not in published and time.monotonic() < end:
            observation.wake.wait(0.05)
            published |= observation.take_renamed_folders()
        assert published == {str(root / "m" / "2")}
    finally:
        observation.close()


def test_a_directory_renamed_into_place_counts_with_the_next_look(root: Path, add_model: Any, follow: Any) -> None:
    _linux_only()
    add_model("m", files={"1/weights": b"1"})
    followed = follow()
    (root / ".staging" / "1").mkdir(parents=True)
    (root / ".staging" / "1" / "weights").write_bytes(b"2")
    (root / ".staging" / "1").rename(root / "m" / "2")
    assert followed.becomes({"m": (2,)})
    (root / ".staging").rename(root / "new")
    assert followed.wait(lambda: "new" in followed.stated[-1])


def test_a_model_is_never_gone_while_its_link_is_swapped(root: Path, add_model: Any, follow: Any) -> None:
    for release in ("a", "b"):
        add_model(f".releases/{release}", files={"1/weights": release.encode()})
    (root / "m").symlink_to(".releases/a")
    followed = follow()
    before = followed.prints["m", 1]
    subprocess.run(["ln", "-sfn", ".releases/b", root / "m"], check=True)
    assert followed.wait(lambda: followed.prints.get(("m", 1), before) != before)
    os.symlink(".releases/a", root / "next")
    os.rename(root / "next", root / "m")
    assert followed.wait(lambda: followed.prints.get(("m", 1)) == before)
    assert all(desired_model.get("m") == (1,) for desired_model in followed.stated)


def test_what_a_link_leads_to_outside_is_followed_too(root: Path, tmp_path: Path, add_model: Any, follow: Any) -> None:
    target = add_model("target", files={"1/weights": b"1"}, at=tmp_path)
    other = add_model("other", files={"1/weights": b"1"}, at=tmp_path)
    (root / "m").symlink_to(target)
    followed = follow(links=True)
    for folder in (target, other):
        if folder == other:
            before = followed.prints["m", 3]
            subprocess.run(["ln", "-sfn", other, root / "m"], check=True)
            assert followed.becomes({"m": (1,)})
            assert before
        (folder / "3").mkdir()
        (folder / "3" / "weights").write_bytes(b"3")
        assert followed.becomes({"m": (3,)})


def test_a_link_out_of_the_repository_is_refused_with_the_reason(
    root: Path, tmp_path: Path, add_model: Any, follow: Any
) -> None:
    outside = add_model("outside", files={"1/weights": b"1"}, at=tmp_path)
    (root / "whole").symlink_to(outside)
    (add_model("version", versions=()) or root / "version").mkdir(exist_ok=True)
    (root / "version" / "1").symlink_to(outside / "1")
    file = add_model("file") / "1" / "weights"
    file.symlink_to(outside / "1" / "weights")
    inside = add_model("inside") / "1" / "weights"
    inside.symlink_to("../../blob")
    (root / "blob").write_bytes(b"1")
    refused = follow()
    assert refused.stated == [{"file": (), "inside": (1,), "version": (), "whole": ()}]
    for name in ("file", "version", "whole"):
        assert "leads out of the repository" in refused.reasons[name]
        assert str(outside) in refused.reasons[name]
        assert "--allow-external-links" in refused.reasons[name]
    assert follow(links=True).stated == [dict.fromkeys(("file", "inside", "version", "whole"), (1,))]


def test_a_root_that_is_a_link_may_be_swapped_as_a_whole(tmp_path: Path, add_model: Any, follow: Any) -> None:
    for release, names in (("41", ["old", "both"]), ("42", ["new", "both"])):
        for name in names:
            add_model(name, files={"1/weights": release.encode()}, at=tmp_path / "releases" / release)
    current = tmp_path / "current"
    current.symlink_to("releases/41")
    followed = follow(current)
    assert followed.stated == [{"both": (1,), "old": (1,)}]
    (tmp_path / "next").symlink_to("releases/42")
    (tmp_path / "next").rename(current)
    assert followed.becomes({"both": (1,), "new": (1,)})
    add_model("newer", files={"1/weights": b"1"}, at=tmp_path / "releases" / "42")
    assert followed.becomes({"both": (1,), "new": (1,), "newer": (1,)})
    assert all("both" in desired_model for desired_model in followed.stated)


def test_a_root_that_goes_away_takes_nothing_with_it_and_is_followed_again(
    root: Path, tmp_path: Path, add_model: Any, follow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = tmp_path / "other"
    add_model("stick", files={"1/weights": b"1"})
    add_model("disk", files={"1/weights": b"1"}, at=other)
    followed = follow(root, other, fallback_s=0.05)
    root.rename(tmp_path / "unplugged")
    add_model("more", files={"1/weights": b"1"}, at=other)
    assert followed.becomes({"disk": (1,), "more": (1,), "stick": (1,)})
    (tmp_path / "unplugged").rename(root)
    add_model("again", files={"1/weights": b"1"})
    assert followed.becomes({"again": (1,), "disk": (1,), "more": (1,), "stick": (1,)})
    assert all("stick" in desired_model for desired_model in followed.stated)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("its loaded models continue to serve" in message for message in messages) == 1
    assert sum("is back" in message and "until" not in message for message in messages) == 1


def test_an_empty_mount_point_is_a_root_that_went_away(
    root: Path, tmp_path: Path, add_model: Any, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model("m", files={"1/weights": b"1"})
    followed = follow(fallback_s=0.05)
    followed.watcher.close()
    followed.watcher._devices = {root: root.stat().st_dev + 1}  # as if it had been another file system until now
    (root / "m").rename(tmp_path / "away")
    assert list(followed.watcher.scan()) == ["m"]
    (tmp_path / "away").rename(root / "m")
    assert list(followed.watcher.scan()) == ["m"]
    shutil.rmtree(root / "m")
    followed.watcher.scan()
    assert _looks_until_settled(followed.watcher) == {}


def test_a_full_scan_makes_nothing_anew_from_a_model_that_has_not_changed(
    root: Path, add_model: Any, follow: Any
) -> None:
    for name in ("a", "b"):
        add_model(name, files={"1/weights": b"1"})
    watcher = follow().watcher
    watcher.close()
    before = _looks_until_settled(watcher)
    (root / "b" / "1" / "weights").write_bytes(b"changed")
    after = _looks_until_settled(watcher)
    assert after["a"] is before["a"]
    assert after["b"] != before["b"]


def _looks_until_settled(watcher: Watcher) -> dict[str, DesiredModel]:
    desired = watcher.scan()
    end = time.monotonic() + 20
    while watcher._settled.next_scan_s is not None and time.monotonic() < end:
        time.sleep(0.02)
        desired = watcher.scan()
    return desired


def test_a_root_that_is_not_there_at_the_start_is_an_error(tmp_path: Path, follow: Any) -> None:
    with pytest.raises(ServingFault, match="cannot be read"):
        follow(tmp_path / "nowhere")


def test_a_work_tree_counts_when_git_has_released_its_lock(root: Path, add_model: Any, follow: Any) -> None:
    (root / ".git").mkdir()
    followed = follow(fallback_s=0.05)
    (root / ".git" / "index.lock").write_bytes(b"")
    path = add_model("m", files={"1/weights": b"1"})
    time.sleep(PACE.settle_s * 3)  # what would be enough without the lock
    assert followed.stated == [{}]
    (path / "1" / "more").write_bytes(b"1")
    (root / ".git" / "index.lock").unlink()
    assert followed.becomes({"m": (1,)})


@pytest.mark.parametrize("jump_s", [86_400, -86_400])
def test_a_work_tree_that_git_writes_does_not_count_when_the_clock_is_set(
    root: Path, add_model: Any, follow: Any, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    (root / ".git").mkdir()
    (root / ".git" / "index.lock").write_bytes(b"")
    followed = follow(fallback_s=0.05)
    before, before_ns = time.time, time.time_ns
    monkeypatch.setattr("time.time", lambda: before() + jump_s)
    monkeypatch.setattr("time.time_ns", lambda: before_ns() + jump_s * 10**9)
    add_model("m", files={"1/weights": b"1"})
    time.sleep(PACE.settle_s * 3)  # what would be enough without the lock
    assert followed.stated == [{}]
    (root / ".git" / "index.lock").unlink()
    assert followed.becomes({"m": (1,)})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
def test_without_room_for_watches_the_polling_observer_takes_over_and_it_is_said(
    add_model: Any, follow: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    from watchdog.observers.inotify import InotifyObserver

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(InotifyObserver, "schedule", refuse)
    followed = follow()
    add_model("m", files={"1/weights": b"1"})
    assert followed.becomes({"m": (1,)})
    assert "inotify cannot be used" in caplog.text
    assert os.strerror(code) in caplog.text


def test_inotify_is_given_up_when_its_watches_run_out_later(
    add_model: Any, follow: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    followed = follow()
    monkeypatch.setattr(file_events.WatchLimit, "problem", lambda self: "the limit is reached")
    for number in range(3):
        add_model(f"m{number}", files={"1/weights": b"1"})
        assert followed.wait(lambda number=number: f"m{number}" in followed.stated[-1])
    assert caplog.text.count("inotify cannot be used (the limit is reached)") == 1


@pytest.mark.parametrize(
    ("kind", "how"), [("ext4", "by inotify"), ("overlay", "by polling every 1 s"), ("nfs4", "by polling every 2 s")]
)
def test_how_a_root_is_watched_follows_its_file_system_and_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, how: str
) -> None:
    _linux_only()
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(file_events, "read_mounts", lambda: f"36 35 98:0 / / rw - {kind} /dev/x rw\n")
    observation = FileObservation([root])
    observation.close()
    assert [record.getMessage() for record in caplog.records] == [f"watching model repository '{root}' ({kind}) {how}"]
    assert observation.is_remote(root) == (kind == "nfs4")


def test_reading_a_model_wakes_no_watcher(root: Path, add_model: Any) -> None:
    path = add_model("m", files={"1/weights": b"1" * 1000})
    observation = FileObservation([root])
    try:
        observation.watch({file_events.WatchedFolder(os.path.realpath(root)): observation.is_polled(root)})
        observation.wake.clear()
        for _ in range(20):
            (path / "1" / "weights").read_bytes()
        assert not observation.wake.wait(0.3)
        (path / "1" / "weights").write_bytes(b"2")
        assert observation.wake.wait(20)
    finally:
        observation.close()


def test_what_keeps_a_model_from_being_served_as_a_whole_is_logged_once_while_it_lasts(
    root: Path, add_model: Any, follow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    add_model("fine", 'backend: "identity"', versions=(1,))
    followed = follow()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    add_model("misspelt", 'backend: "identity" max_batch_siez: 3', versions=(1,))
    assert followed.wait(lambda: "max_batch_siez" in followed.reasons.get("misspelt", ""))
    add_model("other", 'backend: "identity"', versions=(1,))
    assert followed.becomes({"fine": (1,), "misspelt": (), "other": (1,)})
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(told) == 1
    assert "model 'misspelt'" in told[0]
    assert "max_batch_siez" in told[0]


def test_a_lock_of_gits_from_a_time_to_come_does_not_hold_the_models_back(
    root: Path, add_model: Any, follow: Any
) -> None:
    # Left by a crash, before the clock of a box without a battery fell back by a year.
    (root / ".git").mkdir()
    lock = root / ".git" / "index.lock"
    lock.write_bytes(b"")
    at_s = time.time() + 365 * 86_400
    os.utime(lock, (at_s, at_s))
    add_model("m", files={"1/weights": b"1"})
    assert follow().becomes({"m": (1,)})


def test_a_scan_that_fails_unexpectedly_is_followed_by_others(root: Path, add_model: Any, caplog: Any) -> None:
    told = threading.Condition()
    stated: list[list[str]] = []

    def take(desired: Mapping[str, DesiredModel]) -> None:
        with told:
            stated.append(sorted(desired))
            told.notify_all()
            if len(stated) < 4:
                raise RuntimeError("can't start new thread")

    source = RepositorySource(Scanner([root]), ResolveOptions())
    watcher = Watcher(source, take, 0.05, pace=PACE)
    assert watcher.scan_first() == {}
    watcher.start()
    try:
        add_model("m", files={"1/weights": b"1"})
        with told:
            assert told.wait_for(lambda: len(stated) >= 4, 30)
        assert stated[:4] == [["m"]] * 4
        assert caplog.text.count("the repository could not be scanned") == 1, "told once, not at every look"
    finally:
        watcher.close()


def test_a_look_that_hangs_does_not_keep_the_server_from_ending(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("edge_server.repository.disk.watch._CLOSE_S", 0.01, raising=False)
    source = RepositorySource(Scanner([root]), ResolveOptions())
    watcher = Watcher(source, lambda desired: None, 0.05, pace=PACE)
    watcher.scan_first()
    hangs, is_over = threading.Event(), threading.Event()

    def hang() -> frozenset[str]:
        hangs.set()
        assert is_over.wait(60)
        return frozenset()

    with monkeypatch.context() as patched:
        patched.setattr(watcher._observation, "take_renamed_folders", hang)
        watcher.start()
        assert hangs.wait(60)
        watcher.close()
        assert watcher._thread is not None
        assert watcher._thread.is_alive()
        assert "hangs; its thread ends with the process" in caplog.text
    is_over.set()
    watcher._thread.join()
    watcher.close()


def test_an_observer_that_hangs_does_not_keep_the_server_from_ending(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from watchdog.observers.polling import PollingObserver

    monkeypatch.setattr("edge_server.repository.disk.file_events._CLOSE_S", 0.01, raising=False)
    hangs, is_over = threading.Event(), threading.Event()
    plain = PollingObserver.stop
    ended: list[threading.Thread] = []

    def stop(observer: PollingObserver) -> None:
        ended.append(threading.current_thread())
        hangs.set()
        assert is_over.wait(60)
        plain(observer)

    monkeypatch.setattr(PollingObserver, "stop", stop)
    observation = FileObservation([root], wants_inotify=False)
    observation.watch({file_events.WatchedFolder(str(root)): True})
    observation.close()
    assert hangs.wait(60)
    is_over.set()
    (thread,) = ended
    assert thread is not threading.current_thread(), "who closes would wait for the disk"
    thread.join()


def test_a_configuration_that_becomes_readable_is_read_though_its_content_is_as_it_was(
    root: Path, add_model: Any, follow: Any, modes_count: None
) -> None:
    config = add_model("m", 'backend: "identity"', {"1/model": b""}) / "config.pbtxt"
    config.chmod(0)
    followed = follow()
    assert followed.becomes({"m": ()})
    assert "Permission denied" in followed.reasons["m"]
    config.chmod(0o644)
    assert followed.becomes({"m": (1,)})


def test_a_model_file_that_becomes_readable_is_loaded_anew_and_other_changes_of_its_mode_are_none(
    root: Path, add_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & 0o444))
    file = add_model("m", 'backend: "identity"', {"1/model": b""}) / "1" / "model"
    prints = []
    for mode in (0o644, 0o600, 0o000, 0o444):
        file.chmod(mode)
        prints.append(Scanner([root]).scan().models["m"].fingerprint_of(1))
    assert prints[0] == prints[1] == prints[3] != prints[2]


def test_a_change_to_one_model_has_no_other_looked_into(
    root: Path, add_model: Any, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_model("m", "", files={"1/weights": b"one"})
    for number in range(5):
        add_model(f"other{number}", files={"1/weights": b"1"})
    looked: list[str] = []
    look = Scanner._scan_model
    monkeypatch.setattr(
        Scanner, "_scan_model", lambda self, where, *rest: looked.append(where.name) or look(self, where, *rest)
    )
    followed = follow()
    assert set(looked) == {"m", *(f"other{number}" for number in range(5))}
    for weights in (b"three", b"fifth"):
        # Of the first change the looks after the start are full.
        looked.clear()
        before = followed.prints["m", 1]
        (path / "1" / "weights").write_bytes(weights)
        assert followed.wait(lambda: followed.prints["m", 1] != before)  # noqa: B023
    assert set(looked) == {"m"}


def test_events_before_a_failed_scan_are_not_lost(
    root: Path, add_model: Any, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_model("m", "", files={"1/weights": b"one"})
    followed = follow()
    before = followed.prints["m", 1]
    has_failed = threading.Event()
    take = FileObservation.take_changed_paths

    def fail_once(self: FileObservation) -> frozenset[str] | None:
        touched = take(self)
        if touched and not has_failed.is_set():
            has_failed.set()
            raise ServingFault("the disk does not answer")
        return touched

    monkeypatch.setattr(FileObservation, "take_changed_paths", fail_once)
    (path / "1" / "weights").write_bytes(b"three")
    assert has_failed.wait(20)
    # Something else is on_event of, and nothing more of the model.
    add_model("other", files={"1/weights": b"1"})
    assert followed.wait(lambda: followed.prints["m", 1] != before)


def test_a_thread_of_watchdog_that_reads_after_its_stop_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    emitter = InotifyEmitter(EventQueue(), ObservedWatch(str(tmp_path), recursive=False))
    emitter.queue_events(0)
    assert caplog.records == []
