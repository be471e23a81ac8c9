"""Actions of a robot between two answers of a policy: the schedule without a jump, and the broker that asks in time."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.client import ActionBroker, BackOff, action_broker, reconnecting
from edge_server.client.action_schedule import ActionSchedule

TICK_S = 0.02


def ramp(first: float, steps: int = 10) -> Any:
    return np.arange(first, first + steps)[:, None]


# -- the schedule ------------------------------------------------------------------------------------------------------


def test_a_first_chunk_is_used_from_the_row_of_the_present_tick() -> None:
    schedule = ActionSchedule(3)
    assert schedule.left(7) == 0
    assert schedule.add(ramp(0), observed_tick=4, tick=7)
    assert (schedule.left(7), schedule.action(7).tolist(), schedule.left(13)) == (7, [3.0], 1)


def test_old_actions_go_over_into_new_ones_in_equal_parts() -> None:
    schedule = ActionSchedule(3)
    schedule.add(np.zeros((10, 1)), 0, 0)
    assert schedule.add(np.full((10, 1), 8.0), 2, 4)
    assert [schedule.action(tick)[0] for tick in range(4, 9)] == [2.0, 4.0, 6.0, 8.0, 8.0]


def test_the_last_action_stands_for_those_that_have_run_out() -> None:
    schedule = ActionSchedule(1)
    schedule.add(np.zeros((2, 1)), 0, 0)
    schedule.add(np.full((5, 1), 4.0), 2, 2)
    assert [schedule.action(tick)[0] for tick in (2, 3)] == [2.0, 4.0]


def test_a_chunk_that_is_older_or_used_up_is_of_no_use() -> None:
    schedule = ActionSchedule(0)
    assert schedule.add(ramp(0), 5, 6)
    assert not schedule.add(ramp(50), 5, 7)
    assert not schedule.add(ramp(50), 3, 7)
    assert not schedule.add(ramp(50), 6, 16)
    assert schedule.action(6).tolist() == [1.0]


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ([1.0, 2.0], r"expected a chunk of actions \(steps, values\), given shape \[2\]"),
        (np.empty((0, 2)), r"given shape \[0, 2\]"),
        ([[1.0, float("nan")]], "not finite"),
        ([[1.0, 2.0]], "expected 1 values in an action, given 2"),
    ],
)
def test_a_chunk_that_no_robot_may_follow_is_refused(chunk: Any, message: str) -> None:
    schedule = ActionSchedule(0)
    schedule.add(ramp(0), 0, 0)
    with pytest.raises(ValueError, match=message):
        schedule.add(chunk, 1, 1)
    assert schedule.action(1).tolist() == [1.0]


@given(
    seed=st.integers(0, 10_000),
    blend=st.integers(0, 6),
    steps=st.integers(1, 12),
    arrivals=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), min_size=1, max_size=8),
)
def test_no_step_is_larger_than_the_blend_allows_and_none_is_from_a_chunk_that_is_used_up(
    seed: int, blend: int, steps: int, arrivals: list[tuple[int, int]]
) -> None:
    random = np.random.default_rng(seed)
    schedule = ActionSchedule(blend)
    tick, last = 0, None
    for age, ticks in arrivals:
        chunk = random.normal(size=(steps, 2))
        before = schedule.rest(tick).copy()
        if schedule.add(chunk, tick - age, tick):
            assert age < steps
            new = chunk[age:]
            assert schedule.left(tick) == len(new)
            if last is not None:
                assert_blended(last, before, new, schedule.rest(tick), blend)
        else:
            np.testing.assert_array_equal(schedule.rest(tick), before)
        for _ in range(ticks):
            if schedule.left(tick):
                last = schedule.action(tick).copy()
            tick += 1


def assert_blended(last: Any, before: Any, new: Any, found: Any, blend: int) -> None:
    """Check the bound of each step: the old or new one, and a part of the distance between old and new."""
    old = np.vstack([last[None], before]) if len(before) else last[None]
    old = np.vstack([old, np.repeat(old[-1:], max(0, len(new) + 1 - len(old)), axis=0)])[: len(new) + 1]
    path = np.vstack([last[None], found])
    for at in range(min(blend, len(new))):
        distance = np.abs(new[at] - old[at + 1])
        step_of_old = np.abs(old[at + 1] - old[at])
        step_of_new = np.abs(new[at] - new[at - 1]) if at else step_of_old
        bound = np.maximum(step_of_old, step_of_new) + distance / (blend + 1)
        assert (np.abs(path[at + 1] - path[at]) <= bound + 1e-9).all()
    np.testing.assert_array_equal(found[blend:], new[blend:])


# -- the broker --------------------------------------------------------------------------------------------------------


class Policy:
    """Answers each question once `allow` was called for it, with a ramp from the observation's value."""

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps
        self.asked: list[Mapping[str, Any]] = []
        self._allowed = threading.Semaphore(0)
        self._came = threading.Condition()

    def __call__(self, observation: Mapping[str, Any]) -> Any:
        with self._came:
            self.asked.append(observation)
            self._came.notify_all()
        self._allowed.acquire()
        if isinstance(observation["value"], Exception):
            raise observation["value"]
        return ramp(observation["value"], self.steps)

    def allow(self) -> None:
        self._allowed.release()

    def await_question(self, number: int) -> Mapping[str, Any]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.asked) >= number, 30)
            return self.asked[number - 1]


