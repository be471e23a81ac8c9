"""CUDA shared-memory regions: device memory of client processes on this machine, registered by handle.

A client allocates on the GPU, exports a handle (cudaIpcGetMemHandle, 64 bytes), registers it once, and then names the
region in place of tensor bytes, as with system shared memory. The same pins hold a region open while a request runs.

Runtimes here take their inputs from the host, so an input is copied out of the region when its request is decoded, and
an output straight into it when it is answered: one copy each, by the driver, and counted. Tensors never cross the wire.

Handles do not exist on GPUs that share the machine's memory (every Jetson before CUDA 13's): there the registration is
refused, and system shared memory is the way without a copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edge_server.core.view import CudaRegion
from edge_server.errors import (
    AlreadyExists,
    EdgeServerError,
    InvalidRequest,
    NotFound,
    ServingFault,
    Throttled,
    Unsupported,
)
from edge_server.memory.bounds import check_inside

log = logging.getLogger(__name__)

_HANDLE_BYTES = 64
_MAX_NAME_LENGTH = 1024
_MOST_REGIONS = 4096

NOT_ALLOWED = "shared memory of clients is not allowed on this server; start it with --allow-client-shm=true"


class DeviceMemory(Protocol):
    """The GPUs of the box; see backends.cuda_device.CudaDevices. Raises OSError where the driver says no."""

    @property
    def count(self) -> int: ...

    def is_integrated(self, device_id: int) -> bool: ...

    def open(self, device_id: int, handle: bytes) -> tuple[int, int]: ...

    def close(self, device_id: int, address: int) -> None: ...

    def read(self, device_id: int, address: int, byte_size: int) -> memoryview: ...

    def write(self, device_id: int, address: int, data: bytes | bytearray | memoryview) -> None: ...


@dataclass(slots=True)
class CudaCopies:
    """Bytes that were copied out of regions for inputs, and into them for outputs, since the start."""

    read_bytes: int = 0
    written_bytes: int = 0


class _Region:
    """An open region. `pins` and `is_retired` are guarded by the registry's lock."""

    __slots__ = ("address", "is_retired", "pins", "report")

    def __init__(self, report: CudaRegion, address: int) -> None:
        self.report = report
        self.address = address
        self.pins = 0
        self.is_retired = False


