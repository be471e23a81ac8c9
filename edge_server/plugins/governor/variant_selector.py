"""Selector between a model and its lighter variant: says which of the two answers the model's requests while the
machine is hot or short of power.

The lighter variant becomes active if the policy allows clearly less work than is requested. The model itself becomes
active again if, by prediction, its work would fit for `fits_for_s`. After each change there is a rest without changes.
If a return to the model did not last, the rest before the next return is doubled, but not the rest before the next
change to the variant. So a machine at its limit changes less and less often, and the lighter variant answers most of
the time. No clock, no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import NamedTuple

from edge_server.plugins.governor.control_algorithms import smoothing_weight
from edge_server.plugins.governor.control_policy import PolicyDecision
from edge_server.plugins.governor.work_meter import CompletedWork, ModelWork
from edge_server.record import record

_SMOOTHING_S = 3.0


class VariantConstants(NamedTuple):
    """Constants of the rule. Times are in seconds.

    `short_below`: work is short if the allowed work is less than this part of the requested work. `room_c`: degrees
    below the set-point that a return needs. `rest_s`: least time between two changes. `longest_rest_s`: longest rest
    before the next return.
    """

    short_below: float = 0.8
    short_for_s: float = 5.0
    fits_for_s: float = 60.0
    room_c: float = 10.0
    rest_s: float = 600.0
    longest_rest_s: float = 3600.0


class VariantRule:
    """The rule for one model that names a variant."""

    def __init__(self, constants: VariantConstants = VariantConstants()) -> None:
        self._constants = constants
        self._rest_before_return_s = constants.rest_s
        self._changed_s: float | None = None
        self._since_s: float | None = None
        self.is_light = False
        self.switch_count = 0

    def step(self, offered: float, allowed: float, room_c: float | None, now_s: float) -> bool:
        """Return whether the lighter variant answers from now on.

        `offered` is the computing time that the requested work would take with the *heavy* model. `allowed` is the time
        that the policy leaves to this model. Both are in seconds per second. `room_c` is the distance of the
        temperature to its set-point, None if unknown. It is needed because the time allowed while the light variant
        runs says little about the time that would be allowed for the heavy model.
        """
        constants = self._constants
        is_short = allowed < constants.short_below * offered
        fits = allowed >= offered and (room_c is None or room_c >= constants.room_c)
        needs_change = fits if self.is_light else is_short
        if not needs_change:
            self._since_s = None
            return self.is_light
        if self._since_s is None:
            self._since_s = now_s
        lasts_s = constants.fits_for_s if self.is_light else constants.short_for_s
        rest_s = self._rest_before_return_s if self.is_light else constants.rest_s
        is_rested = self._changed_s is None or now_s - self._changed_s >= rest_s
        if not is_rested or now_s - self._since_s < lasts_s:
            return self.is_light
        if not self.is_light and self._changed_s is not None:
            has_bounced = now_s - self._changed_s < 2 * constants.rest_s
            doubled_s = min(2 * self._rest_before_return_s, constants.longest_rest_s)
            self._rest_before_return_s = doubled_s if has_bounced else constants.rest_s
        self.is_light = not self.is_light
        self.switch_count += 1
        self._changed_s = now_s
        self._since_s = None
        return self.is_light


class ActiveVariants:
    """The active variants, for the service. Immutable: each change makes a new one."""

    __slots__ = ("_lighter",)

    def __init__(self, lighter: Mapping[str, str]) -> None:
        self._lighter = dict(lighter)

    def variant_for(self, name: str) -> str | None:
        """Return the variant that answers for model `name` now, or None."""
        return self._lighter.get(name)


@record(slots=True)
class _Rates:
    """Rates of one model per second: requested inferences, and seconds of computing."""

    requested: float = 0.0
    busy: float = 0.0
    cost_s: float | None = None
    """Seconds of computing per inference; None before the first one."""

    def update(self, work: ModelWork, dt_s: float) -> None:
        weight = smoothing_weight(dt_s, _SMOOTHING_S)
        self.requested += weight * ((work.inferences + work.refused) / dt_s - self.requested)
        self.busy += weight * (work.busy_s / dt_s - self.busy)
        if work.inferences:
            cost_s = work.busy_s / work.inferences
            self.cost_s = cost_s if self.cost_s is None else self.cost_s + weight * (cost_s - self.cost_s)


@record(slots=True)
class VariantSelector:
    """Applies the rule to every model that names a variant. One thread calls `step` after each sample."""

    make_rule: Callable[[], VariantRule] = VariantRule
    active: Mapping[str, str] = field(default_factory=dict)
    """Model -> the lighter variant that answers for it."""

    _rules: dict[str, VariantRule] = field(default_factory=dict)
    _rates: dict[str, _Rates] = field(default_factory=dict)

    def step(
        self,
        pairs: Mapping[str, str],
        work: CompletedWork,
        decision: PolicyDecision,
        capacity: float,
        dt_s: float,
        now_s: float,
    ) -> Mapping[str, str]:
        """Return the active variants from now on. `pairs`: model -> the variant that it names and that serves."""
        if dt_s > 0:
            for name in work.models.keys() | self._rates.keys():
                self._rates.setdefault(name, _Rates()).update(work.models.get(name, ModelWork()), dt_s)
            for name in [
                known for known, rates in self._rates.items() if known not in work.models and rates.requested < 1e-9
            ]:
                del self._rates[name]
        self._rules = {name: self._rules.get(name) or self.make_rule() for name in pairs}
        busy = sum(rates.busy for rates in self._rates.values()) if pairs else 0.0
        self.active = {
            name: lighter
            for name, lighter in pairs.items()
            if self._is_light(name, lighter, decision, capacity, busy, now_s)
        }
        return self.active

    def _is_light(
        self, name: str, lighter: str, decision: PolicyDecision, capacity: float, busy: float, now_s: float
    ) -> bool:
        """`busy`: computing seconds a second of all models."""
        rule = self._rules[name]
        heavy, light = self._rates.get(name, _Rates()), self._rates.get(lighter, _Rates())
        if heavy.cost_s is None:
            return rule.is_light
        # While the variant answers, requests for either model count as requests for the heavy one.
        requested = heavy.requested + (light.requested if rule.is_light else 0.0)
        offered = requested * heavy.cost_s
        others = busy - heavy.busy - light.busy
        allowed = max(0.0, decision.share * capacity - others)
        if decision.share >= 1.0:
            # The work is not limited: all requested work is done.
            allowed = max(allowed, offered)
        set_point_c, predicted_c = decision.set_point_c, decision.predicted_c
        room_c = None if set_point_c is None or predicted_c is None else set_point_c - predicted_c
        return rule.step(offered, allowed, room_c, now_s)
