"""Admission of requests and frames while the machine is hot or short of power: accepts or rejects each one by its
priority class."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from edge_server.core.model_spec import ModelSpec
from edge_server.core.priority_class import PriorityClass, priority_class
from edge_server.core.request_response import Request
from edge_server.core.status_reports import GovernorState
from edge_server.errors import Throttled
from edge_server.plugins.governor.computing_time_bucket import RateAllocator, TimeCharge
from edge_server.plugins.governor.control_policy import Cause, PolicyDecision, ThermalLevel

_MIN_RETRY_S = 0.05
"""Shortest retry delay that a rejection names."""

_MAX_FRAME_MARGIN = 0.24
"""Largest random part of the time budget that a frame needs in addition to the reserve of its class. It must be less
than the distance between two classes, else a lower class could get frames before a higher one."""

_MIN_CHARGE_S = 1e-9
"""Charge while the cost is not known yet. Not 0, which means that the request did not pass admission control."""


class GovernorAdmission:
    """Admits work by priority class. Thread-safe; one lock, held for a few additions.

    The control loop calls `apply`; the serving core and the frame streams call the other methods. `decision`,
    `is_open` and `allowed_fraction` may be read without the lock: they are replaced as a whole.
    """

    def __init__(
        self, control_floor_share: float = 0.2, clock: Callable[[], float] = time.monotonic, seed: int | None = None
    ) -> None:
        self.is_open = True
        self.allowed_fraction = 1.0
        self.control_need: Callable[[], float] = float
        """See RateAllocator."""
        self._clock = clock
        self._lock = threading.Lock()
        self._allocator = RateAllocator(control_floor_share, lambda: self.control_need())
        self.decision = PolicyDecision()
        """The decision in effect."""
        self._state = GovernorState()
        """The state to report, of that decision."""
        self._random = random.Random(seed)
        self._shed: dict[tuple[PriorityClass, str], int] = {}
        self._refused_frames: Counter[str] = Counter()

    def apply(self, decision: PolicyDecision, capacity: float) -> None:
        """Apply a decision from now on. `capacity`: see RateAllocator."""
        with self._lock:
            self.decision = decision
            self._state = GovernorState(decision.level.name, decision.detail)
            lowest = _lowest_admitted_class(decision)
            self._allocator.grant(decision.share, capacity, self._clock(), lowest=lowest)
            self.allowed_fraction = decision.share
            self.is_open = decision.share >= 1.0 and lowest is PriorityClass.BULK

    @property
    def control_share(self) -> float:
        """The part of full work that control keeps in every state."""
        return self._allocator.floor_share

    def state(self) -> GovernorState:
        return self._state

    def admit(self, spec: ModelSpec, request: Request, cost_s: float) -> float:
        """See serving.execution.admission_control.AdmissionControl."""
        priority = PriorityClass.of_priority(request.priority) if request.priority else priority_class(spec)
        with self._lock:
            now_s = self._clock()
            charge = self._allocator.admit(priority, max(cost_s, _MIN_CHARGE_S), now_s)
            if charge is not None:
                return charge
            wait_s = self._allocator.wait_s(priority, now_s)
            self._count_rejected(priority)
            decision = self.decision
        raise Throttled(
            f"model '{spec.name}' takes no more {priority.name.lower()} requests for now: {_reason(decision)}",
            retry_after_s=max(wait_s, _MIN_RETRY_S),
            state=_reported_level(decision).name,
        )

    def correct_charge(self, charged_s: float, took_s: float) -> None:
        """See serving.execution.admission_control.AdmissionControl. `charged_s` is the return value of `admit`."""
        charge = charged_s if isinstance(charged_s, TimeCharge) else TimeCharge(charged_s, charged_s, is_of_floor=False)
        with self._lock:
            self._allocator.settle(charge, took_s)

    def refuse_frame(self, model: str, priority: int) -> str | None:
        """See serving.execution.admission_control.AdmissionControl.

        Cameras often run in step. With equal requirements, the second of two equal streams could always find the
        budget empty. So each frame needs a small random margin.
        """
        if self.is_open:
            return None
        level = PriorityClass.of_priority(priority)
        with self._lock:
            if self._allocator.wait_s(level, self._clock(), _MAX_FRAME_MARGIN * self._random.random()) == 0.0:
                return None
            self._count_refused_frame(model, level)
            return _reason(self.decision)

    def count_refused(self, model: str, priority: int) -> None:
        """See serving.execution.admission_control.AdmissionControl."""
        with self._lock:
            self._count_refused_frame(model, PriorityClass.of_priority(priority))

    def shed(self) -> Mapping[tuple[PriorityClass, str], int]:
        """Return the number of rejected requests and frames, by class and by the cause that limits the share."""
        with self._lock:
            return dict(self._shed)

    def refused_frames(self) -> Mapping[str, int]:
        """Return the number of rejected frames by model, without the one of each rejected request."""
        with self._lock:
            return dict(self._refused_frames)

    def _count_refused_frame(self, model: str, priority: PriorityClass) -> None:
        self._refused_frames[model] += 1
        self._count_rejected(priority)

    def _count_rejected(self, priority: PriorityClass) -> None:
        decision = self.decision
        cause = decision.limited_by or "heat"
        if priority > _lowest_admitted_class(decision):
            cause = "critical" if decision.only_control else Cause.MEMORY.value
        self._shed[priority, cause] = self._shed.get((priority, cause), 0) + 1


def _lowest_admitted_class(decision: PolicyDecision) -> PriorityClass:
    if decision.only_control:
        return PriorityClass.CONTROL
    return PriorityClass.NORMAL if decision.sheds_bulk else PriorityClass.BULK


def _reason(decision: PolicyDecision) -> str:
    level = _reported_level(decision).name
    return f"the box is {level}: {decision.detail}" if decision.detail else f"the box is {level}"


def _reported_level(decision: PolicyDecision) -> ThermalLevel:
    """Return the state that a rejection names, at least WARM: NORMAL would contradict the rejection."""
    return max(decision.level, ThermalLevel.WARM)
