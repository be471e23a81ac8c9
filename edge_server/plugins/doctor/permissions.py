"""Checks of permissions: whether the server's user may open the device files of the GPUs."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_server.core.finding import Finding, FindingLevel
from edge_server.telemetry.sysfs import SysfsFiles

_SECTION = "permissions"

_NODES: tuple[tuple[str, str], ...] = (
    ("/dev", r"nvmap|nvsciipc|host1x-fence|nvhost-ctrl(-nvdla\d)?|nvhost-(.+-)?gpu|nvidia\d+|nvidiactl|nvidia-uvm"),
    ("/dev/nvgpu/igpu0", r".+"),
    ("/dev/dri", r"renderD\d+"),
)
"""Folder -> names of the device files that GPU computing opens. Display and camera devices are left out."""

_TOOLS = re.compile(
    r"/dev/nvsciipc|/dev/(nvgpu/igpu0/|nvhost-)(sched|nvsched|nvsched_ctrl_fifo|dbg|ctxsw|prof|prof-ctx|prof-dev)(-gpu)?"
)
"""Nodes of schedulers, debuggers and profilers, which NVIDIA's rules (99-tegra-devices.rules) keep from `video`."""


@dataclass(frozen=True, slots=True)
class ServerUser:
    """The user that opens the devices. `is_me`: it is the user of this process, so the kernel can check access."""

    name: str
    uid: int
    gids: frozenset[int]
    is_me: bool

    def may_open(self, path: Path) -> bool:
        """Return whether the user may read and write. For another user only the mode is checked, not access lists."""
        if self.is_me:
            return os.access(path, os.R_OK | os.W_OK)
        if self.uid == 0:
            return True
        found = path.stat()
        if found.st_uid == self.uid:
            wanted = stat.S_IRUSR | stat.S_IWUSR
        elif found.st_gid in self.gids:
            wanted = stat.S_IRGRP | stat.S_IWGRP
        else:
            wanted = stat.S_IROTH | stat.S_IWOTH
        return found.st_mode & wanted == wanted


def find_user(name: str) -> ServerUser:
    """Return a user by name; "" means the user of this process. Raises KeyError."""
    if not name:
        uid = os.geteuid()
        gids = frozenset({*os.getgroups(), os.getegid()})
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = str(uid)
        return ServerUser(name, uid, gids, is_me=True)
    entry = pwd.getpwnam(name)
    gids = frozenset(os.getgrouplist(name, entry.pw_gid))
    return ServerUser(
        name, entry.pw_uid, gids, is_me=entry.pw_uid == os.geteuid() and gids <= {*os.getgroups(), os.getegid()}
    )


def check_permissions(files: SysfsFiles, root: Path, user: ServerUser, *, is_jetson: bool) -> Iterator[Finding]:
    """Report for each GPU device whether the user may open it."""
    nodes = [f"{folder}/{name}" for folder, pattern in _NODES for name in files.names(folder, pattern)]
    closed: dict[str, list[str]] = {}
    tools: list[str] = []
    for node in nodes:
        path = root / node.lstrip("/")
        if user.may_open(path):
            continue
        if _TOOLS.fullmatch(node):
            tools.append(node)
        else:
            closed.setdefault(_group(path), []).append(node)
    opened = len(nodes) - len(tools) - sum(map(len, closed.values()))
    if is_jetson and "/dev/nvmap" not in nodes:
        advice = (
            "in a container, start it with --runtime=nvidia; else the GPU's driver is not loaded: dmesg | grep nvgpu"
        )
        yield Finding(_SECTION, "/dev/nvmap", "is not there: no CUDA on this board", FindingLevel.WARNING, advice)
    if opened:
        yield Finding(_SECTION, "devices", f"user {user.name} may open {opened} of {len(nodes)} GPU devices")
    elif not nodes:
        yield Finding(_SECTION, "devices", "this box has no GPU devices: models run on its processor")
    if tools:
        text = f"user {user.name} may not open them: they are for schedulers, debuggers and profilers"
        yield Finding(_SECTION, _shown(tools), text, FindingLevel.NOTE)
    for group, paths in sorted(closed.items()):
        yield Finding(
            _SECTION, _shown(paths), f"user {user.name} may not open it", FindingLevel.WARNING, _advice(group, user)
        )


def _group(path: Path) -> str:
    """Return the group that may open a device, or "" if no group may."""
    found = path.stat()
    both = stat.S_IRGRP | stat.S_IWGRP
    if found.st_mode & both != both or found.st_gid == 0:
        return ""
    try:
        return grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        return str(found.st_gid)


def _advice(group: str, user: ServerUser) -> str:
    if not group:
        return "no group may open it: install jetson/udev.rules, or the driver's own rules, and run udevadm trigger"
    return (
        f"sudo usermod --append --groups {group} {user.name}, then log in anew; in a unit, "
        f"SupplementaryGroups={group}; in a container, --group-add {group}"
    )


def _shown(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
