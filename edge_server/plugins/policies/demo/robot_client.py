"""Client of a policy over openpi's WebSocket, for programs with threads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

from edge_server.errors import ServingFault
from edge_server.plugins.policies.array_messages import read_message, write_message


class RobotClient:
    """A robot's connection. `infer` may be called from any thread, by one at a time. Blocks."""

    def __init__(self, address: str) -> None:
        """`address`: ws://HOST:PORT or ws://HOST:PORT/MODEL. Raises OSError, aiohttp.ClientError."""
        self._loop = asyncio.new_event_loop()
        try:
            self._session, self._socket = self._loop.run_until_complete(self._connect(address))
        except BaseException:
            self._loop.close()
            raise
        self.metadata: Mapping[str, Any] = self._loop.run_until_complete(self._receive())

    def infer(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to an observation. Raises ServingFault with the server's sentence, or if it has left."""
        return self._loop.run_until_complete(self._ask(observation))

    def close(self) -> None:
        self._loop.run_until_complete(self._disconnect())
        self._loop.close()

    async def _connect(self, address: str) -> tuple[ClientSession, ClientWebSocketResponse[Any]]:
        session = ClientSession()
        try:
            return session, await session.ws_connect(address, compress=0, max_msg_size=0)
        except BaseException:
            await session.close()
            raise

    async def _ask(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._socket.send_bytes(write_message(observation))
        return await self._receive()

    async def _receive(self) -> Mapping[str, Any]:
        data = (await self._socket.receive()).data
        if not isinstance(data, bytes):
            raise ServingFault(data if isinstance(data, str) else "the server has closed the connection")
        return read_message(data)

    async def _disconnect(self) -> None:
        await self._socket.close()
        await self._session.close()
