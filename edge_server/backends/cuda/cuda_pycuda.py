"""Alternative to `cuda_ctypes` with the same classes: uses the package pycuda for GPU contexts, memory, streams and
copies. Graphs, which pycuda lacks, are called through ctypes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from edge_server.backends.cuda.cuda_ctypes import CudaCalls, CudaContext, CudaDriver, CudaFault, HostBlock
from edge_server.core.gpu_fault import classify_gpu_fault
from edge_server.errors import BackendError


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    """Convert exceptions of pycuda into CudaFault. Their messages name the function and quote the driver."""
    pycuda: Any = importlib.import_module("pycuda.driver")
    try:
        yield
    except pycuda.MemoryError as error:
        raise CudaFault(2, str(error)) from error
    except (pycuda.Error, pycuda.RuntimeError) as error:
        # pycuda keeps only the driver's text of a launch or runtime error, not its code.
        fault = classify_gpu_fault(BackendError(str(error)))
        is_lost = (fault is not None and fault.is_device_unusable) or "launch failed" in str(error)
        raise CudaFault(719 if is_lost else 999, str(error)) from error


class PycudaDriver(CudaDriver):
    """See CudaDriver."""

    access_library = "pycuda"

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self._pycuda: Any = importlib.import_module("pycuda.driver")
        with _translated_errors():
            self._pycuda.init()

    def retain_context(self, device_id: int) -> CudaContext:
        with _translated_errors():
            context = self._pycuda.Device(device_id).retain_primary_context()
        return PycudaContext(self._calls, self._pycuda, self._device_handle(device_id), context)


class PycudaContext(CudaContext):
    """See CudaContext. It holds pycuda's objects, which free their memory when they are dropped."""

    def __init__(self, calls: CudaCalls, pycuda: Any, device: Any, context: Any) -> None:
        super().__init__(calls, device, 0)
        self._pycuda = pycuda
        self._context = context
        self._streams: dict[int, Any] = {}
        self._memory: dict[int, Any] = {}
        self._blocks: dict[int, Any] = {}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with _translated_errors():
            self._context.push()
        try:
            yield
        finally:
            with _translated_errors():
                self._pycuda.Context.pop()

    def create_stream(self) -> int:
        with _translated_errors():
            stream = self._pycuda.Stream(self._pycuda.stream_flags.NON_BLOCKING)
        self._streams[int(stream.handle)] = stream
        return int(stream.handle)

    def destroy_stream(self, stream: int) -> None:
        del self._streams[stream]

    def allocate(self, byte_count: int) -> int:
        with _translated_errors():
            memory = self._pycuda.mem_alloc(max(byte_count, 1))
        self._memory[int(memory)] = memory
        return int(memory)

    def free(self, address: int) -> None:
        with _translated_errors():
            self._memory.pop(address).free()

    def allocate_host(self, byte_count: int, *, is_mapped: bool) -> HostBlock:
        flags = self._pycuda.host_alloc_flags
        wanted = flags.PORTABLE | (flags.DEVICEMAP if is_mapped else 0)
        with _translated_errors():
            array = self._pycuda.pagelocked_empty(max(byte_count, 1), "u1", mem_flags=wanted)
            device_address = int(array.base.get_device_pointer()) if is_mapped else 0
        address = int(array.ctypes.data)
        self._blocks[address] = array
        return HostBlock(array, address, device_address)

    def free_host(self, block: HostBlock) -> None:
        with _translated_errors():
            self._blocks.pop(block.address).base.free()

    def copy_to_device(self, target: int, source: int, byte_count: int, stream: int) -> None:
        with _translated_errors():
            self._pycuda.memcpy_htod_async(target, self._blocks[source][:byte_count], self._streams[stream])

    def copy_to_host(self, target: int, source: int, byte_count: int, stream: int) -> None:
        with _translated_errors():
            self._pycuda.memcpy_dtoh_async(self._blocks[target][:byte_count], source, self._streams[stream])

    def copy_on_device(self, target: int, source: int, byte_count: int, stream: int) -> None:
        with _translated_errors():
            self._pycuda.memcpy_dtod_async(target, source, byte_count, self._streams[stream])

    def fill_zero(self, target: int, byte_count: int, stream: int) -> None:
        with _translated_errors():
            self._pycuda.memset_d8_async(target, 0, byte_count, self._streams[stream])

    def synchronise(self, stream: int) -> None:
        with _translated_errors():
            self._streams[stream].synchronize()

    def free_bytes(self) -> int:
        with _translated_errors():
            return int(self._pycuda.mem_get_info()[0])

    def close(self) -> None:
        with _translated_errors():
            self._context.detach()
