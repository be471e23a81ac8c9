"""The history of the server's gauges: what it keeps, how much memory it takes, and the rates of counters."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.core.model_statistics import Duration, VersionStatistics
from edge_server.plugins.dashboard.gauge_history import MAX_GAUGES, MAX_SAMPLES, GaugeHistory
from edge_server.plugins.dashboard.server_gauges import CounterRates, ServerGauges


def test_samples_come_back_in_order_with_their_ages() -> None:
    history = GaugeHistory()
    for second in range(3):
        history.add(100.0 + second, {"heat": 40.0 + second})
    assert history.as_json(103.0) == {"ages_s": [3.0, 2.0, 1.0], "gauges": {"heat": [40.0, 41.0, 42.0]}}


def test_the_oldest_samples_make_room() -> None:
    history = GaugeHistory(max_samples=3)
    for second in range(5):
        history.add(float(second), {"heat": float(second)})
    assert history.as_json(5.0) == {"ages_s": [3.0, 2.0, 1.0], "gauges": {"heat": [2.0, 3.0, 4.0]}}


def test_a_gauge_without_a_value_has_none() -> None:
    history = GaugeHistory()
    history.add(0.0, {"heat": 1.0})
    history.add(1.0, {"power": 2.0, "broken": math.nan})
    assert history.as_json(1.0)["gauges"] == {"heat": [1.0, None], "power": [None, 2.0], "broken": [None, None]}


def test_a_gauge_that_is_gone_is_forgotten_with_its_last_sample() -> None:
    history = GaugeHistory(max_samples=2, max_gauges=1)
    history.add(0.0, {"first": 1.0})
    history.add(1.0, {"second": 1.0})
    assert list(history.as_json(1.0)["gauges"]) == ["first"]  # type: ignore[call-overload]
    history.add(2.0, {"second": 2.0})
    assert history.as_json(2.0)["gauges"] == {"second": [None, 2.0]}


def test_a_full_history_takes_less_than_a_megabyte() -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        history = GaugeHistory()
        for second in range(MAX_SAMPLES + 10):
            history.add(float(second), {f"tokens of model {number}": 1.0 for number in range(2 * MAX_GAUGES)})
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1_000_000
    assert len(history.as_json(0.0)["gauges"]) == MAX_GAUGES  # type: ignore[arg-type]


def version(requests: int, **counts: int) -> VersionStatistics:
    return VersionStatistics(
        "net",
        1,
        pending_count=counts.get("waiting", 0),
        success=Duration(requests - counts.get("failed", 0), 0),
        fail=Duration(counts.get("failed", 0), 0),
        queue=Duration(requests, counts.get("queue_ns", 0)),
        cache_hit=Duration(counts.get("hits", 0), 0),
        cache_miss=Duration(counts.get("misses", 0), 0),
    )


def test_rates_are_the_growth_of_counters() -> None:
    rates = CounterRates()
    assert rates.update([version(10)], [], 5.0) == {"waiting": 0.0}
    after = rates.update([version(30, failed=5, waiting=2, queue_ns=40_000_000, hits=1, misses=3)], [], 5.0)
    assert after == {"waiting": 2.0, "requests": 4.0, "failed": 1.0, "queue": 2.0, "cache": 25.0}


def test_an_unloaded_version_makes_no_rate_negative() -> None:
    rates = CounterRates()
    rates.update([version(10)], [], 5.0)
    assert rates.update([], [], 5.0) == {"waiting": 0.0, "requests": 0.0, "failed": 0.0, "queue": 0.0}


def test_tokens_are_counted_for_each_language_model() -> None:
    def families(count: int) -> Any:
        sample = SimpleNamespace(labels={"model": "assistant"}, value=count)
        return [SimpleNamespace(name="vllm:generation_tokens_total", samples=[sample])]

    rates = CounterRates()
    rates.update([], families(100), 5.0)
    assert rates.update([], families(150), 5.0)["tokens assistant"] == 10.0


@pytest.fixture
def clock() -> Any:
    return SimpleNamespace(now_s=0.0)


def test_a_sample_is_taken_every_five_seconds_and_has_the_gauges_of_plugins(clock: Any, tmp_path: Any) -> None:
    service = SimpleNamespace(statistics=lambda name, version: [], model_families=list)
    core: Any = SimpleNamespace(service=service, machine_root=tmp_path, gauges=lambda: {"heat": clock.now_s})
    gauges = ServerGauges(core, lambda: clock.now_s)
    for _ in range(10):
        clock.now_s += 1.001
        gauges.sample()
    history: Any = gauges.history()
    assert history["gauges"]["heat"] == [5.005, 10.01]
    assert history["ages_s"] == [5.0, 0.0]
