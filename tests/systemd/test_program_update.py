"""The Debian package's exchange of the program: kills and losses of power at each step, and failures that take a
version back. Programs are small scripts here; test_booted_update.py has the real one under systemd."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

UPDATE = Path(__file__).parents[2] / "systemd/deb/program-update"

STEPS = ("cp", "ln", "mkdir", "mv", "rm", "sync")
"""Commands of the script that change or flush the disk."""

WRAPPER = """#!/bin/sh
echo "$0 $*" >>"$COUNTER"
step=0
while read -r _; do step=$((step + 1)); done <"$COUNTER"
[ -z "$SNAPSHOT" ] || /bin/cp --sparse=always "$SNAPSHOT" "$SNAPSHOT.$step"
[ "$step" != "$KILL_AT" ] || kill -9 $PPID
PATH=/usr/bin:/bin exec "${0##*/}" "$@"
"""


class Installation:
    """A folder as /opt/edge_server, and the script on it."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home = home
        self._counter, self._bin = folder / "steps", folder / "bin"
        self._bin.mkdir(parents=True)
        for name in STEPS:
            (self._bin / name).write_text(WRAPPER)
            (self._bin / name).chmod(0o755)

    def unpack(self, version: str) -> None:
        """Put files where dpkg puts them."""
        for part in ("program/bin", "program/lib", "runtimes/lib"):
            (self.home / "packages" / part).mkdir(parents=True, exist_ok=True)
        for name, text in {
            "program/version": f"{version}\n",
            "program/bin/edge-server": f'#!/bin/sh\ncat "${{0%/*}}/../lib/runtime"; echo {version}\n',
            "runtimes/lib/runtime": f"runtime of {version}\n",
        }.items():
            # As dpkg does: a new file under the old name.
            new = self.home / "packages" / f"{name}.dpkg-new"
            new.write_text(text)
            new.chmod(0o755)
            new.rename(self.home / "packages" / name)

    def call(self, *arguments: str, kill_at: int = 0, snapshot: str = "", **environment: str) -> tuple[int, str]:
        """Return the exit code and the number of steps, or the errors."""
        self._counter.write_text("")
        done = subprocess.run(
            [str(UPDATE), *arguments], capture_output=True, text=True, timeout=60, check=False,
            env={
                "PATH": f"{self._bin}:/usr/bin:/bin", "EDGE_HOME": str(self.home), "COUNTER": str(self._counter),
                "KILL_AT": str(kill_at), "SNAPSHOT": snapshot, **environment,
            },
        )  # fmt: skip
        return done.returncode, done.stderr

    def count_steps(self) -> int:
        return len(self._counter.read_text().splitlines())

    def use(self, version: str) -> None:
        self.unpack(version)
        assert self.call("use") == (0, "")

    def started(self) -> str:
        """Return the version that starts. Fails if its files are not all its own."""
        return started(self.home)


def started(home: Path) -> str:
    done = subprocess.run(
        [str(home / "current/bin/edge-server")], capture_output=True, text=True, check=True, timeout=30
    )
    runtime, version = done.stdout.splitlines()
    assert runtime == f"runtime of {version}"
    return version


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Installation]:
    """Make an installation on which 1.0 was accepted."""

    def make(name: str) -> Installation:
        made = Installation(tmp_path / name / "opt", tmp_path / name)
        made.use("1.0")
        return made

    return make


@pytest.fixture
def installation(make: Callable[[str], Installation]) -> Installation:
    return make("one")


def record(installation: Installation, name: str) -> str | None:
    path = installation.home / name
    return path.read_text().strip() if path.exists() else None


def test_the_first_version_is_not_on_trial(installation: Installation) -> None:
    assert installation.started() == "1.0"
    assert record(installation, "trial") is None


def test_a_version_on_trial_that_fails_is_taken_back_with_its_reason(installation: Installation) -> None:
    installation.use("2.0")
    assert installation.started() == "2.0"
    assert installation.call("start")[0] == 0
    code, errors = installation.call("stop", SERVICE_RESULT="watchdog", EXIT_STATUS="ABRT")
    assert (code, errors) == (
        0, "program-update: 2.0 is taken back, 1.0 starts from now on: it hung, and the watchdog ended it\n"
    )  # fmt: skip
    assert installation.started() == "1.0"
    assert record(installation, "failed") == "2.0 it hung, and the watchdog ended it"


@pytest.mark.parametrize(
    ("result", "status", "reason"),
    [
        ("exit-code", "78", "it ended with exit code 78"),
        ("signal", "KILL", "it was ended by the signal KILL"),
        ("core-dump", "SEGV", "it was ended by the signal SEGV"),
        ("timeout", "TERM", "it was not ready, or did not stop, in time"),
        ("oom-kill", "KILL", "it took too much memory"),
        ("protocol", "", "systemd says protocol"),
    ],
)
def test_each_result_of_systemd_has_a_reason(installation: Installation, result: str, status: str, reason: str) -> None:
    installation.use("2.0")
    installation.call("start")
    installation.call("stop", SERVICE_RESULT=result, EXIT_STATUS=status)
    assert record(installation, "failed") == f"2.0 {reason}"


