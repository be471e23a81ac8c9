"""Reader of the clocks of GPU, memory (devfreq) and processor clusters (cpufreq), with their limits."""

from __future__ import annotations

from typing import NamedTuple

from edge_server.plugins.governor.readings import Clock
from edge_server.telemetry.sysfs import FoundPaths, SysfsFiles, source_of

_DEVFREQ = "/sys/class/devfreq"
_CPUFREQ = "/sys/devices/system/cpu/cpufreq"
_GPU_NODES = ("gpu", "ga10b", "gv11b", "gp10b")
"""Names of the GPU in the device tree, and at the end of its devfreq name: Orin, Orin on JetPack 5, Xavier, TX2."""


class _ClockFiles(NamedTuple):
    """Folder and file names of one clock, and the unit of their numbers."""

    name: str
    folder: str
    current: str
    lowest: str
    highest_allowed: str
    highest_hz: int | None
    unit_hz: int
    governor: str


class Clocks:
    """Reads the clocks `gpu`, on Thor also `gpu-nvd`, `emc` if reported, and `cpu0`, `cpu4` ... for the clusters."""

    def __init__(self, files: SysfsFiles, most_clusters: int = 16) -> None:
        self._files = files
        self._most_clusters = most_clusters
        self._places: FoundPaths[_ClockFiles] = FoundPaths(self._find)

    def read(self, now_s: float) -> tuple[Clock, ...]:
        clocks = []
        for place in self._places.items(now_s):
            current, floor, cap = (
                self._hz(f"{place.folder}/{name}", place.unit_hz)
                for name in (place.current, place.lowest, place.highest_allowed)
            )
            if current is None and floor is None and cap is None:
                self._places.forget()
                continue
            source = source_of(f"{place.folder}/{place.current}")
            clocks.append(Clock(place.name, current, floor, cap, place.highest_hz, place.governor, source))
        return tuple(clocks)

    def _find(self) -> list[_ClockFiles]:
        places = []
        for entry in self._files.names(_DEVFREQ):
            folder = f"{_DEVFREQ}/{entry}"
            name = _devfreq_name(entry, self._files.maybe_text(f"{folder}/device/of_node/name"))
            if name:
                offered = (self._files.maybe_text(f"{folder}/available_frequencies") or "").split()
                highest_hz = max((int(word) for word in offered if word.isdigit()), default=None)
                governor = self._files.maybe_text(f"{folder}/governor") or ""
                places.append(_ClockFiles(name, folder, "cur_freq", "min_freq", "max_freq", highest_hz, 1, governor))
        clusters = self._files.names(_CPUFREQ, r"policy\d+")[: self._most_clusters]
        for entry in clusters:
            folder = f"{_CPUFREQ}/{entry}"
            highest_hz = self._hz(f"{folder}/cpuinfo_max_freq", 1000)
            governor = self._files.maybe_text(f"{folder}/scaling_governor") or ""
            names = ("scaling_cur_freq", "scaling_min_freq", "scaling_max_freq")
            places.append(_ClockFiles(entry.replace("policy", "cpu"), folder, *names, highest_hz, 1000, governor))
        return places

    def _hz(self, path: str, unit_hz: int) -> int | None:
        number = self._files.maybe_number(path)
        return None if number is None else number * unit_hz


def gpu_devfreq(files: SysfsFiles) -> str | None:
    """Return the devfreq folder of a Jetson's GPU, or None if there is none (yet)."""
    for entry in files.names(_DEVFREQ):
        if _devfreq_name(entry, files.maybe_text(f"{_DEVFREQ}/{entry}/device/of_node/name")) == "gpu":
            return f"{_DEVFREQ}/{entry}"
    return None


def _devfreq_name(entry: str, node: str | None) -> str | None:
    if entry == "gpu-gpc-0" or node in _GPU_NODES or entry.rpartition(".")[2] in _GPU_NODES:
        return "gpu"
    return {"gpu-nvd-0": "gpu-nvd", "bwmgr": "emc"}.get(entry)
