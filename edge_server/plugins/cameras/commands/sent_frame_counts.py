"""Counter of one stream's frames in `edge-server stream`: offered, answered, dropped, lost, waiting, with rates and
ages. At any time: offered = answered + dropped + lost + waiting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edge_server.plugins.cameras.commands.percentiles import Percentiles, RecentValues, percentile
from edge_server.protocol.frame_messages import DropReason, FrameResult, StreamCounts

RECENT_S = 5.0
"""Time window of live rates and ages."""

_FORGET_BEHIND = 1024
"""A frame this far behind an answered one gets no result any more, because results arrive in order."""


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Current rates, ages and counts of a stream. An age is the time from the offer of a frame to its result.

    `fps_in`, `fps_out` and `age_...` cover the last seconds or the whole run (see `FrameCounts`). Ages are NaN without
    results. `failed` counts the results that are errors, `late` those after their deadline. `client_drops` counts
    frames that the client dropped before sending, `server_drops` those that the server dropped.
    """

    name: str
    fps_in: float
    fps_out: float
    age_p50_s: float
    age_p99_s: float
    age_largest_s: float
    server_p50_s: float
    """Time from the arrival of a frame at the server to its result, by the server's clock."""
    offered: int
    answered: int
    failed: int
    lost: int
    waiting: int
    client_drops: int = 0
    server_drops: Mapping[DropReason, int] = field(default_factory=dict)
    late: int = 0

    @property
    def dropped(self) -> int:
        return self.client_drops + sum(self.server_drops.values())


