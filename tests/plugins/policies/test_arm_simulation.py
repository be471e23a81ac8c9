"""The simulated arm: its controller, the policy that imitates it, and what a slow answer does to two ways of asking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cloned_policy import HORIZON, train
from simulated_arm import PERIOD_S, Arm, controller, joint_angles, positions, target

from edge_server.client.action_schedule import ActionSchedule

DELAY_TICKS = 6
TICKS = 1500


@pytest.fixture(scope="module")
def policy() -> Any:
    return train()


def error_mm(arm: Arm, commands: Any) -> float:
    """Return the mean error of an arm that follows commands(tick)."""
    for tick in range(TICKS):
        arm.follow(commands(tick))
    return arm.mean_error_mm()


def test_the_angles_of_a_position_bring_the_tip_there() -> None:
    tips = target(np.linspace(0, PERIOD_S, 50))
    np.testing.assert_allclose(positions(joint_angles(tips))[1], tips, atol=1e-12)


def test_the_policy_follows_the_target_as_its_controller_does(policy: Any) -> None:
    known, cloned = Arm(1), Arm(1)
    own = error_mm(known, lambda tick: controller(known.time_s, known.angles, 1)[0])
    assert own < 3
    assert error_mm(cloned, lambda tick: policy.act(cloned.observe())[0]) < 1.1 * own


def test_a_schedule_hides_the_delay_of_the_answers(policy: Any) -> None:
    arm, schedule = Arm(1), ActionSchedule(5)
    asked: list[Any] = []  # tick, chunk
    observed_tick = 0

    def command(tick: int) -> Any:
        nonlocal observed_tick
        if not asked and (tick == 0 or tick - observed_tick >= HORIZON // 2):
            asked.append((tick, policy.act(arm.observe())))
        if asked and (tick == 0 or tick >= asked[0][0] + DELAY_TICKS):
            observed_tick, chunk = asked.pop()
            assert schedule.add(chunk, observed_tick, tick)
        assert schedule.left(tick)
        return schedule.action(tick)

    with_schedule = error_mm(arm, command)
    known = Arm(1)
    assert with_schedule < 1.6 * error_mm(known, lambda tick: controller(known.time_s, known.angles, 1)[0])


def test_a_loop_that_waits_for_each_chunk_loses_the_target(policy: Any) -> None:
    arm = Arm(1)
    chunk: list[Any] = []
    waits = 0
    kept = arm.angles

    def command(tick: int) -> Any:
        nonlocal kept, waits
        if not chunk and waits == 0:
            chunk.extend(policy.act(arm.observe()))
            waits = DELAY_TICKS
        if waits:
            waits -= 1
        else:
            kept = chunk.pop(0)
        return kept

    assert error_mm(arm, command) > 20
