"""Readings of Intel GPUs with the drivers i915 and xe: clocks, throttle reasons, and the energy of discrete cards.

The power of an integrated GPU is part of the processor package. Discrete cards have a hwmon device
(Documentation/ABI/testing/sysfs-driver-intel-{i915,xe}-hwmon).
"""

from __future__ import annotations

from typing import NamedTuple

from edge_server.plugins.governor.readings import EnergyCounter, Gpu, Rail, ThrottleReason
from edge_server.plugins.governor.sensors.counter_rates import EnergyMeter
from edge_server.plugins.governor.sensors.sysfs import FoundPaths, MissingReason, SysfsFiles, source_of

_DRM = "/sys/class/drm"

_CAUSES = {
    "thermal": ThrottleReason.THERMAL,
    "prochot": ThrottleReason.THERMAL,
    "ratl": ThrottleReason.THERMAL,
    "vr_thermalert": ThrottleReason.THERMAL,
    "pl1": ThrottleReason.POWER_CAP,
    "pl2": ThrottleReason.POWER_CAP,
    "pl4": ThrottleReason.POWER_CAP,
    "vr_tdc": ThrottleReason.OVER_CURRENT,
}
"""File names after `throttle_reason_` or `reason_`. "status" is left out: it only says that there is a reason."""


class _Card(NamedTuple):
    """Files of one GPU. `monitor` is the folder of its hwmon device, "" for an integrated GPU."""

    key: str
    driver: str
    current: str
    highest: str
    reasons: tuple[tuple[str, str], ...]
    monitor: str


class IntelGpus:
    """Reads all Intel GPUs with one of these drivers."""

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files
        self._cards: FoundPaths[_Card] = FoundPaths(self._find)
        self._meters: dict[str, EnergyMeter] = {}

    def read(self, now_s: float) -> tuple[tuple[Gpu, ...], tuple[Rail, ...], tuple[EnergyCounter, ...]]:
        gpus, rails, counters = [], [], []
        for card in self._cards.items(now_s):
            if card.monitor:
                rail, counter = self._energy(card, now_s)
                rails.append(rail)
                counters += [counter] if counter is not None else []
            gpus.append(self._gpu(card))
        return tuple(gpus), tuple(rails), tuple(counters)

    def _gpu(self, card: _Card) -> Gpu:
        clock_mhz = self._files.number(card.current)
        highest_mhz = self._files.maybe_number(card.highest)
        reasons = frozenset(reason for reason, path in card.reasons if self._files.maybe_number(path))
        if isinstance(clock_mhz, MissingReason):
            self._cards.forget()
        return Gpu(
            card.key,
            name=f"Intel GPU ({card.driver})",
            is_integrated=not card.monitor,
            clock_hz=None if isinstance(clock_mhz, MissingReason) else clock_mhz * 1_000_000,
            highest_clock_hz=None if highest_mhz is None else highest_mhz * 1_000_000,
            reasons=reasons if card.reasons else None,
            slowed_by=frozenset(_CAUSES[reason] for reason in reasons),
            sources={"clock_hz": source_of(card.current)},
            missing={"clock_hz": clock_mhz.reason} if isinstance(clock_mhz, MissingReason) else {},
        )

    def _energy(self, card: _Card, now_s: float) -> tuple[Rail, EnergyCounter | None]:
        path = f"{card.monitor}/energy1_input"
        limit_uw = self._files.maybe_number(f"{card.monitor}/power1_max")
        limit_mw = limit_uw // 1000 if limit_uw else None
        count = self._files.number(path)
        if isinstance(count, MissingReason):
            return Rail(card.key, None, False, limit_mw, source=source_of(path), problem=count.reason), None
        energy_uj, power_uw = self._meters.setdefault(card.key, EnergyMeter()).feed(count, now_s)
        problem = "" if power_uw is not None else f"{path}: power follows from two readings"
        power_mw = None if power_uw is None else round(power_uw / 1000)
        rail = Rail(card.key, power_mw, True, limit_mw, source=source_of(path), problem=problem)
        return rail, EnergyCounter(card.key, energy_uj // 1000, True, source_of(path))

    def _find(self) -> list[_Card]:
        cards = []
        for entry in self._files.names(_DRM, r"card\d+"):
            i915 = f"{_DRM}/{entry}/gt/gt0"
            xe = f"{_DRM}/{entry}/device/tile0/gt0/freq0"
            if self._files.exists(f"{i915}/rps_cur_freq_mhz"):
                cards.append(self._card(entry, "i915", i915, "rps_cur_freq_mhz", "rps_RP0_freq_mhz"))
            elif self._files.exists(f"{xe}/cur_freq"):
                cards.append(self._card(entry, "xe", xe, "cur_freq", "rp0_freq"))
        return cards

    def _card(self, key: str, driver: str, folder: str, current: str, highest: str) -> _Card:
        where, prefix = (folder, "throttle_reason_") if driver == "i915" else (f"{folder}/throttle", "reason_")
        reasons = [
            (entry.removeprefix(prefix), f"{where}/{entry}")
            for entry in self._files.names(where, rf"{prefix}({'|'.join(_CAUSES)})")
        ]
        hwmon = f"{_DRM}/{key}/device/hwmon"
        monitors = (f"{hwmon}/{entry}" for entry in self._files.names(hwmon, r"hwmon\d+"))
        monitor = next(
            (
                path
                for path in monitors
                if self._files.maybe_text(f"{path}/name") == driver and self._files.exists(f"{path}/energy1_input")
            ),
            "",
        )
        return _Card(key, driver, f"{folder}/{current}", f"{folder}/{highest}", tuple(reasons), monitor)