class CudaPin:
    """A piece of a region, kept open. `view` is a copy of it where it was pinned for reading, empty otherwise."""

    __slots__ = ("_offset", "_region", "_registry", "view")

    def __init__(self, registry: CudaMemoryRegistry, region: _Region, offset: int) -> None:
        self._registry = registry
        self._region: _Region | None = region
        self._offset = offset
        self.view = memoryview(b"")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy `data` to the start of the piece. Raises ServingFault."""
        region = self._region
        assert region is not None, "a pin was written to after it was released"
        self._registry._write(region, self._offset, data)

    def release(self) -> None:
        """Give the piece back. May be called from any thread, and again: then it does nothing."""
        region, self._region = self._region, None
        if region is not None:
            self._registry._release(region)


class CudaMemoryRegistry:
    """Names of regions -> device memory. Thread-safe; no lock is held across a call of the driver.

    `devices` makes the way to the driver when the first region is registered, so that a server of clients without
    any makes no context. `missing` says why there is no GPU, "" where there is one.
    """

    def __init__(self, is_allowed: bool, missing: str, devices: Callable[[], DeviceMemory]) -> None:
        self._is_allowed = is_allowed
        self._missing = missing
        self._make = devices
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._made: DeviceMemory | None = None
        self._regions: dict[str, _Region] = {}
        self._coming: set[str] = set()
        self.is_taken: Callable[[str], bool] = lambda name: False
        """Whether a name is that of a region of another kind: all kinds share one name space."""
        self.copies = CudaCopies()

    @property
    def is_usable(self) -> bool:
        """Whether regions can be registered here: clients may, and a GPU is there."""
        return self._is_allowed and not self._missing

    def check_usable(self) -> None:
        """Raise Unsupported when no region can be registered here, whatever it is."""
        if not self._is_allowed:
            raise Unsupported(NOT_ALLOWED)
        if self._missing:
            raise Unsupported(
                f"CUDA shared memory is not available: {self._missing}; register system shared memory instead"
            )

    def register(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Open the allocation behind `handle` on GPU `device_id`, and know its first `byte_size` bytes as `name`.

        Raises Unsupported (not allowed, no GPU, an integrated one), InvalidRequest (name, handle, device, size),
        AlreadyExists, ServingFault (the driver does not open it).
        """
        self.check_usable()
        if not 0 < len(name) <= _MAX_NAME_LENGTH:
            raise InvalidRequest(f"a shared memory region's name has 1 to {_MAX_NAME_LENGTH} characters")
        if len(handle) != _HANDLE_BYTES:
            raise _refused(name, f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, {len(handle)} were given")
        if byte_size <= 0:
            raise _refused(name, f"byte_size must be 1 or more, got {byte_size}")
        devices = self._devices()
        if not 0 <= device_id < devices.count:
            raise _refused(name, f"there is no GPU {device_id}, the box has {devices.count}")
        if devices.is_integrated(device_id):
            raise Unsupported(
                f"failed to register CUDA shared memory region '{name}': GPU {device_id} is integrated, it shares the "
                "machine's memory, and CUDA has no IPC handles there; register system shared memory instead"
            )
        self._reserve(name)
        try:
            region = _open(devices, CudaRegion(name, device_id, byte_size), handle)
            with self._lock:
                self._regions[name] = region
        finally:
            with self._lock:
                self._coming.discard(name)

    def unregister(self, name: str | None = None) -> None:
        """Forget a region, or all of them for None and "". A name that is not registered is no error, as in Triton.

        Never refused: without regions there is nothing to forget, and clients begin by forgetting all.
        """
        with self._lock:
            names = [name] if name else list(self._regions)
            retired = [region for one in names if (region := self._regions.pop(one, None)) is not None]
            for region in retired:
                region.is_retired = True
            idle = [region for region in retired if region.pins == 0]
        for region in idle:
            self._close(region)

    def close(self) -> None:
        """Forget all regions: for the end of the server."""
        self.unregister()

    def status(self, name: str | None = None) -> list[CudaRegion]:
        """Return one region, or all, ordered by name, for None and "". Raises NotFound."""
        with self._lock:
            if not name:
                return [region.report for _, region in sorted(self._regions.items())]
            region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")
        return [region.report]

    def has(self, name: str) -> bool:
        """Return whether the name is a region's, or about to be."""
        with self._lock:
            return name in self._regions or name in self._coming

    def pin(self, name: str, offset: int, byte_size: int, *, writable: bool = False) -> CudaPin | None:
        """Keep `byte_size` bytes from `offset` open until the pin is released; None when there is no such region.

        For reading, the bytes are copied to the host here. Raises InvalidRequest (outside the region), ServingFault.
        """
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                return None
            check_inside(region.report.name, region.report.byte_size, offset, byte_size)
            region.pins += 1
        pin = CudaPin(self, region, offset)
        if not writable:
            try:
                pin.view = self._read(region, offset, byte_size)
            except EdgeServerError:
                pin.release()
                raise
        return pin

    # -- for pins -----------------------------------------------------------------------------------------------------

    def _read(self, region: _Region, offset: int, byte_size: int) -> memoryview:
        report = region.report
        try:
            view = self._devices().read(report.device_id, region.address + offset, byte_size)
        except OSError as error:
            raise ServingFault(f"failed to read CUDA shared memory region '{report.name}': {error}") from error
        with self._lock:
            self.copies.read_bytes += byte_size
        return view

    def _write(self, region: _Region, offset: int, data: bytes | bytearray | memoryview) -> None:
        report = region.report
        try:
            self._devices().write(report.device_id, region.address + offset, data)
        except OSError as error:
            raise ServingFault(f"failed to write CUDA shared memory region '{report.name}': {error}") from error
        with self._lock:
            self.copies.written_bytes += memoryview(data).nbytes

    def _release(self, region: _Region) -> None:
        with self._lock:
            region.pins -= 1
            is_last = region.is_retired and region.pins == 0
        if is_last:
            self._close(region)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _devices(self) -> DeviceMemory:
        with self._making:
            if self._made is None:
                try:
                    self._made = self._make()
                except OSError as error:
                    raise ServingFault(f"CUDA does not start: {error}") from error
            return self._made

    def _reserve(self, name: str) -> None:
        with self._lock:
            is_free = name not in self._regions and name not in self._coming
            if is_free and len(self._regions) + len(self._coming) >= _MOST_REGIONS:
                raise Throttled(f"{_MOST_REGIONS} CUDA shared memory regions are registered, no more fit")
            if is_free:
                self._coming.add(name)
        # Asked without the lock: the other registry asks this one while it holds its own.
        if is_free and self.is_taken(name):
            is_free = False
            with self._lock:
                self._coming.discard(name)
        if not is_free:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")

    def _close(self, region: _Region) -> None:
        try:
            self._devices().close(region.report.device_id, region.address)
        except OSError as error:
            # The client is gone, or the device is: either way nothing is mapped any more.
            log.debug("CUDA shared memory region '%s' could not be closed: %s", region.report.name, error)


def _open(devices: DeviceMemory, report: CudaRegion, handle: bytes) -> _Region:
    try:
        address, size = devices.open(report.device_id, handle)
    except OSError as error:
        raise ServingFault(
            f"failed to register CUDA shared memory region '{report.name}': failed to open CUDA IPC handle: {error}"
        ) from error
    if report.byte_size > size:
        devices.close(report.device_id, address)
        raise _refused(report.name, f"byte_size {report.byte_size} is more than the allocation has: {size}")
    return _Region(report, address)


def _refused(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"failed to register CUDA shared memory region '{name[:_MAX_NAME_LENGTH]}': {why}")
