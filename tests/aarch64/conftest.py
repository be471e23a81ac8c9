"""An emulated aarch64 machine: the files of fetch_root.sh, run by qemu where the kernel meets an Arm program.

It shares this machine's network and /dev/shm, so that clients of this machine reach its servers. What is mounted lives
in a mount namespace of each program, and is gone with it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

SOURCE = Path(__file__).parents[2]
QEMU = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
"""How Debian registers qemu, of the package qemu-user-static."""

CPU = "cortex-a76"
"""Armv8.2 as a Jetson Orin's Cortex-A78AE, without the wide vectors (SVE) of qemu's default: twice as fast."""

READY = re.compile(r"edge-server \S+ is ready: (.*)")
START_LIMIT_S = 600.0

_ENTER = r"""
set -eu
# As on a real machine, / is a mount.
mount --bind "$ROOT" "$ROOT"
mount --bind "$PROJECT" "$ROOT/project"
mount --bind "$PROJECT/tmp" "$ROOT/tmp"
mount -t proc proc "$ROOT/proc"
mount --bind "$ROOT/cpuinfo" "$ROOT/proc/cpuinfo"
mount --rbind /sys "$ROOT/sys"
mount --bind /dev/shm "$ROOT/dev/shm"
exec env --ignore-environment PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 QEMU_CPU="$CPU" \
  PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore \
  chroot "$ROOT" /usr/bin/env --chdir=/project "$@"
"""


@dataclass
class Server:
    """One `edge-server serve` of the machine. `http`, `grpc` and `metrics` are "host:port"."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    metrics: str
    errors: Path


@dataclass(frozen=True)
class Machine:
    """`project` is a copy of this checkout, which programs of the machine see as /project, where they start."""

    root: Path
    project: Path

    def start(self, *command: str, **more: IO[str] | int) -> subprocess.Popen[str]:
        """Start a program of the machine in a process group of its own. Signals to the process reach the program."""
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "ROOT": str(self.root), "PROJECT": str(self.project), "CPU": CPU,
        }  # fmt: skip
        return subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", _ENTER, "sh", *command],
            env=environment, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **more,
        )  # fmt: skip

    def run(self, *command: str, timeout_s: float = 600.0) -> str:
        """Run a program of the machine to its end; return what it printed, errors included."""
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            printed, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            print(process.communicate()[0][-8000:])
            raise
        assert process.returncode == 0, f"{shlex.join(command)}: exit code {process.returncode}\n{printed[-8000:]}"
        return printed

    @contextmanager
    def serve(self, *command: str) -> Iterator[Server]:
        """Start a server by `command`, on ports that the system picks, and wait for its ready line."""
        errors = self.project / "tmp" / "stderr.log"
        with errors.open("w") as stderr:
            process = self.start(
                *command, "--http-port=0", "--grpc-port=0", "--metrics-port=0", stdout=subprocess.PIPE, stderr=stderr
            )
        limit = threading.Timer(START_LIMIT_S, process.kill)
        limit.start()
        try:
            assert process.stdout is not None
            ready = next(filter(None, map(READY.match, process.stdout)), None)
            assert ready, f"the server ended with {process.wait()} before it was ready:\n{errors.read_text()}"
            limit.cancel()
            addresses = [
                re.search(pattern, ready[1])[1]  # type: ignore[index]
                for pattern in (r"HTTP http://([^;\s]+)", r"gRPC ([^;\s]+)", r"metrics http://([^/]+)/")
            ]
            yield Server(process, *addresses, errors)
        finally:
            limit.cancel()
            process.terminate()
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        assert process.returncode == 0, errors.read_text()


@contextmanager
def binfmt(root: Path, folder: Path) -> Iterator[None]:
    """Have the kernel run programs for aarch64 by qemu. What is registered already stays and is used."""

    def runs() -> bool:
        done = subprocess.run(["chroot", root, "/bin/true"], capture_output=True, timeout=30, check=False)
        return done.returncode == 0

    if runs():
        yield
        return
    if not QEMU.exists():
        pytest.skip("nothing here runs programs for aarch64: apt-get install qemu-user-static")
    # The kernel has one list, whatever the place where it is mounted.
    mounted = subprocess.run(
        ["mount", "-t", "binfmt_misc", "binfmt_misc", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"binfmt_misc cannot be mounted here: {mounted.stderr.strip()}")
    name = f"edge-server-test-{os.getpid()}"
    # ":name:M:offset:magic:mask:interpreter:flags". F: the interpreter is opened now, and need not be in the chroot.
    fields = QEMU.read_text().strip().split(":")
    fields[1] = name
    fields[-1] = "".join(sorted({*fields[-1], "F"}))
    try:
        try:
            (folder / "register").write_text(":".join(fields))
        except OSError as error:
            pytest.skip(f"qemu cannot be registered in binfmt_misc here: {error}")
        try:
            if not runs():
                pytest.skip("qemu is registered in binfmt_misc, and still nothing here runs programs for aarch64")
            yield
        finally:
            (folder / name).write_text("-1")
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="session")
def emulation() -> Callable[[Path, Path], AbstractContextManager[None]]:
    """`with emulation(root, folder):`, see `binfmt`."""
    return binfmt


@pytest.fixture(scope="session")
def root() -> Path:
    """The machine's files."""
    if "EDGE_TEST_AARCH64_ROOT" not in os.environ:
        pytest.skip('needs files of an aarch64 machine: eval "$(tests/aarch64/fetch_root.sh FOLDER)"')
    if os.geteuid() != 0:
        pytest.skip("needs root, to run another machine's programs")
    return Path(os.environ["EDGE_TEST_AARCH64_ROOT"])


@pytest.fixture(scope="session")
def emulated(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The machine's files, the programs of which the kernel runs."""
    with binfmt(root, tmp_path_factory.mktemp("binfmt_misc")):
        yield root


@pytest.fixture(scope="module")
def machine(emulated: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The machine with a copy of this checkout of its own, in which nothing is installed."""
    project = tmp_path_factory.mktemp("aarch64")
    listed = subprocess.run(
        ["git", "-C", SOURCE, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (SOURCE / name).exists():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(SOURCE / name, project / name, follow_symlinks=False)
    (project / "tmp").mkdir()
    return Machine(emulated, project)


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Machine:
    """The machine with the project installed in /project/.venv by pip, and its dependencies as unpacked before."""
    machine.run("python3", "-m", "venv", "--without-pip", "--system-site-packages", ".venv")
    machine.run(".venv/bin/python", "-m", "pip", "install", "-q", "--no-build-isolation", ".[cpu]")
    return machine


@pytest.fixture(scope="session")
def readme() -> Callable[[str], str]:
    """`readme("curl-command")` is the README's command between `<!-- curl-command -->` and `<!-- end -->`."""
    text = (SOURCE / "README.md").read_text()

    def command(name: str) -> str:
        found = re.search(rf"<!-- {name} -->\s*```sh\n(.*?)\n```\s*<!-- end -->", text, re.DOTALL)
        assert found, f"the README has no command marked {name}"
        return found[1]

    return command
