"""Port of GR00T's protocol over ZeroMQ: answers its calls ping, get_modality_config, reset and get_action.

Messages are MessagePack, as GR00T N1.5 to N1.7 send them (gr00t/eval/service.py, gr00t/policy/server_client.py):
{endpoint, data, api_token}. Until the token is known, nothing else is made of a message. N1.6 and later wrap the
observation, {observation, options}, and expect [actions, info]; N1.5 sends it bare and expects the actions. Arrays have
leading dimensions for batch and time, which must be 1. A call that fails is answered with {error: text}. The call kill
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from edge_server.errors import EdgeServerError, InvalidRequest, QueueFull
from edge_server.frontends.http.request_head import Headers
from edge_server.plugins.policies.array_messages import find_text, read_message, write_groot_message
from edge_server.plugins.policies.connections.listener import RobotListener
from edge_server.plugins.policies.connections.message_memory import MAX_MESSAGE_BYTES, MessageMemory
from edge_server.plugins.policies.connections.message_stream import MessageStream
from edge_server.plugins.policies.connections.zmtp import ZmtpConnection
from edge_server.plugins.policies.policy import Policy
from edge_server.plugins.policies.robot_session import Robot

if TYPE_CHECKING:
    from edge_server.frontends.http.access_check import AccessCheck

_ZIP = b"PK\x03\x04"
"""Begin of what torch.save writes, and GR00T N1 sends."""


class GrootPort(RobotListener):
    """Answers calls on one ZeroMQ address, from `start` to `stop`. Lives on one event loop."""

    def __init__(
        self, access: AccessCheck, memory: MessageMemory, make_robot: Callable[[str], Robot], address: str
    ) -> None:
        """`make_robot(name)` returns a robot of this wire for a model, "": the only policy. `address`: HOST:PORT or
        HOST:PORT/MODEL. Listens, to know that no other server does. Raises ServingFault."""
        place, _, self._model = address.partition("/")
        super().__init__("--policy-groot", place, self._serve_robot)
        self.url = f"tcp://{self.address}"
        self._access = access
        self._memory = memory
        self._make_robot = make_robot

    async def _serve_robot(self, stream: MessageStream) -> None:
        connection = ZmtpConnection(stream, self._memory, MAX_MESSAGE_BYTES)
        await connection.shake_hands()
        client = _Client(lambda: self._connect(stream))
        try:
            while await self._answer_one(connection, client):
                pass
        finally:
            client.close()

    async def _answer_one(self, connection: ZmtpConnection, client: _Client) -> bool:
        """Answer the next request; return False if there can be no more. Keeps no reference to the request."""
        try:
            data, memory, arrived_ns, _ = await connection.receive()
        except (InvalidRequest, QueueFull) as error:
            await connection.answer(self._refuse(error))
            return False
        try:
            if data[:4] == _ZIP:
                raise InvalidRequest(
                    "expected a message in MessagePack, as GR00T N1.5 and later send it, given a pickle of torch.save"
                )
            token = find_text(data, "api_token")
            self._access.admit(Headers([("Authorization", f"Bearer {token}")] if token else []), "inference")
            call = read_message(data, memory.charge)
            del data  # a copy of it was made, and the policy may take long
            answer = write_groot_message(await client.answer(call, arrived_ns, memory.charge))
        except EdgeServerError as error:
            answer = self._refuse(error)
        finally:
            memory.release()
        await connection.answer(answer)
        return True

    def _connect(self, stream: MessageStream) -> Robot:
        self.check_room()
        robot = self._make_robot(self._model)
        try:
            self.welcome(stream)
        except ConnectionError:
            robot.close()
            raise
        return robot

    def _refuse(self, error: EdgeServerError) -> bytes:
        self.warn(error.message)
        return bytes(write_groot_message({"error": error.message}))


class _Client:
    """Client at one connection: a robot from its first call that needs a policy."""

    def __init__(self, connect: Callable[[], Robot]) -> None:
        """`connect` returns a new robot. Raises EdgeServerError."""
        self._connect = connect
        self._robot: Robot | None = None

    def close(self) -> None:
        if self._robot is not None:
            self._robot.close()

    async def answer(self, call: dict[Any, Any], arrived_ns: int, charge: Callable[[int], None]) -> Any:
        """Return the answer to a call that came at `arrived_ns` (time.monotonic_ns). `charge`: see Robot.infer. Raises
        EdgeServerError."""
        name, data = call.get("endpoint", "get_action"), call.get("data")
        if name == "ping":
            return {"status": "ok", "message": "Server is running"}
        if name == "kill":
            raise InvalidRequest("the call kill is refused: clients cannot stop this server")
        if name not in ("get_modality_config", "reset", "get_action"):
            raise InvalidRequest(
                f"expected the call ping, get_modality_config, reset or get_action, given '{str(name)[:60]}'"
            )
        if self._robot is None:
            self._robot = self._connect()
        robot = self._robot
        if name == "get_modality_config":
            return describe_modalities(robot.policy)
        if name == "reset":
            robot.end_episode()
            return {}
        is_wrapped = isinstance(data, dict) and isinstance(data.get("observation"), dict)
        observation = data.get("observation", data) if isinstance(data, dict) else data
        if not isinstance(observation, dict):
            raise InvalidRequest(
                f"expected an observation as a map, given a value of type {type(observation).__name__}"
            )
        actions = await robot.infer(observation, arrived_ns, charge)
        if not is_wrapped:
            return actions
        return [{key: value[None] for key, value in actions.items()}, {"model": robot.policy.spec.name}]


def describe_modalities(policy: Policy) -> dict[str, Any]:
    """Return the names of an observation's parts by kind, and the action's steps, as GR00T's clients read them.

    N1.5 has names like video.front in one map, and expects JSON as text. N1.6 and later have maps in maps, and refuse a
    kind without names. Some versions know one marker of the class, others the other one.
    """
    found: dict[str, list[str]] = {"video": [], "state": [], "language": []}
    steps = {"action": list(range(policy.horizon or 1))}
    is_flat = any(field.key.startswith(("video.", "state.", "annotation.")) for field in policy.inputs)
    for field in policy.inputs:
        kind, _, name = field.key.partition("." if is_flat else "/")
        kind = "language" if is_flat and kind == "annotation" else kind
        if kind in found and name:
            found[kind].append(field.key if is_flat else name)
            steps[kind] = max(steps.get(kind, [0]), _frame_steps(policy, field.spec.dims, kind), key=len)
    found["action"] = [policy.action_key if output is policy.output else output.name for output in policy.spec.outputs]
    modalities = {}
    for kind, names in found.items():
        if names:
            config = {"delta_indices": steps[kind], "modality_keys": names}
            modalities[kind] = {
                "__ModalityConfig_class__": True,
                "__ModalityConfig__": True,
                "as_json": json.dumps(config) if is_flat else config,
            }
    return modalities


def _frame_steps(policy: Policy, dims: Sequence[int], kind: str) -> list[int]:
    """Return the steps of an input's frames in relation to the newest one: a video has the dims (frames, height, width,
    channels), a state (frames, values)."""
    rank = {"video": 4, "state": 2}.get(kind, 0)
    frames = dims[-rank] if 0 < rank <= len(dims) else 1
    return list(policy.frame_steps) if frames == len(policy.frame_steps) else list(range(1 - max(frames, 1), 1))
