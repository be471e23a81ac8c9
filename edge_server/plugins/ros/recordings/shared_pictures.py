"""Shared memory with the server, if it runs on this machine and allows it: large raw images then cross no socket.

A server keeps the region of a replay that was killed. The name of a region tells which process made it, so the next
replay removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import re
import secrets
import threading
from pathlib import Path

from edge_server.client.server_connection import ServerEndpoint
from edge_server.protocol.frame_messages import Frame, RegionSlice

MAX_BYTES = 128 << 20
"""Largest region. Images that find no room in it are sent as usual."""

MIN_IMAGE_BYTES = 256 << 10
"""Smaller images cost less in a socket than their bookkeeping here."""

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"ros_replay_(?P<namespace>[0-9a-f-]+_\d+)_(?P<pid>\d+)_(?P<started>\d+)_[0-9a-f]+")


class SharedPictures:
    """Region with a slot for each image, all of the size of the first one.

    A slot belongs to the `seq` of its frame until `free`: another send of the frame uses it, too. Frames are returned
    as they are if the server refuses the region, or this machine has no memory for it. `place` is for one thread, the
    other methods are for any.
    """

    def __init__(self, address: str, max_slots: int) -> None:
        self._endpoint = ServerEndpoint(address)
        self._max_slots = max_slots
        self._name = ""
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
        try:
            self._remove_abandoned()
            self._name = f"ros_replay_{_namespace()}_{os.getpid()}_{_start_time(os.getpid())}_{secrets.token_hex(8)}"
            path = _FOLDER / self._name
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

    def _remove_abandoned(self) -> None:
        """Remove the regions of replays that were killed, from the server and from this machine."""
        for name in filter(_is_abandoned, self._endpoint.region_names()):
            self._endpoint.unregister_region(name)
        for path in _FOLDER.glob("ros_replay_*"):
            if _is_abandoned(path.name):
                with contextlib.suppress(OSError):  # of another user
                    path.unlink()


def _is_abandoned(name: str) -> bool:
    """Return whether a region's name is that of a process that has ended. A process of another machine or of another
    container, which is not seen here, is taken for alive."""
    found = _NAME.fullmatch(name)
    return found is not None and found["namespace"] == _namespace() and _start_time(found["pid"]) != found["started"]


def _namespace() -> str:
    """Return the name of all PIDs that this process sees: the machine's boot and the PID namespace. Raises OSError."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}_{os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int | str) -> str:
    """Return when a process started, in clock ticks after the boot (proc(5)); "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
