"""Registry of CUDA shared-memory regions: GPU memory of client processes on this machine.

A client allocates on the GPU, exports a handle (cudaIpcGetMemHandle, 64 bytes), registers it once, and then sends the
region's name in place of tensor bytes, as with system shared memory. Pins keep a region open while a request runs.

Runtimes that accept device memory (backends.base.Session.takes_device_memory) read inputs in place, and their outputs
are copied on the device. For all others, an input is copied to the host when its elements are first needed, and an
output is copied into the region when the response is made: one counted copy each, by the driver.

A client must not change a region between its request and the response: nothing is copied when a request arrives.

CUDA has no handles on GPUs that share the machine's memory (every Jetson before CUDA 13's). Registration is refused
there; system shared memory avoids the copy instead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from edge_server.core.status_reports import CudaRegion
from edge_server.errors import (
    AlreadyExists,
    InvalidRequest,
    NotFound,
    ServingFault,
    Throttled,
    Unsupported,
)
from edge_server.memory.region_pins import check_inside
from edge_server.record import record

log = logging.getLogger(__name__)

_HANDLE_BYTES = 64
_MAX_NAME_LENGTH = 1024
_MAX_REGIONS = 4096

NOT_ALLOWED = "shared memory of clients is not allowed on this server; start it with --allow-client-shm=true"


class DeviceMemory(Protocol):
    """The machine's GPUs; see backends.cuda.cuda_devices.CudaDevices. Raises OSError on driver errors."""

    @property
    def count(self) -> int: ...

    def is_integrated(self, device_id: int) -> bool: ...

    def open(self, device_id: int, handle: bytes) -> tuple[int, int]: ...

    def close(self, device_id: int, address: int) -> None: ...

    def read(self, device_id: int, address: int, byte_size: int) -> memoryview: ...

    def write(self, device_id: int, address: int, data: bytes | bytearray | memoryview) -> None: ...

    def copy(self, device_id: int, target: int, source: int, byte_size: int) -> None: ...


