"""Checks of the board and its system software."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Mapping

from edge_server import cgroup_limits
from edge_server.core.finding import Finding
from edge_server.telemetry.sysfs import SysfsFiles

_PACKAGES = ("nvidia-l4t-core", "nvidia-jetpack", "libnvinfer10", "libnvinfer8", "python3-libnvinfer")


def check_board(files: SysfsFiles) -> Iterator[Finding]:
    """Report the board, the processor, the system and Python."""
    dmi = (files.maybe_text(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name"))
    name = files.maybe_text("/proc/device-tree/model") or " ".join(part for part in dmi if part)
    yield Finding("board", "name", name or "not reported by the firmware")
    if soc := files.soc():
        yield Finding("board", "chip", soc)
    else:
        yield Finding("board", "processor", _processor(files))
    release = re.search(r'(?m)^PRETTY_NAME="?(.*?)"?$', files.maybe_text("/etc/os-release") or "")
    system = release[1] if release else "unknown"
    kernel = files.maybe_text("/proc/sys/kernel/osrelease") or "unknown"
    yield Finding("board", "system", f"{system}, kernel {kernel}, {platform.machine()}")
    yield Finding("board", "python", f"{platform.python_version()} at {sys.executable}")


def check_packages(packages: Mapping[str, str]) -> Iterator[Finding]:
    """Report NVIDIA's installed packages of a Jetson."""
    for name, version in sorted(packages.items()):
        yield Finding("jetpack", name, version)


def installed_packages(files: SysfsFiles) -> dict[str, str]:
    """Return NVIDIA's packages that are installed according to dpkg, with their versions."""
    found: dict[str, str] = {}
    name, is_installed = "", False
    for line in files.lines("/var/lib/dpkg/status"):
        key, _, value = line.partition(": ")
        if key == "Package":
            name, is_installed = value.strip(), True
        elif key == "Status":
            is_installed = value.split()[-1:] == ["installed"]
        elif key == "Version" and name in _PACKAGES and is_installed:
            found[name] = value.strip()
    return found


def _processor(files: SysfsFiles) -> str:
    text = files.maybe_text("/proc/cpuinfo") or ""
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", text)
    count = len(re.findall(r"(?m)^processor\s*:", text))
    limit = cgroup_limits.cpu_limit(files.root)
    limited = f", of which this control group may use {limit:g}" if limit is not None and limit < count else ""
    return f"{found[1] if found else platform.machine()}, {count or 'unknown'} cores{limited}"
