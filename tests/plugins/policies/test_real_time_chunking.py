"""Real-time chunking with a policy that was made for it: its chunks go on where the one before was, without a jerk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from cloned_policy import HORIZON
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_arm import Arm

from edge_server.client.action_schedule import ActionSchedule
from tests.plugins.policies.sampling_policy import train_sampling_policy, write_sampling_policy


@pytest.fixture(scope="module")
def policy() -> Any:
    return train_sampling_policy()


def test_the_exported_policy_gives_the_actions_of_the_trained_one(policy: Any, tmp_path: Path) -> None:
    write_sampling_policy(tmp_path / "arm", policy)
    session = onnxruntime.InferenceSession(tmp_path / "arm/1/model.onnx")
    state = Arm(1).observe()
    previous = (policy.mean.act(state) + 0.05).astype(np.float32)
    for frozen in (0, 1, 7, HORIZON):
        given = {"state": state, "previous": previous, "frozen": np.array([frozen])}
        (found,) = session.run(None, given)
        np.testing.assert_allclose(found, policy.act(state, previous, frozen), atol=1e-4)
        np.testing.assert_array_equal(found[:frozen], previous[:frozen])


class Commands:
    """Commands of a loop in simulated time, whose answers come some ticks after their question."""

    def __init__(self, policy: Any, blend_steps: int, *, continues: bool) -> None:
        self.schedule = ActionSchedule(blend_steps)
        self.commands: list[Any] = []
        self.arm = Arm(1)
        self._policy = policy
        self._continues = continues

    def ask(self, frozen: int) -> Any:
        """Return the chunk for now."""
        tick = len(self.commands)
        rest = self.schedule.rest(tick) if self.schedule.left(tick) and self._continues else np.zeros((0, 2))
        previous = np.concatenate([rest, np.zeros((HORIZON - len(rest), 2))])
        return self._policy.act(self.arm.observe(), previous, min(frozen, len(rest)))

    def move(self, ticks: int) -> None:
        for _ in range(ticks):
            self.commands.append(self.schedule.action(len(self.commands)).copy())
            self.arm.follow(self.commands[-1])

    def jerk_rad(self) -> float:
        """Return the largest change of the step between two commands."""
        return float(np.abs(np.diff(self.commands, n=2, axis=0)).max())


@pytest.mark.parametrize("blend_steps", [0, 5])
def test_the_arm_moves_without_jerks_if_its_policy_continues_its_chunks(policy: Any, blend_steps: int) -> None:
    jerks_rad = []
    for continues in (False, True):
        loop = Commands(policy, blend_steps, continues=continues)
        loop.schedule.add(loop.ask(0), 0, 0)
        loop.move(HORIZON // 2)
        for _ in range(40):
            tick = len(loop.commands)
            chunk = loop.ask(7)
            loop.move(6)
            assert loop.schedule.add(chunk, tick, tick + 6)
            loop.move(HORIZON // 2 - 6)
        jerks_rad.append(loop.jerk_rad())
    assert jerks_rad[1] < jerks_rad[0] / 5


@settings(max_examples=50, deadline=None)
@given(
    blend_steps=st.integers(0, 6),
    answers=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(5, 25)), min_size=1, max_size=6),
)
def test_what_was_fixed_is_done_and_what_follows_goes_on_from_it(
    policy: Any, blend_steps: int, answers: list[tuple[int, int, int]]
) -> None:
    loop = Commands(policy, blend_steps, continues=True)
    loop.schedule.add(loop.ask(0), 0, 0)
    loop.move(5)
    for delay, more_frozen, ticks in answers:
        tick, frozen = len(loop.commands), delay + more_frozen
        fixed = loop.schedule.rest(tick)[:frozen].copy()
        chunk = loop.ask(frozen)
        loop.move(delay)
        assert loop.schedule.add(chunk, tick, tick + delay)
        loop.move(min(ticks, loop.schedule.left(tick + delay) - 13))
        np.testing.assert_allclose(loop.commands[tick:][: len(fixed)], fixed[: len(loop.commands) - tick], atol=1e-12)
    assert loop.jerk_rad() < 0.05
