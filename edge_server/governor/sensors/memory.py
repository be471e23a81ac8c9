"""Memory of the machine: /proc/meminfo (proc(5)) and /proc/pressure/memory (Documentation/accounting/psi.rst).

MemAvailable is the truth also for a GPU that shares the machine's memory: what CUDA calls free leaves out the page
cache, which is there for the taking.
"""

from __future__ import annotations

import re

from edge_server.governor.readings import BoxReading, MemoryState
from edge_server.governor.sensors.files import Absent, Files, source

_MEMINFO = "/proc/meminfo"
_PRESSURE = "/proc/pressure/memory"


class MemorySensor:
    """Reads the machine's memory."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def read(self, now_s: float) -> BoxReading:
        missing: dict[str, str] = {}
        sources: dict[str, str] = {}
        texts: dict[str, str] = {}
        for path in (_MEMINFO, _PRESSURE):
            text = self._files.text(path)
            texts[path] = "" if isinstance(text, Absent) else text
            if isinstance(text, Absent):
                missing["memory" if path == _MEMINFO else "memory_pressure"] = text.reason
            else:
                sources["memory" if path == _MEMINFO else "memory_pressure"] = source(path)
        memory = MemoryState(
            _kibibytes(texts[_MEMINFO], "MemTotal"),
            _kibibytes(texts[_MEMINFO], "MemAvailable"),
            _percent(texts[_PRESSURE], "some"),
            _percent(texts[_PRESSURE], "full"),
        )
        return BoxReading(now_s, memory=memory, sources=sources, missing=missing)

    def close(self) -> None:
        pass


def _kibibytes(text: str, name: str) -> int | None:
    found = re.search(rf"(?m)^{name}:\s+(\d+) kB$", text)
    return int(found[1]) * 1024 if found else None


def _percent(text: str, line: str) -> float | None:
    found = re.search(rf"(?m)^{line} avg10=(\d+(?:\.\d+)?)", text)
    return float(found[1]) if found else None
