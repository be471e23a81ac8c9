"""Results of the time windows of a measurement (rate, percentiles), and the test whether they are stable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edge_server.plugins.tuning.clients.client_interface import ServerCounts, TextTimes

PERCENTILES = (50, 90, 95, 99)

STEADY_WINDOWS = 3
"""Number of consecutive windows that must agree, as in perf_analyzer."""


class Answer(NamedTuple):
    """Outcome of one request. `reason` is "" for a success. `lag_s` is how late the request was sent. `text`: times of
    the answer, if it is text."""

    start_s: float
    end_s: float
    reason: str = ""
    message: str = ""
    lag_s: float = 0.0
    text: TextTimes | None = None


@dataclass(frozen=True, slots=True)
class MeasurementWindow:
    """Requests that ended within a time window. `server` is None if its statistics are not available.

    `server_cpu` and `client_cpu` are in cores: 1.0 means one fully used core.
    """

    seconds: float
    answers: Sequence[Answer]
    server: ServerCounts | None = None
    server_cpu: float | None = None
    server_bytes: float | None = None
    client_cpu: float = 0.0
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.reason]

    @property
    def rate(self) -> float:
        return len(self.good) / self.seconds

    @property
    def latency_s(self) -> float:
        """Mean latency of the good answers; NaN without any."""
        times = [answer.end_s - answer.start_s for answer in self.good]
        return sum(times) / len(times) if times else math.nan


def are_steady(windows: Sequence[MeasurementWindow], tolerance: float) -> bool:
    """Whether rate and latency of the last windows differ from their means by at most `tolerance` (0.1 means 10 %)."""
    last = windows[-STEADY_WINDOWS:]
    if len(last) < STEADY_WINDOWS:
        return False
    for values in ([window.rate for window in last], [window.latency_s for window in last]):
        mean = sum(values) / len(values)
        if not all(abs(value - mean) <= tolerance * mean for value in values):  # NaN is not steady
            return False
    return True


def joined(windows: Sequence[MeasurementWindow]) -> MeasurementWindow:
    """Return one window that joins all the given ones."""
    seconds = sum(window.seconds for window in windows)
    servers = [window.server for window in windows if window.server is not None]
    dropped: Counter[str] = Counter()
    for window in windows:
        dropped.update(window.dropped)
    known = [window.server_cpu * window.seconds for window in windows if window.server_cpu is not None]
    memory = [window.server_bytes for window in windows if window.server_bytes is not None]
    return MeasurementWindow(
        seconds=seconds,
        answers=[answer for window in windows for answer in window.answers],
        server=sum(servers, ServerCounts()) if len(servers) == len(windows) else None,
        server_cpu=sum(known) / seconds if len(known) == len(windows) else None,
        server_bytes=max(memory, default=None),
        client_cpu=sum(window.client_cpu * window.seconds for window in windows) / seconds,
        dropped=dict(dropped),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of sorted values; NaN if there are none."""
    if not ordered:
        return math.nan
    return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)]


@dataclass(frozen=True, slots=True)
class ServerTimeSplit:
    """Mean time of a request in each stage of the server, in microseconds, from the server's statistics."""

    request_us: float
    queue_us: float
    input_us: float
    infer_us: float
    output_us: float
    requests: int
    inferences: int
    executions: int

    @classmethod
    def of(cls, counts: ServerCounts) -> ServerTimeSplit | None:
        """Return None when the server counted no request."""
        if not counts.successes:
            return None
        parts = (counts.request_ns, counts.queue_ns, counts.input_ns, counts.infer_ns, counts.output_ns)
        means = [part / counts.successes / 1000 for part in parts]
        request, queue, given, infer, output = means
        return cls(request, queue, given, infer, output, counts.successes, counts.inferences, counts.executions)


