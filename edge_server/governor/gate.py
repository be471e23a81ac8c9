"""The gate: where requests and frames meet what the law decided. One lock, held for a few additions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from edge_server.core.message import Request
from edge_server.core.model import ModelSpec
from edge_server.core.view import GovernorState
from edge_server.errors import BadModelConfig, Throttled
from edge_server.governor.policy import Decision, Level
from edge_server.governor.rates import PriorityClass, WorkMeter

CLASS_PARAMETER = "priority_class"
"""Key of config.pbtxt's parameters: control, normal or bulk, for requests that state no priority."""

_LEAST_CHARGE_S = 1e-9
"""Charged where the cost is not known yet; not 0, which means that the gate was not asked."""


def priority_class(spec: ModelSpec) -> PriorityClass:
    """Return the class that a model declares; normal where it declares none. Raises BadModelConfig."""
    text = spec.parameters.get(CLASS_PARAMETER, "normal").strip().upper()
    if text not in PriorityClass.__members__:
        raise BadModelConfig(
            f"model '{spec.name}', parameter '{CLASS_PARAMETER}': "
            f"expected control, normal or bulk, given '{text.lower()}'"
        )
    return PriorityClass[text]


class GovernorGate:
    """Thread-safe. `apply` is the sampler's; everything else belongs to those who ask.

    `is_open` and `share` may be read without a lock: they are replaced, never changed.
    """

    def __init__(self, control_floor_share: float = 0.2, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_open = True
        self.share = 1.0
        self._clock = clock
        self._lock = threading.Lock()
        self._meter = WorkMeter(control_floor_share)
        self._decision = Decision()
        self._shed: dict[tuple[PriorityClass, str], int] = {}

    def apply(self, decision: Decision, capacity: float) -> None:
        """Let a decision hold from now on. `capacity`: see WorkMeter."""
        with self._lock:
            self._decision = decision
            self._meter.grant(decision.share, capacity, self._clock(), sheds_bulk=decision.sheds_bulk)
            self.share = decision.share
            self.is_open = decision.share >= 1.0 and not decision.sheds_bulk

    @property
    def decision(self) -> Decision:
        """What holds now."""
        return self._decision

    def state(self) -> GovernorState:
        decision = self._decision
        return GovernorState(decision.level.name, decision.detail)

    def admit(self, spec: ModelSpec, request: Request, cost_s: float) -> float:
        """See serving.gate.Gate."""
        priority = PriorityClass.of_priority(request.priority) if request.priority else priority_class(spec)
        charged_s = max(cost_s, _LEAST_CHARGE_S)
        with self._lock:
            wait_s = self._meter.admit(priority, charged_s, self._clock())
            if wait_s is None:
                return charged_s
            self._count(priority)
            decision = self._decision
        raise Throttled(
            f"model '{spec.name}' takes no more {priority.name.lower()} requests for now: {_reason(decision)}",
            retry_after_s=max(wait_s, 0.05),
        )

    def settle(self, charged_s: float, took_s: float) -> None:
        """See serving.gate.Gate."""
        with self._lock:
            self._meter.settle(charged_s, took_s)

    def refuse_frame(self, priority: int) -> str | None:
        """Return why a frame of that priority is not begun now, None when it may be. Charges nothing."""
        if self.is_open:
            return None
        level = PriorityClass.of_priority(priority)
        with self._lock:
            if self._meter.wait_s(level, self._clock()) is None:
                return None
            self._count(level)
            return _reason(self._decision)

    def shed(self) -> Mapping[tuple[PriorityClass, str], int]:
        """Return how many requests and frames were refused, by class and state."""
        with self._lock:
            return dict(self._shed)

    def _count(self, priority: PriorityClass) -> None:
        key = (priority, _cause(self._decision))
        self._shed[key] = self._shed.get(key, 0) + 1


def _reason(decision: Decision) -> str:
    level = decision.level if decision.level > Level.NORMAL else Level.WARM
    return f"the box is {level.name}: {decision.detail}" if decision.detail else f"the box is {level.name}"


def _cause(decision: Decision) -> str:
    """Return the one word under which a refusal is counted."""
    causes = sorted(cause.value for cause in decision.causes if cause.value != "over_current")
    if causes:
        return causes[0]
    return "power_budget" if decision.power_share < decision.heat_share else "heat"
