"""The state of the box in sentences that a person on site understands, with what to do about it."""

from __future__ import annotations

from collections.abc import Collection

_CAUSES = {
    "thermal": "the box slows itself down because it is too hot",
    "power_cap": "the box slows itself down at its power limit",
    "power_brake": "the power supply asked the GPU to brake",
    "under_voltage": "the supply voltage drops under load: check the power supply and its cable",
    "over_current": "short over-current events slow the clocks for about a millisecond each; the board does this by "
    "design in its fastest power modes",
    "power_mode": "the power mode or a clock cap of this box limits the clocks: this is a setting, not heat",
    "memory": "tasks wait for memory: no bulk work and no loads until there is some",
}
"""By the value of policy.Cause. "sensor_lost" has its own sentence, which names the sensor."""

HARMLESS = frozenset({"over_current", "power_mode"})
"""Causes that explain slow clocks and hold no work back: told last."""


def temperature(temperature_c: float, set_point_c: float) -> str:
    return f"{temperature_c:.0f} °C, to be kept at {set_point_c:.0f} °C"


def power(limit_w: float) -> str:
    return f"the power budget of {limit_w:.1f} W is used up"


def easing() -> str:
    return "what slowed the box down is over, and work comes back step by step"


def lost(names: Collection[str], share: float | None) -> str:
    """`share`: what may be done without the sensor, None where nothing is steered by it."""
    consequence = "" if share is None else f": at most {share:.0%} of full work until it is back"
    return f"no reading of {' and '.join(sorted(names))} any more{consequence}"


def causes(values: Collection[str]) -> list[str]:
    """Return a sentence for each cause that has one, the most telling first."""
    return [sentence for value, sentence in _CAUSES.items() if value in values]