@record(slots=True)
class CudaCopies:
    """Bytes copied out of regions for inputs, and into them for outputs, since the start."""

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
    """Piece of a region, kept open until it is released. A core.device_tensor.DevicePiece."""

    __slots__ = ("_copy", "_copying", "_is_released", "_offset", "_region", "_registry", "byte_size")

    def __init__(self, registry: CudaMemoryRegistry, region: _Region, offset: int, byte_size: int) -> None:
        self._registry = registry
        self._region = region
        self._offset = offset
        self._is_released = False
        self._copy: memoryview | None = None
        self._copying = threading.Lock()
        self.byte_size = byte_size

    @property
    def device(self) -> CudaPin:
        """The pin itself, because the piece is on a GPU."""
        return self

    @property
    def device_id(self) -> int:
        return self._region.report.device_id

    @property
    def address(self) -> int:
        """Start of the piece in the device's primary context. Valid until `release`."""
        return self._region.address + self._offset

    @property
    def view(self) -> memoryview:
        """Copy of the piece in host memory, made at first use and kept. Raises ServingFault."""
        registry = self._registry
        with self._copying:
            if self._copy is None:
                with registry.held(self, "read") as devices:
                    self._copy = devices.read(self.device_id, self.address, self.byte_size)
                registry.count_copied(read_bytes=self.byte_size)
            return self._copy

    def is_at(self, other: object) -> bool:
        """Return whether another pin starts at the same offset of the same region."""
        return isinstance(other, CudaPin) and other._region is self._region and other._offset == self._offset

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy `data` to the start of the piece. Raises ServingFault."""
        size = memoryview(data).nbytes
        assert size <= self.byte_size, f"{size} bytes do not fit a piece of {self.byte_size}"
        with self._registry.held(self, "write") as devices:
            devices.write(self.device_id, self.address, data)
        self._registry.count_copied(written_bytes=size)

    def copy_from(self, device_id: int, address: int, byte_count: int) -> None:
        """Copy memory of the piece's GPU, `device_id`, to the start of the piece, and wait for it. Raises
        ServingFault."""
        assert device_id == self.device_id, f"the piece is on GPU {self.device_id}, what is copied on {device_id}"
        assert byte_count <= self.byte_size, f"{byte_count} bytes do not fit a piece of {self.byte_size}"
        with self._registry.held(self, "write") as devices:
            devices.copy(device_id, self.address, address, byte_count)

    def release(self) -> None:
        """Release the piece. May be called from any thread. Further calls do nothing."""
        self._registry.release(self)


class CudaMemoryRegistry:
    """Names of regions -> device memory. Thread-safe; no lock is held across a driver call.

    `devices` opens the driver when the first region is registered, so that a server whose clients use none creates no
    context. `missing` is the reason why there is no GPU, "" if there is one.
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
        """Whether a region of another kind has the name. All kinds share one name space."""
        self.copies = CudaCopies()

    @property
    def is_usable(self) -> bool:
        """Whether regions can be registered: clients are allowed to, and there is a GPU."""
        return self._is_allowed and not self._missing

    def check_usable(self) -> None:
        """Raise Unsupported if no region can be registered on this server."""
        if not self._is_allowed:
            raise Unsupported(NOT_ALLOWED)
        if self._missing:
            raise Unsupported(
                f"CUDA shared memory is not available: {self._missing}; register system shared memory instead"
            )

    def register(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Open the allocation behind `handle` on GPU `device_id`, and register its first `byte_size` bytes as `name`.

        Raises Unsupported (not allowed, no GPU, an integrated one), InvalidRequest (name, handle, device, size),
        AlreadyExists, Throttled (too many regions), ServingFault (the driver does not open it).
        """
        self.check_usable()
        _check_values(name, handle, byte_size)
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
        """Unregister a region, or all of them for None and "". An unknown name is no error, as in Triton.

        Never refused: without regions there is nothing to unregister, and clients begin by unregistering all.
        """
        with self._lock:
            names = [name] if name else list(self._regions)
            retired = [region for one in names if (region := self._regions.pop(one, None)) is not None]
            for region in retired:
                region.is_retired = True
            idle = [region for region in retired if region.pins == 0]
        for region in idle:
            self._close(region)

    def status(self, name: str | None = None) -> list[CudaRegion]:
        """Return one region, or for None and "" all, ordered by name. Raises NotFound."""
        with self._lock:
            if not name:
                return [region.report for _, region in sorted(self._regions.items())]
            region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")
        return [region.report]

    def has(self, name: str) -> bool:
        """Return whether the name is registered or being registered."""
        with self._lock:
            return name in self._regions or name in self._coming

    def pin(self, name: str, offset: int, byte_size: int, *, writable: bool = False) -> CudaPin | None:
        """Keep `byte_size` bytes from `offset` open until the pin is released; None when there is no such region.

        Nothing is copied until the pin's `view` is read. Raises InvalidRequest (outside the region).
        """
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                return None
            check_inside(region.report.name, region.report.byte_size, offset, byte_size)
            region.pins += 1
        return CudaPin(self, region, offset, byte_size)

    # -- for pins -----------------------------------------------------------------------------------------------------

    def count_copied(self, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """Count bytes that a pin has copied."""
        with self._lock:
            self.copies.read_bytes += read_bytes
            self.copies.written_bytes += written_bytes

    @contextlib.contextmanager
    def held(self, pin: CudaPin, doing: str) -> Iterator[DeviceMemory]:
        """Keep a pin's region open for a block even if the pin is released meanwhile. OSError becomes ServingFault."""
        region, name = pin._region, pin._region.report.name
        with self._lock:
            if pin._is_released:
                raise ServingFault(f"failed to {doing} CUDA shared memory region '{name}': its request is over")
            region.pins += 1
        try:
            yield self._devices()
        except OSError as error:
            raise ServingFault(f"failed to {doing} CUDA shared memory region '{name}': {error}") from error
        finally:
            self._unpin(region)

    def release(self, pin: CudaPin) -> None:
        """See CudaPin.release."""
        with self._lock:
            if pin._is_released:
                return
            pin._is_released = True
        self._unpin(pin._region)

    def _unpin(self, region: _Region) -> None:
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
            if is_free and len(self._regions) + len(self._coming) >= _MAX_REGIONS:
                raise Throttled(f"{_MAX_REGIONS} CUDA shared memory regions are registered, no more fit")
            if is_free:
                self._coming.add(name)
        # Called without the lock: the other registry calls this one while it holds its own.
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
            # The client or the device is gone. In both cases nothing is mapped any more.
            log.debug("CUDA shared memory region '%s' could not be closed: %s", region.report.name, error)


def _check_values(name: str, handle: bytes, byte_size: int) -> None:
    """Raise InvalidRequest for values that are wrong on every machine."""
    if not 0 < len(name) <= _MAX_NAME_LENGTH:
        raise InvalidRequest(f"a shared memory region's name has 1 to {_MAX_NAME_LENGTH} characters")
    if len(handle) != _HANDLE_BYTES:
        raise _refused(name, f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, {len(handle)} were given")
    if byte_size <= 0:
        raise _refused(name, f"byte_size must be 1 or more, got {byte_size}")


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
