"""Loop of the simulated arm in real time: one command for each tick, whoever gives it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edge_server.plugins.policies.demo.arm import DT_S, Arm, Array

_SETTLED_TICKS = 100

Step = Callable[[Mapping[str, Any]], Array]
Infer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class LoopReport(NamedTuple):
    """`dry_ticks`: ticks without a new command, in which the arm kept the last one. `error_mm`: root of the mean square
    of the tip's distance to its target; `largest_error_mm`: the largest one. The first two seconds do not count."""

    ticks: int
    dry_ticks: int
    error_mm: float
    largest_error_mm: float


class ChunkByChunk:
    """Gives the actions of a chunk one by one, and asks for the next chunk when they are used up: the loop waits."""

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        self._left: list[Array] = []

    def step(self, observation: Mapping[str, Any]) -> Array:
        if not self._left:
            self._left = list(self._infer(observation)["actions"])
        return self._left.pop(0)


def run_loop(
    arm: Arm,
    step: Step,
    seconds: float,
    *,
    is_over: threading.Event | None = None,
    on_tick: Callable[[LoopReport], None] = lambda report: None,
) -> LoopReport:
    """Move the arm by the commands of `step` for some seconds, or until `is_over`. `on_tick` gets the report so far."""
    is_over = is_over or threading.Event()
    command = arm.angles
    ticks = dry_ticks = counted = 0
    square_sum = largest_m = 0.0
    step(_observe(arm))  # the first answer comes before the clock runs
    began_s = time.monotonic()
    while ticks * DT_S < seconds and not is_over.wait(max(0.0, began_s + ticks * DT_S - time.monotonic())):
        wanted = step(_observe(arm))
        missed = int((time.monotonic() - began_s) / DT_S) - ticks
        for at in range(max(0, missed) + 1):
            if at == max(0, missed):
                command = wanted
            else:
                dry_ticks += 1
            arm.follow(command)
            ticks += 1
            if ticks > _SETTLED_TICKS:
                counted += 1
                square_sum += arm.error_m() ** 2
                largest_m = max(largest_m, arm.error_m())
        error_mm = 1000 * math.sqrt(square_sum / counted) if counted else 0.0
        on_tick(LoopReport(ticks, dry_ticks, error_mm, 1000 * largest_m))
    error_mm = 1000 * math.sqrt(square_sum / counted) if counted else 0.0
    return LoopReport(ticks, dry_ticks, error_mm, 1000 * largest_m)


def _observe(arm: Arm) -> dict[str, Any]:
    return {"observation/state": arm.observe().astype("float32")}
