"""Port of openpi's protocol: a WebSocket for each robot, which sends observations and gets actions.

The server first sends the policy's metadata. Then each binary message is an observation, and its answer holds the
actions, or is a text that says what is wrong (openpi-client 0.1.2, websocket_client_policy.py). The path of the address
names the model; it may be left out if only one policy serves. GET /healthz answers 200.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from edge_server.errors import (
    EdgeServerError,
    ErrorCode,
    InvalidRequest,
    NotReady,
    QueueFull,
    ServingFault,
)
from edge_server.frontends.http.request_head import Headers
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.plugins.policies.array_messages import MAX_MESSAGE_BYTES, read_message, write_message
from edge_server.plugins.policies.policy_counters import PolicyCounters
from edge_server.plugins.policies.robot import Robot
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.frontends.http.access_check import AccessCheck

log = logging.getLogger(__name__)

MAX_ROBOTS = 16
MAX_CONNECTIONS = 64
"""Also of clients that have not become a robot yet."""

_BACKLOG = 64
_HANDSHAKE_S = 10.0
_PING_EVERY_S = 20.0
"""A robot that does not answer a ping within half of it is gone."""

_WARNING_EVERY_S = 5.0
_STATUS = {ErrorCode.NOT_FOUND: 404, ErrorCode.INVALID_ARG: 400, ErrorCode.UNAUTHENTICATED: 401,
           ErrorCode.PERMISSION_DENIED: 403, ErrorCode.RESOURCE_EXHAUSTED: 503, ErrorCode.UNAVAILABLE: 503}  # fmt: skip


class OpenpiPort:
    """Listens on one address, and answers from `start` to `stop`. Lives on one event loop."""

    def __init__(
        self,
        service: InferenceService,
        access: AccessCheck,
        counters: PolicyCounters,
        choose_policy: Callable[[str], str],
        address: str,
    ) -> None:
        """`choose_policy(name)` returns the model for a name, "": the only policy. Listens, to know that no other
        server does; clients wait until `start`. Raises ServingFault."""
        self._service = service
        self._access = access
        self._counters = counters
        self._choose_policy = choose_policy
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, place = found[0]
            self._socket = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:
            raise ServingFault(f"--policy-openpi={address}: cannot listen: {error}") from None
        self.address = f"ws://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._waiting: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Connections that have not become a robot's yet, oldest first."""
        self._robots: set[web.WebSocketResponse] = set()
        self._is_stopping = False
        self._next_warning_s = 0.0

    async def start(self) -> None:
        """Answer the clients that wait, and all later ones."""
        loop = asyncio.get_running_loop()
        self._dispatch = LoopDispatch(loop)
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._listener = await loop.create_server(self._accept, sock=self._socket)

    def stop_listening(self) -> None:
        """Accept no more connections. May be called again."""
        if self._listener is None:
            self._socket.close()
        else:
            self._listener.close()

    async def stop(self) -> None:
        """Close all connections. Observations that run get no answer."""
        self._is_stopping = True
        self.stop_listening()
        for robot in list(self._robots):
            await robot.close(code=1001, message=b"the server stops")
        if self._server is not None:
            await self._server.shutdown(1.0)

    def _accept(self) -> asyncio.BaseProtocol:
        assert self._server is not None
        if len(self._server.connections) >= MAX_CONNECTIONS:
            if not self._waiting:
                return _RefusedConnection()
            self._close(next(iter(self._waiting)))
        connection = self._server()
        self._waiting[connection] = asyncio.get_running_loop().call_later(_HANDSHAKE_S, self._close, connection)
        return connection

    def _close(self, connection: web.RequestHandler) -> None:
        """Close a connection that has not become a robot's."""
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
            connection.force_close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/healthz":
            return web.Response(text="OK\n")
        try:
            robot = self._connect(request)
        except EdgeServerError as error:
            self._warn(error.message)
            return web.Response(text=f"{error.message}\n", status=_STATUS.get(error.code, 500))
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False, heartbeat=_PING_EVERY_S)
        self._robots.add(socket)
        try:
            await socket.prepare(request)
            timer = self._waiting.pop(request.protocol, None)
            if timer is not None:
                timer.cancel()
            await _Conversation(socket, robot).run()
        except ConnectionError:
            pass  # the robot has left
        finally:
            self._robots.discard(socket)
            robot.close()
        return socket

    def _connect(self, request: web.BaseRequest) -> Robot:
        """Return the robot of a request that opens a WebSocket. Raises EdgeServerError."""
        if self._is_stopping:
            raise NotReady("the server stops")
        self._access.admit(_access_headers(request.headers), "inference")
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise InvalidRequest(f"expected a WebSocket of openpi's protocol at {self.address}/MODEL")
        if len(self._robots) >= MAX_ROBOTS:
            raise QueueFull(f"{MAX_ROBOTS} robots are connected, which is the maximum")
        model = self._choose_policy(request.path.strip("/"))
        return Robot(self._service, self._dispatch, self._counters, model, "openpi")

    def _warn(self, message: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + _WARNING_EVERY_S
            log.warning("a client of --policy-openpi was refused: %s", message)


class _Conversation:
    """Observations of one robot and their answers. While an observation runs, the newest other one waits, and each one
    that it overtakes is answered with a text. Answers have the order of the observations."""

    def __init__(self, socket: web.WebSocketResponse, robot: Robot) -> None:
        self._socket = socket
        self._robot = robot
        self._waiting: tuple[bytes, int] | None = None
        self._overtaken = 0
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Return when the robot leaves. Raises ConnectionError."""
        policy = self._robot.policy
        metadata = {"model": policy.spec.name, "action_key": policy.action_key, "action_horizon": policy.horizon,
                    "action_dt_ms": policy.dt_ms, **policy.metadata}  # fmt: skip
        await self._socket.send_bytes(write_message(metadata))
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.BINARY:
                    await self._socket.send_str("expected an observation as a binary message in MessagePack")
                    continue
                observation = message.data, time.monotonic_ns()
                if self._running is None or self._running.done():
                    self._running = asyncio.create_task(self._answer(*observation))
                    continue
                if self._waiting is not None:
                    self._overtaken += 1
                    self._robot.overtake()
                self._waiting = observation
        finally:
            if self._running is not None:
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)

    async def _answer(self, data: bytes, arrived_ns: int) -> None:
        """Answer an observation, and those that come meanwhile."""
        while True:
            try:
                answer: dict[str, Any] = await self._robot.infer(read_message(data), arrived_ns)
            except EdgeServerError as error:
                await self._socket.send_str(error.message)
            else:
                infer_ms = (time.monotonic_ns() - arrived_ns) / 1e6
                await self._socket.send_bytes(write_message({**answer, "server_timing": {"infer_ms": infer_ms}}))
            if self._waiting is None:
                return
            (data, arrived_ns), self._waiting = self._waiting, None
            overtaken, self._overtaken = self._overtaken, 0
            for _ in range(overtaken):
                await self._socket.send_str("the observation was overtaken by a newer one")


class _RefusedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _access_headers(headers: Mapping[str, str]) -> Headers:
    """Return the headers with openpi's form of a key, "Api-Key KEY", as the token of the server."""
    fields = []
    for name, value in headers.items():
        scheme, _, key = value.partition(" ")
        is_key = name.lower() == "authorization" and scheme.lower() == "api-key"
        fields.append((name, f"Bearer {key}" if is_key else value))
    return Headers(fields)
