"""Connection between the server and a model's child process: pickled messages, with large arrays in shared memory.

A message is any picklable tuple. On the socket: a header, the sizes of the arrays, the pickle, then the arrays
themselves if they are small. Tiny ones are in the pickle. Each direction has one shared memory: its owner writes
arrays, the other process reads them. The memory has no name in any file system (memfd), so nothing is left behind
however the processes end.

Both ends are of the same version of this package. Isolation protects against models that crash, not against hostile
ones.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from edge_server.errors import NotReady, Refusal

ALIGNMENT = 64
"""Alignment of every array in bytes: suits vector instructions and numpy."""

_FIRST_BYTES = 1 << 20

_HEADER = struct.Struct("<4sIIqQ")
"""_MAGIC, bytes of the pickle, number of arrays, offset of the first in the shared memory (-1: they follow on the
socket), size of the shared memory."""

_MAGIC = b"EDGE"

_ON_SOCKET = -1
_SMALL_BYTES = 64 << 10
"""Arrays of at most this size together go through the socket: a copy costs less than freeing shared memory."""
_IN_PICKLE_BYTES = 1 << 10
"""An array of at most this size stays in the pickle: to receive it apart costs a system call."""


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Shared memory, at the side of its owner, which writes. Grows as needed and never shrinks. Thread-safe."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: memory that another process created; None creates it."""
        self.fd = os.memfd_create("edge-isolated-model", os.MFD_CLOEXEC) if fd is None else fd
        self.size = _FIRST_BYTES
        self._allocated = 0
        os.ftruncate(self.fd, self.size)
        self._memory = mmap.mmap(self.fd, self.size)
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}
        """Offset -> size of each block in use."""

    def write(self, buffers: Sequence[memoryview]) -> int:
        """Copy the buffers into one block and return its offset. The block stays until `free(offset)`.

        Raises Refusal if the system has no memory for it.
        """
        need = sum(aligned(len(buffer)) for buffer in buffers)
        with self._lock:
            offset = self._first_gap(need)
            try:
                self._allocate(offset + need)
            except OSError as error:
                raise Refusal(
                    f"the connection to a model's process has no memory for {need >> 10} KiB of tensors: "
                    f"{error.strerror}"
                ) from None
            self._used[offset] = need
            position = offset
            for buffer in buffers:
                self._memory[position : position + len(buffer)] = buffer
                position += aligned(len(buffer))
        return offset

    def free(self, offset: int) -> None:
        """Free the block at `offset`, which no process reads any more. An unused offset is ignored."""
        with self._lock:
            self._used.pop(offset, None)

    def unmap(self) -> None:
        """Unmap memory that another process writes to. Its file descriptor stays open."""
        self._memory.close()

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(self._used.values())

    def _first_gap(self, need: int) -> int:
        position = 0
        for offset in sorted(self._used):
            if offset - position >= need:
                return position
            position = offset + self._used[offset]
        return position

    def _allocate(self, end: int) -> None:
        """Grow to `end` bytes at least, and allocate the pages before it. Raises OSError."""
        size = self.size
        while size < end:
            size *= 2
        if size > self.size:
            os.ftruncate(self.fd, size)
            memory = mmap.mmap(self.fd, size)
            self._memory.close()
            self._memory, self.size = memory, size
        if end > self._allocated:
            # Writing to a page that the system does not give, e.g. with vm.overcommit_memory=2, is a SIGBUS.
            os.posix_fallocate(self.fd, self._allocated, end - self._allocated)
            self._allocated = end


