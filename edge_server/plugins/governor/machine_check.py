"""Check of the machine for `edge-server doctor`: the release of a Jetson, memory and sensors, as the governor reads
them."""

from __future__ import annotations

import dataclasses
import grp
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from edge_server import cgroup_limits
from edge_server.core.finding import Finding, FindingLevel
from edge_server.memory.available_memory import RUNTIME_BYTES
from edge_server.plugins.governor.readings import MachineReading
from edge_server.plugins.governor.sensors.all_sensors import read_machine
from edge_server.plugins.governor.sensors.nvml_sensor import NvmlSensor

_MIB = 1 << 20

_MIN_BYTES = RUNTIME_BYTES
"""Least memory for the server itself (about 80 MB) and one small model."""
_LITTLE_BYTES = 512 * _MIB


def check_machine(root: Path) -> Iterator[Finding]:
    """Yield what the sensors below a root folder say."""
    yield from findings_of(read_machine(root), root)


def findings_of(reading: MachineReading, root: Path) -> Iterator[Finding]:
    """Yield what a reading says. The limits of the control group are read below the root folder."""
    yield from _check_jetpack(reading)
    yield from _check_memory(root, reading)
    yield from _check_sensors(reading)


def nvml_facts() -> dict[str, object]:
    """Return the readings of each GPU from NVML, and the problem if NVML cannot be read."""
    reading = NvmlSensor().read(time.monotonic())
    gpus = [{**dataclasses.asdict(gpu), "uuid": None} for gpu in reading.gpus]
    return {"problem": reading.missing.get("nvml", ""), "gpus": gpus}


def _check_jetpack(reading: MachineReading) -> Iterator[Finding]:
    """Report the release of a Jetson's software; nothing on other machines."""
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


def _check_memory(root: Path, reading: MachineReading) -> Iterator[Finding]:
    """Report available memory, its limit, and memory pressure."""
    section, state = "memory", reading.memory
    if state.total_bytes is None or state.available_bytes is None:
        why = reading.missing.get("memory", "/proc/meminfo does not report it")
        yield Finding(section, "available", why, FindingLevel.WARNING, "mount /proc where the server runs")
        return
    text = f"{state.available_bytes // _MIB} of {state.total_bytes // _MIB} MiB available"
    available = state.available_bytes
    room = cgroup_limits.available_memory(root)
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


def _check_sensors(reading: MachineReading) -> Iterator[Finding]:
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
    unreadable = re.search(r"\S+/energy_uj", " ".join(reading.missing.values()))
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
