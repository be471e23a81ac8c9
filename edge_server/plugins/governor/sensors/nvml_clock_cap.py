"""Limit on the clocks of NVIDIA cards: sets NVML's locked clocks, which needs root. All cards get the same cap."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from edge_server.plugins.governor.sensors.nvml_gpu_readings import LOST

_GRAPHICS = 0
_NO_PERMISSION = 4


class NvmlCap:
    """Implements governor.clock_cap.ClockActuator. NVML counts its users, so this does not disturb the sensors."""

    def highest_hz(self) -> int | None:
        with _opened() as (nvml, handles):
            clocks = [nvml.nvmlDeviceGetMaxClockInfo(handle, _GRAPHICS) for handle in handles]
        return max(clocks) * 1_000_000 if clocks else None

    def cap(self, at_hz: int) -> int:
        megahertz = at_hz // 1_000_000
        with _opened() as (nvml, handles):
            for index, handle in enumerate(handles):
                try:
                    nvml.nvmlDeviceSetGpuLockedClocks(handle, 0, megahertz)
                except nvml.NVMLError:
                    # All cards or none: a partial cap would not be recorded and never be removed.
                    for capped in handles[:index]:
                        nvml.nvmlDeviceResetGpuLockedClocks(capped)
                    raise
        return megahertz * 1_000_000

    def release(self) -> None:
        with _opened() as (nvml, handles):
            problems = []
            for handle in handles:
                try:
                    nvml.nvmlDeviceResetGpuLockedClocks(handle)
                except nvml.NVMLError as error:
                    # Continue with the other cards.
                    problems.append(error)
            lasting = [error for error in problems if error.value not in LOST]
            if lasting:
                raise lasting[0]

    def memo(self) -> dict[str, int]:
        # A lock has no previous value: to restore means to remove the lock.
        return {"is_locked": 1}

    def restore(self, memo: dict[str, int]) -> None:
        if memo.get("is_locked"):
            self.release()


def _handle(nvml: ModuleType, index: int) -> Any:
    """Return the handle of a card, or None if the card is lost."""
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        if error.value not in LOST:
            raise
        return None


@contextlib.contextmanager
def _opened() -> Iterator[tuple[ModuleType, list[Any]]]:
    """Open NVML for the block. Converts NVML's errors to OSError."""
    try:
        import pynvml
    except ImportError as error:
        raise OSError(f"needs pynvml ({error}): pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
        try:
            count = pynvml.nvmlDeviceGetCount()
            yield pynvml, [handle for index in range(count) if (handle := _handle(pynvml, index)) is not None]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        if error.value == _NO_PERMISSION:
            raise PermissionError(f"NVML: {error} (user {os.getuid()} may not set clocks)") from None
        raise OSError(f"NVML: {error}") from None
