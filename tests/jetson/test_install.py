"""jetson/install.sh against folders that replace boards; apt-get, systemctl and others are recorded."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "jetson" / "install.sh"

RELEASES = {
    "36.4.3": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 2025\n",
    "38.2.0": "# R38 (release), REVISION: 2.0, GCID: 41844464, BOARD: generic, EABI: aarch64, DATE: Fri Aug 22 2025\n",
    "39.2.1": "# R39 (release), REVISION: 2.1, GCID: 1, BOARD: generic, EABI: aarch64, DATE: Mon Jun 15 2026\n",
    "35.4.1": "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref, EABI: aarch64, DATE: Tue Aug  1 2023\n",
}
ORIN = "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0"
THOR = "nvidia,p4071-0000+p3834-0008\0nvidia,p3834-0008\0nvidia,tegra264\0"

RECORDER = """#!/bin/sh
printf '%s' "$(basename "$0")" >>"$RECORD"
printf ' %s' "$@" >>"$RECORD"
printf '\\n' >>"$RECORD"
"""

PYTHON = """#!/bin/sh
# Stands in for a Python of a certain version: makes environments of itself, and takes pip's orders.
printf 'python %s\\n' "$*" >>"$RECORD"
case "$1 $2" in
  "-c "*) case $2 in *sys.exit*) [ "$2" != "${2%'VERSION'\\'*}" ] ;; *) echo VERSION ;; esac ;;
  "-m venv")
    mkdir -p "$4/bin"
    cp "$0" "$4/bin/python"
    echo "include-system-site-packages = true" >"$4/pyvenv.cfg" ;;
  "-m pip") [ ! -e "$FAIL_PIP" ] || exit 1; touch "$(dirname "$0")/edge-server" ;;
esac
"""

DPKG_QUERY = """#!/bin/sh
for name in $INSTALLED; do
  eval last=\\${$#}
  if [ "${name%%=*}" = "$last" ]; then
    case "$*" in *Status*) printf 'installed %s' "${name#*=}" ;; *) printf '%s' "${name#*=}" ;; esac
    exit 0
  fi
