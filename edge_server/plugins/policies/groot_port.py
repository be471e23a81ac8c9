"""Port of GR00T's protocol over ZeroMQ: answers its calls ping, get_modality_config, reset and get_action.

Messages are MessagePack, as GR00T N1.5 to N1.7 send them (gr00t/policy/server_client.py): {endpoint, data, api_token}.
N1.6 and later wrap the observation, {observation, options}, and expect [actions, info]; N1.5 sends it bare and expects
the actions. Arrays have leading dimensions for batch and time, which must be 1. A call that fails is answered with
{error: text}. The call kill is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from edge_server.errors import EdgeServerError, InvalidRequest, QueueFull, ServingFault
from edge_server.frontends.http.request_head import Headers
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.plugins.policies.array_messages import MAX_MESSAGE_BYTES, read_message, write_groot_message
from edge_server.plugins.policies.policy import Policy
from edge_server.plugins.policies.policy_counters import PolicyCounters
from edge_server.plugins.policies.robot import Robot

if TYPE_CHECKING:
    from edge_server.frontends.http.access_check import AccessCheck
    from edge_server.service import InferenceService

log = logging.getLogger(__name__)

MAX_ROBOTS = 16
MAX_CALLS = 32
"""Calls that are answered at a time, of all robots."""

_SILENCE_S = 60.0
"""A robot that has not called for so long is forgotten: ZeroMQ does not say when a client leaves."""

_WARNING_EVERY_S = 5.0


class _Client:
    def __init__(self, robot: Robot) -> None:
        self.robot = robot
        self.is_running = False
        self.last_call_s = 0.0


class GrootPort:
    """Answers calls on one ZeroMQ address, from `start` to `stop`. Lives on one event loop."""

    def __init__(
        self,
        service: InferenceService,
        access: AccessCheck,
        counters: PolicyCounters,
        choose_policy: Callable[[str], str],
        address: str,
    ) -> None:
        """`choose_policy(name)` returns the model for a name, "": the only policy. `address`: HOST:PORT or
        HOST:PORT/MODEL. Listens, to know that no other server does. Raises ServingFault."""
        self._service = service
        self._access = access
        self._counters = counters
        self._choose_policy = choose_policy
        place, _, self._model = address.partition("/")
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        """Robots by the identity of their connection, the one that called last at the end."""
        self._calls: set[asyncio.Task[None]] = set()
        self._receiver: asyncio.Task[None] | None = None
        self._next_warning_s = 0.0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_CALLS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1 if place.startswith("[") else 0)
        try:
            self._socket.bind(f"tcp://{place}")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ServingFault(f"--policy-groot={address}: cannot listen: {error.strerror}") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        """Answer the clients that wait, and all later ones. Call it on the event loop."""
        self._dispatch = LoopDispatch(asyncio.get_running_loop())
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    async def stop(self) -> None:
        """Stop listening; calls that run get no answer. May be called again."""
        tasks = [task for task in (self._receiver, *self._calls) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            client.robot.close()
        self._clients.clear()
        if not self._context.closed:
            self._context.destroy()

    async def _receive(self) -> None:
        while True:
            identity, *parts = await self._socket.recv_multipart()
            if len(self._calls) >= MAX_CALLS:
                continue  # the client's own time limit tells it
            # REQ sockets put an empty part before the message, and expect one.
            envelope = [identity, b""] if parts[:1] == [b""] else [identity]
            task = asyncio.create_task(self._respond(envelope, parts[len(envelope) - 1 :], time.monotonic_ns()))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _respond(self, envelope: list[bytes], parts: Sequence[bytes], arrived_ns: int) -> None:
        try:
            if len(parts) != 1:
                raise InvalidRequest(f"expected a message of one part, given {len(parts)}")
            answer = await self._answer(envelope[0], read_message(parts[0]), arrived_ns)
        except EdgeServerError as error:
            self._warn(error.message)
            answer = {"error": error.message}
        await self._socket.send_multipart([*envelope, write_groot_message(answer)])

    async def _answer(self, identity: bytes, call: dict[Any, Any], arrived_ns: int) -> Any:
        self._check_token(call.get("api_token"))
        name, data = call.get("endpoint", "get_action"), call.get("data")
        if name == "ping":
            return {"status": "ok", "message": "Server is running"}
        if name == "kill":
            raise InvalidRequest("the call kill is refused: clients cannot stop this server")
        if name == "get_modality_config":
            return _modalities(self._client(identity).robot.policy)
        if name == "reset":
            self._client(identity).robot.end_episode()
            return {}
        if name != "get_action":
            raise InvalidRequest(
                f"expected the call ping, get_modality_config, reset or get_action, given '{str(name)[:60]}'"
            )
        is_wrapped = isinstance(data, dict) and isinstance(data.get("observation"), dict)
        observation = data.get("observation", data) if isinstance(data, dict) else data
        if not isinstance(observation, dict):
            raise InvalidRequest(
                f"expected an observation as a map, given a value of type {type(observation).__name__}"
            )
        client = self._client(identity)
        if client.is_running:
            raise QueueFull("an observation of this robot is running")
        client.is_running = True
        try:
            actions = await client.robot.infer(observation, arrived_ns)
        finally:
            client.is_running = False
        if not is_wrapped:
            return actions
        return [{key: value[None] for key, value in actions.items()}, {"model": client.robot.policy.spec.name}]

    def _client(self, identity: bytes) -> _Client:
        now_s = asyncio.get_running_loop().time()
        if identity not in self._clients:
            self._forget_silent(now_s)
            robot = Robot(self._service, self._dispatch, self._counters, self._choose_policy(self._model), "groot")
            self._clients[identity] = _Client(robot)
        client = self._clients[identity]
        client.last_call_s = now_s
        self._clients.move_to_end(identity)
        return client

    def _forget_silent(self, now_s: float) -> None:
        """Forget robots that are silent, and the one that is silent for longest if there are as many as may be."""
        while self._clients:
            identity, client = next(iter(self._clients.items()))
            is_old = now_s - client.last_call_s > _SILENCE_S or len(self._clients) >= MAX_ROBOTS
            if client.is_running or not is_old:
                break
            del self._clients[identity]
            client.robot.close()
        if len(self._clients) >= MAX_ROBOTS:
            raise QueueFull(f"{MAX_ROBOTS} robots are connected, which is the maximum")

    def _check_token(self, token: object) -> None:
        fields = [("Authorization", f"Bearer {token}")] if isinstance(token, str) else []
        self._access.admit(Headers(fields), "inference")

    def _warn(self, message: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + _WARNING_EVERY_S
            log.warning("a call of GR00T's protocol failed: %s", message)


def _modalities(policy: Policy) -> dict[str, Any]:
    """Return the names of an observation's parts by kind, and the action's steps, as GR00T's clients read them."""
    found: dict[str, list[str]] = {"video": [], "state": [], "language": []}
    for field in policy.inputs:
        kind, _, name = field.key.partition("/")
        if kind in found and name:
            found[kind].append(name)
    actions = [policy.action_key if output is policy.output else output.name for output in policy.spec.outputs]
    found["action"] = actions
    return {
        kind: {
            "__ModalityConfig_class__": True,
            "as_json": {
                "delta_indices": list(range(policy.horizon or 1)) if kind == "action" else [0],
                "modality_keys": names,
            },
        }
        for kind, names in found.items()
    }
