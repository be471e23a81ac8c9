"""WebSocket of a server (RFC 6455): the answer to the request that opens it, and messages in frames. No extensions."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from typing import NamedTuple

import numpy as np

from edge_server.errors import InvalidRequest, QueueFull
from edge_server.frontends.http.request_head import RequestHead
from edge_server.plugins.policies.connections.message_memory import HeldMessage, MessageMemory
from edge_server.plugins.policies.connections.message_stream import MessageStream

_ACCEPT_KEY = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455, section 1.3."""

_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = _OPCODES = 0, 1, 2, 8, 9, 10
_NORMAL, _PROTOCOL_ERROR, _TOO_LARGE, _TRY_AGAIN_LATER = 1000, 1002, 1009, 1013
_MAX_CONTROL_BYTES = 125
_PIECE_BYTES = 1 << 20
"""What is unmasked at a time, before the next part is received. Divisible by 4, the length of a mask."""

_FRAMES_AT_ONCE = 64
"""Frames that are read before other connections are served."""


class ReceivedMessage(NamedTuple):
    data: memoryview
    is_text: bool
    memory: HeldMessage
    """To be released once the data is not used any more."""


class _Wrong(Exception):
    """The client breaks the protocol, or its message is too large: the connection ends with a code and a reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def accept_websocket(head: RequestHead) -> bytes:
    """Return the answer to a request that opens a WebSocket. Raises InvalidRequest."""
    headers = head.headers
    key = headers.get("sec-websocket-key") or ""
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        is_key = False
    is_upgrade = head.method == "GET" and (headers.get("upgrade") or "").lower() == "websocket"
    if not is_upgrade or not is_key or headers.get("sec-websocket-version") != "13":
        raise InvalidRequest(
            "expected GET with the headers Upgrade: websocket, Sec-WebSocket-Version: 13, and Sec-WebSocket-Key with "
            "16 bytes in base64"
        )
    digest = base64.b64encode(hashlib.sha1(key.encode() + _ACCEPT_KEY, usedforsecurity=False).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
        + digest
        + b"\r\n\r\n"
    )


class WebSocket:
    """The messages of a connection that was accepted. One task calls `receive`; `send` and `close` may be called by
    others."""

    def __init__(self, stream: MessageStream, memory: MessageMemory, max_bytes: int) -> None:
        """`max_bytes`: of one message."""
        self._stream = stream
        self._memory = memory
        self._max_bytes = max_bytes
        self._is_closing = False
        self._frame_count = 0

    async def receive(self) -> ReceivedMessage | None:
        """Return the next message, or None at the end: the client closes, or it broke the protocol, or there is no
        memory for its message, of which it was told. Raises ConnectionError."""
        try:
            return await self._receive()
        except _Wrong as wrong:
            await self.close(wrong.code, str(wrong))
        except QueueFull as error:
            await self.close(_TRY_AGAIN_LATER, error.message)
        return None

    async def send(self, message: bytes | str) -> None:
        """Send a binary message or a text. Raises ConnectionError."""
        if isinstance(message, str):
            await self._send_frame(_TEXT, message.encode("utf-8", "replace"))
        else:
            await self._send_frame(_BINARY, message)

    async def close(self, code: int, reason: str = "") -> None:
        """Tell the client that the connection ends, once. Raises ConnectionError."""
        if not self._is_closing:
            self._is_closing = True
            await self._send_frame(_CLOSE, code.to_bytes(2, "big") + reason.encode()[: _MAX_CONTROL_BYTES - 2])

    def fail(self, error: Exception) -> None:
        """Raise an error in the task that receives."""
        self._stream.fail(error)

    async def _receive(self) -> ReceivedMessage | None:
        held: HeldMessage | None = None
        joined: bytearray | None = None
        is_text = False
        try:
            while True:
                self._frame_count += 1
                if self._frame_count % _FRAMES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                is_final, opcode, size = await self._read_header()
                if opcode in (_CLOSE, _PING, _PONG):
                    payload = bytes(await self._read_payload(size, None))
                    if opcode == _CLOSE:
                        await self.close(_NORMAL)
                        return None
                    if opcode == _PING:
                        await self._send_frame(_PONG, payload)
                    continue
                if (opcode == _CONTINUATION) == (held is None):
                    raise _Wrong(_PROTOCOL_ERROR, "a frame is not the one that has to follow")
                if held is None:
                    held, is_text = self._memory.begin(self._stream.fail), opcode == _TEXT
                if size + (len(joined) if joined is not None else 0) > self._max_bytes:
                    raise _Wrong(_TOO_LARGE, f"expected a message of at most {self._max_bytes} bytes")
                data = await self._read_payload(size, held)
                if joined is not None or not is_final:
                    joined = bytearray() if joined is None else joined
                    joined += data
                    data = memoryview(b"")  # else it would be held until the next frame has come
                if is_final:
                    message = ReceivedMessage(data if joined is None else memoryview(joined), is_text, held)
                    held.is_complete = True
                    held = None
                    return message
        finally:
            if held is not None:
                held.release()

    async def _read_header(self) -> tuple[bool, int, int]:
        """Return whether the frame is the last one of its message, its opcode, and its size."""
        first, second = await self._stream.read(2)
        opcode, size = first & 0x0F, second & 0x7F
        is_final = first >= 0x80
        if first & 0x70 or opcode not in _OPCODES or second < 0x80:
            raise _Wrong(_PROTOCOL_ERROR, "expected a frame with a mask and a known opcode, without extensions")
        if opcode >= _CLOSE and (not is_final or size > _MAX_CONTROL_BYTES):
            raise _Wrong(_PROTOCOL_ERROR, f"expected a control frame of at most {_MAX_CONTROL_BYTES} bytes")
        if size > _MAX_CONTROL_BYTES:
            size = int.from_bytes(await self._stream.read(2 if size == _MAX_CONTROL_BYTES + 1 else 8), "big")
        return is_final, opcode, size

    async def _read_payload(self, size: int, held: HeldMessage | None) -> memoryview:
        mask = await self._stream.read(4)
        if held is not None:
            await held.grow(size)
        payload = np.empty(size, np.uint8)
        for start in range(0, size, _PIECE_BYTES):
            piece = payload[start : start + _PIECE_BYTES]
            await self._stream.read_into(piece.data)
            whole = len(piece) & ~3
            words = piece[:whole].view(np.uint32)
            words ^= np.frombuffer(mask, np.uint32)
            piece[whole:] ^= np.frombuffer(mask, np.uint8)[: len(piece) - whole]
        return payload.data

    async def _send_frame(self, opcode: int, payload: bytes) -> None:
        size = len(payload)
        if size <= _MAX_CONTROL_BYTES:
            header = bytes((0x80 | opcode, size))
        elif size < 1 << 16:
            header = bytes((0x80 | opcode, 126)) + size.to_bytes(2, "big")
        else:
            header = bytes((0x80 | opcode, 127)) + size.to_bytes(8, "big")
        await self._stream.write(header, payload)
