"""Thermal model of a machine for simulations: temperatures of chip and heat sink, and the kernel's thermal throttling.

The simulator uses it, and tests in which the work of a real server heats it. The default constants
are those of a small fanless module with about 22 W at full work.

    chip --(chip_to_sink)-- sink --(sink_to_air)-- ambient

Power is idle + dynamic * busy * f * v^2 + leakage, with f the clock as a part of the highest and v the voltage that it
needs; leakage grows with temperature. Work gets done in proportion to busy * f.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LONGEST_STEP_S = 0.1
"""Heat is computed in steps of at most this."""

_HOTTEST_LEAKAGE_C = 150.0
"""Leakage does not grow above this temperature, which limits a thermal runaway."""


@dataclass(frozen=True, slots=True)
class ThermalModelConstants:
    """Heat capacities in J/K, thermal resistances in K/W, power in W, temperatures in degrees Celsius."""

    chip_j_per_k: float = 8.0
    sink_j_per_k: float = 150.0
    chip_to_sink_k_per_w: float = 1.0
    sink_to_air_k_per_w: float = 2.2
    idle_w: float = 5.0
    dynamic_w: float = 17.0
    leakage_w_at_50: float = 0.5
    leakage_doubles_every_k: float = 30.0
    trip_c: float = 99.0
    critical_c: float = 104.5
    clock_steps: int = 8
    lowest_clock: float = 0.3
    governor_period_s: float = 1.0


@dataclass(slots=True)
class ThermalModel:
    """State of the model. `step` advances the time. Between steps, attributes may be read and `ambient_c` changed."""

    constants: ThermalModelConstants = ThermalModelConstants()
    ambient_c: float = 25.0
    fan_factor: float = 1.0
    """Factor on the thermal resistance from sink to air: 1.8 for a dead fan."""
    chip_c: float = field(default=math.nan)
    sink_c: float = field(default=math.nan)
    power_w: float = 0.0
    clock_step: int = 0
    energy_j: float = 0.0
    _governor_s: float = 0.0

    def __post_init__(self) -> None:
        if math.isnan(self.sink_c):
            self.sink_c = self.ambient_c + self.constants.idle_w * self.constants.sink_to_air_k_per_w
        if math.isnan(self.chip_c):
            self.chip_c = self.sink_c + self.constants.idle_w * self.constants.chip_to_sink_k_per_w

    @property
    def clock(self) -> float:
        """The kernel's clock as a part of the highest."""
        steps = self.constants.clock_steps - 1
        return 1.0 - (1.0 - self.constants.lowest_clock) * self.clock_step / steps

    @property
    def is_throttled(self) -> bool:
        return self.clock_step > 0

    def step(self, busy: float, dt_s: float) -> None:
        """Advance by `dt_s` seconds with the busy part `busy`, 0 to 1."""
        while dt_s > LONGEST_STEP_S * 1.001:
            self._step(busy, LONGEST_STEP_S)
            dt_s -= LONGEST_STEP_S
        self._step(busy, dt_s)

    def _step(self, busy: float, dt_s: float) -> None:
        constants = self.constants
        voltage = 0.6 + 0.4 * self.clock
        leaking_c = min(self.chip_c, _HOTTEST_LEAKAGE_C)
        leakage_w = constants.leakage_w_at_50 * 2 ** ((leaking_c - 50.0) / constants.leakage_doubles_every_k)
        self.power_w = constants.idle_w + constants.dynamic_w * busy * self.clock * voltage**2 + leakage_w
        to_sink_w = (self.chip_c - self.sink_c) / constants.chip_to_sink_k_per_w
        to_air_w = (self.sink_c - self.ambient_c) / (constants.sink_to_air_k_per_w * self.fan_factor)
        self.chip_c += (self.power_w - to_sink_w) * dt_s / constants.chip_j_per_k
        self.sink_c += (to_sink_w - to_air_w) * dt_s / constants.sink_j_per_k
        self.energy_j += self.power_w * dt_s
        self._throttle(dt_s)

    def _throttle(self, dt_s: float) -> None:
        """Throttle like the kernel's step-wise governor: one clock step down above the trip point, one up below it."""
        self._governor_s += dt_s
        if self._governor_s < self.constants.governor_period_s:
            return
        self._governor_s = 0.0
        if self.chip_c >= self.constants.trip_c:
            self.clock_step = min(self.clock_step + 1, self.constants.clock_steps - 1)
        elif self.clock_step:
            self.clock_step -= 1
