"""What an inference costs in joules, learned while the box works. Pure: readings and work done are handed in.

The box tells its power, not whose it is. Models run in changing mixtures, which makes one linear equation of each
interval: the energy above what the idle box draws is the sum, over all models, of seconds busy times the watts that
being busy adds. The watts are the solution by least squares, none below zero, of the equations of the recent past,
drawn slightly towards what the box adds on average: models that always run together are told apart by busy time alone.
By these watts each interval's energy is shared out; shares add up to what was measured, never to more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_server.governor.readings import BoxReading

HALF_LIFE_S = 600.0
"""Measurements count half as much after ten minutes: clocks, heat and leakage change what an inference costs."""

LONGEST_GAP_S = 5.0
"""Power is not known between two readings that lie further apart. Energy counters are good over any time."""

MOST_W = 100_000.0
"""No box draws more: a counter that jumped, not energy."""

_IDLE_RISE_S, _IDLE_FALL_S = 120.0, 5.0
"""Half-lives of the idle power. Falling is quicker: what runs unseen can only make a box seem to draw more at rest."""

_LONGEST_RUN_S = 60.0
_MOST_BUSY_S = 1e6
_MOST_WEIGHT = 2.0**30
_SOME_INTERVALS = 5.0
_LEAST_WEIGHT = 1e-6
_TOWARDS_MEAN = 1e-3
"""Weight of the average against what was measured."""
_SWEEPS = 4
"""Steps towards the solution for each interval; the next one goes on from there."""


@dataclass(frozen=True, slots=True)
class ModelWorkload:
    """What one model did with batches of one size in an interval: seconds of computing, and inferences in them.

    Several instances that compute at the same time add up, to more seconds than the interval has.
    """

    busy_s: float
    inferences: int


@dataclass(frozen=True, slots=True)
class InferenceCost:
    """What one inference takes. `watts` is what the box draws above idle while it is computed.

    `inferences` is how many of them count, older ones less. `confidence`, 0 to 1, rises with the intervals measured.
    `total_j` is everything ever put down to this model and batch size.
    """

    joules: float
    watts: float
    inferences: float
    confidence: float
    total_j: float


@dataclass(frozen=True, slots=True)
class _Interval:
    energy_j: float
    duration_s: float


@dataclass(slots=True)
class _Learned:
    """Sums in which newer intervals weigh more, and `watts`, the solution so far. `together` has busy seconds times
    those of each other key, and of this one; `busy_joules` busy seconds times joules: a row of the normal equations and
    its right side."""

    joules: float = 0.0
    busy_s: float = 0.0
    inferences: float = 0.0
    intervals: float = 0.0
    total_j: float = 0.0
    watts: float | None = None
    busy_joules: float = 0.0
    together: dict[tuple[str, int], float] = field(default_factory=dict)

    def fade(self, factor: float) -> None:
        self.joules *= factor
        self.busy_s *= factor
        self.inferences *= factor
        self.intervals *= factor
        self.busy_joules *= factor
        for key in self.together:
            self.together[key] *= factor


class EnergyLearner:
    """Learns the cost of inferences by model and batch size. Not safe from several threads.

    Old sums fade by giving new ones more weight, so that an interval costs what ran in it, and not all that ever ran.
    Work is told of when it is done: a run longer than an interval is given those before it, in which nothing was done.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._learned: dict[tuple[str, int], _Learned] = {}
        self._idle_w: float | None = None
        self._weight = 1.0
        self._longest_run_s = 0.0
        self._waiting: deque[_Interval] = deque()

    @property
    def idle_w(self) -> float | None:
        """What the box draws when no model computes; None until it was seen doing nothing."""
        return self._idle_w

    def learn(
        self, energy_j: float | None, duration_s: float, work: Mapping[tuple[str, int], ModelWorkload]
    ) -> dict[tuple[str, int], float]:
        """Share out what was measured in one interval, by (name, batch size); return the joules that each was given.

        `energy_j` None: it could not be measured, and nothing is learned. Work of no time, and times that are no
        numbers, are left out.
        """
        if not (math.isfinite(duration_s) and duration_s > 0):
            return {}
        self._grow(duration_s)
        if energy_j is None or not 0 <= energy_j <= MOST_W * duration_s:
            self._waiting.clear()
            return {}
        busy = {key: item for key, item in work.items() if 0 < item.busy_s <= _MOST_BUSY_S}
        if not busy:
            self._waiting.append(_Interval(energy_j, duration_s))
            self._settle(self._longest_run_s)
            return {}
        whole = self._claimed(_Interval(energy_j, duration_s), max(map(_run_s, busy, busy.values())))
        self._settle(0.0)
        self._feel_idle(whole, is_idle=False)
        above_j = max(0.0, whole.energy_j - (self._idle_w or 0.0) * whole.duration_s)
        shares = self._shares(busy, above_j)
        for key, joules in shares.items():
            self._add(key, joules, above_j, busy)
        self._solve(list(shares))
        return shares

    def cost(self, name: str, batch_size: int) -> InferenceCost | None:
        """Return what one inference in batches of that size takes; None as long as nothing is known."""
        return _cost(self._learned.get((name, batch_size)), self._weight)

    def costs(self) -> dict[tuple[str, int], InferenceCost]:
        """Return all that is known, by (name, batch size)."""
        return {
            key: cost for key, learned in self._learned.items() if (cost := _cost(learned, self._weight)) is not None
        }

    def forget(self, name: str) -> None:
        """Drop what was learned of a model: another version may cost something else."""
        gone = {key: self._watts(key) for key in self._learned if key[0] == name}
        for key in gone:
            del self._learned[key]
        for learned in self._learned.values():
            for key, watts in gone.items():
                # What ran beside it keeps its own part of what was measured then.
                learned.busy_joules -= watts * learned.together.pop(key, 0.0)

    def _grow(self, duration_s: float) -> None:
        """Let what comes now weigh more than what came before."""
        self._weight *= 2.0 ** min(duration_s / self._half_life_s, 60.0)
        if self._weight > _MOST_WEIGHT:
            for learned in self._learned.values():
                learned.fade(1.0 / self._weight)
            self._weight = 1.0

    def _claimed(self, last: _Interval, run_s: float) -> _Interval:
        """Return the interval in which a run ended with those before it that the run began in."""
        self._longest_run_s = max(self._longest_run_s, min(run_s, _LONGEST_RUN_S))
        while self._waiting and last.duration_s < run_s:
            before = self._waiting.pop()
            last = _Interval(before.energy_j + last.energy_j, before.duration_s + last.duration_s)
        return last

    def _settle(self, newest_s: float) -> None:
        """Take intervals without work for idle ones, but for the newest, in which a run may have begun."""
        waiting_s = sum(item.duration_s for item in self._waiting)
        while self._waiting and waiting_s > newest_s:
            interval = self._waiting.popleft()
            waiting_s -= interval.duration_s
            self._feel_idle(interval, is_idle=True)

    def _feel_idle(self, interval: _Interval, *, is_idle: bool) -> None:
        power_w = interval.energy_j / interval.duration_s
        if self._idle_w is None:
            if is_idle:
                self._idle_w = power_w
                # What was put down to models so far held the idle power too.
                for learned in self._learned.values():
                    learned.fade(0.0)
        elif is_idle or power_w < self._idle_w:
            # A box that computes draws no less than one that does not: the idle power was taken while it was hot.
            half_life_s = _IDLE_FALL_S if power_w < self._idle_w else _IDLE_RISE_S
            self._idle_w += (1.0 - 0.5 ** (interval.duration_s / half_life_s)) * (power_w - self._idle_w)

    def _add(
        self, key: tuple[str, int], joules: float, above_j: float, busy: Mapping[tuple[str, int], ModelWorkload]
    ) -> None:
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

    def _shares(self, busy: Mapping[tuple[str, int], ModelWorkload], above_j: float) -> dict[tuple[str, int], float]:
        expected_j = {key: self._watts(key) * item.busy_s for key, item in busy.items()}
        if sum(expected_j.values()) <= 0:
            expected_j = {key: item.busy_s for key, item in busy.items()}
        total_j = sum(expected_j.values())
        if not (math.isfinite(total_j) and total_j > 0):
            return {}
        return {key: above_j * (joules / total_j) for key, joules in expected_j.items()}

    def _watts(self, key: tuple[str, int]) -> float:
        """Return what computing this adds, as far as is known: else what the box adds on average."""
        learned = self._learned.get(key)
        return self._mean_w() if learned is None or learned.watts is None else learned.watts

    def _mean_w(self) -> float:
        busy_s = sum(item.busy_s for item in self._learned.values())
        joules = sum(item.joules for item in self._learned.values())
        return joules / busy_s if busy_s > _LEAST_WEIGHT * self._weight else 1.0

    def _solve(self, keys: list[tuple[str, int]]) -> None:
        """Improve the watts of what just ran, one after the other with the others held (Gauss-Seidel)."""
        mean_w = self._mean_w()
        watts = {key: mean_w if item.watts is None else item.watts for key, item in self._learned.items()}
        for _ in range(_SWEEPS):
            for key in keys:
                learned = self._learned[key]
                own = learned.together[key]
                if own <= 0.0:
                    continue
                all_j = sum(weight * watts[other] for other, weight in learned.together.items())
                drawn = _TOWARDS_MEAN * own
                watts[key] = max(
                    0.0, watts[key] + (learned.busy_joules - all_j + drawn * (mean_w - watts[key])) / (own + drawn)
                )
        for key in keys:
            self._learned[key].watts = watts[key]


