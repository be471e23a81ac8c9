"""Port of openpi's protocol: a WebSocket for each robot, which sends observations and gets actions.

The server first sends the policy's metadata. Then each binary message is an observation, and its answer holds the
actions, or is a text that says what is wrong (openpi-client 0.1.2, websocket_client_policy.py). The path of the address
names the model; it may be left out if only one policy serves. GET /healthz answers 200.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError, ErrorCode, InvalidRequest, NotReady
from edge_server.frontends.http.request_head import MAX_HEAD_BYTES, Headers, RequestHead, parse_head
from edge_server.plugins.policies.array_messages import read_message, write_message
from edge_server.plugins.policies.connections.listener import RobotListener
from edge_server.plugins.policies.connections.message_memory import MAX_MESSAGE_BYTES, MessageMemory, ReceivedMessage
from edge_server.plugins.policies.connections.message_stream import MessageStream
from edge_server.plugins.policies.connections.websocket import WebSocket, accept_websocket
from edge_server.plugins.policies.robot_session import Robot

if TYPE_CHECKING:
    from edge_server.frontends.http.access_check import AccessCheck

_GOING_AWAY = 1001
"""Code of a WebSocket's end (RFC 6455, 7.4.1)."""

_STATUS = {ErrorCode.NOT_FOUND: 404, ErrorCode.INVALID_ARG: 400, ErrorCode.UNAUTHENTICATED: 401,
           ErrorCode.PERMISSION_DENIED: 403, ErrorCode.RESOURCE_EXHAUSTED: 503, ErrorCode.UNAVAILABLE: 503}  # fmt: skip


class OpenpiPort(RobotListener):
    """Listens on one address, and answers from `start` to `stop`. Lives on one event loop."""

    def __init__(
        self, access: AccessCheck, memory: MessageMemory, make_robot: Callable[[str], Robot], address: str
    ) -> None:
        """`make_robot(name)` returns a robot of this wire for a model, "": the only policy. Listens, to know that no
        other server does; clients wait until `start`. Raises ServingFault."""
        super().__init__("--policy-openpi", address, self._serve_robot)
        self.url = f"ws://{self.address}"
        self._access = access
        self._memory = memory
        self._make_robot = make_robot
        self._robots: set[WebSocket] = set()
        self._is_stopping = False

    async def stop(self) -> None:
        """Tell robots that the server stops, and close all connections. May be called again."""
        self._is_stopping = True
        self.stop_listening()
        ends = [robot.close(_GOING_AWAY, "the server stops") for robot in self._robots]
        await asyncio.gather(*ends, return_exceptions=True)
        await super().stop()

    async def _serve_robot(self, stream: MessageStream) -> None:
        try:
            head = parse_head(await stream.read_until(b"\r\n\r\n", MAX_HEAD_BYTES))
            if head.target == "/healthz":
                await stream.write(_http_answer(200, "OK"))
                return
            answer, robot = self._connect(head)
        except EdgeServerError as error:
            self.warn(error.message)
            await stream.write(_http_answer(_STATUS.get(error.code, 500), error.message))
            return
        socket = WebSocket(stream, self._memory, MAX_MESSAGE_BYTES)
        self._robots.add(socket)
        try:
            self.welcome(stream)
            await stream.write(answer)
            await _Conversation(socket, robot).run()
        finally:
            self._robots.discard(socket)
            robot.close()

    def _connect(self, head: RequestHead) -> tuple[bytes, Robot]:
        """Return the answer to a request that opens a WebSocket, and its robot. Raises EdgeServerError."""
        if self._is_stopping:
            raise NotReady("the server stops")
        self._access.admit(_access_headers(head.headers), "inference")
        try:
            answer = accept_websocket(head)
        except InvalidRequest as error:
            raise InvalidRequest(f"openpi's protocol at {self.url}/MODEL: {error.message}") from None
        self.check_room()
        return answer, self._make_robot(head.target.partition("?")[0].strip("/"))


class _Conversation:
    """Observations of one robot and their answers. While an observation runs, the newest other one waits, and each one
    that it overtakes is answered with a text. Answers have the order of the observations."""

    def __init__(self, socket: WebSocket, robot: Robot) -> None:
        self._socket = socket
        self._robot = robot
        self._waiting: ReceivedMessage | None = None
        self._overtaken = 0
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Return when the robot leaves. Raises ConnectionError."""
        policy = self._robot.policy
        metadata = {"model": policy.spec.name, "action_key": policy.action_key, "action_horizon": policy.horizon,
                    "action_dt_ms": policy.dt_ms, **policy.metadata}  # fmt: skip
        await self._socket.send(write_message(metadata))
        try:
            while await self._take(await self._socket.receive()):
                pass
        finally:
            if self._running is not None:
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
            if self._waiting is not None:
                self._waiting.memory.release()

    async def _take(self, received: ReceivedMessage | None) -> bool:
        """Run an observation, or let it wait. Return False at the end. Keeps no reference to a message."""
        if received is None:
            return False
        if received.is_text:
            received.memory.release()
            await self._socket.send("expected an observation as a binary message in MessagePack")
            return True
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._answer(received))
            self._running.add_done_callback(self._end_if_failed)
            return True
        if self._waiting is not None:
            self._waiting.memory.release()
            self._overtaken += 1
            self._robot.overtake()
        self._waiting = received
        return True

    def _end_if_failed(self, answer: asyncio.Task[None]) -> None:
        """End the conversation by the error of an answer: the robot would wait for ever."""
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, Exception):
            self._socket.fail(error)

    async def _answer(self, observation: ReceivedMessage) -> None:
        """Answer an observation, and those that come meanwhile."""
        while True:
            data, memory, arrived_ns, _ = observation
            del observation
            try:
                content = read_message(data, memory.charge)
                del data  # a copy of it was made, and the policy may take long
                answer = await self._robot.infer(content, arrived_ns, memory.charge)
            except EdgeServerError as error:
                await self._socket.send(error.message)
            else:
                infer_ms = (time.monotonic_ns() - arrived_ns) / 1e6
                await self._socket.send(write_message({**answer, "server_timing": {"infer_ms": infer_ms}}))
            finally:
                memory.release()
            if self._waiting is None:
                return
            observation, self._waiting = self._waiting, None
            overtaken, self._overtaken = self._overtaken, 0
            for _ in range(overtaken):
                await self._socket.send("the observation was overtaken by a newer one")


def _http_answer(status: int, text: str) -> bytes:
    body = f"{text}\n".encode("utf-8", "replace")
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body


def _access_headers(headers: Headers) -> Headers:
    """Return the headers with openpi's form of a key, "Api-Key KEY", as the token of the server."""
    fields = []
    for name, value in headers.items():
        scheme, _, key = value.partition(" ")
        is_key = name.lower() == "authorization" and scheme.lower() == "api-key"
        fields.append((name, f"Bearer {key}" if is_key else value))
    return Headers(fields)
