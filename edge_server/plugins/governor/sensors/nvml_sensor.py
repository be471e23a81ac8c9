"""Readings of all NVIDIA GPUs: opens the library NVML, and tries again after a driver update or the loss of a GPU.

Each metric is queried separately each time. So a driver that is loaded later, a lost or reset GPU, or a missing call
affects only its own values.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from types import ModuleType

from edge_server.plugins.governor.readings import MachineReading
from edge_server.plugins.governor.sensors.nvml_gpu_readings import (
    LOST,
    MEMORY_CALLS,
    SOURCE,
    VERSION_MISMATCH,
    GpuGone,
    GpuReadingParts,
    NvmlClosed,
    NvmlGpu,
    NvmlQueries,
    is_jetson_gpu,
    read_gpu,
    unresponsive_gpu,
)

_log = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_LIBRARY_NOT_FOUND = 12
"""NVML_ERROR_LIBRARY_NOT_FOUND."""

OPEN_AGAIN_S = 10.0
"""Time until NVML or a lost GPU is tried again."""
MISMATCH_AGAIN_S = 600.0
"""The same after a driver update: this process keeps the old library until it ends."""


class NvmlSensor:
    """Reads all GPUs of NVML, identified by their UUIDs: indexes change when GPUs appear or disappear."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._devices: dict[str, NvmlGpu] = {}
        self._owner = 0
        self._is_open = False
        self._tried_s: float | None = None
        self._retry_s = OPEN_AGAIN_S
        self._has_warned = False
        self._problem = ""

    def read(self, now_s: float) -> MachineReading:
        self._open(now_s)
        parts = [self._parts(device, now_s) for device in self._devices.values()]
        return MachineReading(
            now_s,
            zones=tuple(item.zone for item in parts if item.zone is not None),
            rails=tuple(item.rail for item in parts if item.rail is not None),
            energy=tuple(item.energy for item in parts if item.energy is not None),
            fans=tuple(item.fan for item in parts if item.fan is not None),
            gpus=tuple(item.gpu for item in parts),
            missing={} if self._is_open else {SOURCE: self._problem},
        )

    def close(self) -> None:
        if self._is_open and self._owner == os.getpid():
            self._shut_down()
        self._is_open = False
        self._tried_s = None
        for device in self._devices.values():
            device.handle = None

    def _open(self, now_s: float) -> None:
        """Open NVML if needed. If that fails, `_problem` has the reason."""
        if self._is_open and self._owner != os.getpid():
            # NVML cannot be used after a fork, and its handles belong to the parent process.
            self._abandon("NVML was opened by the parent process")
            self._tried_s = None
        if self._is_open and self._devices and all(item.handle is not None for item in self._devices.values()):
            return
        if self._tried_s is not None and 0 <= now_s - self._tried_s < self._retry_s:
            return
        self._tried_s, self._retry_s = now_s, OPEN_AGAIN_S
        if self._is_open:
            # A GPU is found after a reset only if NVML is initialized again.
            self._shut_down()
            self._is_open = False
        try:
            self._initialize()
            self._find_gpus()
        except NvmlClosed as error:
            self._fail(error)

    def _initialize(self) -> None:
        if "pynvml" not in sys.modules:
            try:
                # pynvml does the same, but it also costs memory on machines without NVML.
                ctypes.CDLL(_LIBRARY)
            except OSError as error:
                raise NvmlClosed(_LIBRARY_NOT_FOUND, f"NVML Shared Library Not Found: {error}") from None
        try:
            import pynvml
        except ImportError as error:
            raise NvmlClosed(0, f"needs pynvml ({error}): pip install nvidia-ml-py") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlClosed(error.value, str(error)) from None
        self._owner = os.getpid()
        self._is_open = True

    def _shut_down(self) -> None:
        assert self._nvml is not None
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            _log.debug("NVML could not be shut down: %s", error)

    def _fail(self, error: NvmlClosed) -> None:
        if self._is_open:
            self._shut_down()
        self._abandon(f"NVML: {error}")
        if error.code != VERSION_MISMATCH:
            return
        self._retry_s = MISMATCH_AGAIN_S
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "GPUs are not monitored: %s The driver was replaced: restart this server or the machine.",
                self._problem,
            )

    def _abandon(self, problem: str) -> None:
        self._is_open = False
        self._problem = problem
        for device in self._devices.values():
            device.handle = None
            device.problem = device.problem if device.is_lost else problem

    def _find_gpus(self) -> None:
        """Find the present GPUs. Known GPUs that are not found are lost."""
        nvml = self._nvml
        assert nvml is not None
        self._devices = {identity: device for identity, device in self._devices.items() if not device.is_unknown}
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise NvmlClosed(error.value, str(error)) from None
        found = {self._register(index) for index in range(count)}
        for identity, device in self._devices.items():
            if identity in found:
                continue
            device.handle = None
            if not device.is_lost:
                device.is_lost, device.problem = True, "NVML does not find this GPU any more"

    def _register(self, index: int) -> str:
        """Add the GPU at an index of NVML's list to `_devices`, and return its identity."""
        nvml = self._nvml
        assert nvml is not None
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            query = NvmlQueries(nvml, handle)
            uuid = query("uuid", ("nvmlDeviceGetUUID",))
            identity = uuid or f"index {index}"
            if identity not in self._devices:
                name = query("name", ("nvmlDeviceGetName",))
                memory = query("memory", *MEMORY_CALLS)
                # A GPU without its own memory shares the machine's memory.
                has_no_memory = query.is_never("memory") if memory is None else memory.total == 0
                is_integrated = has_no_memory or is_jetson_gpu(name)
                key = "igpu" if is_integrated else self._free_key(index)
                self._devices[identity] = NvmlGpu(key, uuid, name, is_integrated)
        except GpuGone as error:
            return self._register_unresponsive(index, str(error), is_lost=True)
        except nvml.NVMLError as error:
            return self._register_unresponsive(index, str(error), is_lost=error.value in LOST)
        device = self._devices[identity]
        device.handle, device.is_lost, device.problem = handle, False, ""
        return identity

    def _register_unresponsive(self, index: int, problem: str, *, is_lost: bool) -> str:
        """Add a GPU that is listed but does not answer. If it is known by its UUID, it is reported as lost anyway."""
        identity = f"index {index}"
        if all(device.handle is not None for name, device in self._devices.items() if name != identity):
            device = self._devices.setdefault(identity, NvmlGpu(self._free_key(index), None, None, False))
            device.handle, device.is_lost, device.problem = None, is_lost, problem
        return identity

    def _free_key(self, index: int) -> str:
        taken = {device.key for device in self._devices.values()}
        while f"gpu{index}" in taken:
            index += 1
        return f"gpu{index}"

    def _parts(self, device: NvmlGpu, now_s: float) -> GpuReadingParts:
        if device.handle is not None:
            assert self._nvml is not None
            try:
                return read_gpu(NvmlQueries(self._nvml, device.handle), device, now_s)
            except GpuGone as error:
                device.handle, device.is_lost, device.problem = None, True, str(error)
                self._tried_s = now_s
            except NvmlClosed as error:
                self._fail(error)
        return unresponsive_gpu(device)