done
echo "no packages found matching" >&2
exit 1
"""


@dataclass
class Board:
    """A folder that replaces a board's root, and the recorded calls of its programs."""

    root: Path
    programs: Path
    installed: dict[str, str]
    is_booted: bool = True

    @property
    def record(self) -> Path:
        return self.programs / "record"

    def run(self, *flags: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
        self.record.write_text("")
        return subprocess.run(
            [str(SCRIPT), "--root", str(self.root), *flags],
            capture_output=True, text=True, timeout=60, check=False, umask=umask,
            env={
                "PATH": f"{self.programs}:/usr/bin:/bin",
                "RECORD": str(self.record),
                "INSTALLED": " ".join(f"{name}={version}" for name, version in self.installed.items()),
                "FAIL_PIP": str(self.programs / "fail_pip"),
            },
        )  # fmt: skip

    def orders(self) -> list[str]:
        """Return what was asked of programs, without looks."""
        lines = self.record.read_text().splitlines()
        return [line for line in lines if not line.startswith("python -c")]

    def files(self) -> dict[str, str]:
        """Return each file's content and mode; links as such."""
        return {
            str(path.relative_to(self.root)): f"{stat.filemode(path.stat().st_mode)} {path.read_bytes()!r}"
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        }

    def settle(self) -> None:
        """Do what systemctl, sysusers and tmpfiles would have done in a first run."""
        self.write("/etc/systemd/system/multi-user.target.wants/edge-server.service", "")
        self.write("/etc/passwd", "edge:x:990:990::/var/lib/edge_server:/usr/sbin/nologin\n")
        (self.root / "var/lib/edge_server/models").mkdir(parents=True)

    def write(self, path: str, content: str, mode: int = 0o644) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        target.chmod(mode)


@pytest.fixture
def board(tmp_path: Path) -> Callable[..., Board]:
    def make(
        release: str = "36.4.3", compatible: str = ORIN, python: str = "3.10", installed: dict[str, str] | None = None
    ) -> Board:
        programs = tmp_path / "programs"
        programs.mkdir()
        for name in ("apt-get", "systemctl", "systemd-sysusers", "systemd-tmpfiles", "udevadm", "userdel"):
            (programs / name).write_text(RECORDER)
        (programs / "dpkg-query").write_text(DPKG_QUERY)
        for program in programs.iterdir():
            program.chmod(0o755)
        made = Board(tmp_path / "root", programs, {"python3-venv": "3.10.6-1", **(installed or {})})
        made.write("/proc/device-tree/model", "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0")
        made.write("/proc/device-tree/compatible", compatible)
        if release:
            made.write("/etc/nv_tegra_release", RELEASES[release])
        made.write("/usr/bin/python3", PYTHON.replace("VERSION", python), 0o755)
        made.write("/run/systemd/system/.here", "")
        return made

    return make


UNIT = "etc/systemd/system/edge-server.service"


@pytest.mark.parametrize(
    ("release", "compatible", "python", "jetpack"),
    [("36.4.3", ORIN, "3.10", "6"), ("38.2.0", THOR, "3.12", "7"), ("39.2.1", ORIN, "3.12", "7")],
)
def test_it_installs_on_jetpack_6_and_7(
    board: Callable[..., Board], release: str, compatible: str, python: str, jetpack: str
) -> None:
    box = board(release, compatible, python)
    done = box.run()
    assert done.returncode == 0, done.stderr
    assert f"L4T {release}, JetPack {jetpack}, Python {python}" in done.stdout
    venv = box.root / "opt/edge_server"
    orders = box.orders()
    assert orders[0] == "apt-get install --yes --no-install-recommends python3-libnvinfer"
    assert orders[1] == f"python -m venv --system-site-packages {venv}"
    assert orders[2].startswith("python -m pip install")
    assert orders[2].endswith(f"{ROOT}[vision,onnxruntime,signatures]")
    assert f"systemd-sysusers --root={box.root} edge-server.conf" in orders
    assert orders[-1] == "systemctl enable --now edge-server.service"
    assert (box.root / UNIT).read_text() == (ROOT / "systemd/edge-server.service").read_text()
    drop_in = (box.root / f"{UNIT}.d/box.conf").read_text()
    assert "SupplementaryGroups=video render" in drop_in
    for wanted in re.findall(r"(?m)^Wants=(.*)$", drop_in):
        assert (box.root / "etc/systemd/system" / wanted).is_file()


def test_a_second_run_changes_nothing_and_reports_that(board: Callable[..., Board]) -> None:
    box = board(installed={"python3-libnvinfer": "10.3.0.30-1+cuda12.5"})
    assert box.run().returncode == 0
    box.settle()
    before = box.files()
    done = box.run()
    assert (done.returncode, box.orders(), box.files()) == (0, [], before)
    assert "nothing to do" in done.stdout
    assert "TensorRT: 10.3.0.30-1+cuda12.5" in done.stdout


def test_a_change_of_the_clone_is_installed_and_the_service_restarted(board: Callable[..., Board]) -> None:
    box = board(installed={"python3-libnvinfer": "10.3"})
    assert box.run().returncode == 0
    box.settle()
    (box.root / "opt/edge_server/.installed").write_text("something older\n")
    box.write(f"/{UNIT}", "an older unit\n")
    box.write("/etc/edge_server/config.toml", "# the operator's own\n")
    assert box.run().returncode == 0
    orders = box.orders()
    assert orders[0].startswith("python -m pip install")
    assert orders[-1] == "systemctl restart edge-server.service"
    assert (box.root / UNIT).read_text() != "an older unit\n"
    assert (box.root / "etc/edge_server/config.toml").read_text() == "# the operator's own\n"


def test_a_dry_run_prints_all_steps_and_changes_nothing(board: Callable[..., Board]) -> None:
    box = board()
    before = box.files()
    done = box.run("--dry-run")
    assert (done.returncode, box.orders(), box.files()) == (0, [], before), done.stderr
    said = [shlex.split(line.partition(": ")[2]) for line in done.stdout.splitlines() if line.startswith("would run")]
    programs = {words[0].rpartition("/")[2] for words in said}
    assert {"env", "python3", "install", "systemd-sysusers", "systemctl"} <= programs
    real = box.run()
    assert real.returncode == 0
    done_for_real = [shlex.split(line[2:]) for line in real.stdout.splitlines() if line.startswith("+ ")]
    assert done_for_real == said


def test_an_uninstall_removes_everything_except_models_settings_and_own_drop_ins(board: Callable[..., Board]) -> None:
    box = board()
    before = box.files()
    assert box.run().returncode == 0
    box.write("/var/lib/edge_server/models/m/config.pbtxt", "")
    box.write(f"/{UNIT}.d/own.conf", "[Service]\n")
    done = box.run("--uninstall")
    assert done.returncode == 0, done.stderr
    assert box.orders() == ["systemctl disable --now edge-server.service", "systemctl daemon-reload"]
    kept = set(box.files()) - set(before)
    assert kept == {"var/lib/edge_server/models/m/config.pbtxt", f"{UNIT}.d/own.conf", "etc/edge_server/config.toml"}
    assert box.run("--uninstall", "--purge").returncode == 0
    assert set(box.files()) - set(before) == {f"{UNIT}.d/own.conf"}
    assert box.run("--uninstall").returncode == 0, "nothing to take away is no error"


def test_a_dry_run_of_the_uninstall_changes_nothing(board: Callable[..., Board]) -> None:
    box = board()
    assert box.run().returncode == 0
    before = box.files()
    assert box.run("--uninstall", "--purge", "--dry-run").returncode == 0
    assert (box.orders(), box.files()) == ([], before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compatible": "raspberrypi,4-model-b\0brcm,bcm2711\0"}, ("is no Jetson", "systemd/README.md")),
        ({"release": "35.4.1"}, ("JetPack 5", "flash JetPack 6 or 7")),
        ({"release": ""}, ("nvidia-l4t-core",)),
        ({"python": "3.12"}, ("Python 3.12", "JetPack 6 has 3.10")),
    ],
)
def test_an_unsupported_machine_is_one_clear_line_and_no_change(
    board: Callable[..., Board], changes: dict[str, str], words: tuple[str, ...]
) -> None:
    box = board(**changes)
    before = box.files()
    done = box.run()
    assert (done.returncode, box.orders(), box.files()) == (1, [], before)
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_the_release_is_read_from_the_package_if_the_file_is_missing(board: Callable[..., Board]) -> None:
    done = board(release="", installed={"nvidia-l4t-core": "36.4.7-20250918154033"}).run("--dry-run")
    assert "L4T 36.4.7, JetPack 6" in done.stdout, done.stderr


