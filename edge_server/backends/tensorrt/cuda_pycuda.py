"""CUDA driver through pycuda: context, memory, streams and copies. Graphs, which pycuda lacks, use ctypes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from edge_server.backends.tensorrt.cuda_ctypes import CtypesCalls, CtypesContext, CtypesCuda
from edge_server.backends.tensorrt.cuda_driver import Context, CudaFault, HostBlock
from edge_server.core.gpu_fault import classify_gpu_fault
from edge_server.errors import BackendError


def make(library: str) -> PycudaCuda:
    return PycudaCuda(library)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn what pycuda raises into CudaFault. Its messages begin with the function and end with the driver's words."""
    pycuda: Any = importlib.import_module("pycuda.driver")
    try:
        yield
    except pycuda.MemoryError as error:
        raise CudaFault(2, str(error)) from error
    except (pycuda.Error, pycuda.RuntimeError) as error:
        # Launch and runtime errors alike: pycuda does not hand the code on, only what the driver says of it.
        fault = classify_gpu_fault(BackendError(str(error)))
        is_lost = (fault is not None and fault.takes_device) or "launch failed" in str(error)
        raise CudaFault(719 if is_lost else 999, str(error)) from error


class PycudaCuda(CtypesCuda):
    """See cuda.Cuda."""

    way = "pycuda"

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self._pycuda: Any = importlib.import_module("pycuda.driver")
        with _translated():
            self._pycuda.init()

    def retain(self, device_id: int) -> Context:
        with _translated():
            context = self._pycuda.Device(device_id).retain_primary_context()
        return PycudaContext(self._calls, self._pycuda, self._handle(device_id), context)


class PycudaContext(CtypesContext):
    """See cuda.Context. Keeps pycuda's objects, which free what they hold when they are dropped."""

    def __init__(self, calls: CtypesCalls, pycuda: Any, device: Any, context: Any) -> None:
        super().__init__(calls, device, 0)
        self._pycuda = pycuda
        self._context = context
        self._streams: dict[int, Any] = {}
        self._memory: dict[int, Any] = {}
        self._blocks: dict[int, Any] = {}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with _translated():
            self._context.push()
        try:
            yield
        finally:
            with _translated():
                self._pycuda.Context.pop()

    def make_stream(self) -> int:
        with _translated():
            stream = self._pycuda.Stream(self._pycuda.stream_flags.NON_BLOCKING)
        self._streams[int(stream.handle)] = stream
        return int(stream.handle)

    def destroy_stream(self, stream: int) -> None:
        del self._streams[stream]

    def allocate(self, byte_count: int) -> int:
        with _translated():
            memory = self._pycuda.mem_alloc(max(byte_count, 1))
        self._memory[int(memory)] = memory
        return int(memory)

    def free(self, address: int) -> None:
        with _translated():
            self._memory.pop(address).free()

    def allocate_host(self, byte_count: int, *, is_mapped: bool) -> HostBlock:
        flags = self._pycuda.host_alloc_flags
        wanted = flags.PORTABLE | (flags.DEVICEMAP if is_mapped else 0)
        with _translated():
            array = self._pycuda.pagelocked_empty(max(byte_count, 1), "u1", mem_flags=wanted)
            seen = int(array.base.get_device_pointer()) if is_mapped else 0
        address = int(array.ctypes.data)
        self._blocks[address] = array
        return HostBlock(array, address, seen)

    def free_host(self, block: HostBlock) -> None:
        with _translated():
            self._blocks.pop(block.address).base.free()

    def copy_in(self, target: int, source: int, byte_count: int, stream: int) -> None:
        with _translated():
            self._pycuda.memcpy_htod_async(target, self._blocks[source][:byte_count], self._streams[stream])

    def copy_out(self, target: int, source: int, byte_count: int, stream: int) -> None:
        with _translated():
            self._pycuda.memcpy_dtoh_async(self._blocks[target][:byte_count], source, self._streams[stream])

    def copy_within(self, target: int, source: int, byte_count: int, stream: int) -> None:
        with _translated():
            self._pycuda.memcpy_dtod_async(target, source, byte_count, self._streams[stream])

    def clear(self, target: int, byte_count: int, stream: int) -> None:
        with _translated():
            self._pycuda.memset_d8_async(target, 0, byte_count, self._streams[stream])

    def synchronise(self, stream: int) -> None:
        with _translated():
            self._streams[stream].synchronize()

    def free_bytes(self) -> int:
        with _translated():
            return int(self._pycuda.mem_get_info()[0])

    def close(self) -> None:
        with _translated():
            self._context.detach()
