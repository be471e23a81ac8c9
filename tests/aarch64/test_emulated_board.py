"""An emulated Jetson: `jetson/install.sh` whole on an aarch64 machine that has a board's files, by Debian's Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

RECORDER = """#!/bin/sh
echo "$(basename "$0") $*" >>/project/record
"""


class Installed(NamedTuple):
    """What the installer printed, and the board's folder, as the machine and as this one see it."""

    printed: str
    root: str
    board: Any


def install(machine: Any, root: str, *flags: str) -> str:
    """Run the installer of the copy, by Debian's Python; return what it printed."""
    script = machine.project / "jetson/install.sh"
    script.write_text(re.sub(r"wanted=3\.\d+", "wanted=3.11", script.read_text()))
    path = "PATH=/project/programs:/usr/sbin:/usr/bin:/sbin:/bin"
    command = ["bash", "/project/jetson/install.sh", "--root", root, "--wheels", "/wheels", *flags]
    return str(machine.run("/usr/bin/env", path, *command, timeout_s=1500))


def orders(machine: Any) -> list[str]:
    """Return what was asked of programs that this machine does not have, and forget it."""
    record = machine.project / "record"
    found: list[str] = record.read_text().splitlines() if record.exists() else []
    record.unlink(missing_ok=True)
    return found


def put_board(machine: Any, boards: Any, name: str) -> Any:
    board = boards.Board(name, machine.project / name)
    board.write("/run/systemd/system/.here", "")
    board.write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh")
    board.write("/etc/group", "root:x:0:")
    (board.root / "usr/bin").mkdir(parents=True)
    (board.root / "usr/bin/python3").symlink_to("/usr/bin/python3")
    return board


@pytest.fixture(scope="module")
def installed(machine: Any, boards: Any) -> Iterator[Installed]:
    if not (machine.root / "bin/bash").exists():
        pytest.skip("the machine has no bash: make it again by tests/aarch64/fetch_root.sh")
    programs = machine.project / "programs"
    programs.mkdir()
    for name in ("apt-get", "systemctl"):
        (programs / name).write_text(RECORDER)
        (programs / name).chmod(0o755)
    board = put_board(machine, boards, "orin_nano_jp6")
    root = f"/project/{board.root.relative_to(machine.project)}"
    yield Installed(install(machine, root), root, board)
    board.close()


def test_the_installer_makes_a_whole_installation(machine: Any, installed: Installed) -> None:
    assert "software: L4T 36.4.3, JetPack 6, Python 3.11" in installed.printed
    assert "done; models go to /var/lib/edge_server/models" in installed.printed
    first, *_, last = orders(machine)
    assert first.startswith("apt-get install --yes --no-install-recommends")
    assert "python3-libnvinfer" in first
    assert last == "systemctl enable --now edge-server.service"
    users = (installed.board.root / "etc/passwd").read_text()
    assert re.search(r"(?m)^edge:.*:/var/lib/edge_server:/usr/sbin/nologin$", users)
    groups = dict(line.split(":", 1) for line in (installed.board.root / "etc/group").read_text().splitlines())
    assert groups["video"].endswith(":edge")
    assert groups["render"].endswith(":edge")
    models = (installed.board.root / "var/lib/edge_server/models").stat()
    assert models.st_mode & 0o7777 == 0o2775
    assert models.st_uid != 0


@pytest.mark.parametrize(
    ("name", "release", "heat"),
    [
        ("orin_nano_jp6", "JetPack 6.2 (L4T 36.4.3)", "(tj)"),
        ("agx_orin_jp6", "JetPack 6.0 (L4T 36.3.0)", "(tj)"),
        ("thor_jp7", "JetPack 7.0 (L4T 38.2.0)", "(tj)"),
    ],
)
def test_the_installed_program_reads_the_sensors_of_each_board(
    machine: Any, installed: Installed, make_board: Any, name: str, release: str, heat: str
) -> None:
    board = make_board(name)
    # The folder is on this machine: the program sees a copy without what is switched off.
    archive = machine.project / f"{name}.tar"
    subprocess.run(["tar", "--exclude-vcs", "-cf", str(archive), *files_of(board)], cwd=board.root, check=True)
    folder = machine.project / "boards" / name
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-xf", str(archive)], cwd=folder, check=True)
    program = f"{installed.root}/opt/edge_server/bin/edge-server"
    printed = machine.run(program, "doctor", "--json", "--skip-runtimes", f"--sysfs-root=/project/boards/{name}")
    sections = json.loads(printed)["sections"]
    texts = {item["name"]: item["text"] for items in sections.values() for item in items}
    assert texts["release"] == release
    assert heat in texts["heat"]
    assert " W" in texts["power"]
    assert texts["system"].endswith(", aarch64")


def files_of(board: Any) -> list[str]:
    return [path.lstrip("/") for path, content in board.files.items() if isinstance(content, bytes)]


def test_the_installed_runtime_runs_a_model(machine: Any, installed: Installed) -> None:
    program = f"{installed.root}/opt/edge_server/bin/edge-server"
    sections = json.loads(machine.run(program, "doctor", "--json", timeout_s=900))["sections"]
    texts = {item["name"]: item["text"] for item in sections["runtimes"]}
    assert texts["onnxruntime"].endswith(" on CPU, f32")


@pytest.mark.parametrize(("name", "jetpack"), [("agx_orin_jp6", "6"), ("thor_jp7", "7")])
def test_a_dry_run_knows_the_other_boards(
    machine: Any, installed: Installed, boards: Any, name: str, jetpack: str
) -> None:
    board = put_board(machine, boards, name)
    try:
        printed = install(machine, f"/project/{name}/root", "--dry-run")
    finally:
        board.close()
    assert f"JetPack {jetpack}, Python 3.11" in printed
    assert "would run: systemctl enable --now edge-server.service" in printed


def test_a_second_run_installs_nothing_again_and_an_uninstall_leaves_the_board(
    machine: Any, installed: Installed
) -> None:
    orders(machine)
    installed.board.write("/etc/systemd/system/multi-user.target.wants/edge-server.service", "")
    printed = install(machine, installed.root)
    # Debian's packages are unpacked on this machine, not installed: the installer asks for them again.
    assert [line for line in printed.splitlines() if line.startswith("+ ")] == [
        line for line in printed.splitlines() if "apt-get" in line
    ]
    printed = install(machine, installed.root, "--uninstall", "--purge")
    assert "removed; packages of apt stay, everything else is gone" in printed
    left = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(installed.board.root)
        for name in names
        if "edge" in name
    ]
    assert [path for path in left if "multi-user.target.wants" not in path] == []
    assert not Path(installed.board.root / "opt/edge_server").exists()
