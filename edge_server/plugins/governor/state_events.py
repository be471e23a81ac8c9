"""Publisher of the governor's events and log lines: one for each change of the heat level, of the lost sensors, of a
model's lighter variant, or of the limit on the clock."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from edge_server.plugins.governor.control_policy import Cause, PolicyDecision, ThermalLevel
from edge_server.telemetry.event_bus import PublishEvent

GOVERNOR_STATE = "governor.state"
GOVERNOR_CLOCK_CAP = "governor.clock_cap"
SENSOR_LOST = "governor.sensor_lost"
SENSOR_BACK = "governor.sensor_back"
VARIANT_CHANGED = "governor.variant"

_log = logging.getLogger(__name__)

_REPEAT_AFTER_S = 60.0
"""A cause that comes and goes without a change of the state is reported at most once a minute."""


class StateEvents:
    """Compares each state with the previous one and publishes the difference. No clock, no threads."""

    def __init__(self, publish: PublishEvent) -> None:
        self._publish = publish
        self._level = ThermalLevel.NORMAL
        self._lost: frozenset[str] = frozenset()
        self._reported_s: dict[Cause, float] = {}
        self._variants: Mapping[str, str] = {}
        self._cap_hz: int | None = None

    def report_state(self, decision: PolicyDecision, now_s: float) -> None:
        """Publish a changed state, a new cause, and sensors that are lost or back."""
        before, self._level = self._level, decision.level
        lost_before, self._lost = self._lost, decision.lost
        newly_lost = decision.lost - lost_before
        for name in sorted(newly_lost):
            self._publish(SENSOR_LOST, sensor=name, reason=f"no reading of {name} any more")
        for name in sorted(lost_before - decision.lost):
            self._publish(SENSOR_BACK, sensor=name)
            _log.info("%s can be read again", name)
        fresh = {
            cause
            for cause in decision.causes
            if now_s - self._reported_s.get(cause, -_REPEAT_AFTER_S) >= _REPEAT_AFTER_S
        }
        if decision.level is before and not fresh and not newly_lost:
            return
        self._reported_s.update(dict.fromkeys(decision.causes, now_s))
        reason = decision.detail or "nothing is held back"
        self._publish(
            GOVERNOR_STATE,
            level=decision.level.name,
            before=before.name,
            share=round(decision.share, 3),
            causes=",".join(sorted(cause.value for cause in decision.causes)),
            reason=reason,
        )
        log_level = logging.WARNING if decision.level >= ThermalLevel.HOT or newly_lost else logging.INFO
        _log.log(log_level, "%sthe box is %s: %s", "SENSOR LOST: " if newly_lost else "", decision.level.name, reason)

    def report_variants(self, active: Mapping[str, str], decision: PolicyDecision) -> None:
        """Publish each model whose active variant changed."""
        before, self._variants = self._variants, dict(active)
        for model in sorted(before.keys() | active.keys()):
            variant = active.get(model)
            if variant == before.get(model):
                continue
            reason = f"the box is {decision.level.name}" + (f": {decision.detail}" if decision.detail else "")
            self._publish(VARIANT_CHANGED, model=model, variant=variant or model, reason=reason)
            if variant is None:
                _log.info("model '%s' answers its own requests again", model)
            else:
                _log.warning("model '%s' answers for '%s' from now on: %s", variant, model, reason)

    def report_clock_cap(self, cap_hz: int | None) -> None:
        """Publish a changed clock cap."""
        before, self._cap_hz = self._cap_hz, cap_hz
        if cap_hz == before:
            return
        reason = (
            "the GPU's clock is not capped any more"
            if cap_hz is None
            else f"the GPU's clock is capped at {cap_hz / 1e6:.0f} MHz"
        )
        self._publish(GOVERNOR_CLOCK_CAP, cap_hz=cap_hz, reason=reason)
        _log.info("%s", reason)