def test_wheels_in_a_folder_install_without_a_network(board: Callable[..., Board]) -> None:
    box = board(installed={"python3-libnvinfer": "10.3"})
    assert box.run("--wheels", "/media/wheels", "--extras", "onnxruntime", "--no-start").returncode == 0
    pip = next(order for order in box.orders() if "pip install" in order)
    assert "--no-index --find-links /media/wheels" in pip
    assert pip.endswith("[onnxruntime]")
    assert not any(order.startswith("apt-get") for order in box.orders())
    assert box.orders()[-1] == "systemctl enable edge-server.service"


def test_an_interrupted_installation_is_resumed(board: Callable[..., Board]) -> None:
    box = board(installed={"python3-libnvinfer": "10.3"})
    (box.programs / "fail_pip").touch()
    assert box.run().returncode != 0
    assert not (box.root / UNIT).exists()
    (box.programs / "fail_pip").unlink()
    assert box.run().returncode == 0
    assert any("pip install" in order for order in box.orders())


def test_a_service_that_was_not_restarted_is_restarted_by_the_next_run(board: Callable[..., Board]) -> None:
    """The new code and units are installed: only a marker file shows that the service still runs the old ones."""
    box = board(installed={"python3-libnvinfer": "10.3"})
    assert box.run().returncode == 0
    box.settle()
    (box.root / "opt/edge_server/.installed").write_text("something older\n")
    (box.programs / "systemctl").write_text("#!/bin/sh\nexit 1\n")
    assert box.run().returncode != 0
    (box.programs / "systemctl").write_text(RECORDER)
    assert "systemctl restart edge-server.service" in box.run("--dry-run").stdout
    assert box.run().returncode == 0
    assert box.orders()[-1] == "systemctl restart edge-server.service"
    assert box.run().returncode == 0
    assert box.orders() == []


def test_the_umask_of_root_does_not_exclude_the_services_user(board: Callable[..., Board]) -> None:
    box = board(installed={"python3-libnvinfer": "10.3"})
    assert box.run(umask=0o077).returncode == 0
    for folder in ("opt", "opt/edge_server", "opt/edge_server/bin", "etc/edge_server"):
        assert (box.root / folder).stat().st_mode & 0o055 == 0o055, folder
    assert (box.root / "opt/edge_server/bin/edge-server").stat().st_mode & 0o044 == 0o044


@pytest.mark.parametrize("flags", [["--nonsense"], ["--root"]])
def test_a_wrong_flag_shows_the_usage(flags: list[str]) -> None:
    done = subprocess.run([str(SCRIPT), *flags], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == os.EX_USAGE
    assert "--dry-run" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="this user is root")
def test_without_root_the_error_says_that_it_is_needed() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, timeout=30, check=False)
    assert "needs root" in done.stderr
