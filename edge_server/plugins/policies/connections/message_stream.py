"""Byte stream of a connection for protocols whose messages say their length: large parts are received where they stay,
without a copy."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
from collections.abc import Callable

from edge_server.errors import InvalidRequest

BUFFER_BYTES = 64 * 1024
"""Buffer for what was received before it was asked for. `read` returns at most so much."""

_WRITE_S = 10.0
"""A client that takes nothing for so long is gone."""

_FINISH_S = 2.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 2))
"""A robot that was switched off is gone after 30 seconds. In seconds; the last one is a number of probes."""

_GONE = "the client has left"


class MessageStream(asyncio.BufferedProtocol):
    """One connection. All calls are made on its event loop; one task reads."""

    def __init__(self, on_connected: Callable[[MessageStream], None]) -> None:
        self._on_connected = on_connected
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        """The received bytes in the buffer that were not read."""
        self._target: memoryview | None = None
        """What a reader waits to be filled; bytes go there before the buffer."""
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_closed = asyncio.Event()
        self._discards = False

    # -- reading and writing -----------------------------------------------------------------------------------------

    async def read(self, size: int) -> bytes:
        """Return the next `size` bytes, at most BUFFER_BYTES. Raises ConnectionError, and the error of `fail`."""
        while self._end - self._start < size:
            await self._receive()
        return self._take(size)

    async def read_until(self, end: bytes, max_bytes: int) -> bytes:
        """Return the bytes up to `end`, with it. Raises InvalidRequest if they are more than `max_bytes`."""
        while (at := bytes(self._buffer[self._start : self._end]).find(end)) < 0:
            if self._end - self._start >= min(max_bytes, BUFFER_BYTES):
                raise InvalidRequest(f"expected {end!r} within {max_bytes} bytes")
            await self._receive()
        return self._take(at + len(end))

    async def read_into(self, target: memoryview) -> None:
        """Fill the target with the next bytes. Raises ConnectionError, and the error of `fail`."""
        count = min(self._end - self._start, len(target))
        target[:count] = self._buffer[self._start : self._start + count]
        self._skip(count)
        if count == len(target):
            return
        self._target = target[count:]
        try:
            while self._target is not None:
                await self._receive()
        finally:
            self._target = None

    async def write(self, *parts: bytes) -> None:
        """Send bytes; wait while the client takes none. Raises ConnectionError."""
        if self._is_closed.is_set():
            raise ConnectionResetError(_GONE)
        self._transport.writelines(parts)
        if not self._may_write.is_set():
            try:
                await asyncio.wait_for(self._may_write.wait(), _WRITE_S)
            except asyncio.TimeoutError:
                self._transport.abort()
                raise ConnectionAbortedError("the client takes nothing") from None

    def fail(self, error: Exception) -> None:
        """Raise an error in the task that reads, now or when it reads next."""
        self._error = self._error or error
        self._wake()

    async def finish(self) -> None:
        """Send what was written, and close. A client that still sends gets some time to read the end."""
        self._discards = True
        if not self._transport.is_closing():
            self._transport.resume_reading()
            # OSError: the client is gone, and the loop has not heard of it.
            with contextlib.suppress(asyncio.TimeoutError, OSError):
                self._transport.write_eof()
                await asyncio.wait_for(self._is_closed.wait(), _FINISH_S)
        self._transport.abort()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # -- asyncio.BufferedProtocol ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._on_connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._discards:
            return self._buffer
        return self._buffer[self._end :] if self._target is None else self._target

    def buffer_updated(self, nbytes: int) -> None:
        if self._discards:
            return
        if self._target is None:
            self._end += nbytes
            if self._end == BUFFER_BYTES:
                self._transport.pause_reading()
        elif nbytes < len(self._target):
            self._target = self._target[nbytes:]
            return
        else:
            self._target = None
        self._wake()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(ConnectionResetError(_GONE))
        self._may_write.set()
        self._is_closed.set()

    # ----------------------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Wait until more was received."""
        self._raise_error()
        if self._start and self._target is None:
            count = self._end - self._start
            self._buffer[:count] = self._buffer[self._start : self._end]
            self._start, self._end = 0, count
        self._transport.resume_reading()
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            # A copy: its traceback holds what was received of a message, and must not stay as long as the connection.
            raise copy.copy(self._error)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[self._start : self._start + size])
        self._skip(size)
        return data

    def _skip(self, size: int) -> None:
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
