"""Broker between a robot's loop and a policy that is slower than the loop: asks for the next actions before the present
ones run out. And a connection to the policy that is made anew when it is lost."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from edge_server.client.action_schedule import Actions, ActionSchedule
from edge_server.core.back_off import BackOff

_log = logging.getLogger(__name__)
_REMEMBERED_LATENCIES = 8
_CLOSE_S = 1.0
_BACK_OFF = BackOff(first_s=0.1, most_s=2.0)
"""Between a question that failed and the next one."""
_Connection = TypeVar("_Connection")
_REFUSALS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of an observation, an answer or the caller's own code. openpi's client raises RuntimeError for a refusal. None
of them says that the connection is lost, and a server has few places for robots that leave theirs open."""


def reconnecting(
    connect: Callable[[], _Connection], ask: Callable[[_Connection, Mapping[str, Any]], npt.ArrayLike]
) -> Callable[[Mapping[str, Any]], npt.ArrayLike]:
    """Return a function for ActionBroker that asks over a connection. It connects when it first needs it, and again
    after a loss, such as a restart of the server.

    An observation that finds the connection lost is asked once more over a new one. RuntimeError, ValueError,
    TypeError, LookupError and AttributeError of `ask` mean that the connection stands; any other error, that it is
    lost. The function raises the errors of `connect` and `ask`. ActionBroker waits before it calls it again.
    """
    connection: _Connection | None = None

    def infer(observation: Mapping[str, Any]) -> npt.ArrayLike:
        nonlocal connection
        is_new = connection is None
        used = connect() if connection is None else connection
        connection = used
        try:
            return ask(used, observation)
        except _REFUSALS:
            raise
        except Exception:
            connection = None
            if is_new:
                raise
        return infer(observation)

    return infer


@dataclass(frozen=True, slots=True)
class BrokerCounts:
    """Counts since the broker was made.

    `steps`: actions returned. `dry_steps`: those of them that had to wait because the actions before had run out; the
    first one of an episode does not count. `held_steps`: those of them that returned the last action again. `chunks`:
    chunks that were used. `useless_chunks`: those that came too late. `failures`: requests that failed. `latency_s`:
    seconds from the newest request to its chunk.
    """

    steps: int = 0
    dry_steps: int = 0
    held_steps: int = 0
    chunks: int = 0
    useless_chunks: int = 0
    failures: int = 0
    latency_s: float = 0.0


class _Question(NamedTuple):
    episode: int
    tick: int
    observation: Mapping[str, Any]


