"""Actuators of the clock cap: devfreq's `max_freq` for a Jetson's GPU, and NVML's locked clocks for NVIDIA cards.

Both need root. devfreq: Documentation/ABI/testing/sysfs-class-devfreq.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_server.plugins.governor.sensors.clocks import gpu_devfreq
from edge_server.plugins.governor.sensors.nvml_gpu_readings import GRAPHICS, LOST
from edge_server.telemetry.sysfs import SysfsFiles

_NO_PERMISSION = 4


class DevfreqCap:
    """Implements governor.clock_cap.ClockActuator. Remembers the limit from before its first cap.

    If another program, e.g. nvpmodel, sets a limit while the cap is in effect, `release` keeps that limit.
    """

    def __init__(self, sysfs_root: str | Path = "/") -> None:
        self._root = Path(sysfs_root)
        self._files = SysfsFiles(sysfs_root)
        self._before_hz: int | None = None
        self._capped_hz: int | None = None

    def highest_hz(self) -> int | None:
        return self._before_hz if self._is_ours() else self._limit_hz()

    def cap(self, at_hz: int) -> int:
        before_hz = self.highest_hz()
        if before_hz is None:
            # An unknown limit could not be restored.
            raise OSError("the GPU's devfreq folder is not there, or its max_freq cannot be read")
        offered = (self._files.maybe_text(f"{gpu_devfreq(self._files)}/available_frequencies") or "").split()
        steps_hz = [int(word) for word in offered if word.isdigit()]
        chosen_hz = max((step for step in steps_hz if step <= at_hz), default=at_hz)
        self._write(chosen_hz)
        # The driver may round the value. If it cannot be read now, the written value counts.
        limit_hz = self._limit_hz()
        self._before_hz, self._capped_hz = before_hz, chosen_hz if limit_hz is None else limit_hz
        return self._capped_hz

    def release(self) -> None:
        if self._is_ours() and self._before_hz is not None:
            self._write(self._before_hz)
        self._before_hz = self._capped_hz = None

    def _is_ours(self) -> bool:
        return self._capped_hz is not None and self._limit_hz() in (self._capped_hz, None)

    def memo(self) -> dict[str, int]:
        limit_hz = self.highest_hz()
        return {} if limit_hz is None else {"max_freq": limit_hz}

    def restore(self, memo: dict[str, int]) -> None:
        if "max_freq" in memo:
            self._write(memo["max_freq"])

    def _limit_hz(self) -> int | None:
        folder = gpu_devfreq(self._files)
        return None if folder is None else self._files.maybe_number(f"{folder}/max_freq")

    def _write(self, at_hz: int) -> None:
        folder = gpu_devfreq(self._files)
        if folder is None:
            raise OSError("the GPU's devfreq folder is not there")
        path = self._root / f"{folder}/max_freq".lstrip("/")
        try:
            # Without O_CREAT: a missing file must not be created.
            descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        except PermissionError:
            raise PermissionError(
                f"{folder}/max_freq may not be written by this user (number {os.getuid()}): "
                "only root may, or a user that a udev rule permits"
            ) from None
        try:
            os.write(descriptor, f"{at_hz}\n".encode())
        finally:
            os.close(descriptor)


class NvmlCap:
    """Implements governor.clock_cap.ClockActuator. NVML counts its users, so this does not disturb the sensors."""

    def highest_hz(self) -> int | None:
        with _opened() as (nvml, handles):
            clocks = [nvml.nvmlDeviceGetMaxClockInfo(handle, GRAPHICS) for handle in handles]
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
