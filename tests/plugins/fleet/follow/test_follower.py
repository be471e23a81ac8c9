"""A box that follows a signed repository over HTTP: what it installs, refuses, resumes and survives. With real TUF."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.follow.trial import Trial

pytest.importorskip("tuf")
pytestmark = pytest.mark.full

AddModel = Callable[..., None]


@pytest.fixture
def tried() -> None:
    """Each release is tried in a process, which takes a second. In other tests each passes its trial."""


@pytest.fixture(autouse=True)
def _trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "tried" not in request.fixturenames:
        monkeypatch.setattr(Trial, "run", lambda *arguments, is_return: "")


@pytest.mark.usefixtures("tried")
def test_a_release_is_installed_updated_and_withdrawn(publication: Any, box: Any) -> None:
    publication.release(0.5)
    state = box.follow().report.models["m"]
    assert (state.wanted, state.state, state.reason, state.installed) == ("m/1.json", "installed", "", "m/1.json")
    assert box.factor() == 0.5
    publication.release(0.25)
    assert box.follow().report.models["m"].installed == "m/2.json"
    assert box.factor() == 0.25
    publication.publish("", "--withdraw=m/2")
    assert box.follow().report.models["m"].installed == "m/1.json"
    assert box.factor() == 0.5
    publication.publish("", "--withdraw=m/1")
    assert box.follow().report.models == {}
    assert box.factor() is None


def test_files_that_were_withdrawn_do_not_become_a_release_again(publication: Any, box: Any) -> None:
    publication.release(0.5)
    publication.release(0.25)
    publication.publish("", "--withdraw=m/2")
    publication.publish()
    box.follow()
    assert box.factor() == 0.5
    publication.release(0.125)
    assert box.follow().report.models["m"].installed == "m/3.json"


def test_only_files_that_changed_are_downloaded(publication: Any, box: Any) -> None:
    publication.release(0.5, filler=100_000)
    box.follow()
    publication.release(0.25, filler=100_000)
    publication.requests.clear()
    box.follow()
    targets = [path for path, _ in publication.requests if path.startswith("/targets/")]
    assert len(targets) == 3  # the list of files, the model and its sample
    assert box.factor() == 0.25
    publication.requests.clear()
    box.follow()
    assert [path for path, _ in publication.requests if path.startswith("/targets/")] == []


def test_a_model_of_somebody_else_is_not_touched(publication: Any, box: Any, add_model: AddModel) -> None:
    publication.release(0.5)
    add_model(box.folder / "m", 3.0)
    assert box.follow().report.models["m"].state == "foreign"
    assert box.factor() == 3.0


def test_boxes_of_another_group_do_not_get_it(publication: Any, box: Any, new_box: Any) -> None:
    publication.release(0.5, '[models.m]\ngroups = ["line-3"]')
    assert box.follow().report.models == {}
    other = new_box("other")
    other.follow(groups="line-2, line-3")
    assert other.factor() == 0.5


def test_outside_its_hours_a_box_takes_back_what_was_withdrawn_and_installs_nothing_new(
    publication: Any, box: Any
) -> None:
    publication.release(0.5)
    with box.models.locked():
        follower = box.follower()
        follower.follow_once("it is noon")
        assert follower.report.models["m"][:4] == ("m/1.json", "waiting", "it is noon", "")
        follower.follow_once()
        publication.release(0.25)
        publication.requests.clear()
        follower.follow_once("it is noon")
        assert follower.report.models["m"][:4] == ("m/2.json", "waiting", "it is noon", "m/1.json")
        assert not any(path.startswith("/targets/") for path, _ in publication.requests)
        follower.follow_once()
        assert box.factor() == 0.25
        publication.publish("", "--withdraw=m/2")
        follower.follow_once("it is noon")
        assert follower.report.models["m"][:4] == ("m/1.json", "installed", "", "m/1.json")
        assert box.factor() == 0.5


def test_waves_that_are_written_later_take_a_release_from_no_box(publication: Any, box: Any) -> None:
    publication.release(0.5)
    box.follow()
    publication.publish('waves = ["box-2", "all"]')
    assert box.follow().report.models["m"][:4] == ("m/1.json", "installed", "", "m/1.json")
    publication.release(0.25, 'waves = ["box-2", "all"]')
    assert box.follow().report.models["m"].wanted == "m/1.json"
    publication.publish('waves = ["box-2", "box-1", "all"]')
    assert box.follow().report.models["m"].wanted == "m/1.json"


def test_a_rollout_that_stops_takes_the_release_from_no_box_that_has_it_and_gives_it_to_no_other(
    publication: Any, box: Any, new_box: Any, utc_now: datetime
) -> None:
    from edge_server.plugins.fleet.publish.rollout import lead, newest_releases, open_publisher, see_progress

    publication.release(0.5)
    other = new_box("other")
    for each in (box, other):
        each.follow(box=each.folder.name)
    publication.release(0.25)
    box.follow(box="box")
    with open_publisher(publication.site, publication.keys) as publisher:
        # No box has reported yet.
        progress = [see_progress(newest_releases(publisher)["m"], [], utc_now.timestamp())]
        lead("stop", publisher, progress, utc_now.timestamp())
        publisher.commit(utc_now)
    for each, factor in ((box, 0.25), (other, 0.5), (new_box("late"), 0.5)):
        each.follow(box=each.folder.name)
        assert each.factor() == factor


def test_a_box_that_has_the_files_of_a_new_release_has_the_release(publication: Any, box: Any) -> None:
    publication.release(0.5)
    box.follow()
    publication.release(0.25, 'ids = ["box-2"]')
    publication.release(0.5)
    publication.requests.clear()
    state = box.follow().report.models["m"]
    assert (state.wanted, state.state, state.installed) == ("m/3.json", "installed", "m/3.json")
    assert box.follow().report.models["m"].installed == "m/3.json"
    assert [path for path, _ in publication.requests if path.startswith("/targets/")] == []


# -- releases that are not fit


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize(
    ("rollout", "expected", "message"),
    [
        ("tolerance = 0.01", 0.3, "output 'Y' differs from the expected ones by 0.2 of its largest value"),
        ("max_latency_ms = 0.001", 0.25, "more than 0.001 ms"),
    ],
)
def test_a_release_that_fails_its_trial_is_not_installed_and_not_tried_again(
    publication: Any, box: Any, add_model: AddModel, rollout: str, expected: float, message: str
) -> None:
    publication.release(0.5)
    box.follow()
    add_model(publication.models / "m", 0.25, expected=expected)
    publication.publish(rollout)
    state = box.follow().report.models["m"]
    assert state.state == "failed"
    assert message in state.reason.replace("0.167", "0.2")
    assert (state.wanted, state.installed) == ("m/2.json", "m/1.json")
    assert box.factor() == 0.5
    publication.requests.clear()
    assert box.follow().report.models["m"] == state
    assert [path for path, _ in publication.requests if path.startswith("/targets/")] == []


@pytest.fixture
def publish_sampled(publication: Any, add_model: AddModel) -> Callable[..., None]:
    """Publish a release whose sample has no expected outputs."""

    def publish(factor: float, rollout: str) -> None:
        add_model(publication.models / "m", factor)
        np.savez(publication.models / "m" / "release_sample.npz", X=np.ones((1, 4), np.float32))
        publication.publish(rollout)

    return publish


@pytest.mark.usefixtures("tried")
def test_without_expected_outputs_the_serving_version_is_the_measure(publish_sampled: Any, box: Any) -> None:
    publish_sampled(0.5, "tolerance = 0.1")
    box.follow()
    publish_sampled(0.25, "tolerance = 0.1")
    reason = box.follow().report.models["m"].reason
    assert "output 'Y' differs from those of the version that serves by 0.5" in reason


@pytest.mark.usefixtures("tried")
def test_a_withdrawn_release_is_no_measure_of_the_one_before(publication: Any, publish_sampled: Any, box: Any) -> None:
    publish_sampled(0.5, "tolerance = 0.1")
    box.follow()
    publish_sampled(0.25, "")
    assert box.follow().report.models["m"].installed == "m/2.json"
    publication.publish("tolerance = 0.1", "--withdraw=m/2")
    state = box.follow().report.models["m"]
    assert (state.installed, state.reason, box.factor()) == ("m/1.json", "", 0.5)


@pytest.mark.usefixtures("tried")
def test_a_release_that_cannot_be_loaded_is_not_installed(publication: Any, box: Any, add_model: AddModel) -> None:
    add_model(publication.models / "m", 0.5)
    (publication.models / "m" / "1" / "model.onnx").write_bytes(b"damaged")
    publication.publish()
    assert "it cannot be loaded" in box.follow().report.models["m"].reason
    assert box.factor() is None


@pytest.mark.usefixtures("tried")
def test_a_release_that_ends_its_process_is_not_installed(publication: Any, box: Any) -> None:
    folder = publication.models / "p"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (folder / "config.pbtxt").write_text('backend: "python"\n')
    publication.publish()
    assert "its process was ended by SIGSEGV" in box.follow().report.models["p"].reason


@pytest.mark.usefixtures("tried")
def test_a_release_that_this_machine_cannot_load_now_is_tried_again_and_not_remembered(
    publication: Any, box: Any, add_model: AddModel
) -> None:
    add_model(publication.models / "m", 0.5)
    runtime = 'backend: "openvino"\n'
    (publication.models / "m" / "config.pbtxt").write_text('backend: "not_installed_here"\n')
    publication.publish()
    state = box.follow().report.models["m"]
    assert (state.state, state.installed) == ("waiting", "")
    assert "no backend is called 'not_installed_here'" in state.reason
    assert box.models.failures == {}
    (publication.models / "m" / "config.pbtxt").write_text(runtime)
    publication.publish()
    assert box.follow().report.models["m"].installed == "m/2.json"


@pytest.mark.usefixtures("tried")
def test_an_ensemble_waits_for_its_member(publication: Any, box: Any) -> None:
    (publication.models / "a" / "1").mkdir(parents=True)
    tensor = 'name: "{}" data_type: TYPE_FP32 dims: [ 4 ]'
    (publication.models / "a" / "config.pbtxt").write_text(
        'platform: "ensemble"\nmax_batch_size: 4\n'
        f"input {{ {tensor.format('X')} }}\noutput {{ {tensor.format('Y')} }}\n"
        'ensemble_scheduling { step { model_name: "m" input_map { key: "X" value: "X" } '
        'output_map { key: "Y" value: "Y" } } }\n'
    )
    publication.release(0.5)
    first = box.follow().report.models
    assert {name: model.state for name, model in first.items()} == {"a": "waiting", "m": "installed"}
    assert box.follow().report.models["a"].state == "installed"


@pytest.mark.usefixtures("tried")
def test_a_trial_that_the_kernel_kills_for_memory_says_nothing_against_the_release(publication: Any, box: Any) -> None:
    folder = publication.models / "p"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    (folder / "config.pbtxt").write_text('backend: "python"\n')
    publication.publish()
    state = box.follow().report.models["p"]
    assert state.state == "waiting"
    assert "ended by SIGKILL, as the kernel does when memory runs out" in state.reason
    assert box.models.failures == {}


# -- a site that lies


def test_bytes_that_were_not_signed_are_refused_until_the_next_publish_mends_them(publication: Any, box: Any) -> None:
    publication.release(0.5, filler=5000)
    (large,) = [path for path in publication.site.glob("targets/m/*") if path.stat().st_size == 5000]
    large.write_bytes(b"x" * 5000)
    report = box.follow().report
    assert "other bytes than those that were signed" in report.problem
    assert box.factor() is None
    large.write_bytes(b"x" * 6000)
    assert "more than the 5000 bytes that were signed" in box.follow().report.problem
    publication.publish()
    box.follow()
    assert box.factor() == 0.5


def test_wrong_files_are_downloaded_again_after_a_pause_and_their_withdrawal_does_not_wait_for_it(
    publication: Any, box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication.release(0.5)
    box.follow()
    publication.release(0.25, filler=5000)
    (large,) = [path for path in publication.site.glob("targets/m/*") if path.stat().st_size == 5000]
    large.write_bytes(b"x" * 5000)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def downloads() -> int:
        publication.requests.clear()
        follower.follow_once()
        assert "other bytes than those that were signed" in follower.report.models["m"].reason
        return sum(path.startswith("/targets/") and large.name in path for path, _ in publication.requests)

    with box.models.locked():
        follower = box.follower()
        counts = []
        for passed_s in (0, 4, 2, 8, 3):  # pauses of 5 and 10 s
            now += passed_s
            counts.append(downloads())
        assert counts == [1, 0, 1, 0, 1]
        publication.publish("", "--withdraw=m/2")
        follower.follow_once()
        assert follower.report.models["m"][:4] == ("m/1.json", "installed", "", "m/1.json")


def test_a_thiefs_key_is_worth_nothing(publication: Any, box: Any, tmp_path: Path) -> None:
    publication.release(0.5)
    box.follow()
    shutil.rmtree(publication.site)
    publication.keys = tmp_path / "thief"
    publication.release(0.25)
    report = box.follow().report
    assert "is not trusted" in report.problem
    assert box.factor() == 0.5


def test_old_metadata_are_refused(publication: Any, box: Any) -> None:
    publication.release(0.5)
    shutil.copytree(publication.site, publication.site.with_name("old"))
    publication.release(0.25)
    box.follow()
    shutil.rmtree(publication.site)
    publication.site.with_name("old").rename(publication.site)
    assert "is not trusted" in box.follow().report.problem
    assert box.factor() == 0.25


def test_expired_metadata_are_refused_and_what_is_installed_stays(
    publication: Any, box: Any, add_model: AddModel, monkeypatch: pytest.MonkeyPatch, utc_now: datetime
) -> None:
    from edge_server.plugins.fleet.publish import command as publish_command

    class Past(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return utc_now - timedelta(days=31)

    publication.release(0.5)
    box.follow()
    add_model(publication.models / "m", 0.25)
    with monkeypatch.context() as patch:
        patch.setattr(publish_command, "datetime", Past)
        publication.publish()
    assert "expired" in box.follow().report.problem
    assert box.factor() == 0.5
    publication.publish()
    box.follow()
    assert box.factor() == 0.25


def test_a_clock_that_is_behind_waits(publication: Any, box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    publication.release(0.5)
    box.follow()
    now = time.time()
    publication.release(0.25)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now - 86_400)
        assert "the clock is wrong" in box.follow().report.problem
    assert box.factor() == 0.5
    box.follow()
    assert box.factor() == 0.25


def test_a_release_that_is_larger_than_the_disk_is_not_begun(
    publication: Any, box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication.release(0.5, filler=5000)
    usage = shutil.disk_usage(box.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=(32 << 20) + 4000))
    publication.requests.clear()
    assert "release 'm/1.json' does not fit on the disk" in box.follow().report.problem
    assert len([path for path, _ in publication.requests if path.startswith("/targets/")]) == 1


def test_a_release_that_this_version_does_not_understand_is_not_taken(
    publication: Any, box: Any, add_model: AddModel
) -> None:
    add_model(publication.models / "m", 0.5)
    with pytest.raises(InvalidRequest, match="unknown keys only_for"):
        publication.publish('only_for = ["x"]')


def test_the_keys_are_renewed_before_they_expire_and_boxes_follow_the_new_ones(
    publication: Any, box: Any, add_model: AddModel, monkeypatch: pytest.MonkeyPatch, utc_now: datetime, capsys: Any
) -> None:
    from edge_server.plugins.fleet.publish import publisher, repository_metadata
    from edge_server.plugins.fleet.publish.signing_keys import SigningKeys

    class Past(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return utc_now - timedelta(days=400)

    add_model(publication.models / "m", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(repository_metadata, "datetime", Past)
        publication.publish()  # all is made then, and signed anew now
    assert (publication.site / "metadata" / "2.root.json").exists()
    box.follow()
    assert box.factor() == 0.5

    other, keys = publication.site.with_name("other"), publication.keys.with_name("keys2")
    with monkeypatch.context() as patch:
        patch.setattr(repository_metadata, "datetime", Past)
        publisher.Publisher(other, SigningKeys(keys))
    (keys / "root.pem").unlink()
    publication.site, publication.keys = other, keys
    publication.publish()
    assert "the next root waits for signatures: 1 of 'root'" in capsys.readouterr().out
    assert not (other / "metadata" / "2.root.json").exists()


# -- a network and a power that fail


def test_a_download_that_breaks_off_is_resumed(publication: Any, box: Any) -> None:
    publication.release(0.5, filler=1_000_000)
    publication.cut_after = 300_000
    rounds = 0
    while box.factor() is None:
        box.follow()
        rounds += 1
        assert rounds < 10
    ranges = [asked for path, asked in publication.requests if asked]
    assert ranges == ["bytes=300000-", "bytes=600000-", "bytes=900000-"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_long_download_pauses_for_looks_at_what_is_newest(
    publication: Any, box: Any, add_model: AddModel, is_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication.release(0.5)
    box.follow()
    settings = {"url": publication.site.as_uri()} if is_folder else {}
    for is_withdrawn in (False, True):
        add_model(publication.models / "m", 0.25 - is_withdrawn / 8, filler=300_000)
        (publication.models / "m" / "notes.bin").write_bytes(os.urandom(300_000))
        publication.publish()
        with box.models.locked():
            follower = box.follower(**settings)
            follower.follow_once(download_s=0.0)
            model = follower.report.models["m"]
            assert (model.state, follower.is_paused, box.factor()) == ("waiting", True, 0.5 - is_withdrawn / 4)
            assert "of 300000 bytes came until now" in model.reason
            if is_withdrawn:
                publication.publish("", "--withdraw=m/3")
            count = 1
            while not follower.follow_once(download_s=0.0):
                count += 1
            assert (count > 3, follower.is_paused) == (not is_withdrawn, False)
            assert box.factor() == 0.25


def test_a_download_that_the_site_cannot_resume_does_not_pause(publication: Any, box: Any) -> None:
    publication.has_ranges = False
    publication.release(0.5, filler=300_000)
    with box.models.locked():
        assert box.follower().follow_once(download_s=0.0)


def test_the_network_may_end_after_each_request(publication: Any, box: Any) -> None:
    publication.release(0.5)
    box.follow()
    publication.release(0.25)
    for answered in range(20):
        if box.factor() == 0.25:
            break
        left = [answered]
        follower_site = _cut_after(box, left)
        follower_site.follow()
        assert box.factor() in (0.5, 0.25)
    assert box.factor() == 0.25
    assert answered > 3


def _cut_after(box: Any, left: list[int]) -> Any:
    """Return a box like this one, whose site answers `left` requests."""
    from edge_server.plugins.fleet.follow.site_files import SiteFiles, SiteUnavailable

    read = SiteFiles.read

    class Cut:
        def follow(self) -> None:
            def limited(self: Any, name: str, start: int = 0) -> Any:
                if left[0] == 0:
                    raise SiteUnavailable("the network is cut")
                left[0] -= 1
                return read(self, name, start)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SiteFiles, "read", limited)
                box.follow()

    return Cut()


class _Killed(BaseException):
    """Stands for SIGKILL: nothing but a `finally` runs behind it, and the disk operations there are refused too."""


def test_a_kill_at_each_change_of_the_disk_leaves_a_complete_model(
    publication: Any, new_box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication.release(0.5)
    template = new_box("template")
    template.follow()
    publication.release(0.25)
    kill_at, is_done = 0, False
    while not is_done:
        box = new_box(f"box-{kill_at}")
        shutil.rmtree(box.folder)
        shutil.copytree(template.folder, box.folder)
        is_done = _follow_until_killed(box, kill_at)
        assert box.factor() in ((0.5, 0.25) if not _is_between_renames(box) else (None,))
        box.follow()
        assert box.factor() == 0.25, f"killed at change {kill_at}"
        assert box.follow().report.models["m"].state == "installed"
        kill_at += 1
    assert kill_at > 15


def _is_between_renames(box: Any) -> bool:
    """Whether the kill came between the two renames, after which only `begin` puts a model back."""
    return not (box.folder / "m").exists() and (box.folder / ".follow" / "kept" / "m").exists()


def _follow_until_killed(box: Any, kill_at: int) -> bool:
    """Follow, and end at the change of the disk with this number. Return whether there were fewer."""
    count = [0]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] > kill_at:
                raise _Killed
            return function(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "mkdir", "unlink", "link", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            box.follow()
        except _Killed:
            return False
    return True


def test_a_second_follower_is_refused(publication: Any, box: Any) -> None:
    publication.release(0.5)
    with box.models.locked(), pytest.raises(InvalidRequest, match="another process follows"):
        box.follow()


# -- the commands


@pytest.fixture
def edge() -> Callable[..., subprocess.CompletedProcess[str]]:
    import sys

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "edge_server", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    return run


@pytest.mark.usefixtures("tried")
def test_the_commands_work_from_a_folder_as_from_a_usb_stick(
    tmp_path: Path, add_model: AddModel, edge: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    add_model(tmp_path / "models" / "m", 0.5)
    site, keys, box = tmp_path / "a site", tmp_path / "keys", tmp_path / "box"
    box.mkdir()
    published = edge("publish", str(tmp_path / "models"), str(site), f"--keys={keys}")
    assert "m/1: new" in published.stdout, published.stderr
    assert (keys / "root.pem").stat().st_mode & 0o77 == 0
    assert "m/1: as before" in edge("publish", str(tmp_path / "models"), str(site), f"--keys={keys}").stdout
    url = site.as_uri().replace("%20", "%20")
    followed = edge("follow", url, f"--root={site}/metadata/1.root.json", f"--model-repository={box}", "--once")
    assert followed.returncode == 0, followed.stderr
    assert (box / "m" / "1" / "model.onnx").exists()
    assert followed.stdout == "m/1.json installed\n"


@pytest.mark.usefixtures("tried")
def test_one_round_prints_what_stands_and_why_and_retry_tries_what_failed(
    tmp_path: Path, add_model: AddModel, edge: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    models, site, keys, box = (tmp_path / name for name in ("models", "site", "keys", "box"))
    box.mkdir()

    def follow(*flags: str) -> tuple[int, str]:
        flags = (f"--root={site}/metadata/1.root.json", f"--model-repository={box}", "--box-id=b-1", "--once", *flags)
        done = edge("follow", site.as_uri(), *flags)
        return done.returncode, done.stdout

    add_model(models / "m", 0.5)
    (models / "rollout.toml").write_text('[models.m]\ngroups = ["another"]\n')
    published = edge("publish", str(models), str(site), f"--keys={keys}")
    assert published.returncode == 0, published.stderr
    code, text = follow("--box-groups=line-3")
    assert code == 0
    assert text.startswith("no release is for this box yet: box b-1, groups line-3, machine ")
    (models / "rollout.toml").write_text("")
    (models / "m" / "1" / "model.onnx").write_bytes(b"no model")
    edge("publish", str(models), str(site), f"--keys={keys}")
    for flags in ((), (), ("--retry",)):
        code, text = follow(*flags)
        assert code == 1
        assert re.match(r"m/2\.json failed: release 'm/2\.json': it cannot be loaded: .*; no release stands$", text)
    state = json.loads((box / ".follow" / "state.json").read_text())
    (failure,) = state["failures"].values()
    before_s = failure[2]
    follow("--retry")
    ((_, _, after_s),) = json.loads((box / ".follow" / "state.json").read_text())["failures"].values()
    assert after_s > before_s


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x/y", "--root=ROOT"], "expected the address of a signed repository"),
        (["file://host/y", "--root=ROOT"], "expected the address of a signed repository"),
        (["http://me:secret@127.0.0.1/", "--root=ROOT"], "or file:///PATH, given 'http://127.0.0.1'"),
        (["https://x/y", "--root=/nowhere"], "--root=/nowhere cannot be read"),
        (["https://x/y", "--root=ROOT", "--hours=9"], "--hours: expected HH:MM-HH:MM, given '9'"),
        (["https://x/y", "--root=MODEL"], "the root metadata cannot be read"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, arguments: list[str], message: str, edge: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "MODEL").write_text("{}")
    arguments = [
        text.replace("MODEL", str(tmp_path / "MODEL")).replace("ROOT", str(tmp_path / "MODEL")) for text in arguments
    ]
    found = edge("follow", *arguments, f"--model-repository={tmp_path}", "--once")
    assert found.returncode == 2
    assert message in found.stderr
    assert "--follow" not in found.stderr