def await_chunks(broker: ActionBroker, count: int) -> None:
    with broker._changed:
        assert broker._changed.wait_for(lambda: broker._counts.chunks >= count, 30)


def test_the_broker_asks_when_half_of_the_actions_are_used_and_the_loop_goes_on() -> None:
    policy = Policy()
    policy.allow()
    with ActionBroker(policy, dt_s=TICK_S, blend_steps=0) as broker:
        found = [broker.step({"value": float(tick)})[0] for tick in range(10)]
        assert found == list(range(10))
        assert policy.await_question(2)["value"] == 5.0
        policy.allow()
        await_chunks(broker, 2)
        assert broker.step({"value": 99.0}) == [10.0]
        counts = broker.counts
        policy.allow()
    assert (counts.steps, counts.dry_steps, counts.chunks, counts.failures) == (11, 0, 2, 0)


def test_without_an_answer_the_loop_runs_dry_and_says_so() -> None:
    policy = Policy(2)
    policy.allow()
    with ActionBroker(policy, dt_s=TICK_S, blend_steps=0, wait_ticks=10_000) as broker:
        for tick in range(2):
            broker.step({"value": float(tick)})
        policy.await_question(2)
        threading.Timer(0.05, policy.allow).start()
        assert broker.step({"value": 2.0}).shape == (1,)
        assert broker.counts.dry_steps == 1
        policy.allow()


def test_an_answer_to_an_earlier_episode_is_not_used() -> None:
    policy = Policy()
    policy.allow()
    with ActionBroker(policy, dt_s=TICK_S, blend_steps=0, execute_steps=1) as broker:
        broker.step({"value": 0.0})
        broker.step({"value": 1.0})
        policy.await_question(2)
        broker.reset()
        policy.allow()  # the answer for 1.0 comes after the reset
        policy.allow()
        assert broker.step({"value": 500.0}) == [500.0]
        assert broker.counts.dry_steps == 0
        policy.allow()


def await_failures(broker: ActionBroker, count: int) -> None:
    with broker._changed:
        assert broker._changed.wait_for(lambda: broker._counts.failures >= count, 30)


def test_a_failed_question_is_asked_again_while_actions_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_broker, "_BACK_OFF", BackOff(1e-9, 1e-9))
    policy = Policy()
    policy.allow()
    with ActionBroker(policy, dt_s=TICK_S, blend_steps=0, execute_steps=1) as broker:
        broker.step({"value": 0.0})
        policy.allow()
        broker.step({"value": ValueError("the link is down")})
        await_failures(broker, 1)
        policy.allow()
        assert broker.step({"value": 2.0}) == [2.0]
        await_chunks(broker, 2)
        policy.allow()


def test_the_error_is_raised_when_no_action_is_left() -> None:
    policy = Policy()
    policy.allow()
    with ActionBroker(policy, dt_s=TICK_S) as broker, pytest.raises(OSError, match="the link is down"):
        broker.step({"value": OSError("the link is down")})


def test_a_policy_that_does_not_answer_ends_the_wait() -> None:
    policy = Policy()
    with ActionBroker(policy, dt_s=TICK_S, wait_s=0.05) as broker:
        with pytest.raises(TimeoutError, match=r"has not answered within 0\.05 s"):
            broker.step({"value": 0.0})
        policy.allow()


def test_a_policy_that_fails_is_not_asked_at_each_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_broker, "_BACK_OFF", BackOff(1e6, 1e6))
    policy = Policy()
    policy.allow()
    with ActionBroker(policy, dt_s=TICK_S) as broker:
        for _ in range(50):
            with pytest.raises(OSError, match="the link is down"):
                broker.step({"value": OSError("the link is down")})
        assert len(policy.asked) == 1
        broker.reset()  # an episode begins at once
        policy.allow()
        assert broker.step({"value": 4.0}) == [4.0]


def test_a_policy_that_hangs_holds_the_last_action_within_the_stated_ticks() -> None:
    policy = Policy(4)
    policy.allow()
    with ActionBroker(policy, dt_s=TICK_S, blend_steps=0, execute_steps=4, wait_ticks=0, hold=True) as broker:
        found = [broker.step({"value": float(tick)})[0] for tick in range(14)]
        assert found == [0.0, 1.0, 2.0, 3.0] + 10 * [3.0]
        assert (broker.counts.dry_steps, broker.counts.held_steps) == (10, 10)
        policy.allow()


def test_a_policy_that_hangs_raises_within_the_stated_ticks() -> None:
    policy = Policy(2)
    policy.allow()
    with ActionBroker(policy, dt_s=TICK_S, wait_s=1e6, wait_ticks=1) as broker:
        for tick in range(2):
            broker.step({"value": float(tick)})
        for _ in range(3):
            with pytest.raises(TimeoutError, match=r"has not answered within 0\.02 s"):
                broker.step({"value": 2.0})
        policy.allow()


