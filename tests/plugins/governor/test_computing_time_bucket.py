"""Rate allocator: order of rejection, the floor of control, and correct totals."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.priority_class import PriorityClass
from edge_server.plugins.governor.computing_time_bucket import MAX_WAIT_S, RateAllocator, TimeCharge
from edge_server.plugins.policies.robot_load import RobotLoad

CONTROL, NORMAL, BULK = PriorityClass


def _granted(share: float, *, capacity: float = 1.0, floor: float = 0.2) -> RateAllocator:
    meter = RateAllocator(floor)
    meter.grant(share, capacity, 0.0)
    return meter


def _demand(
    meter: RateAllocator, per_s: dict[PriorityClass, float], cost_s: float, seconds: float, *, error: float = 0.0
) -> dict[PriorityClass, float]:
    """Ask for work at random moments; return the seconds worked for each class. `error`: by how much work takes longer
    than was thought, as a part of it."""
    rnd = random.Random(7)
    asked = [item for item, rate in per_s.items() for _ in range(round(rate * seconds))]
    arrivals = sorted((rnd.uniform(0, seconds), item) for item in asked)
    worked = dict.fromkeys(PriorityClass, 0.0)
    for now_s, item in arrivals:
        charge = meter.admit(item, cost_s, now_s)
        if charge is not None:
            took_s = cost_s * (1 + error)
            worked[item] += took_s
            meter.settle(charge, took_s)
    return worked


def test_a_priority_number_is_mapped_to_a_class() -> None:
    table = [(0, NORMAL), (1, CONTROL), (2, NORMAL), (3, BULK), (4, BULK), (2**31, BULK)]
    assert [(priority, PriorityClass.of_priority(priority)) for priority, _ in table] == table


@given(
    share=st.floats(0.1, 1.0),
    # The number of requests is proportional to the capacity and to 1 / cost: a request costs this test 10 µs.
    capacity=st.sampled_from([1.0, 2.0]),
    cost_s=st.sampled_from([0.01, 0.02, 0.1]),
    error=st.sampled_from([-0.5, 0.0, 0.5]),
)
def test_in_the_long_run_no_more_work_is_admitted_than_granted(
    share: float, capacity: float, cost_s: float, error: float
) -> None:
    meter = _granted(share, capacity=capacity, floor=0.1)
    seconds = 30.0
    rate = 2 * capacity / cost_s / 3
    worked = _demand(meter, dict.fromkeys(PriorityClass, rate), cost_s, seconds, error=error)
    burst_s = max(0.1, 0.5 * share * capacity) + max(0.1, 0.5 * 0.1 * capacity)
    assert sum(worked.values()) <= share * capacity * seconds + burst_s + 2 * cost_s * (1 + error)
    assert sum(worked.values()) >= 0.9 * share * capacity * seconds - 2 * cost_s


@pytest.mark.sample
@pytest.mark.parametrize("share", [0.1, 0.15, 0.3, 0.6])
@pytest.mark.parametrize("floor", [0.1, 0.2, 0.5])
def test_control_gets_at_least_its_floor_under_any_load(share: float, floor: float) -> None:
    meter = _granted(share, floor=floor)
    worked = _demand(meter, {CONTROL: 100.0, NORMAL: 300.0, BULK: 300.0}, 0.01, 60.0)
    assert worked[CONTROL] >= min(floor, 1.0) * 60.0 * 0.95
    assert worked[CONTROL] >= share * 60.0 * 0.95, "what all may do is control's before it is anybody else's"
    assert worked[CONTROL] <= max(share, floor) * 60.0 + 3.0


def test_bulk_is_refused_before_normal_and_normal_before_control() -> None:
    per_s = {CONTROL: 20.0, NORMAL: 20.0, BULK: 40.0}
    parts = {}
    for share in (0.2, 0.3, 0.4, 0.6, 0.8, 1.0):
        worked = _demand(_granted(share, floor=0.05), per_s, 0.01, 120.0)
        parts[share] = {item: worked[item] / (per_s[item] * 0.01 * 120.0) for item in PriorityClass}
        assert parts[share][CONTROL] >= parts[share][NORMAL] >= parts[share][BULK]
    assert parts[0.3][CONTROL] > 0.99
    assert parts[0.3][BULK] < 0.05 < 0.2 < parts[0.3][NORMAL]
    assert parts[0.6][NORMAL] > 0.95
    assert parts[1.0][BULK] > 0.99


@pytest.mark.sample
@pytest.mark.parametrize("share", [0.1, 0.37, 0.8])
@pytest.mark.parametrize("priority", PriorityClass)
def test_a_client_that_waits_the_reported_time_is_admitted(share: float, priority: PriorityClass) -> None:
    rnd = random.Random(3)
    for _ in range(300):
        meter = _granted(share)
        now_s = 1000.0 * rnd.random()
        for _ in range(rnd.randrange(1, 60)):
            now_s += rnd.expovariate(100.0)
            meter.admit(rnd.choice(list(PriorityClass)), rnd.uniform(0.001, 0.3), now_s)
        wait_s = meter.wait_s(priority, now_s)
        assert 0.0 <= wait_s <= MAX_WAIT_S
        if wait_s == 0.0:
            assert meter.admit(priority, 0.01, now_s) is not None
        elif wait_s < MAX_WAIT_S:
            assert meter.admit(priority, 0.01, now_s) is None
            assert meter.admit(priority, 0.01, now_s + wait_s * 0.9) is None, "and not much earlier either"
            assert meter.admit(priority, 0.01, now_s + wait_s) is not None


@pytest.mark.parametrize(("priority", "is_empty"), [(CONTROL, False), (CONTROL, True), (NORMAL, False), (BULK, False)])
def test_work_that_never_ran_costs_nothing(priority: PriorityClass, is_empty: bool) -> None:
    meter = _granted(0.5)
    if is_empty:
        # A store in debt, so that control draws from its floor.
        meter.admit(NORMAL, 0.6, 0.0)
    twin = _granted(0.5)
    if is_empty:
        twin.admit(NORMAL, 0.6, 0.0)
    for _ in range(1000):
        charge = meter.admit(priority, 0.01, 0.0)
        assert charge is not None
        assert charge.is_of_floor == is_empty
        meter.settle(charge, 0.0)
    for item in PriorityClass:
        assert meter.wait_s(item, 0.0) == pytest.approx(twin.wait_s(item, 0.0), abs=1e-9)


@given(costs=st.lists(st.tuples(st.floats(1e-9, 0.02), st.floats(0.0, 0.05)), max_size=8))
def test_corrected_work_counts_by_its_actual_cost(costs: list[tuple[float, float]]) -> None:
    meter, twin = _granted(0.8), _granted(0.8)
    charges = [meter.admit(CONTROL, cost_s, 0.0) for cost_s, _ in costs]
    for charge, (_, took_s) in zip(charges, costs, strict=True):
        assert charge is not None
        meter.settle(charge, took_s)
    exact = [twin.admit(CONTROL, took_s, 0.0) for _, took_s in costs]
    assert all(charge is not None and not charge.is_of_floor for charge in exact)
    assert meter.wait_s(BULK, 0.0) == pytest.approx(twin.wait_s(BULK, 0.0), abs=1e-9)


def test_refunds_of_controls_floor_are_not_given_to_other_classes() -> None:
    meter = _granted(0.1)
    now_s = 0.0
    worked_s = 0.0
    for _ in range(6000):
        now_s += 0.01
        held = [charge for _ in range(5) if (charge := meter.admit(CONTROL, 0.02, now_s)) is not None]
        for index, charge in enumerate(held):
            took_s = 0.02 if index == 0 else 0.0
            worked_s += took_s
            meter.settle(charge, took_s)
        bulk = meter.admit(BULK, 0.02, now_s)
        worked_s += 0.0 if bulk is None else 0.02
    assert worked_s <= 0.2 * now_s + 1.0


def test_work_above_the_burst_limit_is_admitted_and_repaid() -> None:
    meter = _granted(0.5)
    assert meter.admit(BULK, 5.0, 0.0) is not None
    assert meter.admit(NORMAL, 0.01, 5.0) is None
    assert meter.wait_s(NORMAL, 5.0) == pytest.approx((5.0 - 0.25 - 5.0 * 0.5 + 0.25 * 0.25) / 0.5, abs=1e-3)


def test_debt_of_controls_floor_delays_other_classes_for_seconds_only() -> None:
    meter = _granted(0.1, floor=0.5)
    # A debt without a limit would be 48 s after these two minutes.
    _demand(meter, {CONTROL: 100.0}, 0.01, 120.0)
    meter.grant(1.0, 1.0, 120.0)
    assert 0.0 < meter.wait_s(BULK, 120.0) < 3.0


def test_classes_below_the_lowest_admitted_get_nothing() -> None:
    meter = _granted(1.0)
    meter.grant(1.0, 1.0, 0.0, lowest=NORMAL)
    assert meter.admit(BULK, 0.01, 0.0) is None
    assert meter.wait_s(BULK, 0.0) == MAX_WAIT_S
    assert meter.admit(NORMAL, 0.01, 0.0) is not None
    meter.grant(1.0, 1.0, 0.0, lowest=CONTROL)
    assert meter.admit(NORMAL, 0.01, 0.0) is None
    assert meter.admit(CONTROL, 0.01, 0.0) is not None


def test_without_a_floor_control_waits_like_the_others() -> None:
    meter = _granted(0.1, floor=0.0)
    while meter.admit(CONTROL, 0.01, 0.0) is not None:
        pass
    assert 0.0 < meter.wait_s(CONTROL, 0.0) < 1.0


def test_time_that_goes_back_grants_nothing() -> None:
    meter = _granted(0.1, floor=0.0)
    while meter.admit(CONTROL, 0.01, 100.0) is not None:
        pass
    assert meter.admit(CONTROL, 0.01, 50.0) is None


def test_a_charge_is_a_number_of_seconds() -> None:
    charge = TimeCharge(0.25, 0.1, is_of_floor=True)
    assert (charge, charge.common_bucket_s, charge.is_of_floor) == (0.25, 0.1, True)
    assert charge + 0.25 == 0.5


@pytest.mark.parametrize(
    ("need", "floor", "kept"), [(0.0, 0.2, 0.2), (0.4, 0.2, 0.5), (0.9, 0.2, 0.8), (0.9, 0.0, 0.0)]
)
@pytest.mark.parametrize("capacity", [1.0, 4.0])
def test_control_keeps_what_it_is_known_to_need_within_a_bound(
    need: float, floor: float, kept: float, capacity: float
) -> None:
    meter = RateAllocator(floor, lambda: need * capacity)
    meter.grant(0.05, capacity, 0.0)
    assert meter.floor_share == pytest.approx(kept)
    worked = _demand(meter, {CONTROL: 200.0 * capacity}, 0.01, 30.0)
    assert worked[CONTROL] == pytest.approx(max(kept, 0.05) * capacity * 30.0, rel=0.1)


def test_a_robot_that_needs_more_than_the_floor_is_never_refused_on_a_machine_that_stays_hot() -> None:
    refused = []
    for need in (0.0, 0.3):
        meter = RateAllocator(control_need=lambda need=need: need)
        count = 0
        for chunk in range(200):
            now_s = 0.4 * chunk
            meter.grant(0.05, 1.0, now_s)
            charge = meter.admit(CONTROL, 0.12, now_s)
            if charge is None:
                count += 1
            else:
                meter.settle(charge, 0.12)
        refused.append(count)
    assert refused[0] > 50
    assert refused[1] == 0


@pytest.mark.parametrize("phase", range(5))
@pytest.mark.parametrize(("run_s", "period_s"), [(0.03, 0.05), (0.12, 0.2), (0.3, 0.5), (1.5, 2.0)])
def test_a_robot_that_begins_on_a_hot_machine_is_not_refused_before_its_need_is_measured(
    run_s: float, period_s: float, phase: int
) -> None:
    load = RobotLoad()
    meter = RateAllocator(control_need=lambda: load.need)
    meter.grant(0.05, 1.0, 0.0)
    next_grant_s = 100.0 + 0.1 * phase
    for at in range(100):
        now_s = 100.0 + period_s * at
        while next_grant_s <= now_s:
            meter.grant(0.05, 1.0, next_grant_s)
            next_grant_s += 0.5
        load.add_arrival(now_s)
        charge = meter.admit(CONTROL, run_s, now_s)
        assert charge is not None, at
        meter.settle(charge, run_s)
        load.add_run(run_s)


def test_a_need_that_comes_and_goes_grants_no_more_than_one_that_stays() -> None:
    needs = itertools.cycle([math.inf, 0.0])
    meter = RateAllocator(control_need=lambda: next(needs))
    meter.grant(0.05, 1.0, 0.0)
    worked = _demand(meter, {CONTROL: 200.0}, 0.01, 60.0)
    assert worked[CONTROL] <= 0.8 * 60.0 + 1.0
