"""Port of LeRobot's asynchronous inference: the gRPC service transport.AsyncInference.

A client calls Ready, then SendPolicyInstructions with the name of a policy, then SendObservations and GetActions from
two threads (lerobot 0.4.4, async_inference/robot_client.py). The newest observation is run; GetActions waits for one
for OBSERVATION_WAIT_S and else answers nothing, as LeRobot's own server does. Messages are protobuf with one or two
fields, which are read here, and hold pickles, see lerobot_pickles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np

from edge_server.errors import EdgeServerError, InvalidRequest, QueueFull, ServingFault
from edge_server.frontends.http.request_head import Headers
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.plugins.policies.array_messages import MAX_MESSAGE_BYTES
from edge_server.plugins.policies.connections.listener import MAX_ROBOTS
from edge_server.plugins.policies.connections.message_memory import HeldMessage, MessageMemory
from edge_server.plugins.policies.lerobot_pickles import (
    ClientObservation,
    ClientPolicy,
    TimedRow,
    read_pickle,
    write_actions,
)
from edge_server.plugins.policies.policy_counters import PolicyCounters
from edge_server.plugins.policies.robot import Robot

if TYPE_CHECKING:
    from edge_server.frontends.http.access_check import AccessCheck
    from edge_server.service import InferenceService

log = logging.getLogger(__name__)

OBSERVATION_WAIT_S = 2.0
_SILENCE_S = 60.0
_MAX_CALLS = 32
_PIECE_BYTES = 4 << 20
"""Largest message of the wire; an observation comes in several."""

_BEGIN, _END = 1, 3
_MAX_TIME_S = 1e12
_MAX_STEP = 1 << 30
_EMPTY = b""


class _Observation(NamedTuple):
    content: ClientObservation
    memory: HeldMessage
    arrived_ns: int


class _Client:
    """A robot's channel: the policy that it wants, and the newest observation that was not run."""

    def __init__(self, robot: Robot, policy: ClientPolicy) -> None:
        self.robot = robot
        self.policy = policy
        self.newest: _Observation | None = None
        self.has_newest = asyncio.Event()
        self.is_running = False
        self.last_call_s = 0.0


