"""Replay of recorded sensor readings: shows what the control policy would have decided.

It is an open loop: decisions do not change the recording. So it shows when the policy would limit the work, but not the
effect.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from edge_server.errors import InvalidRequest
from edge_server.plugins.governor.control_policy import (
    ControlPolicy,
    PolicyConstants,
    PolicyDecision,
    PolicyInput,
    ThermalLevel,
)

COLUMNS = ("time_s", "temperature_c", "power_w", "trip_c")
"""Columns of a recording. The last two may be absent; other columns are ignored."""

MAX_ROWS = 2_000_000


class RecordedReading(NamedTuple):
    """One recorded sample. None: the reading failed."""

    time_s: float
    temperature_c: float | None = None
    power_w: float | None = None
    trip_c: float | None = None


@dataclass(slots=True)
class StatePeriod:
    """A period in one state of the governor."""

    from_s: float
    to_s: float
    level: ThermalLevel
    least_share: float
    hottest_c: float | None
    detail: str


@dataclass(slots=True)
class PolicyReplay:
    """Inputs and decisions of a replay, one point per sample, and the periods of each state."""

    time_s: list[float] = field(default_factory=list)
    temperature_c: list[float | None] = field(default_factory=list)
    power_w: list[float | None] = field(default_factory=list)
    set_point_c: list[float | None] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    periods: list[StatePeriod] = field(default_factory=list)


def read_recording(lines: Iterable[str], name: str) -> list[RecordedReading]:
    """Return the samples of a CSV file with a heading line. An empty cell or "nan" is a failed reading.

    Raises InvalidRequest with the line number.
    """
    rows = csv.DictReader(lines, skipinitialspace=True)
    try:
        headings = [heading.strip() for heading in rows.fieldnames or ()]
    except csv.Error as error:
        raise InvalidRequest(f"{name}, line 1: {error}") from None
    rows.fieldnames = headings
    missing = [column for column in COLUMNS[:2] if column not in headings]
    if missing:
        given = ", ".join(headings) or "nothing"
        raise InvalidRequest(f"{name}: expected a first line with {' and '.join(COLUMNS[:2])}, given {given}")
    try:
        return _parse_samples(rows, name)
    except csv.Error as error:
        raise InvalidRequest(f"{name}, line {rows.line_num}: {error}") from None


def _parse_samples(rows: csv.DictReader[str], name: str) -> list[RecordedReading]:
    samples: list[RecordedReading] = []
    for row in rows:
        where = f"{name}, line {rows.line_num}"
        time_s = _number(row["time_s"], f"{where}: time_s")
        if time_s is None or (samples and time_s < samples[-1].time_s):
            raise InvalidRequest(f"{where}: expected a time_s that does not go back, given '{row['time_s']}'")
        values = {column: _number(row.get(column), f"{where}: {column}") for column in COLUMNS[1:]}
        samples.append(RecordedReading(time_s, **values))
        if len(samples) > MAX_ROWS:
            raise InvalidRequest(f"{name}: expected at most {MAX_ROWS} lines")
    if len(samples) < 2:
        raise InvalidRequest(f"{name}: expected two readings or more, given {len(samples)}")
    return samples


def replay_policy(samples: Iterable[RecordedReading], constants: PolicyConstants) -> PolicyReplay:
    """Run a new policy on the samples in order. Times start at the first sample."""
    policy = ControlPolicy(constants)
    replayed = PolicyReplay()
    start_s: float | None = None
    for sample in samples:
        start_s = sample.time_s if start_s is None else start_s
        now_s = sample.time_s - start_s
        decision = policy.step(PolicyInput(sample.temperature_c, sample.trip_c, power_w=sample.power_w), now_s)
        replayed.time_s.append(now_s)
        replayed.temperature_c.append(sample.temperature_c)
        replayed.power_w.append(sample.power_w)
        replayed.set_point_c.append(decision.set_point_c)
        replayed.share.append(decision.share)
        _extend_periods(replayed.periods, decision, sample.temperature_c, now_s)
    return replayed


def _extend_periods(
    periods: list[StatePeriod], decision: PolicyDecision, temperature_c: float | None, now_s: float
) -> None:
    """Extend the last period to now, or begin a new one if the state changed."""
    if periods:
        periods[-1].to_s = now_s
    if not periods or periods[-1].level is not decision.level:
        periods.append(StatePeriod(now_s, now_s, decision.level, decision.share, temperature_c, decision.detail))
        return
    period = periods[-1]
    if decision.share < period.least_share:
        period.least_share, period.detail = decision.share, decision.detail
    if temperature_c is not None and (period.hottest_c is None or temperature_c > period.hottest_c):
        period.hottest_c = temperature_c


def _number(text: str | None, where: str) -> float | None:
    if text is None or not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        raise InvalidRequest(f"{where}: expected a number or nothing, given '{text}'") from None
    return value if math.isfinite(value) else None
