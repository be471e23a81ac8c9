"""Which models another one stands in for now: the rule of `variants` applied to what was measured. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edge_server.governor.control_policy import PolicyDecision
from edge_server.governor.controllers import part
from edge_server.governor.variant_policy import VariantRule
from edge_server.governor.work_meter import CompletedWork, ModelWork

_SMOOTHING_S = 3.0


class Chosen:
    """The lighter models in force. Given to the service; replaced, never changed."""

    __slots__ = ("_lighter",)

    def __init__(self, lighter: Mapping[str, str]) -> None:
        self._lighter = dict(lighter)

    def stand_in(self, name: str) -> str | None:
        """Return the model that is to answer for `name` now; None: itself."""
        return self._lighter.get(name)


@dataclass(slots=True)
class _Rates:
    """Of one model, a second: what is asked of it in inferences, and for how long it computes."""

    asked: float = 0.0
    busy: float = 0.0
    cost_s: float | None = None
    """Seconds of computing that one inference takes; None as long as none was made."""

    def feel(self, work: ModelWork, dt_s: float) -> None:
        weight = part(dt_s, _SMOOTHING_S)
        self.asked += weight * ((work.inferences + work.refused) / dt_s - self.asked)
        self.busy += weight * (work.busy_s / dt_s - self.busy)
        if work.inferences:
            cost_s = work.busy_s / work.inferences
            self.cost_s = cost_s if self.cost_s is None else self.cost_s + weight * (cost_s - self.cost_s)


@dataclass(slots=True)
class VariantSelector:
    """Decides for every model that names a variant. `step` is called at each look, from one thread."""

    make_rule: Callable[[], VariantRule] = VariantRule
    in_force: Mapping[str, str] = field(default_factory=dict)
    """Model -> the lighter one that answers for it."""

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
        """Return what is in force from now on. `pairs`: model -> the lighter one that it names and that serves."""
        if dt_s > 0:
            self._feel(work, dt_s)
        self._rules = {name: self._rules.get(name) or self.make_rule() for name in pairs}
        self.in_force = {
            name: lighter for name, lighter in pairs.items() if self._is_light(name, lighter, decision, capacity, now_s)
        }
        return self.in_force

    def _feel(self, work: CompletedWork, dt_s: float) -> None:
        for name in work.models.keys() | self._rates.keys():
            self._rates.setdefault(name, _Rates()).feel(work.models.get(name, ModelWork()), dt_s)
        for name in [known for known, rates in self._rates.items() if known not in work.models and rates.asked < 1e-9]:
            del self._rates[name]

    def _is_light(self, name: str, lighter: str, decision: PolicyDecision, capacity: float, now_s: float) -> bool:
        rule = self._rules[name]
        heavy, light = self._rates.get(name, _Rates()), self._rates.get(lighter, _Rates())
        if heavy.cost_s is None:
            return rule.is_light
        # While the lighter one answers, what is asked of either is taken for what was asked of the heavy one.
        asked = heavy.asked + (light.asked if rule.is_light else 0.0)
        offered = asked * heavy.cost_s
        others = sum(rates.busy for known, rates in self._rates.items() if known not in (name, lighter))
        allowed = max(0.0, decision.share * capacity - others)
        if decision.share >= 1.0:
            # Nothing is held back: then what is asked for is what is done.
            allowed = max(allowed, offered)
        set_point_c, ahead_c = decision.set_point_c, decision.predicted_c
        room_c = None if set_point_c is None or ahead_c is None else set_point_c - ahead_c
        return rule.step(offered, allowed, room_c, now_s)
