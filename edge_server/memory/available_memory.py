"""Check whether one more model fits into the available memory, as the kernel reports it.

/proc/meminfo (proc(5)): MemAvailable is the memory that programs can still get without swapping; a control group may
allow less. /proc/pressure/memory (Documentation/accounting/psi.rst): the share of the last ten seconds in which some
task waited for memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from edge_server import cgroup_limits
from edge_server.core.model_spec import ModelFile

_MIB = 1 << 20

RUNTIME_BYTES = 150 * _MIB
"""About what the server and a runtime take beside the models."""
_NEAR = 0.8


class MemoryReading(NamedTuple):
    """Memory figures of the kernel. None: the kernel does not report the figure."""

    available_bytes: int | None
    pressure_percent: float | None


class MemoryFloor:
    """Decides whether a load may begin. Stateless and thread-safe.

    `floor_bytes` 0: any amount may be used; a model whose backend computes its memory must still fit.
    `pressure_limit_percent` 0: pressure is not checked. `root` is the file system's root.
    """

    def __init__(self, floor_bytes: int, pressure_limit_percent: float, root: Path = Path("/")) -> None:
        self._floor_bytes = floor_bytes
        self._pressure_limit_percent = pressure_limit_percent
        self._root = root

    def refusal(self, file: ModelFile, instance_count: int) -> str | None:
        """Return the reason not to load the model now, or None if it may be loaded."""
        limit = self._pressure_limit_percent
        if not (limit or self._floor_bytes or file.memory_bytes):
            # Nothing depends on the figures, whose files take a quarter of the time of loading a small model.
            return None
        reading = read_memory(self._root)
        if limit and reading.pressure_percent is not None and reading.pressure_percent > limit:
            return (
                f"memory is under pressure: tasks waited for it {reading.pressure_percent:g} % of the last 10 s, "
                f"--memory-pressure-limit is {limit:g} %"
            )
        if reading.available_bytes is None or not (self._floor_bytes or file.memory_bytes):
            return None
        need_bytes = estimate_bytes(file, instance_count)
        if reading.available_bytes - need_bytes >= self._floor_bytes:
            return None
        keeps = f", and --memory-floor-mb keeps {_mib(self._floor_bytes)} free" if self._floor_bytes else ""
        return (
            f"memory is short: {_mib(reading.available_bytes)} are available, the model needs about "
            f"{_mib(need_bytes)}{keeps}"
        )


def read_memory(root: Path = Path("/")) -> MemoryReading:
    """Return the kernel's memory figures; None for a figure in an unexpected format.

    The available memory is that of the machine or, if less, what the limit of the control group leaves.
    """
    available_kb = _first_number(root / "proc/meminfo", r"^MemAvailable:\s+(\d+) kB$")
    pressure = _first_number(root / "proc/pressure/memory", r"^some avg10=(\d+(?:\.\d+)?) ")
    machine = None if available_kb is None else int(available_kb) * 1024
    known = [room for room in (machine, cgroup_limits.available_memory(root)) if room is not None]
    return MemoryReading(min(known, default=None), pressure)


def limit_warning(folders: Iterable[Path], root: Path = Path("/")) -> str:
    """Return a sentence if the limit of the control group is near what the models in these folders of versions need
    besides this process as it is, "" if it is not or there is none. Files count twice, as in `estimate_bytes`."""
    room = cgroup_limits.available_memory(root)
    need = RUNTIME_BYTES + 2 * sum(weight_bytes(ModelFile(path, path.parent, 0)) for path in folders)
    if room is None or need < _NEAR * room:
        return ""
    return (
        f"the memory limit of this control group leaves {_mib(room)}, and the models need about {_mib(need)}, by the "
        "size of their files: the kernel may end the server. Raise the limit, or serve fewer models at a time "
        "(--max-resident-models)"
    )


def estimate_bytes(file: ModelFile, instance_count: int) -> int:
    """Return the estimated peak memory of opening the file: what the backend has computed, else its weights once for
    reading, and once for each instance in the runtime's layout. Activations are extra; the floor covers them."""
    if file.memory_bytes:
        return file.memory_bytes * max(instance_count, 1)
    return weight_bytes(file) * (1 + max(instance_count, 1))


def weight_bytes(file: ModelFile) -> int:
    """Return the size of the model's file, or of all files in a folder, with the weights beside it: `model.onnx.data`
    and `model.onnx_data` of model.onnx, `model.bin` of model.xml. 0 for a model without files."""
    import glob  # here, because a server without a model has no use for it

    path = file.path
    try:
        if path.is_dir():
            return sum(_size(item) for item in path.rglob("*"))
        beside = [path, *path.parent.glob(f"{glob.escape(path.name)}[._]*")]
        if path.suffix == ".xml":
            beside.append(path.with_suffix(".bin"))
        return sum(_size(item) for item in beside)
    except OSError:
        # A path that cannot be listed cannot be opened either. The runtime reports it with a better message.
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _first_number(path: Path, pattern: str) -> float | None:
    try:
        text = path.read_text("ascii", "replace")
    except OSError:
        return None
    found = re.search(pattern, text, re.MULTILINE)
    return float(found[1]) if found else None


def _mib(count: int) -> str:
    return f"{count / _MIB:.0f} MiB"
