"""Limit on the clock of a Jetson's GPU: writes `max_freq` of devfreq as root
(Documentation/ABI/testing/sysfs-class-devfreq)."""

from __future__ import annotations

import os
from pathlib import Path

from edge_server.plugins.governor.sensors.clocks import gpu_devfreq
from edge_server.plugins.governor.sensors.sysfs import SysfsFiles


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
        chosen_hz = max((step for step in self._steps() if step <= at_hz), default=at_hz)
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

    def _steps(self) -> list[int]:
        """Return the clock steps of the hardware; empty if unknown."""
        text = self._files.maybe_text(f"{gpu_devfreq(self._files)}/available_frequencies") or ""
        return [int(word) for word in text.split() if word.isdigit()]

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
