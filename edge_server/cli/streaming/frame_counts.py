"""Frame counts of one stream: offered = answered + dropped + lost + waiting, at every moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edge_server.cli.streaming.percentiles import Percentiles, RecentValues, percentile
from edge_server.core.frame_stream_types import DropReason, FrameResult, StreamCounts

RECENT_S = 5.0
"""Live rates and ages are those of this many seconds."""


_FORGET_BEHIND = 1024
"""A frame this far behind one that was answered was decided long ago, for results come in order."""


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """A stream as it stands. Ages are seconds from handing a frame to the client until its result was there.

    `fps_in`, `fps_out` and `age_...` are recent ones, or those of the whole run (see `FrameCounts`); NaN where
    nothing came.
    `failed` counts the answers that were errors. `here` counts drops before the wire, `there` those of the server.
    """

    name: str
    fps_in: float
    fps_out: float
    age_p50_s: float
    age_p99_s: float
    age_largest_s: float
    server_p50_s: float
    """From the arrival of a frame at the server until its result was ready, by the server's clock."""
    offered: int
    answered: int
    failed: int
    lost: int
    waiting: int
    here: int = 0
    there: Mapping[DropReason, int] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        return self.here + sum(self.there.values())


class FrameCounts:
    """Counts one stream. Not thread-safe; every time passed in is of one monotonic clock, in seconds.

    Drops of the server are known from its notices, frame by frame, and from the totals in its results: a notice may be
    left out for a client that reads slowly, and no result tells of what was dropped after the last one. The larger
    number is the true one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._in, self._out = RecentValues(RECENT_S), RecentValues(RECENT_S)
        self._recent_there = RecentValues(RECENT_S)
        self._ages, self._times_there = Percentiles(), Percentiles()
        self._sent: dict[int, float] = {}
        self._here = 0
        self._noticed: dict[DropReason, int] = {}
        self._base: Mapping[DropReason, int] = {}
        self._told: Mapping[DropReason, int] = {}
        self._offered = self._answered = self._failed = self._lost = 0
        self._first_in = self._last_in = self._first_out = self._last_out = math.nan
        self._is_over = False

    def open(self, counts: StreamCounts) -> None:
        """Take what the server had counted for this stream before the first frame."""
        self._base = counts.dropped

    def offer(self, seq: int, now: float) -> None:
        """Count a frame that is handed to the client now."""
        self._sent[seq] = now
        self._offered += 1
        self._in.add(now)
        self._first_in = now if math.isnan(self._first_in) else self._first_in
        self._last_in = now

    def answer(self, result: FrameResult, now: float) -> float | None:
        """Count a result and return its age. None, and nothing counted, for one that nobody waits for."""
        seq = result.header.seq
        sent = self._sent.pop(seq, None)
        if sent is None:
            return None
        self._forget(seq - _FORGET_BEHIND)
        age_s, there_s = max(now - sent, 0.0), result.times.finished_us / 1e6
        self._answered += 1
        self._failed += bool(result.error_code)
        self._told = result.counts.dropped
        self._out.add(now, age_s)
        self._ages.add(age_s)
        self._recent_there.add(now, there_s)
        self._times_there.add(there_s)
        self._first_out = now if math.isnan(self._first_out) else self._first_out
        self._last_out = now
        return age_s

    def notice(self, seq: int, reason: DropReason) -> bool:
        """Count a drop of the server; False, and nothing counted, for a frame that nobody waits for."""
        if self._sent.pop(seq, None) is None:
            return False
        self._noticed[reason] = self._noticed.get(reason, 0) + 1
        return True

    def settle(self, here: int, lost: int) -> None:
        """Take what the client counts itself, in all: drops before sending, and frames lost with a connection."""
        self._here, self._lost = here, lost

    def end(self) -> None:
        """Note that nothing comes any more: what was not accounted for by now is lost."""
        self._is_over = True

    def _forget(self, below: int) -> None:
        while self._sent and (oldest := next(iter(self._sent))) < below:
            del self._sent[oldest]

    def recent(self, now: float) -> StreamFigures:
        """Return rates and ages of the last RECENT_S seconds, and the counts."""
        ages = self._out.values(now)
        return self._figures(
            self._in.rate(now),
            self._out.rate(now),
            (percentile(ages, 0.5), percentile(ages, 0.99), max(ages, default=math.nan)),
            percentile(self._recent_there.values(now), 0.5),
        )

    def whole(self) -> StreamFigures:
        """Return rates and ages of the whole run, and the counts."""
        return self._figures(
            _rate(self._offered, self._first_in, self._last_in),
            _rate(self._answered, self._first_out, self._last_out),
            (self._ages.percentile(0.5), self._ages.percentile(0.99), self._ages.largest),
            self._times_there.percentile(0.5),
        )

    def _figures(
        self, fps_in: float, fps_out: float, ages: tuple[float, float, float], there_s: float
    ) -> StreamFigures:
        there = self._drops_there()
        rest = max(self._offered - self._answered - self._here - sum(there.values()), 0)
        lost = rest if self._is_over else min(self._lost, rest)
        return StreamFigures(
            self.name, fps_in, fps_out, *ages, there_s,
            self._offered, self._answered, self._failed, lost, rest - lost, self._here, there,
        )  # fmt: skip

    def _drops_there(self) -> dict[DropReason, int]:
        found = dict(self._noticed)
        for reason, count in self._told.items():
            # What a connection took with it when it broke is lost, not dropped.
            if reason is not DropReason.CLOSED:
                found[reason] = max(found.get(reason, 0), count - self._base.get(reason, 0))
        return {reason: count for reason, count in found.items() if count > 0}

    @staticmethod
    def recent_of_all(tallies: Iterable[FrameCounts], name: str, now: float) -> StreamFigures:
        """Return recent figures over several streams: sums of rates and counts, ages of all frames."""
        several = list(tallies)
        ages = [age for one in several for age in one._out.values(now)]
        there = [age for one in several for age in one._recent_there.values(now)]
        spread = (percentile(ages, 0.5), percentile(ages, 0.99), max(ages, default=math.nan))
        return total([one.recent(now) for one in several], name, spread, percentile(there, 0.5))

    @staticmethod
    def whole_of_all(tallies: Iterable[FrameCounts], name: str) -> StreamFigures:
        """As `recent_of_all`, of the whole run."""
        several = list(tallies)
        ages = Percentiles.joined(one._ages for one in several)
        there = Percentiles.joined(one._times_there for one in several)
        spread = (ages.percentile(0.5), ages.percentile(0.99), ages.largest)
        return total([one.whole() for one in several], name, spread, there.percentile(0.5))


def total(
    parts: Iterable[StreamFigures], name: str, ages: tuple[float, float, float], server_p50_s: float
) -> StreamFigures:
    """Return sums of rates and counts, with ages that are given: percentiles do not add up."""
    parts = list(parts)
    return StreamFigures(
        name, sum(one.fps_in for one in parts), sum(one.fps_out for one in parts), *ages, server_p50_s,
        sum(one.offered for one in parts), sum(one.answered for one in parts), sum(one.failed for one in parts),
        sum(one.lost for one in parts), sum(one.waiting for one in parts),
        sum(one.here for one in parts), _sum(one.there for one in parts),
    )  # fmt: skip


def _sum(counts: Iterable[Mapping[DropReason, int]]) -> dict[DropReason, int]:
    summed: dict[DropReason, int] = {}
    for one in counts:
        for reason, count in one.items():
            summed[reason] = summed.get(reason, 0) + count
    return summed


def _rate(count: int, first: float, last: float) -> float:
    """Return events a second between the first and the last of them."""
    return (count - 1) / (last - first) if count > 1 and last > first else 0.0
