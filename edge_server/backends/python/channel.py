"""Messages between the server and the process of a model: pickled, large arrays through shared memory.

A message is any picklable tuple. On the socket: a header, the sizes of the arrays, the pickle, then the arrays
themselves when they are small. Both ends are this package's, of one version; isolation is there for models that crash,
not against models that mean harm.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

from edge_server.backends.python.arena import Arena, ArenaReader

_HEADER = struct.Struct("<IIqQ")
"""Bytes of the pickle, number of arrays, offset of the first in the shared memory (-1: they follow), size of it."""

_FOLLOWS = -1
_SMALL_BYTES = 64 << 10
"""Arrays of so many bytes together go through the socket: copying them costs less than giving memory back."""


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
        buffers: list[memoryview] = []
        with self._sending:
            freed, self._freed = self._freed, []
            data = pickle.dumps((freed, message), protocol=5, buffer_callback=lambda item: buffers.append(item.raw()))
            sizes = [len(buffer) for buffer in buffers]
            offset = _FOLLOWS if sum(sizes) <= _SMALL_BYTES else self.arena.write(buffers)
            parts = [
                _HEADER.pack(len(data), len(sizes), offset, self.arena.size),
                struct.pack(f"<{len(sizes)}Q", *sizes),
            ]
            parts.append(data)
            if offset == _FOLLOWS:
                parts += [bytes(buffer) for buffer in buffers]
            self._line.sendall(b"".join(parts))
        return None if offset == _FOLLOWS else offset

    def receive(self) -> tuple[tuple[Any, ...] | None, int | None]:
        """Return the next message, and the place in the other end's shared memory that its arrays lie in, if they do:
        they hold until that place is given to `free`."""
        length, count, offset, arena_size = _HEADER.unpack(self._read(_HEADER.size))
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
            with self._sending:
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
