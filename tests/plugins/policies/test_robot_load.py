"""What a robot's observations need of the machine: their number per second times the time of one."""

from __future__ import annotations

import math

import pytest

from edge_server.errors import BackendError, DeadlineExceeded, EdgeServerError, InvalidRequest, QueueFull, Throttled
from edge_server.plugins.policies.policy_counters import PolicyCounters
from edge_server.plugins.policies.robot_load import RobotLoad


def observe(load: RobotLoad, times_s: list[float], run_s: float) -> None:
    for now_s in times_s:
        load.add_arrival(now_s)
        load.add_run(run_s)


def test_the_need_is_the_rate_times_the_shortest_of_the_latest_runs() -> None:
    load = RobotLoad()
    assert load.need == 0
    observe(load, [0.0], 0.1)
    assert load.need == math.inf
    observe(load, [0.5, 1.0, 1.5], 0.1)
    assert load.need == pytest.approx(0.2)
    observe(load, [2.0, 2.5], 0.4)  # these waited for another robot
    assert load.need == pytest.approx(0.2)
    observe(load, [3.0 + 0.5 * at for at in range(20)], 0.4)
    assert load.need == pytest.approx(0.8)


def test_an_observation_that_was_refused_counts_too() -> None:
    load = RobotLoad()
    observe(load, [0.0], 0.1)
    for now_s in (0.5, 1.0):
        load.add_arrival(now_s)
    assert load.need == pytest.approx(0.2)


def test_a_robot_that_pauses_needs_nothing_and_its_next_episode_knows_the_run() -> None:
    load = RobotLoad()
    observe(load, [0.0, 1.0], 0.1)
    load.end_episode()
    assert load.need == 0
    load.add_arrival(100.0)
    assert load.need == math.inf
    load.add_arrival(100.5)
    assert load.need == pytest.approx(0.2)


def fail(load: RobotLoad, count: int, error: EdgeServerError, begin_s: float = 0.0) -> None:
    for at in range(count):
        load.add_arrival(begin_s + 0.5 * at)
        load.add_failure(error)


@pytest.mark.parametrize("error", [InvalidRequest("wrong shape"), BackendError("failed")])
def test_a_robot_that_was_never_answered_needs_nothing_after_ten_failures(error: EdgeServerError) -> None:
    load = RobotLoad()
    fail(load, 9, error)
    assert load.need == math.inf
    fail(load, 1, error, 4.5)
    assert load.need == 0
    load.end_episode()
    load.add_arrival(100.0)
    assert load.need == 0


def test_an_answer_after_failures_gives_the_need_back_at_once() -> None:
    load = RobotLoad()
    observe(load, [0.0, 0.5], 0.1)
    for begin_s in (1.0, 6.0):
        fail(load, 9, BackendError("failed"), begin_s)
        assert load.need == pytest.approx(0.2)
        observe(load, [begin_s + 4.5], 0.1)
    fail(load, 10, BackendError("failed"), 11.0)
    assert load.need == 0
    observe(load, [16.0], 0.1)
    assert load.need == pytest.approx(0.2)


@pytest.mark.parametrize("error", [Throttled("hot"), QueueFull("full"), DeadlineExceeded("too old")])
def test_a_robot_that_the_machine_has_no_time_for_keeps_its_need(error: EdgeServerError) -> None:
    load = RobotLoad()
    fail(load, 50, error)
    assert load.need == math.inf


def test_the_needs_of_robots_add_up_until_they_leave() -> None:
    counters = PolicyCounters()
    loads = [RobotLoad(), RobotLoad()]
    counts = [counters.connect("arm", "openpi", load) for load in loads]
    for load in loads:
        observe(load, [0.0, 0.5], 0.1)
    assert counters.control_need() == pytest.approx(0.4)
    counters.disconnect(counts[0], loads[0])
    assert counters.control_need() == pytest.approx(0.2)
    assert counts[0].robots == 1
