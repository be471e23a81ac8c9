"""The device files of each board, from documents: what the unit lets the service open, and what the doctor says."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from edge_server.core.finding import Finding, FindingLevel
from edge_server.plugins.doctor.permissions import ServerUser, check_permissions
from edge_server.telemetry.sysfs import SysfsFiles

ROOT = Path(__file__).parents[2]
DROP_IN = ROOT / "systemd/edge-server.service.d/jetson.conf"
BOARDS = ("orin_nano_jp6", "agx_orin_jp6", "thor_jp7")

CLOSED = re.compile(r"/dev/(mem|i2c-\d+|ttyTHS\d+|video\d+|nvme.*)")
"""What is on the boards and not the GPU's."""
TOOLS = re.compile(r"nvsciipc|.*\b(sched|nvsched|nvsched_ctrl_fifo|dbg|ctxsw|prof|prof-ctx|prof-dev)(-gpu)?")
DISPLAY = re.compile(r"/dev/(nvidia-modeset|nvidia-uvm-tools|null|dri/card\d+)")

GROUPS = {"root": 0, "video": 9001, "render": 9002, "debug": 9003}


class Node(NamedTuple):
    """A line of boards/NAME.nodes."""

    path: str
    kind: str
    major: int
    minor: int
    mode: int
    group: str


def nodes_of(boards: Any, name: str) -> list[Node]:
    found = []
    for line in (boards.BOARDS / f"{name}.nodes").read_text().splitlines():
        path, kind, number, mode, owner = line.split()
        major, minor = map(int, number.split(":"))
        found.append(Node(path, kind, major, minor, int(mode, 8), owner.partition(":")[2]))
    return found


def device_filter(drop_in: str, devices: str, nodes: list[Node]) -> Iterator[tuple[str, int, int | None]]:
    """Yield what systemd lets through by DeviceAllow= when the service starts: kind, major and minor (None: all).

    After systemd.resource-control(5): a path is the device of that file, "char-" and a pattern those registered by a
    name that fits. DevicePolicy=closed adds null, zero, full, random, urandom, tty, ptmx and the pseudo terminals."""
    yield from (("c", 1, minor) for minor in (3, 5, 7, 8, 9))
    yield from (("c", 5, 0), ("c", 5, 2), ("c", 136, None))
    characters = devices.partition("Block devices:")[0]
    registered = [(int(major), name) for major, name in re.findall(r"(?m)^ *(\d+) (.*)$", characters)]
    for allowed, access in re.findall(r"(?m)^DeviceAllow=(\S+) (\S+)$", drop_in):
        assert access == "rw"
        if allowed.startswith("/dev/"):
            yield from ((node.kind, node.major, node.minor) for node in nodes if node.path == allowed)
        else:
            pattern = allowed.removeprefix("char-")
            yield from (("c", major, None) for major, name in registered if fnmatch.fnmatchcase(name, pattern))


@pytest.mark.parametrize("name", BOARDS)
def test_the_service_may_open_every_device_of_the_gpu_and_no_other(name: str, boards: Any, make_board: Any) -> None:
    nodes = nodes_of(boards, name)
    devices = make_board(name).at("/proc/devices").read_text()
    passed = set(device_filter(DROP_IN.read_text(), devices, nodes))
    opened = {
        node.path
        for node in nodes
        if (node.kind, node.major, node.minor) in passed or (node.kind, node.major, None) in passed
    }
    assert opened == {node.path for node in nodes if not CLOSED.fullmatch(node.path)}


def put_nodes(root: Path, nodes: list[Node]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files to groups")
    for node in nodes:
        target = root / node.path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"")
        target.chmod(node.mode)
        os.chown(target, 0, GROUPS.get(node.group, 9009))


def ask(root: Path, *groups: str) -> list[Finding]:
    user = ServerUser("edge", 12345, frozenset({12345, *(GROUPS[group] for group in groups)}), is_me=False)
    return list(check_permissions(SysfsFiles(root), root, user, is_jetson=True))


@pytest.mark.parametrize("name", BOARDS)
def test_the_doctor_is_content_with_the_groups_of_the_unit(name: str, boards: Any, tmp_path: Path) -> None:
    nodes = nodes_of(boards, name)
    put_nodes(tmp_path, nodes)
    granted = re.search(r"(?m)^SupplementaryGroups=(.*)$", DROP_IN.read_text())
    assert granted is not None
    findings = ask(tmp_path, *granted[1].split())
    assert {item.level for item in findings} == {FindingLevel.OK, FindingLevel.NOTE}
    wanted = [node.path for node in nodes if not CLOSED.fullmatch(node.path) and not DISPLAY.fullmatch(node.path)]
    closed = [path for path in wanted if TOOLS.fullmatch(path.removeprefix("/dev/"))]
    text = f"user edge may open {len(wanted) - len(closed)} of {len(wanted)} GPU devices"
    assert [item.text for item in findings if item.name == "devices"] == [text]
    (note,) = [item for item in findings if item.level is FindingLevel.NOTE]
    assert note.name == closed[0] if len(closed) == 1 else note.name.endswith(f" and {len(closed) - 1} more")


@pytest.mark.parametrize("name", BOARDS)
def test_the_doctor_names_the_group_that_is_missing(name: str, boards: Any, tmp_path: Path) -> None:
    put_nodes(tmp_path, nodes_of(boards, name))
    assert any("--groups 9001" in item.advice for item in ask(tmp_path, "render"))
    assert any("--groups 9002" in item.advice for item in ask(tmp_path, "video"))


def test_the_rules_for_images_without_groups_open_what_the_doctor_asks_for(boards: Any) -> None:
    rules = (ROOT / "jetson/udev.rules").read_text()
    ruled = [
        (pattern, group)
        for names, group in re.findall(r'KERNEL=="([^"]+)", GROUP="(\w+)", MODE="0660"', rules)
        for pattern in names.split("|")
    ]
    for node in nodes_of(boards, "orin_nano_jp6"):
        name = node.path.rpartition("/")[2]
        if node.group in ("video", "render") and not (
            TOOLS.fullmatch(name) or CLOSED.fullmatch(node.path) or DISPLAY.fullmatch(node.path)
        ):
            assert any(fnmatch.fnmatchcase(name, pattern) and group == node.group for pattern, group in ruled), node


def test_the_service_starts_after_the_drivers_modules() -> None:
    """What is registered later is closed (tests/systemd/test_booted_devices.py)."""
    unit = (ROOT / "systemd/edge-server-nvgpu.service").read_text()
    for module in ("nvgpu", "nvhost-nvdla"):
        assert f"ExecStart=-/sbin/modprobe --quiet {module}\n" in unit
    (after,) = re.findall(r"(?m)^After=(.*)$", DROP_IN.read_text())
    assert {"edge-server-nvgpu.service", "nv-load-display-modules.service"} <= set(after.split())
    assert "Wants=edge-server-nvgpu.service" in DROP_IN.read_text()
