"""Identification of a Jetson: reads board, chip, JetPack release and power mode from files, without NVIDIA's tools."""

from __future__ import annotations

import re
from typing import NamedTuple

from edge_server.plugins.governor.readings import PowerMode
from edge_server.telemetry.sysfs import FIND_AGAIN_S, SysfsFiles

_JETPACKS: tuple[tuple[str, str], ...] = (
    ("35.2.1", "5.1"),
    ("35.3.1", "5.1.1"),
    ("35.4.1", "5.1.2"),
    ("35.5", "5.1.3"),
    ("35.6.0", "5.1.4"),
    ("35.6.1", "5.1.5"),
    ("35.6.2", "5.1.5"),
    ("35.6.3", "5.1.5"),
    ("35.6.4", "5.1.6"),
    ("36.3", "6.0"),
    ("36.4.0", "6.1"),
    ("36.4.2", "6.1"),
    ("36.4.3", "6.2"),
    ("36.4.4", "6.2.1"),
    ("36.4.7", "6.2.1"),
    ("36.5.0", "6.2.2"),
    ("36.5.2", "6.2.3"),
    ("38.2", "7.0"),
    ("38.3", "7.0"),
    ("38.4", "7.1"),
    ("39.0", "7.2"),
    ("39.1", "7.2"),
    ("39.2.0", "7.2"),
    ("39.2.1", "7.2.1"),
)
"""Release of Linux for Tegra -> JetPack, from NVIDIA's archive. A short entry is for all releases with this prefix.

38.3, 39.0 and 39.1 are not in the archive, but on boards and in names of containers: the nearest JetPack."""

_STATUS = "/var/lib/nvpmodel/status"
_MODES = "/etc/nvpmodel.conf"
_INCOMPLETE_AGAIN_S = 60.0
"""Time until an incomplete identity of a Jetson is read again: this searches dpkg's list, which is long."""


class Identity(NamedTuple):
    """Identity of a board. `soc` is the chip's name in the device tree (tegra234 for Orin); None if not a Jetson."""

    board: str | None
    soc: str | None
    l4t: str | None
    jetpack: str | None


class IdentityReader:
    """Reads the identity of the board, and reads it again from time to time while it is not complete."""

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files
        self._identity: Identity | None = None
        self._read_s = 0.0

    def read(self, now_s: float) -> Identity:
        """Return the identity. `now_s` is of a monotonic clock."""
        known = self._identity
        if known is not None:
            if None not in (known.board, known.soc, known.l4t):
                return known
            if 0 <= now_s - self._read_s < (FIND_AGAIN_S if known.soc is None else _INCOMPLETE_AGAIN_S):
                return known
        self._identity, self._read_s = read_identity(self._files), now_s
        return self._identity


def read_identity(files: SysfsFiles) -> Identity:
    """Return the identity of the board. Fields that cannot be read are None."""
    board = files.maybe_text("/proc/device-tree/model") or None
    soc = files.soc()
    if soc is None:
        return Identity(board, None, None, None)
    # For example 36.4.3 for "# R36 (release), REVISION: 4.3, ...".
    found = re.search(r"\bR(\d+)\b.*?\bREVISION:\s*([\d.]+)", files.maybe_text("/etc/nv_tegra_release") or "")
    l4t = f"{found[1]}.{found[2].strip('.')}" if found else _package_release(files)
    return Identity(board, soc, l4t, None if l4t is None else jetpack_of_release(l4t))


def jetpack_of_release(l4t: str) -> str | None:
    """Return the JetPack of a release such as 36.4.3. An unknown release gets that of the next older one."""
    release_numbers = _numbers(l4t)
    known = ((_numbers(release), name) for release, name in _JETPACKS)
    older = [item for item in known if item[0][:2] == release_numbers[:2] and item[0] <= release_numbers]
    return max(older)[1] if older else None


def read_power_mode(files: SysfsFiles) -> PowerMode | str:
    """Return the active power mode, or the reason why it is unknown."""
    status = files.maybe_text(_STATUS)
    if status is None:
        return f"{_STATUS} is not there: nvpmodel has not run"
    found = re.search(r"pmode:(\d+)", status)
    if found is None:
        return f"{_STATUS}: expected 'pmode:' and a number, given '{status[:40]}'"
    number = int(found[1])
    configuration = files.maybe_text(_MODES)
    if configuration is None:
        return f"{_MODES} is not there: power mode {number} has no name"
    mode = _mode(configuration, number)
    return mode or f"{_MODES} has no power mode {number}"


def _mode(configuration: str, number: int) -> PowerMode | None:
    for section in re.split(r"(?m)^\s*(?=<)", configuration):
        header = re.match(r"<\s*POWER_MODEL\s+([^>]*)>", section)
        if header is None:
            continue
        # The attributes may be in any order.
        values = dict(re.findall(r"(\w+)\s*=\s*(\S+)", header[1]))
        if values.get("ID", "").isdigit() and int(values["ID"]) == number:
            cap = re.search(r"(?m)^\s*GPU\s+MAX_FREQ\s+(\d+)", section)
            return PowerMode(number, values.get("NAME", ""), int(cap[1]) if cap else None)
    return None


def _package_release(files: SysfsFiles) -> str | None:
    """Return the release of the package nvidia-l4t-core, for images without the release file."""
    is_core = False
    for line in files.lines("/var/lib/dpkg/status"):
        if line.startswith("Package:"):
            is_core = line.split()[1:] == ["nvidia-l4t-core"]
        elif is_core and line.startswith("Version:"):
            found = re.match(r"Version:\s*([\d.]+)", line)
            return found[1] if found else None
    return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdigit())
