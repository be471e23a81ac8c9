"""Conversion of the sensor readings to the inputs of the control policy: one temperature, one power, the causes of
throttling.

No clock, no I/O. It remembers only which temperature is controlled and which kinds of sensor ever had a reading.
"""

from __future__ import annotations

from edge_server.plugins.governor.control_policy import Cause, PolicyInput
from edge_server.plugins.governor.readings import (
    CriticalTemperature,
    MachineReading,
    ThrottleReason,
)
from edge_server.record import record

BURSTS_PER_S = 20.0
"""Over-current bursts are reported above this rate over a minute. Some boards always have a lower rate, even when idle:
each event halves the clocks for a millisecond."""

SWITCH_MARGIN_C = 3.0
"""Another zone is controlled only if it is closer to its trip point by this much. Each change of the zone is a jump
that looks like heating to the policy."""

_CAUSES = {
    ThrottleReason.THERMAL: Cause.THERMAL,
    ThrottleReason.POWER_CAP: Cause.POWER_CAP,
    ThrottleReason.POWER_BRAKE: Cause.POWER_BRAKE,
    ThrottleReason.UNDER_VOLTAGE: Cause.UNDER_VOLTAGE,
    ThrottleReason.OVER_CURRENT: Cause.OVER_CURRENT,
}
_ALARMS = {"oc1": Cause.UNDER_VOLTAGE, "oc2": Cause.POWER_CAP}
"""Alarms of a Jetson's power monitor that always matter: supply voltage too low, average power too high."""


@record(slots=True)
class PolicyInputReader:
    """Reduces readings to policy inputs, in order."""

    control_zone: str = ""
    """The zone whose temperature is controlled; "" if there is none."""

    _seen_kinds: frozenset[str] = frozenset()

    def reduce(self, reading: MachineReading, *, is_capped_by_us: bool = False) -> PolicyInput:
        """Return the policy input of a reading. `is_capped_by_us`: this server caps the GPU's clock."""
        heat = self._controlled_temperature(reading)
        self.control_zone = "" if heat is None else heat.name
        power_w = None if reading.power_mw is None else reading.power_mw / 1000
        seen = PolicyInput(
            power_w=power_w,
            power_limit_w=None if reading.power_limit_mw is None else reading.power_limit_mw / 1000,
            slowed_by=throttle_causes(reading, is_capped_by_us=is_capped_by_us),
            silent=reading.silent,
            memory_pressure_percent=reading.memory.some_percent or 0.0,
        )
        if heat is not None:
            # The margin is used only without a temperature; else the trip point already contains it.
            margin_c = heat.headroom_c if heat.temperature_c is None else None
            seen = seen._replace(
                temperature_c=heat.temperature_c,
                trip_c=heat.trip_c,
                critical_c=heat.critical_c,
                margin_c=margin_c,
            )
        if seen.temperature_c is not None or seen.margin_c is not None:
            self._seen_kinds |= {"temperature"}
        if power_w is not None:
            self._seen_kinds |= {"power"}
        return seen._replace(expects=self._seen_kinds)

    def _controlled_temperature(self, reading: MachineReading) -> CriticalTemperature | None:
        """Return the temperature to control: that of the most critical zone, or still that of the previous zone."""
        proposed = reading.heat
        zone = next((item for item in reading.zones if item.name == self.control_zone), None)
        if proposed is None or zone is None or proposed.name == self.control_zone or reading.soc is not None:
            return proposed
        headroom_c = zone.headroom_c
        if headroom_c is None or proposed.headroom_c is None or proposed.headroom_c < headroom_c - SWITCH_MARGIN_C:
            return proposed
        return zone.critical


def throttle_causes(reading: MachineReading, *, is_capped_by_us: bool = False) -> frozenset[Cause]:
    """Return the causes for which the machine throttles itself now, as it reports them."""
    # NVML invents answers for the GPU inside a Jetson. The module's own alerts are correct.
    is_jetson = reading.soc is not None
    reported = {cause for gpu in reading.gpus if not (is_jetson and gpu.is_integrated) for cause in gpu.slowed_by}
    found = {_CAUSES[cause] for cause in reported}
    # The kernel's coolers follow the firmware's alerts with a delay, so alerts decide if there are any.
    alerts = [item for item in reading.coolers if item.is_alert]
    # Package counters decide if there are any: with turbo modes a single core is often hot for a moment.
    packages = [item for item in reading.throttles if item.name.startswith("package")]
    if any(item.state > 0 for item in alerts or reading.coolers) or any(
        item.per_s for item in packages or reading.throttles
    ):
        found.add(Cause.THERMAL)
    for counter in reading.over_current:
        if counter.name in _ALARMS:
            if counter.per_s:
                found.add(_ALARMS[counter.name])
        elif counter.sustained_per_s is not None and counter.sustained_per_s > BURSTS_PER_S:
            found.add(_CAUSES[counter.slowdown])
    if not is_capped_by_us and _is_gpu_clock_limited(reading):
        found.add(Cause.POWER_MODE)
    return frozenset(found)


def _is_gpu_clock_limited(reading: MachineReading) -> bool:
    """Return whether a Jetson's power mode or a clock limit keeps the GPU below its highest clock."""
    if reading.soc is None:
        return False
    clock = next((item for item in reading.clocks if item.name == "gpu"), None)
    if clock is None or clock.highest_hz is None:
        return False
    mode_hz = None if reading.power_mode is None else reading.power_mode.gpu_cap_hz
    return clock.is_capped or (mode_hz is not None and mode_hz < clock.highest_hz)
