"""Reader of the machine's memory: /proc/meminfo (proc(5)) and /proc/pressure/memory (Documentation/accounting/psi.rst).

MemAvailable is also correct for a GPU that shares the machine's memory. CUDA's free memory does not include the page
cache, which the kernel can release.
"""

from __future__ import annotations

import re

from edge_server.plugins.governor.readings import MachineReading, MemoryState
from edge_server.telemetry.sysfs import MissingReason, SysfsFiles, source_of

_MEMINFO = "/proc/meminfo"
_PRESSURE = "/proc/pressure/memory"


class MemorySensor:
    """Reads available memory and memory pressure."""

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files

    def read(self, now_s: float) -> MachineReading:
        missing: dict[str, str] = {}
        meminfo = self._text("memory", _MEMINFO, missing)
        pressure = self._text("memory_pressure", _PRESSURE, missing)
        memory = MemoryState(
            _kibibytes(meminfo, "MemTotal"),
            _kibibytes(meminfo, "MemAvailable"),
            _percent(pressure, "some"),
            _percent(pressure, "full"),
        )
        if memory.total_bytes is None or memory.available_bytes is None:
            missing.setdefault("memory", f"{_MEMINFO}: expected MemTotal and MemAvailable in kB")
        if memory.some_percent is None:
            missing.setdefault("memory_pressure", f"{_PRESSURE}: expected a line 'some avg10='")
        paths = {"memory": _MEMINFO, "memory_pressure": _PRESSURE}
        sources = {metric: source_of(path) for metric, path in paths.items() if metric not in missing}
        return MachineReading(now_s, memory=memory, sources=sources, missing=missing)

    def _text(self, metric: str, path: str, missing: dict[str, str]) -> str:
        text = self._files.text(path)
        if isinstance(text, MissingReason):
            missing[metric] = text.reason
            return ""
        return text


def _kibibytes(text: str, name: str) -> int | None:
    found = re.search(rf"(?m)^{name}:\s+(\d+) kB$", text)
    return int(found[1]) * 1024 if found else None


def _percent(text: str, line: str) -> float | None:
    found = re.search(rf"(?m)^{line} avg10=(\d+(?:\.\d+)?)", text)
    return float(found[1]) if found else None
