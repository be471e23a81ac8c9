"""Access to GPU memory for the server itself: opens memory that client processes share (CUDA IPC), copies, and reads
free memory and UUIDs.

It uses the driver of `cuda_driver`, in the primary contexts that the runtimes share. Functions that those
classes lack are called through ctypes (cuda.h: cuIpcOpenMemHandle, cuIpcCloseMemHandle, cuMemGetAddressRange,
cuMemcpyDtoH, cuMemcpyHtoD, cuMemcpyDtoD, cuDeviceGetUuid).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edge_server.backends.cuda import cuda_driver
from edge_server.backends.cuda.cuda_ctypes import CudaCalls

log = logging.getLogger(__name__)

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""

_ADDRESS = ctypes.c_uint64
_SIZE = ctypes.c_size_t


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def missing() -> str:
    """Return why no GPU can be used here, "" if one can. Creates no context."""
    return cuda_driver.unavailable_reason()


def find() -> CudaDevices | None:
    """Return the driver's GPUs; None if there are none, or if the driver fails, which is logged."""
    if missing():
        return None
    try:
        return CudaDevices()
    except OSError as error:
        log.warning("GPUs are not used: the driver does not answer: %s", error)
        return None


class CudaDevices:
    """The driver's GPUs. Thread-safe. A device's primary context is retained on first use, and kept.

    All methods raise OSError for an error of the driver, with its text, and for a device that does not exist.
    """

    def __init__(self) -> None:
        """Call it only after `missing` returned ""."""
        with _translated_errors():
            self._cuda = cuda_driver.driver()
            self._calls = CudaCalls(cuda_driver.LIBRARY)
            self._devices = cuda_driver.devices()
        self._lock = threading.Lock()
        self._contexts: dict[int, cuda_driver.CudaContext] = {}

    @property
    def count(self) -> int:
        return len(self._devices)

    def is_integrated(self, device_id: int) -> bool:
        """Return whether the GPU shares the machine's memory."""
        self._check(device_id)
        return self._devices[device_id].is_integrated

    def uuid(self, device_id: int) -> str:
        """Return the GPU's UUID as NVML writes it: "GPU-" and five groups of hexadecimal digits."""
        self._check(device_id)
        raw = (ctypes.c_ubyte * 16)()
        handle = ctypes.c_int()
        with _translated_errors():
            self._calls.call("cuDeviceGet", ctypes.byref(handle), device_id)
            self._calls.call("cuDeviceGetUuid", raw, handle)
        text = bytes(raw).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def numbers(self) -> dict[str, int]:
        """Return the GPUs' numbers by their UUIDs. GPUs that report no UUID are left out."""
        found: dict[str, int] = {}
        for device_id in range(self.count):
            with contextlib.suppress(OSError):
                found[self.uuid(device_id)] = device_id
        return found

    def memory(self, device_id: int) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory."""
        free, total = _SIZE(), _SIZE()
        with self._current(device_id):
            self._calls.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        if self._devices[device_id].is_integrated:
            # CUDA's number excludes the page cache, which the kernel would free. MemAvailable includes it.
            text = Path("/proc/meminfo").read_text("ascii", "replace")
            found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
            available = int(found[1]) * 1024 if found else 0
            return min(available or free.value, total.value), total.value
        return free.value, total.value

    def open(self, device_id: int, handle: bytes) -> tuple[int, int]:
        """Map an allocation of another process. Return its address in this process, and its size in bytes."""
        address, base, size = _ADDRESS(), _ADDRESS(), _SIZE()
        given = _Handle.from_buffer_copy(handle)
        with self._current(device_id):
            self._calls.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
            try:
                self._calls.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            except cuda_driver.CudaFault:
                self._calls.call("cuIpcCloseMemHandle", address)
                raise
        return address.value, base.value + size.value - address.value

    def close(self, device_id: int, address: int) -> None:
        """Unmap an allocation that `open` mapped."""
        with self._current(device_id):
            self._calls.call("cuIpcCloseMemHandle", _ADDRESS(address))

    def read(self, device_id: int, address: int, byte_size: int) -> memoryview:
        """Return a copy of device memory in host memory."""
        copy = np.empty(byte_size, np.uint8)
        if byte_size:
            with self._current(device_id):
                self._calls.call(
                    "cuMemcpyDtoH_v2", ctypes.c_void_p(copy.ctypes.data), _ADDRESS(address), _SIZE(byte_size)
                )
        copy.flags.writeable = False
        return copy.data

    def write(self, device_id: int, address: int, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes from host memory to the device."""
        source = np.frombuffer(data, np.uint8)
        if source.size:
            with self._current(device_id):
                self._calls.call(
                    "cuMemcpyHtoD_v2", _ADDRESS(address), ctypes.c_void_p(source.ctypes.data), _SIZE(source.size)
                )

    def copy(self, device_id: int, target: int, source: int, byte_size: int) -> None:
        """Copy bytes within the device's memory, and wait for the end of the copy."""
        if byte_size:
            with self._current(device_id):
                self._calls.call("cuMemcpyDtoD_v2", _ADDRESS(target), _ADDRESS(source), _SIZE(byte_size))
                # The driver does not wait for copies within the device. They run in the default stream.
                self._calls.call("cuStreamSynchronize", None)

    def end(self) -> None:
        """Release the contexts. No method may be called after it."""
        with self._lock:
            contexts, self._contexts = list(self._contexts.values()), {}
        for context in contexts:
            # The context of a lost device cannot be released.
            with contextlib.suppress(cuda_driver.CudaFault):
                context.close()

    def _check(self, device_id: int) -> None:
        if not 0 <= device_id < len(self._devices):
            raise OSError(f"there is no GPU {device_id}, the driver has {len(self._devices)}")

    @contextlib.contextmanager
    def _current(self, device_id: int) -> Iterator[None]:
        """Make the device's context current for a `with` block, in which CudaFault becomes OSError."""
        self._check(device_id)
        with _translated_errors():
            with self._lock:
                context = self._contexts.get(device_id)
                if context is None:
                    context = self._contexts[device_id] = self._cuda.retain_context(device_id)
            with context.current():
                yield


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except cuda_driver.CudaFault as error:
        raise OSError(str(error)) from error
