"""Message channel between the server and a model's process: pickles, with large arrays in shared memory.

A message is any picklable tuple. On the socket: a header, the sizes of the arrays, the pickle, then the arrays
themselves when they are small. Both ends are this package's, of one version; isolation is there for models that crash,
not against models that mean harm.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
import time
from typing import Any

from edge_server.backends.python.shared_arena import Arena, ArenaReader

_HEADER = struct.Struct("<4sIIqQ")
"""_BEGIN, bytes of the pickle, number of arrays, offset of the first in the shared memory (-1: they follow), size of
it."""

_BEGIN = b"EDGE"

_FOLLOWS = -1
_SMALL_BYTES = 64 << 10
"""Arrays of so many bytes together go through the socket: copying them costs less than giving memory back."""


class MalformedMessage(Exception):
    """What arrived is no message: the model wrote to a file descriptor that is not its own."""


class Channel:
    """One end. `send` may be called by any thread, `receive` by one. Raises OSError or EOFError once it is cut."""

    def __init__(self, line: socket.socket, arena: Arena, other_fd: int) -> None:
        self.arena = arena
        self._line = line
        self._reader = ArenaReader(other_fd)
        self._sending = threading.Lock()
        self._freed: list[int] = []

    def send(self, message: tuple[Any, ...] | None) -> int | None:
        """Send a message and return the place in this end's shared memory that its arrays take, if they take one."""
        with self._sending:
            return self._send(message)

    def send_within(self, message: tuple[Any, ...], limit_s: float) -> bool:
        """Send a message without arrays, or return False: the other end has read nothing for so long."""
        until = time.monotonic() + limit_s
        if not self._sending.acquire(timeout=limit_s):
            return False
        try:
            room = select.poll()
            room.register(self._line, select.POLLOUT)
            if not room.poll(max(0.0, until - time.monotonic()) * 1000):
                return False
            self._send(message)
            return True
        finally:
            self._sending.release()

    def _send(self, message: tuple[Any, ...] | None) -> int | None:
        """As `send`. *Locked.*"""
        buffers: list[memoryview] = []
        freed = tuple(self._freed)
        data = pickle.dumps((freed, message), protocol=5, buffer_callback=lambda item: buffers.append(item.raw()))
        # Only now: a message that cannot be written must not take them along.
        del self._freed[: len(freed)]
        sizes = [len(buffer) for buffer in buffers]
        offset = _FOLLOWS if sum(sizes) <= _SMALL_BYTES else self.arena.write(buffers)
        parts = [
            _HEADER.pack(_BEGIN, len(data), len(sizes), offset, self.arena.size),
            struct.pack(f"<{len(sizes)}Q", *sizes),
        ]
        parts.append(data)
        if offset == _FOLLOWS:
            parts += [bytes(buffer) for buffer in buffers]
        self._line.sendall(b"".join(parts))
        return None if offset == _FOLLOWS else offset

    def receive(self) -> tuple[tuple[Any, ...] | None, int | None]:
        """Return the next message, and the place in the other end's shared memory that its arrays lie in, if they do:
        they hold until that place is given to `free`. Raises Garbled, and what unpickling raises, where it is none."""
        begin, length, count, offset, arena_size = _HEADER.unpack(self._read(_HEADER.size))
        if begin != _BEGIN:
            raise MalformedMessage(f"{begin!r} where a message should begin")
        sizes = struct.unpack(f"<{count}Q", self._read(8 * count)) if count else ()
        data = self._read(length)
        if offset == _FOLLOWS:
            buffers = [memoryview(self._read(size)) for size in sizes]
        else:
            buffers = self._reader.read(offset, sizes, arena_size)
        freed, message = pickle.loads(data, buffers=buffers)
        for place in freed:
            self.arena.free(place)
        return message, None if offset == _FOLLOWS else offset

    def free(self, place: int | None) -> None:
        """Say, with the next message, that the arrays received there are not needed any more."""
        if place is not None:
            # Without the lock, as this thread has to read on: who holds it may wait for the other end, and that for us.
            self._freed.append(place)

    def flush(self) -> None:
        """Say so now."""
        if self._freed:
            self.send(None)

    def cut(self) -> None:
        """End the connection: both ends' `receive` raises."""
        try:
            self._line.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Give everything back. Nobody may be sending or receiving."""
        self._line.close()
        self.arena.close()
        self._reader.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        position = 0
        while position < size:
            count = self._line.recv_into(view[position:])
            if count == 0:
                raise EOFError("the other process closed the connection")
            position += count
        return data
