"""Choice of the CUDA driver access: pycuda if it imports, else cuda-python, else ctypes.

All three work in the device's primary context, so that memory and streams can be shared with other libraries in the
process. The driver is looked for first, by ctypes: a TensorRT runtime made without one ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger(__name__)

Bytes: TypeAlias = "npt.NDArray[np.uint8]"

LIBRARY = "libcuda.so.1"

_WAYS = (
    ("pycuda.driver", "edge_server.backends.tensorrt.cuda_pycuda"),
    ("cuda.bindings.driver", "edge_server.backends.tensorrt.cuda_bindings"),
)
"""What is tried to be imported, the preferred first, and the module that works through it."""


class CudaFault(Exception):
    """The driver said no. `code` is its CUresult."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == 2

    @property
    def is_context_lost(self) -> bool:
        """Whether nothing works any more in this process: an illegal access, a failed launch, a GPU that is gone."""
        return self.code in _STICKY


_STICKY = frozenset((214, 220, 700, 702, 708, 709, 710, 714, 715, 716, 717, 718, 719, 721))
"""CUresult codes after which the context has to be made anew, which a shared primary context cannot be."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU. `capability` is its compute capability, (8, 7); `is_integrated`: it shares its memory with the CPU."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    is_integrated: bool

    @property
    def capability_text(self) -> str:
        """As Triton's cc_model_filenames writes it: "8.7"."""
        return f"{self.capability[0]}.{self.capability[1]}"


@dataclass(frozen=True, slots=True)
class HostBlock:
    """Page-locked memory of the host: `array` is it, `address` where, `device_address` where the GPU sees it, 0 if it
    was not asked for. Valid until it is given to `free_host`."""

    array: Bytes
    address: int
    device_address: int


class Context(Protocol):
    """One device's primary context. What allocates, copies or launches does so only within `current`."""

    def current(self) -> AbstractContextManager[None]:
        """Make it the calling thread's context for a block. May be entered again inside."""

    def make_stream(self) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def allocate(self, byte_count: int) -> int:
        """Return the address of memory on the device. Raises CudaFault."""

    def free(self, address: int) -> None: ...

    def allocate_host(self, byte_count: int, *, is_mapped: bool) -> HostBlock: ...

    def free_host(self, block: HostBlock) -> None: ...

    def copy_in(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Begin to copy from page-locked host memory to the device."""

    def copy_out(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Begin to copy from the device to page-locked host memory."""

    def copy_within(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Begin to copy from one place of the device's memory to another."""

    def clear(self, target: int, byte_count: int, stream: int) -> None:
        """Begin to set the device's memory to zeros."""

    def synchronise(self, stream: int) -> None:
        """Wait for all work on the stream, the GIL given up. Raises CudaFault for what went wrong in it."""

    def begin_capture(self, stream: int) -> None: ...

    def end_capture(self, stream: int) -> int:
        """Return the captured graph, ready for launch; 0 if nothing could be captured."""

    def launch(self, graph: int, stream: int) -> None: ...

    def destroy_graph(self, graph: int) -> None: ...

    def free_bytes(self) -> int:
        """Return how much of the device's memory is free."""

    def close(self) -> None:
        """Give the primary context back. Called once, after everything made in it is gone."""


class Cuda(Protocol):
    """The driver. `way` names the library it is reached through."""

    way: str

    def devices(self) -> tuple[CudaDevice, ...]: ...

    def retain(self, device_id: int) -> Context:
        """Return the device's primary context, which is made where nobody has made it yet. Raises CudaFault."""


def missing(library: str | None = None) -> str:
    """Return why there is no GPU to be used here, "" when there is one. Makes no context and loads no runtime."""
    name = library or LIBRARY
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"there is no NVIDIA driver ({name} does not load)"
    code = driver.cuInit(0)
    if code != 0:
        return f"the NVIDIA driver does not start (cuInit: CUresult {code})"
    count = ctypes.c_int(0)
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code != 0 or count.value < 1:
        return "the NVIDIA driver finds no GPU"
    return ""


@functools.cache
def driver() -> Cuda:
    """Return the driver, reached in the best way there is. Only where `missing` returned ""."""
    for library, module in _WAYS:
        try:
            importlib.import_module(library)
            made: Cuda = importlib.import_module(module).make(LIBRARY)
        except Exception:
            # Foreign code that finds no driver raises what it likes; there is another way.
            log.debug("%s does not reach the NVIDIA driver", library, exc_info=True)
        else:
            return made
    from edge_server.backends.tensorrt.cuda_ctypes import make

    return make(LIBRARY)


def devices() -> tuple[CudaDevice, ...]:
    """Return the GPUs of the box; none while `missing` says why, which may pass: a driver that is not ready yet."""
    return () if missing() else _found()


@functools.cache
def _found() -> tuple[CudaDevice, ...]:
    return driver().devices()
