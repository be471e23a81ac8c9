"""State of one engine build. Guarded by the lock of the build registry; it decides nothing."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from edge_server.core.status_reports import EngineReport
from edge_server.core.tensorrt_engine import EngineOrder
from edge_server.engines.engine_key import EngineKey

_FIRST_RETRY_S = 30.0
_LONGEST_RETRY_S = 3600.0

MOST_ATTEMPTS = 5
"""Builds that fail in a row for a cause that may pass; after that only an order, or a restart, tries again."""


class BuildState(enum.Enum):
    WAITING = "waiting"
    BUILDING = "building"
    PAUSED = "paused"
    VERIFYING = "verifying"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"


UNDER_WAY = frozenset({BuildState.BUILDING, BuildState.PAUSED, BuildState.VERIFYING})


@dataclass(slots=True, eq=False)
class Build:
    """`cancel_reason`, when not empty, is the order to end it. `due_s` is when it may be begun (time.monotonic)."""

    order: EngineOrder
    key: EngineKey
    reason: str = ""
    state: BuildState = BuildState.WAITING
    phase: str = ""
    percent: float = 0.0
    since_s: float = field(default_factory=time.time)
    attempt_count: int = 0
    due_s: float = 0.0
    retry_s: float | None = None
    took_s: float = 0.0
    difference: float | None = None
    cancel_reason: str = ""

    @property
    def name(self) -> tuple[str, int]:
        return self.order.model, self.order.version

    @property
    def title(self) -> str:
        return f"engine for model '{self.order.model}' version {self.order.version}"

    def move(self, state: BuildState, reason: str | None = None) -> None:
        if state is not self.state:
            self.since_s = time.time()
        self.state = state
        self.retry_s = None
        if reason is not None:
            self.reason = reason

    def fail(self, reason: str, *, is_final: bool) -> None:
        """Note a failure, and when it is tried again: after 30 s, 1 min, 2 min ... an hour."""
        self.move(BuildState.FAILED, reason)
        if is_final or self.attempt_count >= MOST_ATTEMPTS:
            return
        delay_s = min(_FIRST_RETRY_S * 2.0 ** (self.attempt_count - 1), _LONGEST_RETRY_S)
        self.due_s = time.monotonic() + delay_s
        self.retry_s = time.time() + delay_s

    def is_due(self, now_s: float) -> bool:
        may_be_begun = self.state is BuildState.WAITING or (
            self.state is BuildState.FAILED and self.retry_s is not None
        )
        return may_be_begun and now_s >= self.due_s and not self.cancel_reason

    def report(self) -> EngineReport:
        order = self.order
        return EngineReport(
            model=order.model,
            version=order.version,
            library=f"{order.library} {order.library_version}",
            precision=order.precision,
            digest=self.key.digest,
            state=self.state.value,
            phase=self.phase,
            percent=self.percent,
            reason=self.reason,
            since_s=self.since_s,
            attempt_count=self.attempt_count,
            retry_s=self.retry_s,
            took_s=self.took_s,
            difference=self.difference,
            tolerance=order.tolerance,
        )
