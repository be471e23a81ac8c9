"""Data classes for the counts and durations of one model version, as in Triton's statistics extension. Durations are
nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import NamedTuple

from edge_server.record import record


@record(slots=True)
class Duration:
    """Number of events and their total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns

    def copy(self) -> Duration:
        return Duration(self.count, self.ns)


@record(slots=True)
class BatchStatistics:
    """Executions of one batch size; each duration counts executions, not requests."""

    batch_size: int
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def copy(self) -> BatchStatistics:
        return BatchStatistics(
            self.batch_size, self.compute_input.copy(), self.compute_infer.copy(), self.compute_output.copy()
        )


@record(slots=True)
class ResponseStatistics:
    """Responses at one position of a decoupled model's streams."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)

    def copy(self) -> ResponseStatistics:
        return ResponseStatistics(
            self.compute_infer.copy(),
            self.compute_output.copy(),
            self.success.copy(),
            self.fail.copy(),
            self.empty_response.copy(),
            self.cancel.copy(),
        )


class VersionWork(NamedTuple):
    """The part of a version's counters that the governor reads several times a second, for each model.

    `batches`: by batch size, the number of executions and their nanoseconds (inputs, computing and outputs).
    `rejected_count`: the failed requests whose reason is REJECTED.
    """

    name: str
    version: int
    batches: Mapping[int, tuple[int, int]]
    rejected_count: int


LAST_POSITION = 127
"""The last position in a stream with its own counters. Later responses count there too."""

CACHE_LOSSES = ("too_big", "busy", "unreachable", "corrupt")
"""Reasons why the response cache failed a lookup or did not store a response."""


@record(slots=True)
class CacheStatistics:
    """Statistics of the whole response cache. `capacity_bytes`, `size_bytes`, `entry_count` and `eviction_count` are 0
    for a cache in another process, which counts them itself. Keys of `losses` are CACHE_LOSSES."""

    capacity_bytes: int = 0
    size_bytes: int = 0
    entry_count: int = 0
    eviction_count: int = 0
    hit_count: int = 0
    miss_count: int = 0
    lookup: Duration = field(default_factory=Duration)
    insertion: Duration = field(default_factory=Duration)
    losses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CACHE_LOSSES, 0))

    def copy(self) -> CacheStatistics:
        """Return a copy that shares no mutable parts."""
        return replace(self, lookup=self.lookup.copy(), insertion=self.insertion.copy(), losses=dict(self.losses))


LATENCY_PARTS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
"""The whole time of a request, and its parts."""


class Summary(NamedTuple):
    """Quantiles of recent requests in microseconds (NaN without one), and sum and count of all."""

    quantiles_us: Mapping[float, float]
    sum_us: float
    request_count: int


class LatencyStatistics(NamedTuple):
    """Latencies of one version. `first_response_buckets`: by upper bound in milliseconds, the last of them infinite,
    the number of first responses in each; empty if they are not recorded. `summaries` are by LATENCY_PARTS, empty
    likewise."""

    first_response_buckets: Mapping[float, int]
    first_response_sum_ms: float
    summaries: Mapping[str, Summary]


@record(slots=True)
class VersionStatistics:
    """A consistent copy of one version's counters.

    `success.count` is requests; `inference_count` is rows (the sum of batch sizes); `execution_count` is batches.
    Sums of queue and compute times are per request, so a batch of four adds its compute time four times.
    `last_inference_ms` is milliseconds since the epoch, 0 before the first request.
    `failures` counts failed requests by Triton's reason (REJECTED, CANCELED, BACKEND, OTHER).
    `batch_rerun_count` is failed batches whose requests were run again singly.
    `responses` are by position in a decoupled model's streams, up to LAST_POSITION.
    `is_cached`: responses may come from the response cache. These count only in `success`, `queue` and `cache_hit`.
    """

    name: str
    version: int
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    pending_count: int = 0
    batch_rerun_count: int = 0
    load_duration_s: float = 0.0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    responses: dict[int, ResponseStatistics] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    is_cached: bool = False
    live_sequences: int | None = None
    """Number of sequences with a slot; None for a model without sequences. `waiting_sequences` wait for a slot."""
    waiting_sequences: int = 0
    gpu_bytes: dict[int, int] = field(default_factory=dict)
    """GPU memory used by its load, by GPU number."""
    latencies: LatencyStatistics | None = None
    """None unless `--metrics-config` asks for histograms or summaries."""

    def copy(self) -> VersionStatistics:
        """Return a copy that shares no mutable parts."""
        return replace(
            self,
            success=self.success.copy(),
            fail=self.fail.copy(),
            queue=self.queue.copy(),
            compute_input=self.compute_input.copy(),
            compute_infer=self.compute_infer.copy(),
            compute_output=self.compute_output.copy(),
            cache_hit=self.cache_hit.copy(),
            cache_miss=self.cache_miss.copy(),
            batches={size: item.copy() for size, item in self.batches.items()},
            responses={index: item.copy() for index, item in self.responses.items()},
            failures=dict(self.failures),
        )
