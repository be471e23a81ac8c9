"""Counters of frames for the metrics page, one set for each model, and meters for status displays: events per second,
and quantiles of the latest values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edge_server.protocol.frame_messages import DropReason
from edge_server.telemetry.metrics_page import Family

AGE_LIMITS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bucket limits of the result age histogram."""


WINDOW_S = 5.0
_MAX_TIMES = 1024
_MAX_VALUES = 256


@dataclass(slots=True)
class ModelTotals:
    """Frame counters of one model, guarded by the lock of all streams.

    `ages[i]` counts results no older than AGE_LIMITS_S[i] and older than the previous limit. The last entry counts
    results older than every limit.
    """

    received: int = 0
    answered: int = 0
    late: int = 0
    errors: int = 0
    open_streams: int = 0
    age_sum_s: float = 0.0
    dropped: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DropReason, 0))
    ages: list[int] = field(default_factory=lambda: [0] * (len(AGE_LIMITS_S) + 1))

    def add_answer(self, age_ns: int) -> None:
        """Count a result or an error that is sent now, `age_ns` after its frame was received."""
        self.answered += 1
        self.age_sum_s += age_ns / 1e9
        self.ages[bisect_left(AGE_LIMITS_S, age_ns / 1e9)] += 1


def families(models: Mapping[str, ModelTotals]) -> Iterable[Family]:
    """Return the metric families, labelled by model. The caller holds the lock of all streams."""
    received = Family("edge_frame_received_total", "counter", "Frames of streams that were received")
    answered = Family("edge_frame_answered_total", "counter", "Frames of streams that were answered, errors included")
    errors = Family("edge_frame_errors_total", "counter", "Frames of streams that were answered with an error")
    late = Family("edge_frame_late_total", "counter", "Frames of streams that were answered after their deadline")
    dropped = Family("edge_frame_dropped_total", "counter", "Frames of streams that were dropped, by reason")
    streams = Family("edge_frame_streams", "gauge", "Frame streams that are open")
    ages = Family("edge_frame_age_seconds", "histogram", "Age of frames when their result is sent, since reception")
    for name, totals in models.items():
        labels = {"model": name}
        received.add(labels, totals.received)
        answered.add(labels, totals.answered)
        errors.add(labels, totals.errors)
        late.add(labels, totals.late)
        streams.add(labels, totals.open_streams)
        for reason, count in totals.dropped.items():
            dropped.add({**labels, "reason": reason.name}, count)
        below = 0
        for limit, count in zip((*map(str, AGE_LIMITS_S), "+Inf"), totals.ages, strict=True):
            below += count
            ages.add({**labels, "le": limit}, below, part="_bucket")
        ages.add(labels, totals.age_sum_s, part="_sum")
        ages.add(labels, totals.answered, part="_count")
    return [received, answered, errors, late, dropped, streams, ages]


class Rate:
    """Events per second over the last WINDOW_S; over a shorter time if there are more than 1,024 events.

    Times are nanoseconds of any monotonic clock.
    """

    def __init__(self, now_ns: int) -> None:
        self._began_ns = now_ns
        self._times: deque[int] = deque(maxlen=_MAX_TIMES)

    def add(self, now_ns: int) -> None:
        self._times.append(now_ns)

    def per_s(self, now_ns: int) -> float:
        since_ns = max(now_ns - int(WINDOW_S * 1e9), self._began_ns)
        if len(self._times) == _MAX_TIMES:
            since_ns = max(since_ns, self._times[0])
        count = len(self._times) - bisect_left(self._times, since_ns)
        return count / (now_ns - since_ns) * 1e9 if now_ns > since_ns else 0.0


class RecentQuantiles:
    """Quantiles of the last 256 values."""

    def __init__(self) -> None:
        self._values: deque[int] = deque(maxlen=_MAX_VALUES)

    def add(self, value: int) -> None:
        self._values.append(value)

    def quantile(self, fraction: float) -> int:
        """Return the smallest value that at least `fraction` (0 to 1) of the values do not exceed; 0 without values."""
        ordered = sorted(self._values)
        return ordered[max(0, math.ceil(len(ordered) * fraction) - 1)] if ordered else 0