@dataclass(frozen=True, slots=True)
class TextFigures:
    """Figures of streamed text. Times in milliseconds, by percentile.

    `first_ms`: from the request to its first text. `between_ms`: mean time between two tokens of an answer.
    """

    tokens: int
    tokens_per_s: float
    first_ms: Mapping[int, float]
    between_ms: Mapping[int, float]

    @classmethod
    def of(cls, window: MeasurementWindow) -> TextFigures | None:
        """Return None for a window without text."""
        found = [(answer, answer.text) for answer in window.good if answer.text is not None and answer.text.tokens]
        if not found:
            return None
        first = sorted((text.first_s - answer.start_s) * 1000 for answer, text in found)
        between = sorted(
            (text.last_s - text.first_s) / (text.tokens - 1) * 1000 for _, text in found if text.tokens > 1
        )
        tokens = sum(text.tokens for _, text in found)
        return cls(
            tokens,
            tokens / window.seconds,
            {percent: percentile(first, percent) for percent in PERCENTILES},
            {percent: percentile(between, percent) for percent in PERCENTILES},
        )


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """Result of one measurement. `level` is the concurrency, request rate or frame rate, according to `mode`."""

    mode: str
    level: float
    batch: int
    is_steady: bool
    seconds: float
    requests: int
    failures: Mapping[str, int]
    throughput: float
    """Inferences per second: good answers times the batch size."""
    mean_ms: float
    deviation_ms: float
    percentiles_ms: Mapping[int, float]
    split: ServerTimeSplit | None
    server_cpu: float | None
    server_bytes: float | None
    client_cpu: float
    late: int = 0
    """Requests that were sent too long after they were due."""
    lag_p99_ms: float = 0.0
    dropped: Mapping[str, int] = field(default_factory=dict)
    power_w: float | None = None
    text: TextFigures | None = None

    @classmethod
    def of(
        cls,
        mode: str,
        level: float,
        batch: int,
        window: MeasurementWindow,
        *,
        is_steady: bool,
        late_s: float = 0.1,
        power_w: float | None = None,
    ) -> MeasuredPoint:
        """Return the results of a window. A request is late if it was sent more than `late_s` after it was due."""
        good = window.good
        times = sorted((answer.end_s - answer.start_s) * 1000 for answer in good)
        mean = sum(times) / len(times) if times else math.nan
        spread = math.sqrt(sum((item - mean) ** 2 for item in times) / len(times)) if times else math.nan
        lags = sorted(answer.lag_s for answer in window.answers)
        return cls(
            mode=mode,
            level=level,
            batch=batch,
            is_steady=is_steady,
            seconds=window.seconds,
            requests=len(good),
            failures=dict(Counter(answer.reason for answer in window.answers if answer.reason)),
            throughput=len(good) * batch / window.seconds,
            mean_ms=mean,
            deviation_ms=spread,
            percentiles_ms={percent: percentile(times, percent) for percent in PERCENTILES},
            split=None if window.server is None else ServerTimeSplit.of(window.server),
            server_cpu=window.server_cpu,
            server_bytes=window.server_bytes,
            client_cpu=window.client_cpu,
            late=sum(1 for lag in lags if lag > late_s),
            lag_p99_ms=percentile(lags, 99) * 1000 if lags else 0.0,
            dropped=window.dropped,
            power_w=power_w,
            text=TextFigures.of(window),
        )


CLIENT_IS_LIMIT = 0.95
"""In cores. One thread sends all requests; from this load on it has no time left for more."""

MIN_REPORTED_LAG_MS = 5.0
"""Smaller delays are ordinary thread wake-up latency."""


def doubts(point: MeasuredPoint, cores: int) -> list[str]:
    """Return the reasons, as sentences, why a result may not describe the server."""
    reasons = []
    if not point.is_steady:
        reasons.append("the figures did not become steady (~); measure longer, or on a machine that does nothing else")
    if point.client_cpu >= CLIENT_IS_LIMIT:
        reasons.append(
            f"this client used {point.client_cpu:.2f} of the one core it can use: it is the limit, the server may be"
            " faster"
        )
    elif point.server_cpu is not None and point.server_cpu + point.client_cpu > 0.9 * cores > 0:
        share = point.client_cpu / (point.server_cpu + point.client_cpu)
        if share > 0.1:
            reasons.append(
                f"client and server share {cores} busy cores; the client used {share:.0%} of their processor time"
            )
    if point.late > 0.01 * max(point.requests, 1):
        reasons.append(f"{point.late} requests were sent late: the server or this client cannot keep up with the rate")
    elif point.lag_p99_ms > max(point.percentiles_ms[99], MIN_REPORTED_LAG_MS):
        reasons.append(
            f"one request in a hundred was sent {point.lag_p99_ms:.1f} ms or more after it was due, because all workers"
            " were waiting for answers; the latencies do not include this delay"
        )
    return reasons
