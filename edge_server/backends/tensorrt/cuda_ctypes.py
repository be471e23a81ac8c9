"""CUDA driver through ctypes: nothing to install, also on a Jetson. Names and numbers are those of cuda.h."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import numpy as np

from edge_server.backends.tensorrt.cuda_driver import Context, CudaDevice, CudaFault, HostBlock

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
"""Arguments of the functions that take handles and sizes: ctypes would pass them as 32 bits."""


def make(library: str) -> CtypesCuda:
    return CtypesCuda(library)


class CtypesCalls:
    """The driver's functions. `call` raises CudaFault with the driver's own words."""

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
            raise CudaFault(code, f"{name}: {self._words(code)}")

    def _words(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value:
            return text.value.decode(errors="replace")
        return f"CUresult {code}"


class CtypesCuda:
    """See cuda.Cuda."""

    way = "ctypes"

    def __init__(self, library: str) -> None:
        self._calls = CtypesCalls(library)

    def devices(self) -> tuple[CudaDevice, ...]:
        count = ctypes.c_int()
        self._calls.call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(self._device(self._handle(number)) for number in range(count.value))

    def retain(self, device_id: int) -> Context:
        handle = self._handle(device_id)
        context = ctypes.c_void_p()
        self._calls.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        return CtypesContext(self._calls, handle, context.value or 0)

    def _handle(self, device_id: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self._calls.call("cuDeviceGet", ctypes.byref(handle), device_id)
        return handle

    def _device(self, handle: ctypes.c_int) -> CudaDevice:
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


class CtypesContext:
    """See cuda.Context."""

    def __init__(self, calls: CtypesCalls, device: ctypes.c_int, handle: int) -> None:
        self._call = calls.call
        self._device = device
        self._handle = handle

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._handle)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_POINTER()))

    def make_stream(self) -> int:
        stream = _POINTER()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def allocate(self, byte_count: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), max(byte_count, 1))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def allocate_host(self, byte_count: int, *, is_mapped: bool) -> HostBlock:
        address = _POINTER()
        size = max(byte_count, 1)
        self._call("cuMemHostAlloc", ctypes.byref(address), size, _PORTABLE | (_DEVICE_MAP if is_mapped else 0))
        where = address.value or 0
        seen = ctypes.c_uint64()
        if is_mapped:
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), where, 0)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(where))
        return HostBlock(array, where, seen.value)

    def free_host(self, block: HostBlock) -> None:
        self._call("cuMemFreeHost", block.address)

    def copy_in(self, target: int, source: int, byte_count: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", target, source, byte_count, stream)

    def copy_out(self, target: int, source: int, byte_count: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", target, source, byte_count, stream)

    def copy_within(self, target: int, source: int, byte_count: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", target, source, byte_count, stream)

    def clear(self, target: int, byte_count: int, stream: int) -> None:
        self._call("cuMemsetD8Async", target, 0, byte_count, stream)

    def synchronise(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def begin_capture(self, stream: int) -> None:
        self._call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        graph, ready = _POINTER(), _POINTER()
        self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
        if not graph.value:
            return 0
        try:
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)
        return ready.value or 0

    def launch(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    def free_bytes(self) -> int:
        free, total = _SIZE(), _SIZE()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)
