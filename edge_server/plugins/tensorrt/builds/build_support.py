"""Check whether this machine can build TensorRT engines: library, driver and GPU. Imports TensorRT only if it can."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass

from edge_server.backends import ONNX_ORDER, TENSORRT_LIBRARIES, load_backend
from edge_server.config import EngineConfig
from edge_server.errors import BackendMissing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildCapability:
    """The TensorRT and GPUs of this machine. `onnx_order`: runtimes for ONNX files without a stated backend."""

    onnx_order: tuple[str, ...]
    gpu_count: int


def find_capability(config: EngineConfig) -> BuildCapability | None:
    """Return the means to build and run engines; None without TensorRT, a driver or a GPU, or if it is switched off.
    Imports nothing if the libraries are not installed."""
    if not config.is_enabled:
        return None
    installed = [name for name in TENSORRT_LIBRARIES if importlib.util.find_spec(name) is not None]
    if not installed:
        return None
    # Imported here: most machines do not need it.
    from edge_server.backends.cuda import cuda_driver

    missing = cuda_driver.unavailable_reason()
    if missing:
        log.debug("%s is installed, but %s", installed[0], missing)
        return None
    for name in installed:
        try:
            load_backend(name)
        except BackendMissing as error:
            log.warning("no engines are built with %s: %s", name, error.message)
            continue
        try:
            return BuildCapability((name, *ONNX_ORDER), len(cuda_driver.devices()))
        except cuda_driver.CudaFault as error:
            log.warning("no engines are built: the GPU does not answer: %s", error)
            return None
    return None
