"""Python classes for the CUDA driver API (devices, contexts, memory, streams, graphs) that call libcuda through ctypes.
Names and numbers are those of cuda.h.

`cuda_pycuda` derives from these classes and replaces context, memory, streams and copies.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"

_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ..._MINOR, ..._INTEGRATED."""

_NON_BLOCKING = 1
_PORTABLE, _DEVICE_MAP = 1, 2
_THREAD_LOCAL = 1

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t

_SIGNATURES: dict[str, list[type]] = {
    "cuCtxPushCurrent_v2": [_POINTER],
    "cuMemAlloc_v2": [_POINTER, _SIZE],
    "cuMemFree_v2": [ctypes.c_uint64],
    "cuMemFreeHost": [_POINTER],
    "cuMemHostAlloc": [_POINTER, _SIZE, ctypes.c_uint],
    "cuMemHostGetDevicePointer_v2": [_POINTER, _POINTER, ctypes.c_uint],
    "cuMemcpyHtoDAsync_v2": [ctypes.c_uint64, _POINTER, _SIZE, _POINTER],
    "cuMemcpyDtoHAsync_v2": [_POINTER, ctypes.c_uint64, _SIZE, _POINTER],
    "cuMemcpyDtoDAsync_v2": [ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER],
    "cuMemsetD8Async": [ctypes.c_uint64, ctypes.c_ubyte, _SIZE, _POINTER],
    "cuStreamDestroy_v2": [_POINTER],
    "cuStreamSynchronize": [_POINTER],
    "cuStreamBeginCapture_v2": [_POINTER, ctypes.c_int],
    "cuStreamEndCapture": [_POINTER, _POINTER],
    "cuGraphInstantiateWithFlags": [_POINTER, _POINTER, ctypes.c_ulonglong],
    "cuGraphLaunch": [_POINTER, _POINTER],
    "cuGraphExecDestroy": [_POINTER],
    "cuGraphDestroy": [_POINTER],
}
"""Argument types of functions with handles and sizes. Without them ctypes passes 32 bits."""

_CONTEXT_LOST = frozenset((214, 220, 700, 702, 708, 709, 710, 714, 715, 716, 717, 718, 719, 721))
"""CUresult codes after which the context must be created anew, which is impossible for a shared primary context."""


class CudaFault(Exception):
    """The driver returned an error. `code` is its CUresult."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == 2

    @property
    def is_context_lost(self) -> bool:
        """Whether CUDA is unusable in this process: after an illegal access, a failed launch, or a lost GPU."""
        return self.code in _CONTEXT_LOST


@record(frozen=True, slots=True)
class CudaDevice:
    """One GPU. `capability` is its compute capability, (8, 7). `is_integrated`: it shares its memory with the CPU."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    is_integrated: bool

    @property
    def capability_text(self) -> str:
        """The compute capability as in Triton's cc_model_filenames: "8.7"."""
        return f"{self.capability[0]}.{self.capability[1]}"


@record(frozen=True, slots=True)
class HostBlock:
    """Page-locked host memory, valid until `free_host`.

    `array` is the memory, `address` its address, `device_address` its address on the GPU, 0 if it is not mapped.
    """

    array: Bytes
    address: int
    device_address: int


class CudaCalls:
    """The functions of the driver library. `call` raises CudaFault with the driver's error name."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is not None:
                function.argtypes = types
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaFault(-1, f"the NVIDIA driver has no {name}; it is too old")
        code = function(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            is_known = self._library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
            error = text.value.decode(errors="replace") if is_known and text.value else f"CUresult {code}"
            raise CudaFault(code, f"{name}: {error}")


class CudaDriver:
    """The driver. `access_library` names the library that calls it."""

    access_library = "ctypes"

    def __init__(self, library: str) -> None:
        self._calls = CudaCalls(library)

    def devices(self) -> tuple[CudaDevice, ...]:
        count = ctypes.c_int()
        self._calls.call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(self._describe(self._device_handle(number)) for number in range(count.value))

    def retain_context(self, device_id: int) -> CudaContext:
        """Return the device's primary context, which is created on first use. Raises CudaFault."""
        handle = self._device_handle(device_id)
        context = ctypes.c_void_p()
        self._calls.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        return CudaContext(self._calls, handle, context.value or 0)

    def _device_handle(self, device_id: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self._calls.call("cuDeviceGet", ctypes.byref(handle), device_id)
        return handle

    def _describe(self, handle: ctypes.c_int) -> CudaDevice:
        name = ctypes.create_string_buffer(256)
        self._calls.call("cuDeviceGetName", name, 256, handle)
        total = _SIZE()
        self._calls.call("cuDeviceTotalMem_v2", ctypes.byref(total), handle)
        capability = (self._attribute(_MAJOR, handle), self._attribute(_MINOR, handle))
        is_integrated = bool(self._attribute(_INTEGRATED, handle))
        return CudaDevice(name.value.decode(errors="replace"), capability, total.value, is_integrated)

    def _attribute(self, number: int, handle: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._calls.call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
        return value.value


class CudaContext:
    """The primary context of one device. All methods but `current` and `close` are called within `current`.

    Copies and launches are asynchronous on the given stream. Methods raise CudaFault.
    """

    def __init__(self, calls: CudaCalls, device: ctypes.c_int, handle: int) -> None:
        self._call = calls.call
        self._device = device
        self._handle = handle

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it the calling thread's context for a `with` block. Blocks may be nested."""
        self._call("cuCtxPushCurrent_v2", self._handle)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_POINTER()))

    def create_stream(self) -> int:
        stream = _POINTER()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def allocate(self, byte_count: int) -> int:
        """Return the address of new device memory."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), max(byte_count, 1))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def allocate_host(self, byte_count: int, *, is_mapped: bool) -> HostBlock:
        """Return page-locked host memory. `is_mapped`: the GPU can access it too."""
        address = _POINTER()
        size = max(byte_count, 1)
        self._call("cuMemHostAlloc", ctypes.byref(address), size, _PORTABLE | (_DEVICE_MAP if is_mapped else 0))
        host_address = address.value or 0
        device_address = ctypes.c_uint64()
        if is_mapped:
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(device_address), host_address, 0)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(host_address))
        return HostBlock(array, host_address, device_address.value)

    def free_host(self, block: HostBlock) -> None:
        self._call("cuMemFreeHost", block.address)

    def copy_to_device(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Start to copy from page-locked host memory to the device."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, byte_count, stream)

    def copy_to_host(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Start to copy from the device to page-locked host memory."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, byte_count, stream)

    def copy_on_device(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Start to copy within the device's memory."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, byte_count, stream)

    def fill_zero(self, target: int, byte_count: int, stream: int) -> None:
        """Start to set device memory to zero."""
        self._call("cuMemsetD8Async", target, 0, byte_count, stream)

    def synchronise(self, stream: int) -> None:
        """Wait for all work on the stream, without the GIL. Raises CudaFault for errors of that work."""
        self._call("cuStreamSynchronize", stream)

    def begin_capture(self, stream: int) -> None:
        self._call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """Return the captured graph, ready to launch; 0 if nothing was captured or it cannot be launched."""
        graph, ready = _POINTER(), _POINTER()
        self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
        if not graph.value:
            return 0
        try:
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)
        return ready.value or 0

    def launch_graph(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    def free_bytes(self) -> int:
        """Return the free device memory in bytes."""
        free, total = _SIZE(), _SIZE()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def close(self) -> None:
        """Release the primary context. Called once, after all objects in it are freed."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)
