"""Check whether this machine can build TensorRT engines: library, driver and GPU. Imports TensorRT only if it can."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence

from edge_server.backends import load_backend
from edge_server.backends.cuda import cuda_driver
from edge_server.errors import BackendMissing

log = logging.getLogger(__name__)


def supported_library(libraries: Sequence[str]) -> str:
    """Return the first library with which engines can be built and run here, "" if there is none."""
    installed = [name for name in libraries if importlib.util.find_spec(name) is not None]
    if not installed:
        return ""
    missing = cuda_driver.unavailable_reason()
    if missing:
        log.debug("%s is installed, but %s", installed[0], missing)
        return ""
    for name in installed:
        try:
            backend = load_backend(name)
        except BackendMissing as error:
            log.warning("no engines are built with %s: %s", name, error.message)
            continue
        if not getattr(backend, "has_builder", False):
            continue
        try:
            cuda_driver.devices()
        except cuda_driver.CudaFault as error:
            log.warning("no engines are built: the GPU does not answer: %s", error)
            return ""
        return name
    return ""
