"""State of the GPUs that the server uses: which failed and cannot be used any more, how much memory each model takes,
and whether another model may be loaded.

Loads on one GPU run one after the other, so the growth of its used memory during a load is the memory of that model.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from edge_server.core.model_spec import InstanceKind, ModelSpec
from edge_server.errors import DeviceLost, OutOfMemory

_OTHER_GPU_BACKENDS = frozenset(("openvino",))
"""Backends whose GPUs are not CUDA GPUs and have numbers of their own."""

_MAX_LOAD_WAIT_S = 60.0
"""Longest wait of a load for another one on the same GPU, so that a load that hangs does not block the others for
ever."""


class Meter(Protocol):
    """Reads a GPU's memory; see backends.cuda.cuda_devices.CudaDevices."""

    def memory(self, device_id: int) -> tuple[int, int]:
        """Return the free and the total bytes. Raises OSError."""


def gpus_of(spec: ModelSpec) -> tuple[int, ...]:
    """Return the numbers of CUDA's GPUs that instances of a model run on, ascending."""
    if spec.backend in _OTHER_GPU_BACKENDS:
        return ()
    return tuple(
        sorted({gpu for group in spec.instance_groups if group.kind is InstanceKind.GPU for gpu in group.gpus})
    )


class Gpus:
    """Thread-safe. `limits` are fractions of a GPU's memory, by its number; above it no further model is loaded.

    `meter` None: memory is neither measured nor limited.
    """

    def __init__(self, meter: Meter | None = None, limits: Mapping[int, float] | None = None) -> None:
        self._meter = meter
        self._limits = limits or {}
        self._lock = threading.Lock()
        self._loads: dict[int, threading.Lock] = {}
        self._lost: dict[int, str] = {}

    def mark_lost(self, device_id: int, reason: str) -> bool:
        """Mark a GPU as lost for this process. Return False if it was marked before."""
        with self._lock:
            if device_id in self._lost:
                return False
            self._lost[device_id] = reason
            return True

    def lost_gpus(self) -> Mapping[int, str]:
        """Return the lost GPUs with the reason of each."""
        with self._lock:
            return dict(self._lost)

    @contextlib.contextmanager
    def reserve_for_load(self, model: str, device_ids: tuple[int, ...]) -> Iterator[dict[int, int]]:
        """Reserve the GPUs for one load. Yields the bytes that it took of each, which are complete after the block ends
        without an error.

        Raises DeviceLost, and OutOfMemory if --model-load-gpu-limit was already exceeded. `check_limits` within the
        block finds a limit that this load exceeds, as in Triton.
        """
        taken: dict[int, int] = {}
        if not device_ids:
            yield taken
            return
        with contextlib.ExitStack() as held:
            for device_id in device_ids:  # ascending, so that two loads cannot wait for each other
                with self._lock:
                    lock = self._loads.setdefault(device_id, threading.Lock())
                if lock.acquire(timeout=_MAX_LOAD_WAIT_S):
                    held.callback(lock.release)
                if (reason := self.lost_gpus().get(device_id)) is not None:
                    raise DeviceLost(f"model '{model}': GPU {device_id} is lost to this process: {reason}")
            self.check_limits(model, device_ids)
            before = {device_id: self._used(device_id) for device_id in device_ids}
            yield taken
            for device_id, used in before.items():
                after = self._used(device_id)
                if used is not None and after is not None:
                    taken[device_id] = max(after - used, 0)

    def check_limits(self, model: str, device_ids: tuple[int, ...]) -> None:
        """Raise OutOfMemory if more of a GPU is used than --model-load-gpu-limit allows, or if its use cannot be
        read."""
        for device_id in device_ids:
            limit = self._limits.get(device_id)
            if limit is None:
                continue
            memory = self._memory(device_id)
            if memory is not None and memory[1] - memory[0] <= int(limit * memory[1]):
                continue
            # Triton's text (VerifyModelLoadGpuFraction in core's backend_model_instance.cc), followed by ours.
            if memory is None:
                reason = "Its memory cannot be read"
            else:
                reason = f"{1 - memory[0] / memory[1]:.0%} of its memory is used"
            raise OutOfMemory(
                f"can not create model '{model}': memory limit set for GPU {device_id} has exceeded, model loading is "
                f"rejected. {reason}, --model-load-gpu-limit allows {limit:.0%}"
            )

    def _used(self, device_id: int) -> int | None:
        memory = self._memory(device_id)
        return None if memory is None else memory[1] - memory[0]

    def _memory(self, device_id: int) -> tuple[int, int] | None:
        if self._meter is None:
            return None
        try:
            return self._meter.memory(device_id)
        except OSError:
            return None