class ArenaReader:
    """Shared memory, at the side that reads. For one thread. Each view keeps its mapping alive."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = memoryview(b"")

    def read(self, offset: int, sizes: Sequence[int], arena_size: int) -> list[memoryview]:
        """Return views of the buffers at `offset`. They are valid until the owner frees that block."""
        if len(self._memory) < arena_size:
            self._memory = memoryview(mmap.mmap(self._fd, arena_size))
        found = []
        for size in sizes:
            found.append(self._memory[offset : offset + size])
            offset += aligned(size)
        return found

    def close(self) -> None:
        self._memory = memoryview(b"")
        os.close(self._fd)


class _MessageGroup(threading.local):
    """Messages that a thread collects within `one_message`; None outside."""

    messages: list[tuple[Any, ...]] | None = None
    channel: Channel | None = None


_group = _MessageGroup()


@contextlib.contextmanager
def one_message() -> Iterator[None]:
    """Send what this thread sends within the block as one message, at its end: ("group", messages).

    One message for all responses of a step costs far less than one for each. For messages whose arrays the sender does
    not free.
    """
    _group.messages, _group.channel = [], None
    try:
        yield
    finally:
        messages, channel = _group.messages, _group.channel
        _group.messages = _group.channel = None
        if channel is not None:
            channel.send(("group", messages))


class MalformedMessage(Exception):
    """The bytes on the socket are no message: the model wrote to a file descriptor that it does not own."""


class Channel:
    """One end of the connection. Any thread may send, one thread receives.

    All methods raise OSError or EOFError after `cut`, at either end.
    """

    def __init__(self, connection: socket.socket, arena: Arena, other_fd: int) -> None:
        self.arena = arena
        self._socket = connection
        self._reader = ArenaReader(other_fd)
        self._send_lock = threading.Lock()
        self._process_id = os.getpid()
        self._freed: list[int] = []

    def send(self, message: tuple[Any, ...] | None) -> int | None:
        """Send a message. Return the offset of its arrays in this end's shared memory, None if they need none.

        Raises Refusal if the system has no memory for the arrays, and NotReady in a forked child: its messages would be
        mixed with those of the process that it comes from.
        """
        if os.getpid() != self._process_id:
            raise NotReady(f"this process was forked from process {self._process_id}, which alone is connected")
        if _group.messages is not None and message is not None:
            _group.messages.append(message)
            _group.channel = self
            return None
        with self._send_lock:
            return self._send(message)

    def send_within(self, message: tuple[Any, ...], limit_s: float) -> bool:
        """Send a message without arrays. Return False if the other end reads nothing for `limit_s`."""
        until = time.monotonic() + limit_s
        if not self._send_lock.acquire(timeout=limit_s):
            return False
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return False
            self._send(message)
            return True
        finally:
            self._send_lock.release()

    def _send(self, message: tuple[Any, ...] | None) -> int | None:
        """As `send`. *Locked.*"""
        buffers: list[memoryview] = []
        freed = tuple(self._freed)

        def stays_in_pickle(item: pickle.PickleBuffer) -> bool:
            buffer = item.raw()
            if buffer.nbytes <= _IN_PICKLE_BYTES:
                return True
            buffers.append(buffer)
            return False

        data = pickle.dumps((freed, message), protocol=5, buffer_callback=stays_in_pickle)
        sizes = [len(buffer) for buffer in buffers]
        offset = _ON_SOCKET if sum(sizes) <= _SMALL_BYTES else self.arena.write(buffers)
        # After what may fail: the offsets then go with the next message.
        del self._freed[: len(freed)]
        parts = [
            _HEADER.pack(_MAGIC, len(data), len(sizes), offset, self.arena.size),
            struct.pack(f"<{len(sizes)}Q", *sizes),
        ]
        parts.append(data)
        if offset == _ON_SOCKET:
            parts += [bytes(buffer) for buffer in buffers]
        self._socket.sendall(b"".join(parts))
        return None if offset == _ON_SOCKET else offset

    def receive(self) -> tuple[tuple[Any, ...] | None, int | None]:
        """Return the next message, and the offset of its arrays in the other end's shared memory or None.

        The arrays are valid until that offset is passed to `free`. Raises MalformedMessage, and any exception of
        unpickling, for bytes that are no message.
        """
        magic, length, count, offset, arena_size = _HEADER.unpack(self._receive_exactly(_HEADER.size))
        if magic != _MAGIC:
            raise MalformedMessage(f"{magic!r} where a message should begin")
        sizes = struct.unpack(f"<{count}Q", self._receive_exactly(8 * count)) if count else ()
        data = self._receive_exactly(length)
        if offset == _ON_SOCKET:
            buffers = [memoryview(self._receive_exactly(size)) for size in sizes]
        else:
            buffers = self._reader.read(offset, sizes, arena_size)
        freed, message = pickle.loads(data, buffers=buffers)
        for place in freed:
            self.arena.free(place)
        return message, None if offset == _ON_SOCKET else offset

    def free(self, offset: int | None) -> None:
        """Release received arrays. The next message reports it to the other end."""
        if offset is not None:
            # Without the lock: its holder may wait for the other end, which may wait for this thread to receive.
            self._freed.append(offset)

    def flush(self) -> None:
        """Report released arrays to the other end now."""
        if self._freed:
            self.send(None)

    def cut(self) -> None:
        """End the connection: `receive` raises at both ends."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Release the socket and the memory. No thread may send or receive any more."""
        self._socket.close()
        self.arena.close()
        self._reader.close()

    def _receive_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        position = 0
        while position < size:
            count = self._socket.recv_into(view[position:])
            if count == 0:
                raise EOFError("the other process closed the connection")
            position += count
        return data
