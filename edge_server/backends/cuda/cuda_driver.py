"""Choice between pycuda and ctypes for the calls of the CUDA driver, the reason if no GPU can be used, and the list of
the machine's GPUs.

The driver is called through pycuda where pycuda imports, else through ctypes. ctypes needs no package, also on a
Jetson. Both use the device's primary context, so that memory and streams can be shared with other libraries in the
process.

`unavailable_reason` must come first: it loads the driver by ctypes only. A TensorRT runtime that is created without a
driver ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging

from edge_server.backends.cuda.cuda_ctypes import CudaContext as CudaContext
from edge_server.backends.cuda.cuda_ctypes import CudaDevice as CudaDevice
from edge_server.backends.cuda.cuda_ctypes import CudaDriver
from edge_server.backends.cuda.cuda_ctypes import CudaFault as CudaFault
from edge_server.backends.cuda.cuda_pycuda import PycudaDriver

log = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"


def unavailable_reason(library: str | None = None) -> str:
    """Return why no GPU can be used here, "" if one can. Creates no context and loads no runtime."""
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
def driver() -> CudaDriver:
    """Return the driver, through pycuda or ctypes. Call it only after `unavailable_reason` returned ""."""
    try:
        # First: a pycuda with a C++ library of its own inside would give its symbols to the runtimes, which then crash.
        ctypes.CDLL("libstdc++.so.6")
        importlib.import_module("pycuda.driver")
        return PycudaDriver(LIBRARY)
    except Exception:
        # A package that finds no driver may raise any exception at import. ctypes may still work.
        log.debug("pycuda does not reach the NVIDIA driver", exc_info=True)
    return CudaDriver(LIBRARY)


def devices() -> tuple[CudaDevice, ...]:
    """Return the GPUs of the machine; none while `unavailable_reason` has a reason, such as a driver still starting."""
    return () if unavailable_reason() else _devices_of_driver()


@functools.cache
def _devices_of_driver() -> tuple[CudaDevice, ...]:
    return driver().devices()
