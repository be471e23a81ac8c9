"""Classification of GPU errors: decides from a runtime's message whether the GPU is lost, needs a new process, or is
out of memory.

The messages are those of CUDA's runtime and driver (cudaGetErrorString, names and numbers of CUresult), as quoted by
ONNX Runtime ("CUDA failure 719: unspecified launch failure ; GPU=0 ; ..."), TensorRT, cuDNN, cuBLAS and PyTorch.
"""

from __future__ import annotations

import enum
import re

from edge_server.errors import EdgeServerError, OutOfMemory, SessionLost


class GpuFault(enum.Enum):
    """`DEVICE_LOST`: the GPU is gone or needs a reset. `STICKY`: the GPU may work, but the CUDA context of this process
    is broken and every later call fails. `OUT_OF_MEMORY`: one allocation failed."""

    DEVICE_LOST = "lost"
    STICKY = "sticky"
    OUT_OF_MEMORY = "out of memory"

    @property
    def is_device_unusable(self) -> bool:
        """Whether this process cannot use the device any more."""
        return self is not GpuFault.OUT_OF_MEMORY


_LOST_CODES = frozenset((46, 100, 101, 214, 220))
_STICKY_CODES = frozenset((700, 702, 708, 709, 710, 714, 715, 716, 717, 718, 719, 721))
"""Numbers of CUresult and cudaError_t, which are the same for these errors."""

_ERROR_CODE = re.compile(r"\bcuda(?: runtime| driver)? (?:failure|error)[ :]+(\d{1,4})\b")

_LOST_PHRASES = (
    "gpu is lost",
    "fallen off the bus",
    "no cuda-capable device",
    "cuda_error_no_device",
    "cudaerrornodevice",
    "cuda-capable device(s) is/are busy or unavailable",
    "cuda_error_device_unavailable",
    "cudaerrordevicesunavailable",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "cuda_error_ecc_uncorrectable",
    "cudaerroreccuncorrectable",
)
_STICKY_PHRASES = (
    "illegal memory access",
    "cuda_error_illegal_address",
    "cudaerrorillegaladdress",
    "unspecified launch failure",
    "cuda_error_launch_failed",
    "cudaerrorlaunchfailure",
    "launch timed out and was terminated",
    "cuda_error_launch_timeout",
    "cudaerrorlaunchtimeout",
    "device-side assert",
    "cuda_error_assert",
    "an illegal instruction was encountered",
    "misaligned address",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "context is destroyed",
    "cuda_error_context_is_destroyed",
    "cudnn_status_execution_failed",
    "cublas_status_execution_failed",
)
_MEMORY_PHRASES = (
    "out of memory",
    "out_of_memory",
    "cudaerrormemoryallocation",
    "failed to allocate memory for requested buffer",
    "available memory of",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
    "outofmemory",
    "bad_alloc",
    "memoryerror",
)
"""The last two are of C++ and Python, for memory of the host, which a GPU may share."""

_DEVICE = re.compile(r"\bgpu=(\d{1,3})\b")


def classify_gpu_fault(error: EdgeServerError) -> GpuFault | None:
    """Return the fault that an error of a run on a GPU reports, or None if it reports no GPU fault."""
    text = error.message.lower()
    code = _ERROR_CODE.search(text)
    error_code = int(code[1]) if code else 0
    if error_code in _LOST_CODES or any(phrase in text for phrase in _LOST_PHRASES):
        return GpuFault.DEVICE_LOST
    if (
        isinstance(error, SessionLost)
        or error_code in _STICKY_CODES
        or any(phrase in text for phrase in _STICKY_PHRASES)
    ):
        return GpuFault.STICKY
    if isinstance(error, OutOfMemory) or error_code == 2 or any(phrase in text for phrase in _MEMORY_PHRASES):
        return GpuFault.OUT_OF_MEMORY
    return None


def find_gpu_number(error: EdgeServerError) -> int | None:
    """Return the GPU number in the message, as ONNX Runtime writes it, or None if there is none."""
    found = _DEVICE.search(error.message.lower())
    return int(found[1]) if found else None
