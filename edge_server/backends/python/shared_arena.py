"""Shared memory arena between two processes, in one direction: the owner writes messages, the other reads.

The memory has no name in any file system (memfd), so nothing is left behind however the processes end.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

ALIGNMENT = 64
"""Of every buffer: what vector instructions, and numpy's consumers, like best."""

_FIRST_BYTES = 1 << 20


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """The owner's side. Thread-safe. Grows as needed and never shrinks. `fd`: memory that another process made."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("edge-python-model", os.MFD_CLOEXEC) if fd is None else fd
        self.size = _FIRST_BYTES
        os.ftruncate(self.fd, self.size)
        self._memory = mmap.mmap(self.fd, self.size)
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}
        """Offset -> size of what was written and not freed."""

    def write(self, buffers: Sequence[memoryview]) -> int:
        """Copy the buffers in, one behind the other, and return where the first one is; it is to be freed there."""
        need = sum(aligned(len(buffer)) for buffer in buffers)
        with self._lock:
            offset = self._find(need)
            self._used[offset] = need
            if offset + need > self.size:
                self._grow(offset + need)
            position = offset
            for buffer in buffers:
                self._memory[position : position + len(buffer)] = buffer
                position += aligned(len(buffer))
        return offset

    def free(self, offset: int) -> None:
        """Say that nobody reads there any more. An offset that is not in use is left alone."""
        with self._lock:
            self._used.pop(offset, None)

    def forget(self) -> None:
        """Give up the mapping of memory that another process writes to; its file descriptor stays open."""
        self._memory.close()

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(self._used.values())

    def _find(self, need: int) -> int:
        """Return the first gap that is large enough; the last one has no end."""
        position = 0
        for offset in sorted(self._used):
            if offset - position >= need:
                return position
            position = offset + self._used[offset]
        return position

    def _grow(self, need: int) -> None:
        while self.size < need:
            self.size *= 2
        os.ftruncate(self.fd, self.size)
        self._memory.close()
        self._memory = mmap.mmap(self.fd, self.size)


class ArenaReader:
    """The other side. Used by one thread. Views keep the mapping that they were made of."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = memoryview(b"")

    def read(self, offset: int, sizes: Sequence[int], arena_size: int) -> list[memoryview]:
        """Return the buffers written at `offset`, without a copy. They hold until the owner is told to free them."""
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