class LeRobotPort:
    """Answers calls on one address, from `start` to `stop`. Lives on one event loop."""

    def __init__(
        self,
        service: InferenceService,
        access: AccessCheck,
        counters: PolicyCounters,
        memory: MessageMemory,
        choose_policy: Callable[[str], str],
        address: str,
    ) -> None:
        """`choose_policy(name)` returns the model for a name, "": the only policy. Listens. Raises ServingFault."""
        self._service = service
        self._access = access
        self._counters = counters
        self._memory = memory
        self._choose_policy = choose_policy
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        """Robots by the address of their connection, the one that called last at the end."""
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=_MAX_CALLS,
            options=[("grpc.max_receive_message_length", _PIECE_BYTES), ("grpc.so_reuseport", 0)],
        )
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        calls = {
            "Ready": unary(self._answered(self._ready)),
            "SendPolicyInstructions": unary(self._answered(self._take_instructions)),
            "SendObservations": stream(self._answered(self._take_observation)),
            "GetActions": unary(self._answered(self._get_actions)),
        }
        handler = grpc.method_handlers_generic_handler("transport.AsyncInference", calls)
        self._server.add_generic_rpc_handlers((handler,))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ServingFault(f"--policy-lerobot={address}: cannot listen: {error}") from None
        self.address = f"{address.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        """Answer calls."""
        self._dispatch = LoopDispatch(asyncio.get_running_loop())
        await self._server.start()

    async def stop(self) -> None:
        """Stop listening; calls that run get no answer. May be called again."""
        await self._server.stop(None)
        for peer in list(self._clients):
            self._forget(peer)

    def _answered(self, call: Any) -> Any:
        """Return a handler of gRPC that checks the token and answers an EdgeServerError with its sentence."""

        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            try:
                fields = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
                self._access.admit(Headers(fields), "inference")
                return bytes(await call(request, context.peer()))
            except EdgeServerError as error:
                log.warning("a call of LeRobot's client failed: %s", error.message)
                code = grpc.StatusCode.INVALID_ARGUMENT
                if not isinstance(error, InvalidRequest):
                    code = grpc.StatusCode.FAILED_PRECONDITION  # not one that the client repeats
                await context.abort(code, error.message)
                raise

        return handle

    async def _ready(self, request: bytes, peer: str) -> bytes:
        self._forget(peer)
        return _EMPTY

    async def _take_instructions(self, request: bytes, peer: str) -> bytes:
        policy = read_pickle(_read_fields(request)[1].get(1, b""))
        if not isinstance(policy, ClientPolicy) or not isinstance(
            getattr(policy, "pretrained_name_or_path", None), str
        ):
            raise InvalidRequest("expected a RemotePolicyConfig with the name of a policy")
        self._forget(peer)
        self._forget_silent()
        name = policy.pretrained_name_or_path.rpartition("/")[2]
        robot = Robot(self._service, self._dispatch, self._counters, self._choose_policy(name), "lerobot")
        self._clients[peer] = _Client(robot, policy)
        self._client(peer)
        return _EMPTY

    async def _take_observation(self, pieces: AsyncIterator[bytes], peer: str) -> bytes:
        self._client(peer)  # raises for one that is no robot yet
        content: Any
        data = bytearray()
        memory = self._memory.begin(lambda error: data.clear())
        try:
            async for piece in pieces:
                states, parts = _read_fields(piece)
                if states.get(1) == _BEGIN and data:
                    raise InvalidRequest("expected one observation in a call")
                part = parts.get(2, b"")
                if len(data) + len(part) > MAX_MESSAGE_BYTES:
                    raise InvalidRequest(f"expected an observation of at most {MAX_MESSAGE_BYTES} bytes")
                await memory.grow(len(part))
                data += part
                if states.get(1) == _END:
                    break
            memory.is_complete = True
            content = await asyncio.to_thread(read_pickle, bytes(data))
            if not _is_observation(content):
                raise InvalidRequest("expected a TimedObservation with a map, and the time and number of its step")
            client = self._client(peer)
        except BaseException:
            memory.release()
            raise
        if client.newest is not None:
            client.newest.memory.release()
            client.robot.overtake()
        client.newest = _Observation(content, memory, time.monotonic_ns())
        client.has_newest.set()
        return _EMPTY

    async def _get_actions(self, request: bytes, peer: str) -> bytes:
        client = self._client(peer)
        if client.is_running:
            raise QueueFull("a call of GetActions is running for this robot")
        client.is_running = True
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(client.has_newest.wait(), OBSERVATION_WAIT_S)
            if client.newest is None:
                return _EMPTY
            newest, client.newest = client.newest, None
            client.has_newest.clear()
            observation = newest.content
            try:
                found = await client.robot.infer(_arrange(observation.observation, client.policy), newest.arrived_ns)
            finally:
                newest.memory.release()
        finally:
            client.is_running = False
        policy = client.robot.policy
        actions = found[policy.action_key][: _whole(client.policy, "actions_per_chunk")]
        dt_s = (policy.dt_ms or 0.0) / 1000
        began_s, step = observation.timestamp, observation.timestep
        data = write_actions(TimedRow(began_s + at * dt_s, step + at, row) for at, row in enumerate(actions))
        return _write_bytes(1, data)

    def _client(self, peer: str) -> _Client:
        client = self._clients.get(peer)
        if client is None:
            raise InvalidRequest("expected the call SendPolicyInstructions before this one")
        client.last_call_s = asyncio.get_running_loop().time()
        self._clients.move_to_end(peer)
        return client

    def _forget(self, peer: str) -> None:
        client = self._clients.pop(peer, None)
        if client is not None:
            if client.newest is not None:
                client.newest.memory.release()
            client.robot.close()

    def _forget_silent(self) -> None:
        """Forget robots that are silent, and the one that is silent for longest if there are as many as may be. Raises
        QueueFull if all of them wait for actions."""
        limit_s = asyncio.get_running_loop().time() - _SILENCE_S
        for peer, client in list(self._clients.items()):
            if not client.is_running and (client.last_call_s < limit_s or len(self._clients) >= MAX_ROBOTS):
                self._forget(peer)
        if len(self._clients) >= MAX_ROBOTS:
            raise QueueFull(f"{MAX_ROBOTS} robots are connected, which is the maximum")


def _is_observation(content: object) -> bool:
    if not isinstance(content, ClientObservation):
        return False
    timestamp, step = getattr(content, "timestamp", None), getattr(content, "timestep", None)
    return (
        isinstance(getattr(content, "observation", None), dict)
        and isinstance(timestamp, (int, float))
        and abs(timestamp) < _MAX_TIME_S
        and isinstance(step, int)
        and abs(step) < _MAX_STEP
    )


def _arrange(raw: dict[str, Any], policy: ClientPolicy) -> dict[str, Any]:
    """Return an observation with LeRobot's keys, made of the robot's values as the client's features say:
    `observation.state` is the numbers of its names, `observation.images.NAME` the picture NAME."""
    found = dict(raw)
    features = getattr(policy, "lerobot_features", None)
    for key, feature in (features if isinstance(features, dict) else {}).items():
        if not isinstance(feature, dict) or key in found:
            continue
        names, camera = feature.get("names"), key.removeprefix("observation.images.")
        if camera != key:
            if camera in raw:
                found[key] = raw[camera]
        elif isinstance(names, list) and names and all(name in raw for name in names):
            try:
                found[key] = np.array([raw[name] for name in names], np.float32)
            except (TypeError, ValueError):
                raise InvalidRequest(f"expected numbers for {', '.join(map(str, names))[:200]}") from None
    return found


def _whole(policy: ClientPolicy, name: str) -> int | None:
    value = getattr(policy, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _read_fields(message: bytes) -> tuple[dict[int, int], dict[int, bytes]]:
    """Return the numbers and the byte strings of a protobuf message by their field. Raises InvalidRequest."""
    numbers: dict[int, int] = {}
    strings: dict[int, bytes] = {}
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if tag & 7 == 0:
            numbers[tag >> 3] = value
        elif tag & 7 == 2 and at + value <= len(message):
            strings[tag >> 3] = message[at : at + value]
            at += value
        else:
            raise InvalidRequest("expected a message of transport.AsyncInference")
    return numbers, strings


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise InvalidRequest("expected a message of transport.AsyncInference")


def _write_bytes(field: int, data: bytes) -> bytes:
    size, head = len(data), bytearray([field << 3 | 2])
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + data