def test_a_chunk_for_an_observation_of_long_ago_is_not_used_after_the_wait() -> None:
    policy = Policy(4)
    policy.allow()
    with ActionBroker(policy, dt_s=TICK_S, blend_steps=0, execute_steps=4, wait_ticks=0, hold=True) as broker:
        for tick in range(14):
            broker.step({"value": float(tick)})
        policy.allow()  # the answer to the observation of tick 0, 1, 2 or 3
        with broker._changed:
            assert broker._changed.wait_for(lambda: broker._counts.useless_chunks == 1, 30)
        broker.step({"value": 50.0})
        policy.await_question(3)
        policy.allow()
        await_chunks(broker, 2)
        assert broker.step({"value": 51.0}) == [51.0]
        policy.allow()


@pytest.mark.parametrize(("steps", "warnings"), [(4, 1), (20, 0)])
def test_a_chunk_shorter_than_two_answers_warns_once(
    steps: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with ActionBroker(Policy(steps), dt_s=0.03) as broker:
        for tick in range(1, 6):
            broker._take(action_broker._Question(0, tick, {}), ramp(0, steps), None, latency_s=0.09)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == warnings
    assert all("answers in 0.09 s, and its chunk of 4 actions lasts 0.12 s" in message for message in found)


class Link:
    """A connection of the robot. Each observation's value is an action, or the error that comes instead."""

    def __init__(self, is_lost: bool = False) -> None:
        self.is_lost = is_lost

    def infer(self, observation: Mapping[str, Any]) -> Any:
        if self.is_lost:
            raise ConnectionClosed("gone")
        if isinstance(observation["value"], Exception):
            raise observation["value"]
        return ramp(observation["value"])


class ConnectionClosed(Exception):
    """As that of the package websockets: no OSError."""


def test_a_lost_connection_is_made_anew_and_the_observation_asked_again() -> None:
    links: list[Link] = []

    def connect() -> Link:
        links.append(Link())
        return links[-1]

    infer = reconnecting(connect, Link.infer)
    assert not links
    assert infer({"value": 0.0})[0] == [0.0]
    links[0].is_lost = True
    assert infer({"value": 3.0})[0] == [3.0]
    assert len(links) == 2
    with pytest.raises(OSError, match="twice"):
        infer({"value": OSError("twice")})
    assert len(links) == 3
    assert infer({"value": 4.0})[0] == [4.0]
    assert len(links) == 4


def test_a_connection_that_cannot_be_made_is_tried_again_at_the_next_question() -> None:
    found: list[Any] = [OSError("refused"), Link()]

    def connect() -> Link:
        if isinstance(found[0], Exception):
            raise found.pop(0)
        return found[0]

    infer = reconnecting(connect, Link.infer)
    with pytest.raises(OSError, match="refused"):
        infer({"value": 0.0})
    assert infer({"value": 0.0})[0] == [0.0]


@pytest.mark.parametrize("error", [RuntimeError("Error in inference server"), KeyError("action"), ValueError("shape")])
def test_a_refused_observation_keeps_the_connection(error: Exception) -> None:
    links: list[Link] = []

    def connect() -> Link:
        links.append(Link())
        return links[-1]

    infer = reconnecting(connect, Link.infer)
    for _ in range(3):
        with pytest.raises(type(error)):
            infer({"value": error})
    assert len(links) == 1


def test_a_policy_that_continues_chunks_gets_what_is_left() -> None:
    policy = Policy(6)
    policy.allow()
    keys = {"previous_key": "previous", "frozen_key": "frozen"}
    with ActionBroker(policy, dt_s=1e6, blend_steps=0, execute_steps=2, **keys) as broker:
        for tick in range(3):
            broker.step({"value": float(tick)})
        first, second = policy.await_question(1), policy.await_question(2)
        assert "previous" not in first
        assert first["frozen"] == 0
        assert second["previous"].tolist() == [[2.0], [3.0], [4.0], [5.0]]
        assert second["frozen"] == 1
        policy.allow()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dt_s": 0}, "dt_s"),
        ({"dt_s": 1, "execute_steps": 0}, "execute_steps"),
        ({"dt_s": 1, "blend_steps": -1}, "blend"),
        ({"dt_s": 1, "wait_ticks": -1}, "wait_ticks"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActionBroker(Policy(), **arguments)


def test_the_loop_of_the_document_moves_the_robot() -> None:
    text = (Path(__file__).parents[2] / "docs/robots.md").read_text()
    mark = re.escape("<!-- run by tests/client/test_action_broker.py -->")
    (block,) = re.findall(rf"{mark}\n```python\n(.*?)```", text, re.DOTALL)
    moved: list[float] = []

    class ChunkPolicy:
        def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
            return {"actions": ramp(observation["value"])}

    names = {"policy": ChunkPolicy(), "observe": lambda: {"value": 7.0}, "move": lambda action: moved.append(action[0])}
    exec(block, names)
    assert moved == [7.0, 8.0, 9.0]
