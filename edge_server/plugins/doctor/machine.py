"""Checks of the machine: board, system software, memory and sensors."""

from __future__ import annotations

import grp
import os
import platform
import re
import sys
from collections.abc import Iterator

from edge_server import cgroup_limits
from edge_server.memory.available_memory import RUNTIME_BYTES
from edge_server.plugins.doctor.finding import Finding, FindingLevel
from edge_server.plugins.governor.readings import MachineReading
from edge_server.plugins.governor.sensors.sysfs import SysfsFiles

_MIB = 1 << 20

_MIN_BYTES = RUNTIME_BYTES
"""Least memory for the server itself (about 80 MB) and one small model."""
_LITTLE_BYTES = 512 * _MIB

_PACKAGES = ("nvidia-l4t-core", "nvidia-jetpack", "libnvinfer10", "libnvinfer8", "python3-libnvinfer")


def check_board(files: SysfsFiles, reading: MachineReading) -> Iterator[Finding]:
    """Report the board, the processor, the system and Python."""
    dmi = (files.maybe_text(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name"))
    name = reading.board or " ".join(part for part in dmi if part)
    yield Finding("board", "name", name or "not reported by the firmware")
    if reading.soc:
        yield Finding("board", "chip", reading.soc)
    else:
        yield Finding("board", "processor", _processor(files))
    release = re.search(r'(?m)^PRETTY_NAME="?(.*?)"?$', files.maybe_text("/etc/os-release") or "")
    system = release[1] if release else "unknown"
    kernel = files.maybe_text("/proc/sys/kernel/osrelease") or "unknown"
    yield Finding("board", "system", f"{system}, kernel {kernel}, {platform.machine()}")
    yield Finding("board", "python", f"{platform.python_version()} at {sys.executable}")


def check_jetpack(files: SysfsFiles, reading: MachineReading) -> Iterator[Finding]:
    """Report NVIDIA's software of a Jetson; nothing on other machines."""
    if reading.soc is None:
        return
    section = "jetpack"
    if reading.l4t is None:
        why = reading.missing.get("l4t", "the release is not reported")
        advice = "in a container, mount /etc/nv_tegra_release of the host; else: apt-get install nvidia-l4t-core"
        yield Finding(section, "release", why, FindingLevel.WARNING, advice)
    elif reading.jetpack is None:
        advice = "it is newer than this server, or a preview: statements about JetPack may be wrong"
        yield Finding(section, "release", f"L4T {reading.l4t}, of no known JetPack", FindingLevel.NOTE, advice)
    elif reading.jetpack.startswith("5."):
        text = f"JetPack {reading.jetpack} (L4T {reading.l4t})"
        yield Finding(
            section, "release", text, FindingLevel.WARNING, "update to JetPack 6 or 7: its Python 3.8 is too old"
        )
    else:
        yield Finding(section, "release", f"JetPack {reading.jetpack} (L4T {reading.l4t})")
    for name, version in sorted(installed_packages(files).items()):
        yield Finding(section, name, version)


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


def check_memory(files: SysfsFiles, reading: MachineReading) -> Iterator[Finding]:
    """Report available memory, its limit, and memory pressure."""
    section, state = "memory", reading.memory
    if state.total_bytes is None or state.available_bytes is None:
        why = reading.missing.get("memory", "/proc/meminfo does not report it")
        yield Finding(section, "available", why, FindingLevel.WARNING, "mount /proc where the server runs")
        return
    text = f"{state.available_bytes // _MIB} of {state.total_bytes // _MIB} MiB available"
    available = state.available_bytes
    room = cgroup_limits.available_memory(files.root)
    if room is not None and room < available:
        available = room
        text = f"{room // _MIB} MiB available within the limit of this control group; of the machine, {text}"
    advice = "end other programs, add zram or swap, or keep fewer models in memory: --max-resident-models"
    if available < _MIN_BYTES:
        yield Finding(section, "available", text, FindingLevel.PROBLEM, advice)
    elif available < _LITTLE_BYTES:
        yield Finding(section, "available", text, FindingLevel.WARNING, advice)
    else:
        yield Finding(section, "available", text)
    if state.full_percent is not None and state.full_percent > 5:
        text = f"every task waited for memory {state.full_percent:g} % of the last 10 s"
        yield Finding(section, "pressure", text, FindingLevel.WARNING, advice)


def check_sensors(reading: MachineReading) -> Iterator[Finding]:
    """Report the sensors that the governor uses, and those that are missing."""
    section = "sensors"
    yield _heat(section, reading)
    yield _power(section, reading)
    for gpu in reading.gpus:
        yield from _gpu(section, gpu.name or gpu.key, gpu.is_lost, gpu.missing)
    if "nvml" in reading.missing and reading.soc is None:
        yield from _nvml(section, reading.missing["nvml"])
    if reading.slowed_by:
        causes = ", ".join(sorted(cause.value for cause in reading.slowed_by))
        advice = "cool the box, or give it less to do; over_current alone is harmless on Orin Nano in MAXN_SUPER"
        yield Finding(section, "throttled", f"slowed down now: {causes}", FindingLevel.WARNING, advice)
    yield from _clocks(section, reading)


def _heat(section: str, reading: MachineReading) -> Finding:
    known = [zone for zone in reading.zones if zone.temperature_c is not None]
    if known and reading.heat is not None and reading.heat.temperature_c is not None:
        heat = reading.heat
        trip = f", slows down at {heat.trip_c:.0f} °C" if heat.trip_c is not None else ""
        return Finding(section, "heat", f"{heat.temperature_c:.0f} °C ({heat.name}) of {len(known)} sensors{trip}")
    advice = "none on a virtual machine; in a container, mount /sys; else load the sensor's driver (coretemp, k10temp)"
    text = "no temperature can be read: the governor cannot control it"
    return Finding(section, "heat", text, FindingLevel.NOTE, advice)


def _power(section: str, reading: MachineReading) -> Finding:
    if reading.power_mw is not None:
        limit = f" of {reading.power_limit_mw / 1000:.0f} W" if reading.power_limit_mw else ""
        source = reading.sources.get("power_mw", "")
        return Finding(section, "power", f"{reading.power_mw / 1000:.1f} W{limit} ({source})")
    if reading.energy:
        return Finding(section, "power", f"by the energy of {', '.join(item.name for item in reading.energy)}")
    why = " ".join(reading.missing.values())
    unreadable = re.search(r"\S+/energy_uj", why)
    advice = ""
    if unreadable:
        # A file of its own, because a package replaces its own in /usr/lib/tmpfiles.d with each upgrade.
        advice = (
            f"let the server read it: echo 'z {unreadable[0]} 0440 root {_server_group()} -' | "
            "sudo tee /etc/tmpfiles.d/edge-server-energy.conf && sudo systemd-tmpfiles --create edge-server-energy.conf"
        )
    return Finding(section, "power", reading.missing.get("power_mw", "not reported"), FindingLevel.NOTE, advice)


def _server_group() -> str:
    """Return the group of the service that the packages and installers set up, or without it the one of this user, who
    starts a server that pip installed."""
    try:
        return grp.getgrnam("edge").gr_name
    except KeyError:
        return grp.getgrgid(os.getegid()).gr_name


def _gpu(section: str, name: str, is_lost: bool, missing: object) -> Iterator[Finding]:
    if is_lost:
        text = "fell off the bus or needs a reset"
        yield Finding(
            section, name, text, FindingLevel.PROBLEM, "restart the machine; check power supply, slot and dmesg (Xid)"
        )
    else:
        count = len(missing) if isinstance(missing, dict) else 0
        yield Finding(section, name, "answers" + (f"; it does not report {count} values" if count else ""))


def _nvml(section: str, why: str) -> Iterator[Finding]:
    if "mismatch" in why.lower():
        yield Finding(
            section, "nvml", why, FindingLevel.WARNING, "the driver was updated under it: restart the machine"
        )
    else:
        yield Finding(section, "nvml", f"no GPU of NVIDIA is seen: {why}", FindingLevel.NOTE)


def _clocks(section: str, reading: MachineReading) -> Iterator[Finding]:
    mode = reading.power_mode
    if mode is not None:
        yield Finding(
            section, "power mode", f"{mode.name} ({mode.number})", FindingLevel.NOTE, "sudo nvpmodel -p --verbose lists"
        )
    elif reading.soc is not None:
        why = reading.missing.get("power_mode", "not reported")
        yield Finding(section, "power mode", why, FindingLevel.NOTE, "sudo systemctl start nvpmodel")
    for clock in reading.clocks:
        if clock.is_capped and clock.name == "gpu":
            assert clock.cap_hz is not None
            assert clock.highest_hz is not None
            text = f"capped at {clock.cap_hz / 1e6:.0f} of {clock.highest_hz / 1e6:.0f} MHz"
            yield Finding(section, "clock gpu", text, FindingLevel.NOTE, "a power mode with a higher cap serves faster")


def _processor(files: SysfsFiles) -> str:
    text = files.maybe_text("/proc/cpuinfo") or ""
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", text)
    count = len(re.findall(r"(?m)^processor\s*:", text))
    limit = cgroup_limits.cpu_limit(files.root)
    limited = f", of which this control group may use {limit:g}" if limit is not None and limit < count else ""
    return f"{found[1] if found else platform.machine()}, {count or 'unknown'} cores{limited}"
