"""Reader of the machine's processor load and memory from /proc (proc(5))."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_IDLE, _IOWAIT = 3, 4
_COUNTED_TICKS = 8  # user nice system idle iowait irq softirq steal; user and nice include guest time


class HostReading(NamedTuple):
    """Load and memory of the machine. `cpu_utilization` is 0..1 over all cores, since the previous reading."""

    cpu_utilization: float
    memory_total_bytes: int
    memory_used_bytes: int


class HostSampler:
    """Samples the machine's load at most once per `interval_s`; scrapes in between get the last sample. Thread-safe."""

    def __init__(
        self, interval_s: float, *, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._proc = proc
        self._clock = clock
        self._lock = threading.Lock()
        self._sampled_s = clock()
        self._ticks = _read_ticks(proc)
        self._utilization = 0.0

    def read(self) -> HostReading | None:
        """Return the machine's load and memory now, or None on a system without Linux's /proc."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._sampled_s >= self._interval_s:
                before, self._ticks, self._sampled_s = self._ticks, _read_ticks(self._proc), now_s
                if before and self._ticks:
                    idle, total = (now - then for now, then in zip(self._ticks, before, strict=True))
                    if total > 0:
                        # Idle ticks can decrease for a moment when a core goes off-line.
                        self._utilization = min(1.0, max(0.0, 1.0 - idle / total))
            utilization = self._utilization if self._ticks else None
        memory = _read_memory(self._proc)
        if utilization is None or memory is None:
            return None
        return HostReading(utilization, *memory)


def _read_ticks(proc: Path) -> tuple[int, int] | None:
    """Return (idle, total) ticks since boot, summed over all cores."""
    try:
        line = (proc / "stat").read_text().partition("\n")[0].split()
        ticks = [int(word) for word in line[1 : 1 + _COUNTED_TICKS]]
    except (OSError, ValueError):
        return None
    if line[:1] != ["cpu"] or len(ticks) <= _IOWAIT:
        return None
    return ticks[_IDLE] + ticks[_IOWAIT], sum(ticks)


def _read_memory(proc: Path) -> tuple[int, int] | None:
    """Return (total, used) in bytes; used memory is the memory that is not available."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        fields = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
        total = fields["MemTotal"]
        return total, total - fields["MemAvailable"]
    except (OSError, ValueError, LookupError):
        return None