class ActionBroker:
    """Gives a robot's loop one action for each tick, and asks the policy meanwhile, on a thread of its own.

    `infer(observation)` asks the policy over any wire, and returns the chunk: an array (steps, values) whose first row
    is for the time of the observation. One thread calls it, and never twice at a time. `dt_s` is the time between two
    ticks. The broker asks again when `execute_steps` ticks have passed since the last question that was answered
    (default: half of the chunk), or earlier if the answer would come too late otherwise, as measured. The present
    actions go over into the new ones within `blend_steps` ticks, see ActionSchedule. After a failure it waits 0.1 s
    before it asks again, and up to 2 s after several. It logs a warning if a chunk is shorter than twice the time of an
    answer, as measured: then actions run out.

    For a policy that was made to continue a chunk (real-time chunking): `previous_key` adds the actions that are left,
    (steps, values), to the observation, and `frozen_key` the number of those that will be used before the answer comes.

    Use it as a context manager, or `close` it. `step` and `reset` are for one thread.
    """

    def __init__(
        self,
        infer: Callable[[Mapping[str, Any]], npt.ArrayLike],
        *,
        dt_s: float,
        blend_steps: int = 5,
        execute_steps: int | None = None,
        previous_key: str = "",
        frozen_key: str = "",
        wait_s: float = 10.0,
        wait_ticks: int = 10,
        hold: bool = False,
    ) -> None:
        """`wait_s`: how long the first step of an episode waits for actions. `wait_ticks`: for how many ticks, after
        the actions have run out, steps wait for others. After that, and after an error of `infer`, a step returns the
        last action again if `hold` is True, which keeps an arm still that is moved by positions, and else raises."""
        if not dt_s > 0:
            raise ValueError(f"dt_s: expected seconds above 0, given {dt_s}")
        if wait_ticks < 0:
            raise ValueError(f"wait_ticks: expected 0 or more, given {wait_ticks}")
        if execute_steps is not None and execute_steps < 1:
            raise ValueError(f"execute_steps: expected 1 or more, given {execute_steps}")
        self._infer = infer
        self._dt_s = dt_s
        self._blend_steps = blend_steps
        self._execute_steps = execute_steps
        self._previous_key, self._frozen_key = previous_key, frozen_key
        self._wait_s, self._wait_ticks, self._hold = wait_s, wait_ticks, hold
        self._changed = threading.Condition()
        self._schedule = ActionSchedule(blend_steps)
        self._tick = 0
        """Tick of the next action."""
        self._episode = 0
        self._has_begun = False
        self._answered_tick = 0
        """Tick of the question whose chunk is in use, and its number of actions."""
        self._chunk_steps = 0
        self._latencies: deque[int] = deque(maxlen=_REMEMBERED_LATENCIES)
        """In ticks."""
        self._has_warned = False
        self._failures = 0
        """Since the last answer."""
        self._ask_after_s = 0.0
        self._dry_since_s: float | None = None
        """When the actions had run out. None while there are some."""
        self._waiting: _Question | None = None
        self._is_asking = False
        self._error: Exception | None = None
        """Why the last question that ended has no answer."""
        self._error_traceback: TracebackType | None = None
        self._counts = BrokerCounts()
        self._is_closed = False
        self._thread = threading.Thread(target=self._ask, name="action-broker", daemon=True)
        self._thread.start()

    def __enter__(self) -> ActionBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> BrokerCounts:
        with self._changed:
            return self._counts

    def step(self, observation: Mapping[str, Any]) -> Actions:
        """Return the action for now, (values,), given what the robot observes now. The first step of an episode waits
        `wait_s` for the policy, and one for which no action is left until `wait_ticks` after the last one.

        Raises, if there is no action by then and none may be held: TimeoutError; at once, the error of `infer`, or
        ValueError for its chunk. Such a step counts as a tick, too. An episode's first action is never a held one.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the broker is closed")
            if self._must_ask():
                self._post(observation)
            is_dry = not self._schedule.left(self._tick)
            is_held = False
            if is_dry:
                try:
                    self._await_action(observation)
                except Exception:
                    is_held = self._hold and self._has_begun
                    if not is_held:
                        self._tick += 1
                        raise
            if not is_held:
                self._dry_since_s = None
            action: Actions = self._schedule.action(self._tick).copy()
            counts = self._counts
            self._counts = replace(
                counts, steps=counts.steps + 1, dry_steps=counts.dry_steps + (is_dry and self._has_begun),
                held_steps=counts.held_steps + is_held,
            )  # fmt: skip
            self._has_begun = True
            self._tick += 1
            return action

    def reset(self) -> None:
        """Begin an episode: forget all actions, also those that are on their way."""
        with self._changed:
            self._episode += 1
            self._has_begun = False
            self._waiting = self._error = self._dry_since_s = None
            self._failures, self._ask_after_s = 0, 0.0
            self._schedule.clear()

    def close(self) -> None:
        """End the thread; a question that is being asked is not waited for longer than a second."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _must_ask(self) -> bool:
        if self._is_asking or self._waiting is not None or time.monotonic() < self._ask_after_s:
            return False
        execute_steps = self._execute_steps or max(1, self._chunk_steps // 2)
        needed = max(self._latencies, default=0) + self._blend_steps + 1
        return self._tick - self._answered_tick >= execute_steps or self._schedule.left(self._tick) <= needed

    def _post(self, observation: Mapping[str, Any]) -> None:
        asked = dict(observation)
        if self._previous_key and self._schedule.left(self._tick):
            asked[self._previous_key] = self._schedule.rest(self._tick).copy()
        if self._frozen_key:
            asked[self._frozen_key] = min(max(self._latencies, default=0), self._schedule.left(self._tick))
        self._waiting = _Question(self._episode, self._tick, asked)
        self._changed.notify_all()

    def _await_action(self, observation: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        if self._has_begun:
            wait_s = self._wait_ticks * self._dt_s
            if self._dry_since_s is None:
                self._dry_since_s = now_s
            until_s = self._dry_since_s + wait_s
        else:
            wait_s = self._wait_s
            until_s = now_s + wait_s
        while not self._schedule.left(self._tick):
            if self._waiting is None and not self._is_asking:
                if self._error is not None:
                    # Without the frames of the steps that raised it before: each holds an observation.
                    raise self._error.with_traceback(self._error_traceback)
                self._post(observation)
            is_notified = self._changed.wait(max(0.0, until_s - time.monotonic()))
            if not is_notified and not self._schedule.left(self._tick):
                raise TimeoutError(f"the policy has not answered within {wait_s:g} s") from self._error

    def _ask(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._waiting is not None)
                if self._is_closed:
                    return
                question, self._waiting = self._waiting, None
                assert question is not None
                self._is_asking = True
            began_s = time.monotonic()
            chunk: npt.ArrayLike = ()
            error: Exception | None = None
            try:
                chunk = self._infer(question.observation)
            except Exception as failure:  # noqa: BLE001 - of the caller's own function; `step` raises it
                error = failure
            with self._changed:
                self._is_asking = False
                if question.episode == self._episode:
                    self._take(question, chunk, error, time.monotonic() - began_s)
                self._changed.notify_all()

    def _take(self, question: _Question, chunk: npt.ArrayLike, error: Exception | None, latency_s: float) -> None:
        counts = self._counts
        is_used = False
        if error is None:
            try:
                is_used = self._schedule.add(chunk, question.tick, self._tick)
            except ValueError as failure:
                error = failure
        if error is not None:
            self._error, self._error_traceback = error, error.__traceback__
            self._failures += 1
            self._ask_after_s = time.monotonic() + _BACK_OFF.delay_s(self._failures, random.random())
            self._counts = replace(counts, failures=counts.failures + 1)
            return
        self._error = None
        self._failures, self._ask_after_s = 0, 0.0
        self._latencies.append(math.ceil(latency_s / self._dt_s))
        # The first answer may have waited for the model to load.
        steps = len(np.asarray(chunk))
        if not self._has_warned and len(self._latencies) > 1 and 2 * min(self._latencies) > steps:
            self._has_warned = True
            _log.warning(
                "the policy answers in %.3g s, and its chunk of %d actions lasts %.3g s: expected at least twice as "
                "long, or the robot runs out of actions. Use longer chunks, a faster policy or a larger dt_s",
                min(self._latencies) * self._dt_s, steps, steps * self._dt_s,
            )  # fmt: skip
        if is_used:
            self._answered_tick = question.tick
            self._chunk_steps = self._schedule.left(self._tick) + self._tick - question.tick
            self._counts = replace(counts, chunks=counts.chunks + 1, latency_s=latency_s)
        else:
            self._counts = replace(counts, useless_chunks=counts.useless_chunks + 1, latency_s=latency_s)
