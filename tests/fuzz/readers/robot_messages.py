"""Messages of robots over WebSockets and ZeroMQ's protocol, in pieces of any size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from input_reader import InputReader

from edge_server.errors import EdgeServerError
from edge_server.plugins.policies.connections.message_memory import MessageMemory
from edge_server.plugins.policies.connections.message_stream import BUFFER_BYTES, MessageStream
from edge_server.plugins.policies.connections.websocket import WebSocket
from edge_server.plugins.policies.connections.zmtp import ZmtpConnection

_LOOP = asyncio.new_event_loop()
_MAX_BYTES = 100_000
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
_READY = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"


class _Transport(asyncio.Transport):
    """Takes what is written, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self  # the socket

    def setsockopt(self, *_: int) -> None:
        pass

    def writelines(self, parts: Iterable[Any]) -> None:
        self.written += sum(map(len, parts))

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def seeds() -> Iterable[bytes]:
    yield (
        b"\0\x09"
        + b"\x82\x84\1\2\3\4abcd"
        + b"\x02\x81\0\0\0\0x\x89\x80\0\0\0\0\x80\x81\0\0\0\0y"
        + b"\x88\x80\0\0\0\0"
    )
    yield b"\0\xff" + b"\x82\xfe\x00\x80\1\2\3\4" + bytes(128)
    yield (
        b"\1\x20" + _GREETING + _READY + b"\1\0\0\3abc" + b"\4\7\4PING\0\0" + b"\2" + (5).to_bytes(8, "big") + b"hello"
    )


def check(data: bytes) -> None:
    take = InputReader(data)
    read = _read_zmtp if take.byte() % 2 else _read_websocket
    _LOOP.run_until_complete(_feed(read, take.byte() + 1, take.rest()))


async def _feed(read: Any, piece_bytes: int, data: bytes) -> None:
    transport, memory = _Transport(), MessageMemory(64 << 20)
    stream = MessageStream(lambda stream: None)
    stream.connection_made(transport)
    reader = asyncio.ensure_future(read(stream, memory))
    at = 0
    while at < len(data) and not reader.done():
        await asyncio.sleep(0)
        if transport.is_paused:
            continue
        buffer = stream.get_buffer(-1)
        assert 0 < len(buffer) <= max(BUFFER_BYTES, _MAX_BYTES)
        piece = data[at : at + min(piece_bytes, len(buffer))]
        buffer[: len(piece)] = piece
        stream.buffer_updated(len(piece))
        at += len(piece)
    stream.connection_lost(None)
    total = await reader
    assert total <= len(data)
    assert transport.written <= 2 * len(data) + 500
    assert not memory._messages


async def _read_websocket(stream: MessageStream, memory: MessageMemory) -> int:
    socket, total = WebSocket(stream, memory, _MAX_BYTES), 0
    try:
        while (message := await socket.receive()) is not None:
            assert len(message.data) == message.memory.size <= _MAX_BYTES
            total += len(message.data)
            message.memory.release()
    except ConnectionError:
        pass
    return total


async def _read_zmtp(stream: MessageStream, memory: MessageMemory) -> int:
    connection, total = ZmtpConnection(stream, memory, _MAX_BYTES), 0
    try:
        await connection.shake_hands()
        while True:
            request = await connection.receive()
            assert len(request.data) == request.memory.size <= _MAX_BYTES
            total += len(request.data)
            request.memory.release()
    except (ConnectionError, EdgeServerError):
        return total
