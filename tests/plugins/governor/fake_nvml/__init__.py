"""NVIDIA's library without NVIDIA: libnvidia-ml.so.1 compiled from `fake_nvml.c`, and the GPUs that it reports.

Made for the real pynvml, in this process or in another one. The values of the GPUs can be changed at any time through
the object that was made for the file:

    library = build(tmp_path)                      # a file named libnvidia-ml.so.1; skips without a C compiler
    nvidia = FakeNvml(tmp_path / "state")
    nvidia.add_gpu(temperature0=71)                # numbers as the real calls give them: °C, mW, mJ, MHz, bytes
    subprocess.Popen(command, env={**os.environ, **nvidia.environment(library)})
    nvidia.set(0, temperature0=84, power=61_500)   # seen by the next read
    nvidia.set(0, power=Error(NOT_SUPPORTED))
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, TIMEOUT = 3, 4, 9, 10
GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, GPU_NOT_FOUND, UNKNOWN = 15, 16, 18, 28, 999

LIBRARY = "libnvidia-ml.so.1"

A_CARD: dict[str, int | str | Error | None] = {
    "temperature0": 45,
    "threshold0": 98,
    "threshold1": 93,
    "threshold3": 90,
    "power": 20_000,
    "power_limit": 70_000,
    "energy": 1_000_000,
    "utilization": 0,
    "memory_utilization": 0,
    "memory_total": 16 << 30,
    "memory_used": 1 << 30,
    "clock0": 1_590,
    "clock2": 5_000,
    "highest_clock0": 1_590,
    "target_clock0": 1_590,
    "performance_state": 0,
    "fan": 30,
    "reasons": 0,
    "violation0": 0,
    "violation1": 0,
    "lock": 0,
}
"""A card with a fan and memory of its own, at rest."""


@dataclass(frozen=True)
class Error:
    """An answer that is none: NVML's number for what went wrong."""

    code: int


class FakeNvml:
    """The GPUs of one machine, in one file. `set` with None takes a metric away, which makes it not supported."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._lines: dict[str, str] = {"init": "0", "count": "0"}
        self._write()

    def environment(self, library: Path) -> dict[str, str]:
        """Return what a process needs in its environment to find these GPUs."""
        return {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_STATE": str(self.state)}

    def add_gpu(self, **changes: int | str | Error | None) -> int:
        """Add a card that is as A_CARD but for `changes`; return its index."""
        index = int(self._lines["count"])
        self._lines["count"] = str(index + 1)
        given = {"name": f"NVIDIA Fake {index}", "uuid": f"GPU-fake-{index}", **A_CARD, **changes}
        self.set(index, **given)
        return index

    def set(self, index: int, **metrics: int | str | Error | None) -> None:
        """Change the values of a GPU atomically."""
        for metric, value in metrics.items():
            key = f"{index}.{metric}"
            if value is None:
                self._lines.pop(key, None)
            else:
                self._lines[key] = f"!{value.code}" if isinstance(value, Error) else str(value)
        self._write()

    def lose(self, index: int, code: int = GPU_IS_LOST) -> None:
        """Make every call on a GPU return `code`. The library must be reinitialised to see the GPU again."""
        self.set(index, lost=code, handle=code)

    def give_back(self, index: int) -> None:
        """Undo `lose`."""
        self.set(index, lost=None, handle=None)

    def set_init(self, code: int) -> None:
        """Let nvmlInit return `code`; 0 lets it work."""
        self._lines["init"] = str(code)
        self._write()

    def set_count(self, count: int) -> None:
        """Let NVML list this many of the GPUs; a negative number is the error that it returns."""
        self._lines["count"] = str(count)
        self._write()

    def locked_clocks(self, index: int) -> tuple[int, int] | None:
        """Return the lowest and the highest clock in MHz that the GPU was locked to, None when it is free."""
        path = self.state.with_name(self.state.name + ".clocks")
        lines = path.read_text().splitlines() if path.exists() else []
        orders = [tuple(int(word) for word in line.split()) for line in lines]
        last = next((order for order in reversed(orders) if order[0] == index), None)
        return None if last is None or last[2] == 0 else (last[1], last[2])

    def _write(self) -> None:
        # A reader sees the old file or the new one, never half of one.
        draft = self.state.with_name(f"{self.state.name}.{os.getpid()}.draft")
        draft.write_text("".join(f"{key}={value}\n" for key, value in self._lines.items()))
        draft.replace(self.state)


def build(folder: Path, without: Iterable[str] = ()) -> Path:
    """Compile the library into `folder`, less the functions named in `without`; return its path."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler for the library that stands in for NVIDIA's")
    library, script = folder / LIBRARY, folder / "exports.map"
    hidden = "".join(f" {name};" for name in without)
    script.write_text("{ global: nvml*; fake_nvml*;%s };" % (f" local:{hidden} *;" if hidden else " local: *;"))
    source = Path(__file__).with_name("fake_nvml.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"]
    command += [f"-Wl,--version-script={script}", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library
