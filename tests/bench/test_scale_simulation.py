"""The simulation of replicas behind a least-connections balancer agrees with queueing theory."""

from __future__ import annotations

import statistics

import pytest

from tests.bench.scale_simulation import random_arrivals, simulate_closed, simulate_open


def test_one_replica_waits_as_the_pollaczek_khinchine_formula_predicts() -> None:
    # M/D/1: mean wait = utilisation * service / (2 * (1 - utilisation)).
    seen = simulate_open(random_arrivals(0.7 / 0.05, 100_000), 1, lambda: 0.05)
    wait_s = statistics.fmean(seen.latencies_s) - 0.05
    assert wait_s == pytest.approx(0.7 * 0.05 / (2 * 0.3), rel=0.05)


def test_many_replicas_at_a_low_load_add_no_wait() -> None:
    seen = simulate_open(random_arrivals(0.2 * 50 / 0.05, 10_000), 50, lambda: 0.05)
    assert seen.latencies_s == pytest.approx([0.05] * 10_000)


def test_throughput_of_busy_replicas_is_proportional_to_their_number() -> None:
    one, two, ten = (simulate_closed(100, 10_000, replicas, lambda: 0.05).rate for replicas in (1, 2, 10))
    assert (one, two, ten) == pytest.approx((20, 40, 200), rel=0.02)


def test_the_balancer_prefers_the_replica_with_the_fewest_requests() -> None:
    times = iter([10.0, 1.0, 1.0, 1.0])
    # The first request keeps one replica busy; the others go to the other one, which is free again each time.
    seen = simulate_open([0.0, 0.1, 2.0, 4.0], 2, lambda: next(times))
    assert seen.latencies_s == pytest.approx([10.0, 1.0, 1.0, 1.0])


def test_the_same_seed_gives_the_same_requests() -> None:
    assert random_arrivals(10, 5, seed=3) == random_arrivals(10, 5, seed=3) != random_arrivals(10, 5, seed=4)
