"""CUDA driver through cuda-python's bindings."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from edge_server.backends.tensorrt.cuda_driver import Context, CudaDevice, CudaFault, HostBlock

_NON_BLOCKING = 1
_PORTABLE, _DEVICE_MAP = 1, 2


def make(library: str) -> BindingsCuda:
    return BindingsCuda()


class CudaPythonCalls:
    """The driver's functions, which return their CUresult first."""

    def __init__(self) -> None:
        self.driver: Any = importlib.import_module("cuda.bindings.driver")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> Any:
        """Return the result of the function: None, a value, or a tuple. Raises CudaFault."""
        code, *values = getattr(self.driver, name)(*arguments)
        if int(code) != 0:
            raise CudaFault(int(code), f"{name}: {code.name}")
        return values[0] if len(values) == 1 else tuple(values)


class BindingsCuda:
    """See cuda.Cuda."""

    way = "cuda-python"

    def __init__(self) -> None:
        self._calls = CudaPythonCalls()

    def devices(self) -> tuple[CudaDevice, ...]:
        return tuple(self._device(number) for number in range(self._calls.call("cuDeviceGetCount")))

    def retain(self, device_id: int) -> Context:
        handle = self._calls.call("cuDeviceGet", device_id)
        return BindingsContext(self._calls, handle, self._calls.call("cuDevicePrimaryCtxRetain", handle))

    def _device(self, number: int) -> CudaDevice:
        call = self._calls.call
        handle = call("cuDeviceGet", number)
        kinds = self._calls.driver.CUdevice_attribute
        name = bytes(call("cuDeviceGetName", 256, handle)).split(b"\0")[0].decode(errors="replace")
        major = call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
        minor = call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
        is_integrated = call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_INTEGRATED, handle)
        return CudaDevice(name, (int(major), int(minor)), int(call("cuDeviceTotalMem", handle)), bool(is_integrated))


class BindingsContext:
    """See cuda.Context."""

    def __init__(self, calls: CudaPythonCalls, device: Any, handle: Any) -> None:
        self._call = calls.call
        self._driver = calls.driver
        self._device = device
        self._handle = handle

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._handle)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def make_stream(self) -> int:
        return int(self._call("cuStreamCreate", _NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def allocate(self, byte_count: int) -> int:
        return int(self._call("cuMemAlloc", max(byte_count, 1)))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def allocate_host(self, byte_count: int, *, is_mapped: bool) -> HostBlock:
        size = max(byte_count, 1)
        address = int(self._call("cuMemHostAlloc", size, _PORTABLE | (_DEVICE_MAP if is_mapped else 0)))
        seen = int(self._call("cuMemHostGetDevicePointer", address, 0)) if is_mapped else 0
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        return HostBlock(array, address, seen)

    def free_host(self, block: HostBlock) -> None:
        self._call("cuMemFreeHost", block.address)

    def copy_in(self, target: int, source: int, byte_count: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", target, source, byte_count, stream)

    def copy_out(self, target: int, source: int, byte_count: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", target, source, byte_count, stream)

    def copy_within(self, target: int, source: int, byte_count: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, byte_count, stream)

    def clear(self, target: int, byte_count: int, stream: int) -> None:
        self._call("cuMemsetD8Async", target, 0, byte_count, stream)

    def synchronise(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def begin_capture(self, stream: int) -> None:
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        graph = self._call("cuStreamEndCapture", stream)
        if not int(graph):
            return 0
        try:
            return int(self._call("cuGraphInstantiate", graph, 0))
        finally:
            self._call("cuGraphDestroy", graph)

    def launch(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    def free_bytes(self) -> int:
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device)
