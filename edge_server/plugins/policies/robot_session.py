"""Session of one robot: runs its observations one after the other, as one sequence, with one version of the policy for
an episode."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from edge_server.core.ensemble_and_sequence_spec import ControlKind
from edge_server.core.model_spec import ModelSpec
from edge_server.core.priority_class import PriorityClass
from edge_server.core.request_response import Request, SequenceStep
from edge_server.core.tensor import DType
from edge_server.errors import EdgeServerError, InvalidRequest, SequenceNotBegun
from edge_server.frontends.loop_dispatch import LoopDispatch, run_request
from edge_server.plugins.policies.policy import Policy, is_policy, make_policy
from edge_server.plugins.policies.policy_counters import PolicyCounters
from edge_server.plugins.policies.robot_load import RobotLoad
from edge_server.service import READING_THREAD_HOLD_US, Handle, InferenceService

EPISODE_GAP_S = 5.0
"""An episode has ended after so many seconds without an observation: the wires have no message that says so."""

_ids = itertools.count(secrets.randbelow(1 << 30))


class Robot:
    """One robot's connection to one policy. Lives on one event loop; runs one observation at a time.

    In an episode all observations go to the generation of the model that took the first one, also while another one
    already serves. A canary gets its share of the episodes. A model with sequences keeps its state from observation to
    observation; it is reset at the start of an episode.
    """

    def __init__(
        self, service: InferenceService, dispatch: LoopDispatch, counters: PolicyCounters, model: str, wire: str
    ) -> None:
        """Raises UnknownModel, NotReady, and InvalidRequest for a model that is no policy."""
        self._service = service
        self._dispatch = dispatch
        self._model = model
        self._sequence_id = f"{wire}-{next(_ids)}"
        self._handle: Handle | None = None
        self._release_version: Callable[[], None] | None = None
        self._has_begun = False
        self._last_answer_ns = 0
        self._gap_timer: asyncio.TimerHandle | None = None
        self.policy = _policy_of(service.find(model, None).spec)
        self._load = RobotLoad()
        self._counters = counters
        self._counts = counters.connect(model, wire, self._load)

    def close(self) -> None:
        """End the episode. Call it once."""
        self.end_episode()
        self._counters.disconnect(self._counts, self._load)

    def end_episode(self) -> None:
        """Let the next observation begin an episode, with the version that serves then."""
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None
        if self._handle is not None and self._has_begun and self.policy.spec.sequence is not None:
            self._handle.end_sequence(self._id())
        if self._release_version is not None:
            self._release_version()
            self._release_version = None
        self._load.end_episode()
        self._handle = None
        self._has_begun = False
        self._last_answer_ns = 0

    async def infer(
        self, observation: Mapping[str, object], arrived_ns: int, charge: Callable[[int], None]
    ) -> dict[str, Any]:
        """Return the actions for an observation that came at `arrived_ns` (time.monotonic_ns), see Policy.actions.

        `charge(nbytes)` is told the memory of the copies that the policy makes of it, and may raise.
        Raises EdgeServerError, of which InvalidRequest is about the observation.
        """
        if self._gap_timer is not None:
            self._gap_timer.cancel()
        self._load.add_arrival(arrived_ns / 1e9)
        try:
            found = await self._run(observation, arrived_ns, charge)
        except EdgeServerError as error:
            self._counts.fail(error)
            self._load.add_failure(error)
            raise
        finally:
            gap_s = max(EPISODE_GAP_S, 2e-3 * (self.policy.dt_ms or 0.0) * (self.policy.horizon or 0))
            self._gap_timer = asyncio.get_running_loop().call_later(gap_s, self.end_episode)
        now_ns = time.monotonic_ns()
        policy = self.policy
        lasts_ns = (policy.dt_ms or 0.0) * 1e6 * len(found[policy.action_key])
        is_late = 0 < lasts_ns < now_ns - self._last_answer_ns if self._last_answer_ns else False
        self._counts.answer((now_ns - arrived_ns) / 1e9, is_late=is_late)
        self._last_answer_ns = now_ns
        return found

    def overtake(self) -> None:
        """Count an observation that is not run because a newer one has come."""
        self._counts.overtaken += 1

    async def _run(
        self, observation: Mapping[str, object], arrived_ns: int, charge: Callable[[int], None]
    ) -> dict[str, Any]:
        handle = self._begin_or_go_on()
        policy = self.policy
        charge(policy.copied_bytes(observation))
        inputs = (
            await asyncio.to_thread(policy.read, observation) if policy.takes_pictures else policy.read(observation)
        )
        for is_last_attempt in (False, True):
            sequence = None
            if policy.spec.sequence is not None:
                sequence = SequenceStep(self._id(), is_start=not self._has_begun)
            request = Request(
                model=self._model,
                inputs=inputs,
                priority=int(PriorityClass.CONTROL),
                sequence=sequence,
                deadline_ns=arrived_ns + int(policy.max_age_ms * 1e6) if policy.max_age_ms else 0,
            )
            began_s = time.monotonic()
            try:
                response = await run_request(handle, self._dispatch, request, hold_us=READING_THREAD_HOLD_US)
                self._load.add_run(time.monotonic() - began_s)
                break
            except SequenceNotBegun:
                # The model has lost the state, for instance because the robot paused for longer than it keeps it.
                if is_last_attempt:
                    raise
                self._has_begun = False
        self._has_begun = True
        return dict(policy.actions({item.name: item.array for item in response.outputs}))

    def _begin_or_go_on(self) -> Handle:
        if self._handle is None or self._release_version is None:
            self._handle, self._release_version = self._service.hold(self._model)
            if self._handle.spec is not self.policy.spec:
                try:
                    self.policy = _policy_of(self._handle.spec)
                except EdgeServerError:
                    self.end_episode()
                    raise
        return self._handle

    def _id(self) -> int | str:
        batching = self.policy.spec.sequence
        takes_numbers = batching is not None and any(
            control.kind is ControlKind.CORRID and control.dtype is not DType.BYTES for control in batching.controls
        )
        return int(self._sequence_id.rpartition("-")[2]) + 1 if takes_numbers else self._sequence_id


def _policy_of(spec: ModelSpec) -> Policy:
    if not is_policy(spec):
        raise InvalidRequest(
            f"model '{spec.name}' is no policy: its configuration has no parameter 'policy_action_key'"
        )
    return make_policy(spec)