class FrameCounts:
    """Counts the frames of one stream. Not thread-safe. All times are seconds of one monotonic clock.

    The server reports drops in two ways: in a notice per frame, and as totals in its results. A notice may be missing
    if the client reads slowly, and no result covers drops after the last result. The larger number is correct.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._in, self._out = RecentValues(RECENT_S), RecentValues(RECENT_S)
        self._recent_server_times = RecentValues(RECENT_S)
        self._ages, self._server_times = Percentiles(), Percentiles()
        self._sent: dict[int, float] = {}
        self._client_drops = 0
        self._noticed_drops: dict[DropReason, int] = {}
        self._server_baseline: Mapping[DropReason, int] = {}
        self._server_totals: Mapping[DropReason, int] = {}
        self._offered = self._answered = self._failed = self._late = self._lost = 0
        self._first_in = self._last_in = self._first_out = self._last_out = math.nan
        self._is_over = False

    def set_server_baseline(self, counts: StreamCounts) -> None:
        """Set the server's counts from before the first frame; later totals are relative to them."""
        self._server_baseline = counts.dropped

    def count_offered(self, seq: int, now: float) -> None:
        """Count a frame that is offered now."""
        self._sent[seq] = now
        self._offered += 1
        self._in.add(now)
        self._first_in = now if math.isnan(self._first_in) else self._first_in
        self._last_in = now

    def count_result(self, result: FrameResult, now: float) -> float | None:
        """Count a result and return its age. A result for an unknown frame is not counted and gives None."""
        seq = result.header.seq
        sent = self._sent.pop(seq, None)
        if sent is None:
            return None
        while self._sent and (oldest := next(iter(self._sent))) < seq - _FORGET_BEHIND:
            del self._sent[oldest]
        age_s, server_s = max(now - sent, 0.0), result.times.finished_us / 1e6
        self._answered += 1
        self._failed += bool(result.error_code)
        self._late += result.is_late
        self._server_totals = result.counts.dropped
        self._out.add(now, age_s)
        self._ages.add(age_s)
        self._recent_server_times.add(now, server_s)
        self._server_times.add(server_s)
        self._first_out = now if math.isnan(self._first_out) else self._first_out
        self._last_out = now
        return age_s

    def count_server_drop(self, seq: int, reason: DropReason) -> bool:
        """Count a drop by the server. A drop of an unknown frame is not counted and gives False."""
        if self._sent.pop(seq, None) is None:
            return False
        self._noticed_drops[reason] = self._noticed_drops.get(reason, 0) + 1
        return True

    def set_client_totals(self, client_drops: int, lost: int) -> None:
        """Set the client's totals: drops before sending, and frames lost with a connection."""
        self._client_drops, self._lost = client_drops, lost

    def end(self) -> None:
        """Mark the end of the stream: all waiting frames are now lost."""
        self._is_over = True

    def recent(self, now: float) -> StreamFigures:
        """Return rates and ages of the last RECENT_S seconds, and the counts."""
        ages = self._out.values(now)
        return self._figures(
            self._in.rate(now),
            self._out.rate(now),
            (percentile(ages, 0.5), percentile(ages, 0.99), max(ages, default=math.nan)),
            percentile(self._recent_server_times.values(now), 0.5),
        )

    def whole(self) -> StreamFigures:
        """Return rates and ages of the whole run, and the counts."""
        return self._figures(
            _rate(self._offered, self._first_in, self._last_in),
            _rate(self._answered, self._first_out, self._last_out),
            (self._ages.percentile(0.5), self._ages.percentile(0.99), self._ages.largest),
            self._server_times.percentile(0.5),
        )

    def _figures(
        self, fps_in: float, fps_out: float, ages: tuple[float, float, float], server_s: float
    ) -> StreamFigures:
        server_drops = self._server_drops()
        rest = max(self._offered - self._answered - self._client_drops - sum(server_drops.values()), 0)
        lost = rest if self._is_over else min(self._lost, rest)
        return StreamFigures(
            self.name, fps_in, fps_out, *ages, server_s,
            self._offered, self._answered, self._failed, lost, rest - lost, self._client_drops, server_drops,
            self._late,
        )  # fmt: skip

    def _server_drops(self) -> dict[DropReason, int]:
        found = dict(self._noticed_drops)
        for reason, count in self._server_totals.items():
            # Frames of a broken connection count as lost, not as dropped.
            if reason is not DropReason.CLOSED:
                found[reason] = max(found.get(reason, 0), count - self._server_baseline.get(reason, 0))
        return {reason: count for reason, count in found.items() if count > 0}

    @staticmethod
    def recent_of_all(several_counts: Iterable[FrameCounts], name: str, now: float) -> StreamFigures:
        """Return the recent figures of several streams together: summed rates and counts, ages of all frames."""
        several = list(several_counts)
        ages = [age for one in several for age in one._out.values(now)]
        server_times = [age for one in several for age in one._recent_server_times.values(now)]
        age_spread = (percentile(ages, 0.5), percentile(ages, 0.99), max(ages, default=math.nan))
        return total([one.recent(now) for one in several], name, age_spread, percentile(server_times, 0.5))

    @staticmethod
    def whole_of_all(several_counts: Iterable[FrameCounts], name: str) -> StreamFigures:
        """As `recent_of_all`, for the whole run."""
        several = list(several_counts)
        ages = Percentiles.joined(one._ages for one in several)
        server_times = Percentiles.joined(one._server_times for one in several)
        age_spread = (ages.percentile(0.5), ages.percentile(0.99), ages.largest)
        return total([one.whole() for one in several], name, age_spread, server_times.percentile(0.5))


def total(
    parts: Iterable[StreamFigures], name: str, ages: tuple[float, float, float], server_p50_s: float
) -> StreamFigures:
    """Return summed rates and counts with the given ages, because percentiles cannot be summed."""
    parts = list(parts)
    server_drops: Counter[DropReason] = Counter()
    for one in parts:
        server_drops.update(one.server_drops)
    return StreamFigures(
        name, sum(one.fps_in for one in parts), sum(one.fps_out for one in parts), *ages, server_p50_s,
        sum(one.offered for one in parts), sum(one.answered for one in parts), sum(one.failed for one in parts),
        sum(one.lost for one in parts), sum(one.waiting for one in parts),
        sum(one.client_drops for one in parts), dict(server_drops),
        sum(one.late for one in parts),
    )  # fmt: skip


def _rate(count: int, first: float, last: float) -> float:
    """Return events per second between the first and the last event."""
    return (count - 1) / (last - first) if count > 1 and last > first else 0.0
