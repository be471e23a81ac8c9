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

_OLD_DRIVER = (
    "the driver is older than the CUDA of the library that uses it: update the driver, or install the library for the "
    "driver's CUDA (nvidia-smi shows it)"
)
_NO_UVM = (
    "the kernel module nvidia-uvm is not loaded, or /dev/nvidia-uvm may not be opened: run `nvidia-modprobe -u -c 0` "
    "as root before the server starts"
)
_START_FAULTS = {
    2: "the GPU is out of memory",
    3: "the driver's kernel module does not answer: see that it is loaded (lsmod), and who may open its files in /dev",
    34: "the library that was found is the stub of the CUDA toolkit: take its folder out of LD_LIBRARY_PATH",
    35: _OLD_DRIVER,
    36: _OLD_DRIVER,
    100: f"no GPU is visible: {_NO_UVM}; or CUDA_VISIBLE_DEVICES hides all GPUs",
    222: _OLD_DRIVER,
    801: "on a Jetson, the server's user may not open the GPU's files: add it to the group render (/dev/dri/renderD*), "
    "and to the owner's group of /dev/host1x-fence",
    802: "the GPUs are still starting: try again; machines with NVSwitch need nvidia-fabricmanager",
    803: "the driver's kernel module and its library have different versions, as after an update: start the machine "
    "again; in a container, mount the library of the machine's driver",
    804: "this GPU does not support the compatibility library of a newer CUDA: take its folder (cuda-compat) out of "
    "LD_LIBRARY_PATH",
    999: _NO_UVM,
}
"""CUresult of cuInit, or the cudaError_t that TensorRT logs (equal numbers, cuda.h) -> cause and cure, which are from
NVIDIA's documents and public reports."""


def start_fault(code: int) -> str:
    """Return the usual cause, and the cure, if CUDA does not start with this error; "" if there is no usual one."""
    return _START_FAULTS.get(code, "")


def unavailable_reason(library: str | None = None) -> str:
    """Return why no GPU can be used here, "" if one can. Creates no context and loads no runtime."""
    name = library or LIBRARY
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"there is no NVIDIA driver ({name} does not load)"
    code = driver.cuInit(0)
    if code != 0:
        cause = start_fault(code)
        return f"the NVIDIA driver does not start (cuInit: CUresult {code})" + (f": {cause}" if cause else "")
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