def measured_j(before: BoxReading, after: BoxReading) -> float | None:
    """Return the energy that the counted rails took between two readings, None where that cannot be known.

    Counters are taken when every counted rail has one, else the mean of the power before and after.
    """
    duration_s = after.at_s - before.at_s
    names = {rail.name for rail in after.rails if rail.is_counted}
    if duration_s <= 0 or names != {rail.name for rail in before.rails if rail.is_counted}:
        return None
    earlier, later = ({item.name: item.energy_mj for item in reading.energy} for reading in (before, after))
    if names and names <= earlier.keys() & later.keys():
        energy_j = sum(later[name] - earlier[name] for name in names) / 1000
        return energy_j if 0 <= energy_j <= MOST_W * duration_s else None
    if before.power_mw is None or after.power_mw is None or duration_s > LONGEST_GAP_S:
        return None
    return (before.power_mw + after.power_mw) / 2 * duration_s / 1000


def _run_s(key: tuple[str, int], work: ModelWorkload) -> float:
    """Return how long one batch took on average."""
    return work.busy_s / max(1.0, work.inferences / max(1, key[1]))


def _cost(learned: _Learned | None, weight: float) -> InferenceCost | None:
    if learned is None or min(learned.inferences, learned.busy_s) <= _LEAST_WEIGHT * weight:
        return None
    watts = learned.joules / learned.busy_s if learned.watts is None else learned.watts
    intervals = learned.intervals / weight
    return InferenceCost(
        watts * learned.busy_s / learned.inferences,
        watts,
        learned.inferences / weight,
        intervals / (intervals + _SOME_INTERVALS),
        learned.total_j,
    )
