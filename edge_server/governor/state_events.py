"""What people are told when the state of the box changes: events for dashboards, one line in the log. No clock, no
threads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from edge_server.governor.control_policy import Cause, PolicyDecision, ThermalLevel
from edge_server.telemetry.event_bus import (
    GOVERNOR_CLOCK_CAP,
    GOVERNOR_STATE,
    SENSOR_BACK,
    SENSOR_LOST,
    VARIANT_CHANGED,
    EventValue,
)

_log = logging.getLogger(__name__)

_SAY_AGAIN_S = 60.0
"""A cause that comes and goes is told once a minute at most, as long as it does not change the state."""


class PublishEvent(Protocol):
    """Publishes an event; see telemetry.events."""

    def __call__(self, kind: str, /, **fields: EventValue) -> object: ...


class StateEvents:
    """Compares what holds with what held before, and tells the difference once."""

    def __init__(self, announce: PublishEvent) -> None:
        self._announce = announce
        self._level = ThermalLevel.NORMAL
        self._lost: frozenset[str] = frozenset()
        self._told_s: dict[Cause, float] = {}
        self._in_force: Mapping[str, str] = {}
        self._cap_hz: int | None = None

    def tell_state(self, decision: PolicyDecision, now_s: float) -> None:
        before, self._level = self._level, decision.level
        newly_lost = decision.lost - self._lost
        self._tell_sensors(decision)
        fresh = {cause for cause in decision.causes if now_s - self._told_s.get(cause, -_SAY_AGAIN_S) >= _SAY_AGAIN_S}
        if decision.level is before and not fresh and not newly_lost:
            return
        self._told_s.update(dict.fromkeys(decision.causes, now_s))
        words = decision.detail or "nothing is held back"
        self._announce(
            GOVERNOR_STATE,
            level=decision.level.name,
            before=before.name,
            share=round(decision.share, 3),
            causes=",".join(sorted(cause.value for cause in decision.causes)),
            reason=words,
        )
        importance = logging.WARNING if decision.level >= ThermalLevel.HOT or newly_lost else logging.INFO
        _log.log(importance, "%sthe box is %s: %s", "SENSOR LOST: " if newly_lost else "", decision.level.name, words)

    def tell_variants(self, in_force: Mapping[str, str], decision: PolicyDecision) -> None:
        before, self._in_force = self._in_force, dict(in_force)
        for model in sorted(before.keys() | in_force.keys()):
            variant = in_force.get(model)
            if variant == before.get(model):
                continue
            words = f"the box is {decision.level.name}" + (f": {decision.detail}" if decision.detail else "")
            self._announce(VARIANT_CHANGED, model=model, variant=variant or model, reason=words)
            if variant is None:
                _log.info("model '%s' answers by itself again", model)
            else:
                _log.warning("model '%s' answers for '%s' from now on: %s", variant, model, words)

    def tell_clock_cap(self, cap_hz: int | None) -> None:
        before, self._cap_hz = self._cap_hz, cap_hz
        if cap_hz == before:
            return
        words = (
            "the GPU's clock is let go" if cap_hz is None else f"the GPU's clock is capped at {cap_hz / 1e6:.0f} MHz"
        )
        self._announce(GOVERNOR_CLOCK_CAP, cap_hz=cap_hz, reason=words)
        _log.info("%s", words)

    def _tell_sensors(self, decision: PolicyDecision) -> None:
        before, self._lost = self._lost, decision.lost
        for name in sorted(decision.lost - before):
            self._announce(SENSOR_LOST, sensor=name, reason=f"no reading of {name} any more")
        for name in sorted(before - decision.lost):
            self._announce(SENSOR_BACK, sensor=name)
            _log.info("%s is read again", name)
