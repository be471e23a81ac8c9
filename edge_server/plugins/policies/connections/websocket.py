"""WebSocket of a server (RFC 6455): the answer to the request that opens it, and messages. No extensions.

The package `websockets` reads and writes requests and frames. Its connections are not used, nor aiohttp's: they collect
a message before they give it (15 unfinished ones of 31 MB took 458 MB in aiohttp), and say no size before, by which
large ones could take turns. A frame that is read by itself asks for its payload by size: memory is taken first. wsproto
unmasks in Python, at 3 to 6 ms for a megabyte.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator

from websockets.exceptions import PayloadTooBig, ProtocolError
from websockets.frames import Close, CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from edge_server.errors import InvalidRequest, QueueFull
from edge_server.frontends.http.request_head import RequestHead
from edge_server.plugins.policies.connections.message_memory import HeldMessage, MessageMemory, ReceivedMessage
from edge_server.plugins.policies.connections.message_stream import MessageStream

_FIELDS = {"connection", "upgrade", "sec-websocket-key", "sec-websocket-version"}
_MAX_OPENING_BYTES = 1024
"""The library takes 1.5 ms for each KiB of a list in a field."""

_MAX_CONTROL_BYTES = 125
_FRAMES_AT_ONCE = 16
"""Frames that are read before other connections are served."""


def accept_websocket(head: RequestHead) -> bytes:
    """Return the answer to a request that opens a WebSocket. Raises InvalidRequest."""
    fields = (f"{name}: {value}\r\n" for name, value in head.headers.items() if name.lower() in _FIELDS)
    opening = f"{head.method} / HTTP/1.1\r\n{''.join(fields)}\r\n".encode("utf-8", "surrogateescape")
    protocol = ServerProtocol()
    if len(opening) <= _MAX_OPENING_BYTES:
        protocol.receive_data(opening)
    for request in protocol.events_received():
        if isinstance(request, Request) and (answer := protocol.accept(request)).status_code == 101:
            return answer.serialize()
    raise InvalidRequest(
        "expected GET with the headers Upgrade: websocket, Connection: Upgrade, Sec-WebSocket-Version: 13, and "
        "Sec-WebSocket-Key with 16 bytes in base64"
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
        held = self._memory.begin(self._stream.fail)
        try:
            return await self._receive(held)
        except ProtocolError as error:
            await self.close(CloseCode.PROTOCOL_ERROR, str(error))
        except UnicodeDecodeError:
            await self.close(CloseCode.INVALID_DATA, "expected the reason of a close in UTF-8")
        except PayloadTooBig:
            await self.close(CloseCode.MESSAGE_TOO_BIG, f"expected a message of at most {self._max_bytes} bytes")
        except QueueFull as error:
            await self.close(CloseCode.TRY_AGAIN_LATER, error.message)
        finally:
            if not held.is_complete:
                held.release()
        return None

    async def send(self, message: bytes | str) -> None:
        """Send a binary message or a text. Raises ConnectionError."""
        if isinstance(message, str):
            await self._send_frame(Opcode.TEXT, message.encode("utf-8", "replace"))
        else:
            await self._send_frame(Opcode.BINARY, message)

    async def close(self, code: int, reason: str = "") -> None:
        """Tell the client that the connection ends, once. `reason`: at most 123 bytes. Raises ConnectionError."""
        if not self._is_closing:
            self._is_closing = True
            await self._send_frame(Opcode.CLOSE, Close(code, reason).serialize())

    def fail(self, error: Exception) -> None:
        """Raise an error in the task that receives."""
        self._stream.fail(error)

    async def _receive(self, held: HeldMessage) -> ReceivedMessage | None:
        opcode: Opcode | None = None
        joined = bytearray()
        while True:
            self._frame_count += 1
            if self._frame_count % _FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
            frame = await self._read_frame(held, max(self._max_bytes - len(joined), _MAX_CONTROL_BYTES))
            if frame.opcode is Opcode.CLOSE:
                Close.parse(bytes(frame.data))
                await self.close(CloseCode.NORMAL_CLOSURE)
                return None
            if frame.opcode is Opcode.PING:
                await self._send_frame(Opcode.PONG, frame.data)
            if frame.opcode in (Opcode.PING, Opcode.PONG):
                continue
            if (frame.opcode is Opcode.CONT) == (opcode is None):
                raise ProtocolError("a frame is not the one that has to follow")
            opcode = opcode or frame.opcode
            size = len(frame.data)
            if len(joined) + size > self._max_bytes:
                raise PayloadTooBig(size, self._max_bytes)
            if size <= _MAX_CONTROL_BYTES:
                await held.grow(size)
            if joined or not frame.fin:
                joined += frame.data
            if frame.fin:
                held.is_complete = True
                data = memoryview(joined or frame.data)
                return ReceivedMessage(data, held, time.monotonic_ns(), opcode is Opcode.TEXT)
            del frame  # else its data would be held until the next frame has come

    async def _read_frame(self, held: HeldMessage, max_bytes: int) -> Frame:
        """Return the next frame. Its payload is counted before it is received, unless it may be that of a control
        frame, which is no part of the message: only the whole frame tells what it is."""
        size = 0
        data: bytes | bytearray = b""

        def read(nbytes: int) -> Generator[None, None, bytes | bytearray]:
            nonlocal size
            size = nbytes
            yield
            return data

        steps = Frame.parse(read, mask=True, max_size=max_bytes)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                frame: Frame = end.value
                return frame
            if size <= _MAX_CONTROL_BYTES:
                data = await self._stream.read(size)
            else:
                await held.grow(size)
                data = bytearray(size)
                await self._stream.read_into(memoryview(data))

    async def _send_frame(self, opcode: Opcode, data: bytes | bytearray | memoryview) -> None:
        await self._stream.write(Frame(opcode, data).serialize(mask=False))
