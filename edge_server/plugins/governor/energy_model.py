"""Estimate of the energy of one inference in joules, by model and batch size, learned from the power of the machine. No
clock, no I/O.

Only the power of the whole machine is measured. Each interval gives one linear equation: the energy above idle is the
sum over all models of busy seconds times the watts that the busy model adds. The watts are the non-negative
least-squares solution of the recent equations, with a small pull towards the average (models that always run together
differ then only by their busy time). The energy of each interval is divided by these watts. The parts never add up to
more than the measured energy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple, TypeAlias

from edge_server.plugins.governor.readings import MachineReading
from edge_server.record import record

HALF_LIFE_S = 600.0
"""After this time a measurement has half its weight: clocks, heat and leakage change the cost of an inference."""

LONGEST_GAP_S = 5.0
"""Longest gap between two power readings that are averaged. Energy counters are valid over any time."""

MAX_POWER_W = 100_000.0
"""Highest plausible power. A higher value comes from a counter that jumped."""

_IDLE_RISE_S, _IDLE_FALL_S = 120.0, 5.0
"""Half-lives of the idle power. It falls faster, because other programs can only increase the measured idle power."""

_LONGEST_RUN_S = 60.0
_MAX_BUSY_S = 1e6
_MAX_WEIGHT = 2.0**30
_SOME_INTERVALS = 5.0
_MIN_WEIGHT = 1e-6
_TOWARDS_MEAN = 1e-3
"""Weight of the average relative to the measurements."""
_SWEEPS = 4
"""Solver iterations per interval. The next interval continues from the result."""


WorkKey: TypeAlias = tuple[str, "int | str"]
"""Model, and batch size; for a language model "prefill" or "decode", where an inference is a token."""


class ModelWorkload(NamedTuple):
    """Work of one model with batches of one size in an interval: seconds of computing, and inferences.

    The seconds of parallel instances add up, so they can exceed the length of the interval.
    """

    busy_s: float
    inferences: int


class InferenceCost(NamedTuple):
    """Energy of one inference. `watts` is the machine's power above idle while it is computed.

    `inferences` is the weighted number of measured inferences; older ones count less. `confidence`, 0 to 1, rises with
    the number of measured intervals. `total_j` is all energy ever attributed to this model and batch size.
    """

    joules: float
    watts: float
    inferences: float
    confidence: float
    total_j: float


class _Interval(NamedTuple):
    """Measured energy of one interval."""

    energy_j: float
    duration_s: float


@record(slots=True)
class _Learned:
    """Weighted sums of one key (newer intervals weigh more), and `watts`, the current solution.

    `together` and `busy_joules` are a row of the normal equations and its right side: busy seconds times the busy
    seconds of each key, and busy seconds times joules.
    """

    joules: float = 0.0
    busy_s: float = 0.0
    inferences: float = 0.0
    intervals: float = 0.0
    total_j: float = 0.0
    watts: float | None = None
    busy_joules: float = 0.0
    together: dict[WorkKey, float] = field(default_factory=dict)

    def scale(self, factor: float) -> None:
        """Multiply all weighted sums by a factor."""
        self.joules *= factor
        self.busy_s *= factor
        self.inferences *= factor
        self.intervals *= factor
        self.busy_joules *= factor
        for key in self.together:
            self.together[key] *= factor


class EnergyModel:
    """Learns the energy of inferences by model and batch size. Not thread-safe.

    Old sums lose weight because new ones get a higher weight, so the time per interval depends only on the models that
    ran in it. Work is reported when it ends. A run that is longer than its interval also gets the intervals before it
    in which no work ended.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._learned: dict[WorkKey, _Learned] = {}
        self.idle_w: float | None = None
        """Power of the machine while no model computes; None before the first idle interval."""
        self._weight = 1.0
        self._longest_run_s = 0.0
        self._unassigned: deque[_Interval] = deque()

    def learn(
        self, energy_j: float | None, duration_s: float, work: Mapping[WorkKey, ModelWorkload]
    ) -> dict[WorkKey, float]:
        """Divide the energy of one interval among the work; return the joules by (name, batch size).

        `energy_j` None: it could not be measured, and nothing is learned. Work with an invalid time is ignored.
        """
        if not (math.isfinite(duration_s) and duration_s > 0):
            return {}
        self._increase_weight(duration_s)
        if energy_j is None or not 0 <= energy_j <= MAX_POWER_W * duration_s:
            self._unassigned.clear()
            return {}
        busy = {key: item for key, item in work.items() if 0 < item.busy_s <= _MAX_BUSY_S}
        if not busy:
            self._unassigned.append(_Interval(energy_j, duration_s))
            self._count_idle_intervals(self._longest_run_s)
            return {}
        # The average time of the slowest batch. Its run began in the intervals before, in which no work ended.
        run_s = max(
            item.busy_s / max(1.0, item.inferences / (size if isinstance(size, int) and size > 0 else 1))
            for (_, size), item in busy.items()
        )
        self._longest_run_s = max(self._longest_run_s, min(run_s, _LONGEST_RUN_S))
        whole = _Interval(energy_j, duration_s)
        while self._unassigned and whole.duration_s < run_s:
            before = self._unassigned.pop()
            whole = _Interval(before.energy_j + whole.energy_j, before.duration_s + whole.duration_s)
        self._count_idle_intervals(0.0)
        self._update_idle_power(whole, is_idle=False)
        above_j = max(0.0, whole.energy_j - (self.idle_w or 0.0) * whole.duration_s)
        shares = self._divide(busy, above_j)
        for key, joules in shares.items():
            self._add(key, joules, above_j, busy)
        self._solve(list(shares))
        return shares

    def costs(self) -> dict[WorkKey, InferenceCost]:
        """Return all known costs, by (name, batch size)."""
        found: dict[WorkKey, InferenceCost] = {}
        for key, learned in self._learned.items():
            if min(learned.inferences, learned.busy_s) <= _MIN_WEIGHT * self._weight:
                continue
            watts = learned.joules / learned.busy_s if learned.watts is None else learned.watts
            intervals = learned.intervals / self._weight
            found[key] = InferenceCost(
                watts * learned.busy_s / learned.inferences,
                watts,
                learned.inferences / self._weight,
                intervals / (intervals + _SOME_INTERVALS),
                learned.total_j,
            )
        return found

    def forget(self, name: str) -> None:
        """Drop everything learned about a model: another version may have another cost."""
        gone = {key: self._watts(key) for key in self._learned if key[0] == name}
        for key in gone:
            del self._learned[key]
        for learned in self._learned.values():
            for key, watts in gone.items():
                # Models that ran at the same time keep their own part of the measured energy.
                learned.busy_joules -= watts * learned.together.pop(key, 0.0)

    def _increase_weight(self, duration_s: float) -> None:
        """Increase the weight of new measurements relative to old ones."""
        self._weight *= 2.0 ** min(duration_s / self._half_life_s, 60.0)
        if self._weight > _MAX_WEIGHT:
            for learned in self._learned.values():
                learned.scale(1.0 / self._weight)
            self._weight = 1.0

    def _count_idle_intervals(self, newest_s: float) -> None:
        """Count intervals without work as idle, except the newest `newest_s` seconds: a run may have begun there."""
        total_s = sum(item.duration_s for item in self._unassigned)
        while self._unassigned and total_s > newest_s:
            interval = self._unassigned.popleft()
            total_s -= interval.duration_s
            self._update_idle_power(interval, is_idle=True)

    def _update_idle_power(self, interval: _Interval, *, is_idle: bool) -> None:
        power_w = interval.energy_j / interval.duration_s
        if self.idle_w is None:
            if is_idle:
                self.idle_w = power_w
                # The energy attributed to models so far included the idle power.
                for learned in self._learned.values():
                    learned.scale(0.0)
        elif is_idle or power_w < self.idle_w:
            # A busy machine draws at least the idle power. If it draws less, the idle power was measured while hot.
            half_life_s = _IDLE_FALL_S if power_w < self.idle_w else _IDLE_RISE_S
            self.idle_w += (1.0 - 0.5 ** (interval.duration_s / half_life_s)) * (power_w - self.idle_w)

    def _add(self, key: WorkKey, joules: float, above_j: float, busy: Mapping[WorkKey, ModelWorkload]) -> None:
        learned = self._learned.setdefault(key, _Learned())
        mine = busy[key]
        learned.total_j += joules
        learned.joules += self._weight * joules
        learned.busy_s += self._weight * mine.busy_s
        learned.inferences += self._weight * max(0, mine.inferences)
        learned.intervals += self._weight
        learned.busy_joules += self._weight * mine.busy_s * above_j
        for other, item in busy.items():
            learned.together[other] = learned.together.get(other, 0.0) + self._weight * mine.busy_s * item.busy_s

    def _divide(self, busy: Mapping[WorkKey, ModelWorkload], above_j: float) -> dict[WorkKey, float]:
        """Divide the energy above idle in proportion to the expected energy of each key."""
        expected_j = {key: self._watts(key) * item.busy_s for key, item in busy.items()}
        if sum(expected_j.values()) <= 0:
            expected_j = {key: item.busy_s for key, item in busy.items()}
        total_j = sum(expected_j.values())
        if not (math.isfinite(total_j) and total_j > 0):
            return {}
        return {key: above_j * (joules / total_j) for key, joules in expected_j.items()}

    def _watts(self, key: WorkKey) -> float:
        """Return the watts that this work adds; the machine's average if unknown."""
        learned = self._learned.get(key)
        return self._mean_w() if learned is None or learned.watts is None else learned.watts

    def _mean_w(self) -> float:
        busy_s = sum(item.busy_s for item in self._learned.values())
        joules = sum(item.joules for item in self._learned.values())
        return joules / busy_s if busy_s > _MIN_WEIGHT * self._weight else 1.0

    def _solve(self, keys: list[WorkKey]) -> None:
        """Improve the watts of the models that just ran, one by one with the others fixed (Gauss-Seidel)."""
        mean_w = self._mean_w()
        watts = {key: mean_w if item.watts is None else item.watts for key, item in self._learned.items()}
        for _ in range(_SWEEPS):
            for key in keys:
                learned = self._learned[key]
                own = learned.together[key]
                if own <= 0.0:
                    continue
                all_j = sum(weight * watts[other] for other, weight in learned.together.items())
                pull = _TOWARDS_MEAN * own
                watts[key] = max(
                    0.0, watts[key] + (learned.busy_joules - all_j + pull * (mean_w - watts[key])) / (own + pull)
                )
        for key in keys:
            self._learned[key].watts = watts[key]


def measured_j(before: MachineReading, after: MachineReading) -> float | None:
    """Return the energy of the counted rails between two readings, or None if unknown.

    It comes from the energy counters if every counted rail has one, else from the mean power.
    """
    duration_s = after.at_s - before.at_s
    names = {rail.name for rail in after.rails if rail.is_counted}
    if duration_s <= 0 or names != {rail.name for rail in before.rails if rail.is_counted}:
        return None
    earlier, later = ({item.name: item.energy_mj for item in reading.energy} for reading in (before, after))
    if names and names <= earlier.keys() & later.keys():
        energy_j = sum(later[name] - earlier[name] for name in names) / 1000
        return energy_j if 0 <= energy_j <= MAX_POWER_W * duration_s else None
    if before.power_mw is None or after.power_mw is None or duration_s > LONGEST_GAP_S:
        return None
    return (before.power_mw + after.power_mw) / 2 * duration_s / 1000
