"""Reader of fan speeds from the kernel's hwmon files. Fans are only read, never controlled."""

from __future__ import annotations

from edge_server.plugins.governor.readings import FanReading
from edge_server.plugins.governor.sensors.sysfs import SysfsFiles, source_of

_FULL = 255
"""Pulse width at full speed (Documentation/hwmon/sysfs-interface.rst)."""


def jetson_fans(files: SysfsFiles) -> tuple[FanReading, ...]:
    """Return the fan of a Jetson. One hwmon device controls it, another one counts its revolutions."""
    duty, rpm, source = None, None, ""
    for name, folder in files.hwmons():
        if name in ("pwmfan", "pwm-fan"):
            width = files.maybe_number(f"{folder}/pwm1")
            duty = None if width is None else min(1.0, max(0, width) / _FULL)
            source = source_of(f"{folder}/pwm1")
        elif name in ("pwm_tach", "pwm-tach", "tachometer"):
            turns = files.maybe_number(f"{folder}/rpm")
            rpm = turns if turns is not None else files.maybe_number(f"{folder}/fan1_input")
            source = source or source_of(f"{folder}/rpm")
    return () if duty is None and rpm is None else (FanReading("fan", duty, rpm, source),)


def hwmon_fans(files: SysfsFiles) -> tuple[FanReading, ...]:
    """Return all fans with a speed sensor."""
    fans = []
    for name, folder in files.hwmons():
        for entry in files.names(folder, r"fan\d+_input"):
            rpm = files.maybe_number(f"{folder}/{entry}")
            label = files.maybe_text(f"{folder}/{entry.replace('input', 'label')}") or entry.removesuffix("_input")
            if rpm is not None:
                fans.append(FanReading(f"{name} {label}", None, rpm, source_of(f"{folder}/{entry}")))
    return tuple(fans)
