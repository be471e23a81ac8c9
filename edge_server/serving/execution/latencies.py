"""Latencies of the requests to one model version as a histogram and as summaries, for `--metrics-config`."""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from edge_server.core.model_spec import ModelSpec
from edge_server.core.model_statistics import LATENCY_PARTS, LatencyStatistics, Summary

WINDOW_S = 60.0
"""Age of the oldest request that counts for quantiles, as in prometheus-cpp, which Triton uses."""

MAX_WINDOW_REQUESTS = 4096
"""Most requests that count for quantiles: the newest. The 0.999 quantile needs more than 1,000."""


class LatencyOptions(NamedTuple):
    """What is recorded beside the counters. `quantiles`, each from 0 to 1, are those of the summaries; empty: none."""

    has_histogram: bool = False
    quantiles: tuple[float, ...] = ()


NO_LATENCIES = LatencyOptions()


class Latencies:
    """Thread-safe. Times are in nanoseconds of time.monotonic_ns; `buckets_ms` are rising upper bounds."""

    def __init__(self, options: LatencyOptions, buckets_ms: Sequence[float], *, is_decoupled: bool) -> None:
        self._lock = threading.Lock()
        self._options = options
        self._is_decoupled = is_decoupled
        self._buckets_ms = tuple(buckets_ms)
        self._bucket_counts = [0] * (len(buckets_ms) + 1)
        self._first_sum_ms = 0.0
        self._recent: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=MAX_WINDOW_REQUESTS)
        """When a request was answered, and its nanoseconds by LATENCY_PARTS."""
        self._sums_ns = [0] * len(LATENCY_PARTS)
        self._counts = [0] * len(LATENCY_PARTS)

    def add(self, end_ns: int, *parts_ns: int) -> None:
        """Count an answered request: its whole time, in the queue, for inputs, computing and outputs. One from the
        response cache has only the first two."""
        if not self._is_decoupled:
            self.add_first_response(parts_ns[0])
        if self._options.quantiles:
            with self._lock:
                self._recent.append((end_ns, parts_ns))
                for index, part_ns in enumerate(parts_ns):
                    self._sums_ns[index] += part_ns
                    self._counts[index] += 1

    def add_first_response(self, spent_ns: int) -> None:
        """Count the first response to a request, `spent_ns` after its arrival."""
        if self._options.has_histogram:
            spent_ms = spent_ns / 1e6
            with self._lock:
                self._bucket_counts[bisect.bisect_left(self._buckets_ms, spent_ms)] += 1
                self._first_sum_ms += spent_ms

    def snapshot(self) -> LatencyStatistics:
        now_ns = time.monotonic_ns()
        with self._lock:
            while self._recent and now_ns - self._recent[0][0] > WINDOW_S * 1e9:
                self._recent.popleft()
            recent = [parts_ns for _, parts_ns in self._recent]
            sums_ns, counts, bucket_counts = list(self._sums_ns), list(self._counts), list(self._bucket_counts)
            first_sum_ms = self._first_sum_ms
        summaries = {}
        for index, part in enumerate(LATENCY_PARTS if self._options.quantiles else ()):
            ordered = sorted(parts_ns[index] for parts_ns in recent if index < len(parts_ns))
            values_us = {
                quantile: ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] / 1000 if ordered else math.nan
                for quantile in self._options.quantiles
            }
            summaries[part] = Summary(values_us, sums_ns[index] / 1000, counts[index])
        buckets = dict(zip((*self._buckets_ms, math.inf), bucket_counts, strict=True))
        return LatencyStatistics(buckets if self._options.has_histogram else {}, first_sum_ms, summaries)


def make_latencies(spec: ModelSpec, options: LatencyOptions) -> Latencies | None:
    """Return the recorder of a model, or None if nothing is to be recorded."""
    if options == NO_LATENCIES:
        return None
    return Latencies(options, spec.first_response_buckets_ms, is_decoupled=spec.is_decoupled)
