"""Shared memory with the server, if it runs on this machine and allows it: large raw images then cross no socket."""

from __future__ import annotations

import dataclasses
import mmap
import os
import secrets
import threading
from pathlib import Path

from edge_server.client.endpoint import ServerEndpoint
from edge_server.protocol.frame_messages import Frame, RegionSlice

MAX_BYTES = 128 << 20
"""Largest region. Images that find no room in it are sent as usual."""

MIN_IMAGE_BYTES = 256 << 10
"""Smaller images cost less in a socket than their bookkeeping here."""

_FOLDER = Path("/dev/shm")


class SharedPictures:
    """Region with a slot for each image, all of the size of the first one.

    A slot belongs to the `seq` of its frame until `free`: another send of the frame uses it, too. Frames are returned
    as they are if the server refuses the region, or this machine has no memory for it. `place` is for one thread, the
    other methods are for any.
    """

    def __init__(self, address: str, max_slots: int) -> None:
        self._endpoint = ServerEndpoint(address)
        self._max_slots = max_slots
        self._name = f"ros_replay_{os.getpid()}_{secrets.token_hex(8)}"
        self._has_asked = self._is_closed = False
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0
        self._free: list[int] = []
        self._slots: dict[int, int] = {}

    def place(self, frame: Frame) -> Frame:
        """Return the frame with a reference to its image in the region, if it fits. The first call asks the server."""
        size = len(frame.data)
        if not frame.encoding or size < MIN_IMAGE_BYTES:
            return frame
        if not self._has_asked:
            self._has_asked = True
            self._open(size)
        with self._lock:
            memory = self._memory
            slot = self._slots.get(frame.header.seq)
            if memory is None or size > self._slot_bytes or (slot is None and not self._free):
                return frame
            if slot is None:
                slot = self._slots[frame.header.seq] = self._free.pop()
        offset = slot * self._slot_bytes
        memory[offset : offset + size] = frame.data
        return dataclasses.replace(frame, data=b"", region=RegionSlice(self._name, offset, size))

    def free(self, seq: int) -> bool:
        """Free the slot of a frame that has its result. Return whether it had one."""
        with self._lock:
            slot = self._slots.pop(seq, None)
            if slot is not None:
                self._free.append(slot)
            return slot is not None

    def close(self) -> None:
        """Place no further image, and have the server forget the region."""
        with self._lock:
            self._is_closed = True
            memory, self._memory = self._memory, None
        if memory is not None:
            # Not unmapped here, as `place` may be copying, but with the last reference.
            self._endpoint.unregister_region(self._name)

    def _open(self, slot_bytes: int) -> None:
        count = min(self._max_slots, MAX_BYTES // slot_bytes)
        path = _FOLDER / self._name
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError:
            return
        try:
            # Pages that a full folder cannot give later would end this process, or the server, with SIGBUS.
            os.posix_fallocate(file, 0, count * slot_bytes)
            memory = mmap.mmap(file, count * slot_bytes)
            if not self._endpoint.register_region(self._name, f"/{self._name}", count * slot_bytes):
                return
            with self._lock:
                is_late = self._is_closed
                if not is_late:
                    self._memory, self._slot_bytes, self._free = memory, slot_bytes, list(range(count))
            if is_late:
                self._endpoint.unregister_region(self._name)
        except (OSError, ValueError):  # no room in the folder, or not even for one image in MAX_BYTES
            return
        finally:
            os.close(file)
            # Both sides have mapped it: its memory ends with them, however they end.
            path.unlink()
