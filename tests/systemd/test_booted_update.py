"""Updates by apt on a machine booted by systemd: from a signed repository, good ones and bad ones, cut short at each
step."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PUBLISH = HERE.parents[1] / "systemd/publish_apt.sh"

MODEL = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_INT32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [-1] }
"""

QUICK = {
    "edge-server.service": """
[Unit]
StartLimitBurst=100
[Service]
Environment=EDGE_SERVER_DRAIN_DELAY_SECS=0
TimeoutStartSec=8
WatchdogSec=3
RestartSec=1
""",
    "edge-server-accept.timer": """
[Timer]
OnActiveSec=
OnActiveSec=8
""",
}

AFTER_READY = """
_ready = ServiceManager.ready
def _break(self, status):
    _ready(self, status)
    {action}
ServiceManager.ready = _break
"""

NOTIFY = "lib/edge_server/telemetry/systemd_notify.py"
VERSIONS = {
    "1.1": ("", ""),
    "1.2": ("lib/edge_server/cli/main.py", "raise SystemExit(78)"),
    "1.3": (NOTIFY, "ServiceManager.ready = ServiceManager.extend = lambda *_: None"),
    "1.4": (NOTIFY, AFTER_READY.format(action="time.sleep(3600)")),
    "1.5": (NOTIFY, AFTER_READY.format(action="import os, threading; threading.Timer(1, os.abort).start()")),
    "1.6": ("lib/edge_server/backends/builtin_models.py", "def _fail(*_): 1 / 0\nStubBackend.open = _fail"),
    "1.7": ("", ""),
}
"""Version -> file of the program, and what stands at its end."""


def repack(program: Path, version: str, folder: Path, file: str = "", code: str = "") -> Path:
    """Return the program's package as another version, with code at the end of one of its files."""
    root = folder / f"root-{version}"
    subprocess.run(["dpkg-deb", "--raw-extract", str(program), str(root)], check=True, timeout=60)
    control = root / "DEBIAN/control"
    lines = control.read_text().splitlines()
    control.write_text(
        "\n".join(f"Version: {version}" if line.startswith("Version:") else line for line in lines) + "\n"
    )
    packed = root / "opt/edge_server/packages/program"
    (packed / "version").write_text(f"{version}\n")
    if file:
        with (packed / file).open("a") as out:
            out.write(f"\n{code}\n")
    package = folder / f"edge-server_{version}.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(root), str(package)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    shutil.rmtree(root)
    return package


@pytest.fixture(scope="module", autouse=True)
def can_boot(machine: Any) -> None:
    why = machine.missing_requirement()
    missing = [name for name in ("apt-ftparchive", "gpg") if shutil.which(name) is None]
    if why or missing:
        pytest.skip(why or f"needs {' and '.join(missing)}: apt-get install apt-utils gpg")


@pytest.fixture(scope="module")
def seen(machine: Any, packages: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenario saw inside; one boot for all tests."""
    folder = tmp_path_factory.mktemp("update")
    files = folder / "files"
    (files / "site/stable").mkdir(parents=True)
    waiting = files / "waiting"
    waiting.mkdir()
    for package in (packages.runtimes, packages.models):
        shutil.copy(package, waiting)
    for version, (file, code) in {"1.0": ("", ""), **VERSIONS}.items():
        repack(packages.program, version, waiting, file, code)
    shutil.copy(PUBLISH, files)
    model = files / "seed/same"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(MODEL)
    for unit, text in QUICK.items():
        drop_in = files / f"etc/systemd/system/{unit}.d/quick.conf"
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text(text)
    found: dict[str, Any] = machine.boot(None, files, folder, HERE / "update_scenario.py", 600)
    assert "error" not in found, f"{found.get('error')}\n{found.get('journal')}"
    return found


pytestmark = [pytest.mark.long, pytest.mark.timeout(660)]


def test_apt_installs_from_the_signed_repository_and_the_service_serves(seen: dict[str, Any]) -> None:
    assert seen["install"] == {"code": 0, "current": "1.0", "served": True}


def test_an_update_of_the_program_downloads_only_the_program(seen: dict[str, Any]) -> None:
    assert [address.rpartition("/")[2] for address in seen["downloads"]] == ["edge-server_1.1.deb"]


@pytest.mark.parametrize(("version", "before"), [("1.1", "1.0"), ("1.7", "1.1")])
def test_a_good_version_is_on_trial_and_then_accepted(seen: dict[str, Any], version: str, before: str) -> None:
    update = seen[version]
    assert (update["code"], update["current"], update["served"], update["failed"]) == (0, version, True, "")
    assert f"program: version {version} is on trial; {before} starts again if it fails" in update["status"]
    assert f"{version} is accepted" in seen["journal"]
    assert update["status_code"] == 0


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("1.2", "it ended with exit code 78"),
        ("1.3", "it was not ready, or did not stop, in time"),
        ("1.4", "it hung, and the watchdog ended it"),
        ("1.5", "it was ended by the signal ABRT"),
        ("1.6", "more models fail to load than before (1, not 0): 0 models served, 1 NOT: same 1 "),
    ],
)
def test_a_bad_version_is_taken_back_and_the_reason_is_in_the_journal_and_in_status(
    seen: dict[str, Any], version: str, reason: str
) -> None:
    update = seen[version]
    # dpkg has done its work: the package is configured, and apt is not blocked.
    assert (update["code"], update["current"], update["served"]) == (0, "1.1", True)
    assert update["failed"].startswith(f"{version} {reason}")
    assert f"{version} is taken back, 1.1 starts from now on: {reason}" in seen["journal"]
    assert f"FAILED program: version {version} was taken back, 1.1 starts instead: {reason}" in update["status"]
    assert update["status_code"] == 1


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_apt_says_that_a_version_that_did_not_start_was_taken_back(seen: dict[str, Any], version: str) -> None:
    assert f"edge-server: {version} was taken back, the version before starts: it" in seen[version]["output"]


def test_models_and_settings_survive_all_updates(seen: dict[str, Any]) -> None:
    assert seen["kept"] == {"model": True, "config": '[log]\nformat = "text"\n'}


def test_a_crash_after_the_trial_takes_nothing_back(seen: dict[str, Any]) -> None:
    assert seen["later_crash"] == {"served": True, "current": "1.7"}


def test_apt_refuses_a_damaged_package_and_a_list_signed_by_another_key(seen: dict[str, Any]) -> None:
    assert seen["damaged"]["code"] != 0
    assert "Hash Sum mismatch" in seen["damaged"]["output"] or "unexpected size" in seen["damaged"]["output"]
    assert "NO_PUBKEY" in seen["other_key"]["output"] or "signatures" in seen["other_key"]["output"]
    assert (seen["damaged"]["current"], seen["other_key"]["current"]) == ("1.7", "1.7")


def test_a_removal_leaves_models_and_settings_alone(seen: dict[str, Any]) -> None:
    assert seen["removed"] == {"program": True, "model": True, "config": True}


def test_a_kill_of_dpkg_at_each_of_its_steps_leaves_a_version_that_starts(
    machine: Any, packages: Any, tmp_path: Path
) -> None:
    files = tmp_path / "files/new"
    files.mkdir(parents=True)
    for version in ("2.0", "2.1"):
        repack(packages.program, version, files)
    found = machine.boot(packages, files.parent, tmp_path, HERE / "interrupted_scenario.py", is_booted=False)
    assert "error" not in found, json.dumps(found, indent=1)
    assert len(found["steps"]) >= 5
    for step in found["steps"]:
        assert step["starts"] in step["possible"], step
        assert step["in_the_end"] == step["possible"][-1], step
