"""ZeroMQ's protocol for a server that answers requests: ZMTP 3.0 (RFC 23 of ZeroMQ) without security, for clients with
a REQ or a DEALER socket.

Own, because ZeroMQ's library has no bound on the parts of a message that is not complete: it keeps them all, however
small each must be (a ROUTER with MAXMSGSIZE of 1 MiB and a high-water mark of 1 took 275 MB). Here the first part that
is not empty must be the last one, and its size is known before memory is taken. The library also says nothing of
connections, and bounds the memory of each alone.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.plugins.policies.connections.message_memory import MessageMemory, ReceivedMessage
from edge_server.plugins.policies.connections.message_stream import MessageStream

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = (_SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0")).ljust(64, b"\0")
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_COMMAND_BYTES = 512
_FRAMES_AT_ONCE = 16
"""Frames that are read before other connections are served."""


class ZmtpConnection:
    """A client's connection. One task calls its methods."""

    def __init__(self, stream: MessageStream, memory: MessageMemory, max_bytes: int) -> None:
        """`max_bytes`: of one message."""
        self._stream = stream
        self._memory = memory
        self._max_bytes = max_bytes
        self._frame_count = 0
        self._has_delimiter = False
        """Whether the newest request came with an empty part before it, as a REQ socket sends and expects it."""

    async def shake_hands(self) -> None:
        """Raises ConnectionError, and InvalidRequest for any other protocol, mechanism or type of socket."""
        await self._stream.write(_GREETING)
        greeting = await self._stream.read(len(_GREETING))
        if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3 or greeting[12:32] != _GREETING[12:32]:
            raise InvalidRequest("expected ZeroMQ's protocol 3 with the mechanism NULL")
        await self._send_frame(_COMMAND, b"\x05READY" + _property(b"Socket-Type", b"ROUTER"))
        flags, size = await self._read_header()
        command = await self._stream.read(size) if flags & _COMMAND else b""
        if not command.startswith(b"\x05READY") or not any(
            _property(b"Socket-Type", kind) in command for kind in (b"REQ", b"DEALER")
        ):
            raise InvalidRequest("expected a REQ or DEALER socket of ZeroMQ")

    async def receive(self) -> ReceivedMessage:
        """Return the next request. Raises ConnectionError; InvalidRequest and QueueFull for one that is not read, after
        which `answer` may still be called, and nothing else."""
        self._has_delimiter = False
        while True:
            self._frame_count += 1
            if self._frame_count % _FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
            flags, size = await self._read_header()
            if flags & _COMMAND:
                command = await self._stream.read(size)
                if command.startswith(b"\x04PING"):
                    await self._send_frame(_COMMAND, b"\x04PONG" + command[7:])
            elif not flags & _MORE:
                return await self._read_request(size)
            elif size or self._has_delimiter:
                raise InvalidRequest("expected a message of one part")
            else:
                self._has_delimiter = True

    async def answer(self, data: bytes) -> None:
        """Answer the newest request. Raises ConnectionError."""
        if self._has_delimiter:
            await self._send_frame(_MORE, b"")
        await self._send_frame(0, data)

    async def _read_header(self) -> tuple[int, int]:
        """Return the flags and the size of a frame."""
        (flags,) = await self._stream.read(1)
        size = int.from_bytes(await self._stream.read(8 if flags & _LONG else 1), "big")
        if flags > _MORE | _LONG | _COMMAND or (flags & _COMMAND and size > _MAX_COMMAND_BYTES):
            raise InvalidRequest("expected a frame of ZeroMQ's protocol 3")
        return flags, size

    async def _read_request(self, size: int) -> ReceivedMessage:
        if size > self._max_bytes:
            raise InvalidRequest(f"expected a message of at most {self._max_bytes} bytes, given {size}")
        held = self._memory.begin(self._stream.fail)
        try:
            await held.grow(size)
            data = np.empty(size, np.uint8).data
            await self._stream.read_into(data)
        except BaseException:
            held.release()
            raise
        held.is_complete = True
        return ReceivedMessage(data, held, time.monotonic_ns())

    async def _send_frame(self, flags: int, data: bytes) -> None:
        size = len(data)
        is_long = size > 255
        header = bytes((flags | _LONG * is_long,)) + size.to_bytes(8 if is_long else 1, "big")
        await self._stream.write(header, data)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
