"""A machine that is booted by systemd in a container: this one's files under an overlay, with the Debian packages
installed in it. Its mounts are in their own mount namespace, and vanish with its last process. Its systemd may load BPF
programs, as filters of devices (`DeviceAllow=`) are: without that right it starts services unfiltered, in silence."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "systemd" / "build_deb.sh"

_SCRIPT = r"""
set -eu
mount -t tmpfs tmpfs "$WORK"
mkdir "$WORK/upper" "$WORK/work" "$WORK/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$WORK/upper,workdir=$WORK/work" "$WORK/root"
root=$WORK/root
rm -f "$root/etc/machine-id"
: >"$root/etc/fstab"
mount -t proc proc "$root/proc"
if [ -n "$PACKAGES" ]; then
  mkdir "$root/packages"
  cp "$PACKAGES"/*.deb "$root/packages/"
  chroot "$root" sh -c "dpkg --install --force-depends /packages/*.deb" >&2
fi
cp -r "$SCENARIO/." "$root/"
if [ -z "$BOOT" ]; then
  mount --bind "$RESULTS" "$(mkdir "$root/results" && echo "$root/results")"
  exec unshare --pid --fork --kill-child chroot "$root" python3 /scenario.py
fi
umount "$root/proc"
SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 exec systemd-nspawn --directory="$root" --register=no --keep-unit --boot \
  --link-journal=no --private-network --console=pipe --bind="$RESULTS:/results" \
  --capability=CAP_BPF,CAP_PERFMON --system-call-filter=bpf systemd.unit=scenario.service
"""

_UNIT = """
[Unit]
Description=what the test does inside
[Service]
Type=oneshot
ExecStart=/usr/bin/python3 /scenario.py
TimeoutStartSec=600
ExecStopPost=/bin/systemctl poweroff --no-block
StandardOutput=journal+console
"""


def missing_requirement() -> str:
    """Return why no machine can be booted here, "" when one can."""
    if os.geteuid() != 0:
        return "needs root, to boot a container"
    missing = [
        name for name in ("systemd-nspawn", "unshare", "dpkg-deb", "mount", "chroot") if shutil.which(name) is None
    ]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install systemd systemd-container"
    if not Path("/lib/systemd/systemd").exists():
        return "needs systemd: apt-get install systemd"
    mine, theirs = ".".join(map(str, sys.version_info[:2])), _version_of("/usr/bin/python3")
    if mine != theirs:
        return f"the package is built of this Python's {mine} packages, /usr/bin/python3 is {theirs}"
    tried = subprocess.run(
        [
            "unshare", "--mount", "--propagation=private", "sh", "-ec",
            "mount -t tmpfs tmpfs /mnt && mkdir /mnt/u /mnt/w /mnt/r && "
            "mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r",
        ],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return "" if tried.returncode == 0 else f"no overlay can be mounted here: {tried.stderr.strip()}"


def _version_of(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip()


class Packages(NamedTuple):
    """The three Debian packages, in one folder."""

    program: Path
    runtimes: Path
    models: Path


def build_packages(out: Path, extras: str = "") -> Packages:
    """Return packages of what this Python has installed, built without a network."""
    done = subprocess.run(
        [str(BUILD), "--from", sys.executable, "--extras", extras, "--level", "1", str(out)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Packages(*map(Path, done.stdout.splitlines()))


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Machines share this one's control groups: the second one's edge-server.service replaces the filter of devices of
    the first one's."""
    with open(Path(tempfile.gettempdir()) / "edge_server_booted.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def boot(
    packages: Packages | None,
    files: Path,
    folder: Path,
    scenario: Path,
    timeout_s: float = 240,
    *,
    is_booted: bool = True,
) -> dict[str, Any]:
    """Install the packages, lay `files` over the root, boot, run the scenario inside; return what it found.

    Not `is_booted`: the scenario runs without systemd, as in a chroot."""
    work, results = folder / "work", folder / "results"
    work.mkdir()
    results.mkdir()
    unit = files / "etc/systemd/system/scenario.service"
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(_UNIT)
    shutil.copy(scenario, files / "scenario.py")
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "WORK": str(work), "PACKAGES": str(packages.program.parent) if packages else "",
        "SCENARIO": str(files), "RESULTS": str(results), "BOOT": "yes" if is_booted else "",
    }  # fmt: skip
    log = folder / "boot.log"
    with log.open("wb") as out, _one_at_a_time():
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", _SCRIPT],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # systemd-nspawn takes its container with it.
            process.terminate()
            process.wait(20)
    found = results / "results.json"
    if not found.exists():
        reached = [item.read_text() for item in results.glob("reached")]
        raise AssertionError(f"the scenario reached {reached}\n{log.read_text(errors='replace')[-6000:]}")
    answer: dict[str, Any] = json.loads(found.read_text())
    return answer
