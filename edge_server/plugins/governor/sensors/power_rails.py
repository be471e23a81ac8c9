"""Reader of the power of a Jetson's supply rails, from the monitors INA3221 and INA238 in the kernel's hwmon files
(Documentation/hwmon/{ina3221,ina238}.rst).

An INA3221 reports voltage (mV) and current (mA) of its channels 1 to 3, but no power. Its other files are sums and
shunt voltages of the same channels, and would count the power twice. The rails of the whole module depend on the board
and are identified by their labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edge_server.plugins.governor.readings import Rail
from edge_server.plugins.governor.sensors.sysfs import FoundPaths, Mark, MissingReason, SysfsFiles, source_of

_CHANNELS = (1, 2, 3)

TOTALS: tuple[tuple[str, ...], ...] = (
    ("VIN",),
    ("VDD_IN",),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),
)
"""Rails that add up to the total power of a board: Thor with INA238; Orin Nano and NX; AGX Orin; Thor without INA238.

The first row whose rails all exist applies. The rails of AGX Orin's second monitor are behind VIN_SYS_5V0.
"""


class _Channel(NamedTuple):
    """Files of one rail. `power` is the path of a power in microwatts; "": computed from `voltage` and `current`."""

    name: str
    folder: str
    number: int
    mark: Mark
    power: str = ""
    warn_ma: int | None = None
    critical_ma: int | None = None

    @property
    def voltage(self) -> str:
        return f"{self.folder}/in{self.number}_input"

    @property
    def current(self) -> str:
        return f"{self.folder}/curr{self.number}_input"


class JetsonRails:
    """Reads the rails of the board. A failed rail does not affect the others."""

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files
        self._channels: FoundPaths[_Channel] = FoundPaths(self._find, lambda channel: files.matches(channel.mark))

    def read(self, now_s: float) -> tuple[Rail, ...]:
        rails = [self._rail(channel) for channel in self._channels.items(now_s)]
        if any(rail.power_mw is None for rail in rails):
            self._channels.forget()
        counted = _counted([rail.name for rail in rails])
        return tuple(rail._replace(is_counted=rail.name in counted) for rail in rails)

    def _find(self) -> list[_Channel]:
        channels: list[_Channel] = []
        for name, folder in self._files.hwmons():
            if name == "ina3221":
                channels += self._channels_of(folder)
            elif name == "ina238":
                label = self._files.maybe_text(f"{folder}/label") or "VIN"
                channels.append(_Channel(label, folder, 1, Mark(f"{folder}/name", name), f"{folder}/power1_input"))
        return channels

    def _channels_of(self, folder: str) -> list[_Channel]:
        found = []
        for number in _CHANNELS:
            label = self._files.maybe_text(f"{folder}/in{number}_label")
            if not label or label == "NC" or label.startswith("sum of"):
                continue
            warn_ma = self._files.maybe_number(f"{folder}/curr{number}_max")
            critical_ma = self._files.maybe_number(f"{folder}/curr{number}_crit")
            mark = Mark(f"{folder}/in{number}_label", label)
            found.append(_Channel(label, folder, number, mark, "", warn_ma, critical_ma))
        return found

    def _rail(self, channel: _Channel) -> Rail:
        if channel.power:
            return self._measured(channel)
        voltage_mv, current_ma = self._files.number(channel.voltage), self._files.number(channel.current)
        rail = Rail(
            channel.name,
            None,
            False,
            warn_ma=channel.warn_ma,
            critical_ma=channel.critical_ma,
            is_alarmed=self._is_alarmed(channel),
            source=source_of(channel.current),
        )
        for value in (voltage_mv, current_ma):
            if isinstance(value, MissingReason):
                return rail._replace(problem=value.reason)
        assert isinstance(voltage_mv, int)
        assert isinstance(current_ma, int)
        # A rail that is switched off sometimes reads a little below zero.
        power_mw = max(0, voltage_mv * current_ma // 1000)
        return rail._replace(power_mw=power_mw, voltage_mv=voltage_mv, current_ma=current_ma)

    def _measured(self, channel: _Channel) -> Rail:
        power_uw = self._files.number(channel.power)
        if isinstance(power_uw, MissingReason):
            return Rail(channel.name, None, False, source=source_of(channel.power), problem=power_uw.reason)
        return Rail(
            channel.name,
            max(0, power_uw // 1000),
            False,
            voltage_mv=self._files.maybe_number(channel.voltage),
            current_ma=self._files.maybe_number(channel.current),
            source=source_of(channel.power),
        )

    def _is_alarmed(self, channel: _Channel) -> bool | None:
        flags = [
            self._files.maybe_number(f"{channel.folder}/curr{channel.number}_{kind}_alarm") for kind in ("max", "crit")
        ]
        known = [flag for flag in flags if flag is not None]
        return any(known) if known else None


def _counted(names: Sequence[str]) -> frozenset[str]:
    """Return the rails that make up the total power of the board; empty for an unknown board."""
    return next((frozenset(total) for total in TOTALS if set(total) <= set(names)), frozenset())
