"""The gate: where requests and frames meet what the law decided. One lock, held for a few additions."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping

from edge_server.core.model_spec import ModelSpec
from edge_server.core.priority import PriorityClass, priority_class
from edge_server.core.request_response import Request
from edge_server.core.status_reports import GovernorState
from edge_server.errors import Throttled
from edge_server.governor.control_policy import Cause, PolicyDecision, ThermalLevel
from edge_server.governor.rate_allocator import RateAllocator, TimeCharge

_LEAST_RETRY_S = 0.05
"""Nobody is told to come back sooner than this."""

_CAUTION = 0.24
"""The largest part of the store that a frame asks for beyond what its class needs; no more than lies between two
classes, or a frame of the higher one might go without before one of the lower."""

_LEAST_CHARGE_S = 1e-9
"""Charged where the cost is not known yet; not 0, which means that the gate was not asked."""


class GovernorGate:
    """Thread-safe. `apply` is the sampler's; everything else belongs to those who ask.

    `is_open` and `share` may be read without a lock: they are replaced, never changed.
    """

    def __init__(
        self, control_floor_share: float = 0.2, clock: Callable[[], float] = time.monotonic, seed: int | None = None
    ) -> None:
        self.is_open = True
        self.share = 1.0
        self._clock = clock
        self._lock = threading.Lock()
        self._meter = RateAllocator(control_floor_share)
        self._decision = PolicyDecision()
        self._random = random.Random(seed)
        self._shed: dict[tuple[PriorityClass, str], int] = {}

    def apply(self, decision: PolicyDecision, capacity: float) -> None:
        """Let a decision hold from now on. `capacity`: see WorkMeter."""
        with self._lock:
            self._decision = decision
            self._meter.grant(decision.share, capacity, self._clock(), lowest=_lowest(decision))
            self.share = decision.share
            self.is_open = decision.share >= 1.0 and _lowest(decision) is PriorityClass.BULK

    @property
    def decision(self) -> PolicyDecision:
        """What holds now."""
        return self._decision

    def state(self) -> GovernorState:
        decision = self._decision
        return GovernorState(decision.level.name, decision.detail)

    def admit(self, spec: ModelSpec, request: Request, cost_s: float) -> float:
        """See serving.gate.Gate."""
        priority = PriorityClass.of_priority(request.priority) if request.priority else priority_class(spec)
        with self._lock:
            now_s = self._clock()
            charge = self._meter.admit(priority, max(cost_s, _LEAST_CHARGE_S), now_s)
            if charge is not None:
                return charge
            wait_s = self._meter.wait_s(priority, now_s)
            self._count(priority)
            decision = self._decision
        raise Throttled(
            f"model '{spec.name}' takes no more {priority.name.lower()} requests for now: {_reason(decision)}",
            retry_after_s=max(wait_s, _LEAST_RETRY_S),
            state=_told_level(decision).name,
        )

    def settle(self, charged_s: float, took_s: float) -> None:
        """See serving.gate.Gate. `charged_s` is what `admit` returned: it knows which store it was drawn from."""
        charge = charged_s if isinstance(charged_s, TimeCharge) else TimeCharge(charged_s, charged_s, is_of_floor=False)
        with self._lock:
            self._meter.settle(charge, took_s)

    def refuse_frame(self, priority: int) -> str | None:
        """Return why a frame of that priority is not begun now, None when it may be. Charges nothing.

        Frames come in step. Did they all ask for the same, then of two equal streams it might always be the second one
        that finds the store empty: so each asks for a little more, by chance.
        """
        if self.is_open:
            return None
        level = PriorityClass.of_priority(priority)
        with self._lock:
            if self._meter.wait_s(level, self._clock(), _CAUTION * self._random.random()) == 0.0:
                return None
            self._count(level)
            return _reason(self._decision)

    def count_refused(self, priority: int) -> None:
        """Count one more frame that was refused: with others, as one request."""
        with self._lock:
            self._count(PriorityClass.of_priority(priority))

    def shed(self) -> Mapping[tuple[PriorityClass, str], int]:
        """Return how many requests and frames were refused, by class and by what held the share down."""
        with self._lock:
            return dict(self._shed)

    def _count(self, priority: PriorityClass) -> None:
        key = (priority, _cause(self._decision, priority))
        self._shed[key] = self._shed.get(key, 0) + 1


def _lowest(decision: PolicyDecision) -> PriorityClass:
    """Return the least important class that gets anything."""
    if decision.only_control:
        return PriorityClass.CONTROL
    return PriorityClass.NORMAL if decision.sheds_bulk else PriorityClass.BULK


def _reason(decision: PolicyDecision) -> str:
    level = _told_level(decision).name
    return f"the box is {level}: {decision.detail}" if decision.detail else f"the box is {level}"


def _told_level(decision: PolicyDecision) -> ThermalLevel:
    """Return the state that a refusal names: a box that refuses is not NORMAL."""
    return max(decision.level, ThermalLevel.WARM)


def _cause(decision: PolicyDecision, priority: PriorityClass) -> str:
    """Return the one word under which a refusal is counted."""
    if priority > _lowest(decision):
        return "critical" if decision.only_control else Cause.MEMORY.value
    return decision.limited_by or "heat"
