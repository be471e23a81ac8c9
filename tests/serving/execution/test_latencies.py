"""Histograms and summaries of the latencies of one version."""

from __future__ import annotations

import math
import time

import pytest

from edge_server.core.model_spec import ModelSpec
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.execution.latencies import (
    MAX_WINDOW_REQUESTS,
    NO_LATENCIES,
    WINDOW_S,
    Latencies,
    LatencyOptions,
    make_latencies,
)

MS = 1_000_000


def recorder(*quantiles: float, is_decoupled: bool = False) -> Latencies:
    return Latencies(LatencyOptions(True, quantiles), (1, 10), is_decoupled=is_decoupled)


def test_a_batch_counts_each_of_its_requests_in_its_bucket_and_each_part() -> None:
    counters = VersionCounters("m", 1, recorder(0.5, 1.0))
    now_ns = time.monotonic_ns()
    counters.record_batch(
        [now_ns - 20 * MS, now_ns - 10 * MS], 2, 2, now_ns - 6 * MS, now_ns - 5 * MS, now_ns - 2 * MS, now_ns
    )
    found = counters.snapshot(0).latencies
    assert found is not None
    assert found.first_response_buckets == {1: 0, 10: 1, math.inf: 1}
    assert found.first_response_sum_ms == pytest.approx(30)
    assert {part: dict(summary.quantiles_us) for part, summary in found.summaries.items()} == {
        "request": {0.5: 10_000, 1.0: 20_000},
        "queue": {0.5: 4_000, 1.0: 14_000},
        "compute_input": {0.5: 1_000, 1.0: 1_000},
        "compute_infer": {0.5: 3_000, 1.0: 3_000},
        "compute_output": {0.5: 2_000, 1.0: 2_000},
    }
    assert (found.summaries["request"].sum_us, found.summaries["request"].request_count) == (30_000, 2)


def test_an_answer_of_the_response_cache_counts_for_the_request_and_the_queue() -> None:
    counters = VersionCounters("m", 1, recorder(0.5))
    now_ns = time.monotonic_ns()
    counters.record_cache_hit(now_ns - MS, now_ns, 500)
    found = counters.snapshot(0).latencies
    assert found is not None
    assert {part: summary.request_count for part, summary in found.summaries.items()} == {
        "request": 1, "queue": 1, "compute_input": 0, "compute_infer": 0, "compute_output": 0,
    }  # fmt: skip
    assert math.isnan(found.summaries["compute_infer"].quantiles_us[0.5])


def test_a_decoupled_model_counts_its_first_response_and_not_its_last() -> None:
    counters = VersionCounters("m", 1, recorder(0.5, is_decoupled=True))
    now_ns = time.monotonic_ns()
    counters.record_first_response(5 * MS)
    counters.record_batch([now_ns - 90 * MS], 1, 1, now_ns, now_ns, now_ns, now_ns)
    found = counters.snapshot(0).latencies
    assert found is not None
    assert found.first_response_buckets == {1: 0, 10: 1, math.inf: 0}
    assert found.summaries["request"].quantiles_us == {0.5: 90_000}


def test_quantiles_are_of_the_newest_requests_of_the_last_minute_and_sums_of_all() -> None:
    latencies, now_ns = recorder(1.0), time.monotonic_ns()
    latencies.add(now_ns - int((WINDOW_S + 1) * 1e9), 99 * MS, 0, 0, 0, 0)
    latencies.add(now_ns, 7 * MS, 0, 0, 0, 0)
    summary = latencies.snapshot().summaries["request"]
    assert (summary.quantiles_us, summary.sum_us, summary.request_count) == ({1.0: 7_000}, 106_000, 2)
    for _ in range(MAX_WINDOW_REQUESTS):
        latencies.add(now_ns, MS, 0, 0, 0, 0)
    assert latencies.snapshot().summaries["request"].quantiles_us == {1.0: 1_000}


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    spec = ModelSpec("m", "stub", "", 0, (), (), ())
    assert make_latencies(spec, NO_LATENCIES) is None
    assert VersionCounters("m", 1).snapshot(0).latencies is None
    only_histogram = make_latencies(spec, LatencyOptions(has_histogram=True))
    assert only_histogram is not None
    assert only_histogram.snapshot().summaries == {}
    assert list(only_histogram.snapshot().first_response_buckets) == [100, 500, 2000, 5000, math.inf]
    only_summaries = make_latencies(spec, LatencyOptions(quantiles=(0.5,)))
    assert only_summaries is not None
    assert only_summaries.snapshot().first_response_buckets == {}
