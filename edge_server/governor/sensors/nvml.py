"""NVIDIA's GPUs by NVML (docs.nvidia.com/deploy/nvml-api). The only file that imports pynvml.

Each metric is asked for on its own, each time: a driver that comes up later, a GPU that is lost or reset, and a call
that this driver does not have cost just what they concern.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from types import ModuleType

from edge_server.governor.readings import BoxReading
from edge_server.governor.sensors.nvml_gpu import (
    LOST,
    MEMORY_CALLS,
    SOURCE,
    VERSION_MISMATCH,
    Closed,
    GpuGone,
    GpuReadingParts,
    NvmlGpu,
    NvmlQueries,
    is_of_jetson,
    read_gpu,
    silent_gpu,
)

_log = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_LIBRARY_NOT_FOUND = 12
"""NVML_ERROR_LIBRARY_NOT_FOUND."""

OPEN_AGAIN_S = 10.0
"""How long it takes until NVML, or a lost GPU, is tried again."""
MISMATCH_AGAIN_S = 600.0
"""The same, for a driver that was replaced under a library that this process holds until it ends."""


class NvmlSensor:
    """Every GPU that NVML knows, by the UUID that it keeps when others come and go."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._devices: dict[str, NvmlGpu] = {}
        self._owner = 0
        self._is_open = False
        self._tried_s: float | None = None
        self._again_s = OPEN_AGAIN_S
        self._has_warned = False
        self._problem = ""

    def read(self, now_s: float) -> BoxReading:
        self._open(now_s)
        parts = [self._parts(device, now_s) for device in self._devices.values()]
        return BoxReading(
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
        """Make NVML answer, or say in `_problem` why it does not."""
        if self._is_open and self._owner != os.getpid():
            # NVML does not survive a fork, and its handles are the parent's.
            self._abandon("NVML was opened by the parent process")
            self._tried_s = None
        if self._is_open and self._devices and all(item.handle is not None for item in self._devices.values()):
            return
        if self._tried_s is not None and 0 <= now_s - self._tried_s < self._again_s:
            return
        self._tried_s, self._again_s = now_s, OPEN_AGAIN_S
        if self._is_open:
            # A GPU that was reset is found only by a library that starts anew.
            self._shut_down()
            self._is_open = False
        try:
            self._start()
            self._look_up()
        except Closed as error:
            self._fail(error)

    def _start(self) -> None:
        if "pynvml" not in sys.modules:
            try:
                # pynvml would look for it likewise, but costs memory even on boxes that have none.
                ctypes.CDLL(_LIBRARY)
            except OSError as error:
                raise Closed(_LIBRARY_NOT_FOUND, f"NVML Shared Library Not Found: {error}") from None
        try:
            import pynvml
        except ImportError as error:
            raise Closed(0, f"needs pynvml ({error}): pip install nvidia-ml-py") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise Closed(error.value, str(error)) from None
        self._owner = os.getpid()
        self._is_open = True

    def _shut_down(self) -> None:
        assert self._nvml is not None
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            _log.debug("NVML could not be shut down: %s", error)

    def _fail(self, error: Closed) -> None:
        if self._is_open:
            self._shut_down()
        self._abandon(f"NVML: {error}")
        if error.code != VERSION_MISMATCH:
            return
        self._again_s = MISMATCH_AGAIN_S
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "GPUs are not watched: %s The driver was replaced: a restart of this server mends that, or one of the "
                "machine.",
                self._problem,
            )

    def _abandon(self, problem: str) -> None:
        self._is_open = False
        self._problem = problem
        for device in self._devices.values():
            device.handle = None
            device.problem = device.problem if device.is_lost else problem

    def _look_up(self) -> None:
        """Find the GPUs that are there now. Those known and not found are lost."""
        nvml = self._nvml
        assert nvml is not None
        self._devices = {identity: device for identity, device in self._devices.items() if not device.is_unknown}
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise Closed(error.value, str(error)) from None
        found = {self._meet(index) for index in range(count)}
        for identity, device in self._devices.items():
            if identity in found:
                continue
            device.handle = None
            if not device.is_lost:
                device.is_lost, device.problem = True, "NVML does not find this GPU any more"

    def _meet(self, index: int) -> str:
        """Return the identity of the GPU at a place in NVML's list, entered in `_devices`."""
        nvml = self._nvml
        assert nvml is not None
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            ask = NvmlQueries(nvml, handle)
            uuid = ask("uuid", ("nvmlDeviceGetUUID",))
            identity = uuid or f"index {index}"
            if identity not in self._devices:
                self._devices[identity] = self._new(ask, index, uuid)
        except GpuGone as error:
            return self._meet_mute(index, str(error), is_lost=True)
        except nvml.NVMLError as error:
            return self._meet_mute(index, str(error), is_lost=error.value in LOST)
        device = self._devices[identity]
        device.handle, device.is_lost, device.problem = handle, False, ""
        return identity

    def _meet_mute(self, index: int, problem: str, *, is_lost: bool) -> str:
        """Enter a GPU that is listed but answers nothing; one already known by its UUID is missed anyway."""
        identity = f"index {index}"
        if all(device.handle is not None for name, device in self._devices.items() if name != identity):
            device = self._devices.setdefault(identity, NvmlGpu(self._free_key(index), None, None, False))
            device.handle, device.is_lost, device.problem = None, is_lost, problem
        return identity

    def _new(self, ask: NvmlQueries, index: int, uuid: str | None) -> NvmlGpu:
        name = ask("name", ("nvmlDeviceGetName",))
        memory = ask("memory", *MEMORY_CALLS)
        # A GPU without memory of its own shares the machine's.
        has_none = ask.is_never("memory") if memory is None else memory.total == 0
        is_integrated = has_none or is_of_jetson(name)
        return NvmlGpu("igpu" if is_integrated else self._free_key(index), uuid, name, is_integrated)

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
            except Closed as error:
                self._fail(error)
        return silent_gpu(device)