def test_the_end_of_the_version_before_does_not_count_against_the_new_one(installation: Installation) -> None:
    installation.use("2.0")
    installation.call("stop", SERVICE_RESULT="timeout")
    assert installation.started() == "2.0"


def test_a_version_that_was_accepted_is_not_taken_back(installation: Installation) -> None:
    installation.use("2.0")
    installation.call("start")
    assert installation.call("accept") == (0, "program-update: 2.0 is accepted\n")
    installation.call("stop", SERVICE_RESULT="signal", EXIT_STATUS="KILL")
    assert installation.started() == "2.0"


def test_a_version_whose_starts_end_with_the_machine_is_taken_back(installation: Installation) -> None:
    installation.use("2.0")
    for _ in range(3):
        installation.call("start")
        assert installation.started() == "2.0"
    installation.call("start")
    assert installation.started() == "1.0"
    assert "the machine went down" in (record(installation, "failed") or "")


def test_restarts_by_the_operator_are_no_failures(installation: Installation) -> None:
    installation.use("2.0")
    for _ in range(5):
        installation.call("start")
        installation.call("stop", SERVICE_RESULT="success")
    assert installation.started() == "2.0"


def test_an_update_during_a_trial_goes_back_to_the_version_that_was_accepted(installation: Installation) -> None:
    installation.use("2.0")
    installation.use("3.0")
    installation.call("start")
    installation.call("stop", SERVICE_RESULT="exit-code", EXIT_STATUS="1")
    assert installation.started() == "1.0"


def test_only_the_version_before_is_kept(installation: Installation) -> None:
    for version in ("2.0", "3.0", "4.0"):
        installation.use(version)
        installation.call("start")
        installation.call("accept")
    assert sorted(os.listdir(installation.home / "versions")) == ["3.0", "4.0"]
    assert installation.call("use", "3.0") == (0, "")
    assert installation.started() == "3.0"


def test_an_unknown_version_changes_nothing(installation: Installation) -> None:
    code, errors = installation.call("use", "9.9")
    assert (code, errors) == (1, "program-update: there is no version 9.9: expected one of 1.0\n")
    assert installation.started() == "1.0"


OPERATIONS = {
    "use": ((), {}, ("1.0", "2.0"), "2.0"),
    "stop": (("use", "start"), {"SERVICE_RESULT": "signal", "EXIT_STATUS": "SEGV"}, ("1.0", "2.0"), "1.0"),
    "start": (("use",), {}, ("2.0",), "2.0"),
    "accept": (("use", "start"), {}, ("2.0",), "2.0"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_kill_at_each_step_leaves_a_version_that_starts(
    make: Callable[[str], Installation], tmp_path: Path, operation: str
) -> None:
    before, environment, possible, finally_started = OPERATIONS[operation]
    prepared = make("prepared")
    prepared.unpack("2.0")
    for name in before:
        prepared.call(name)
    kills = 0
    while True:
        folder = tmp_path / f"kill-{kills}"
        installation = Installation(folder / "opt", folder)
        # Hard links within it stay such.
        subprocess.run(["cp", "-a", str(prepared.home), str(installation.home)], check=True, timeout=60)
        code, _ = installation.call(operation, kill_at=kills + 1, **environment)
        assert installation.started() in possible
        if code == 0:
            break
        assert code == -9
        kills += 1
        # What dpkg and systemd do next: the same again.
        installation.call(operation, **environment)
        assert installation.started() == finally_started
    assert kills == installation.count_steps()
    assert kills >= 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file with an ext4 file system, and where it is mounted."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4, to mount a file system")
    image, mounted = tmp_path / "disk", tmp_path / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=60)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], capture_output=True, check=False).returncode:
        pytest.skip("no file can be mounted here")
    try:
        yield image, mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True, timeout=60)


@pytest.mark.full
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_loss_of_power_at_each_step_leaves_a_version_that_starts(
    disk: tuple[Path, Path], tmp_path: Path, operation: str
) -> None:
    """The disk is copied before each step as a loss of power leaves it: with what was written to it, without what the
    kernel still holds in memory."""
    image, mounted = disk
    before, environment, possible, finally_started = OPERATIONS[operation]
    installation = Installation(mounted / "opt", tmp_path / "script")
    installation.use("1.0")
    installation.unpack("2.0")
    for name in before:
        installation.call(name)
    os.sync()
    assert installation.call(operation, snapshot=str(image), **environment)[0] == 0
    steps = installation.count_steps()
    assert steps >= 2
    shutil.copy(image, f"{image}.{steps + 1}")
    found = []
    for step in range(1, steps + 2):
        look = tmp_path / "look"
        look.mkdir(exist_ok=True)
        subprocess.run(["mount", "-o", "loop", f"{image}.{step}", str(look)], check=True, timeout=60)
        try:
            found.append(started(look / "opt"))
            assert (look / "opt/packages/program/version").read_text() == "2.0\n"
        finally:
            subprocess.run(["umount", str(look)], check=True, timeout=60)
    assert set(found) <= set(possible)
    assert found[-1] == finally_started
