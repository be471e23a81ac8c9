"""GPU fail-over: when a GPU fails, its models become FAILED at once and are loaded on other devices if possible.

- A lost device, or a sticky CUDA error: this process cannot use that GPU any more. Every version with an instance on it
  becomes FAILED and is loaded again. Lost GPUs are not opened, so a model whose runtime was chosen from several gets
  the next one, and a model with KIND_AUTO goes to the CPU. A model that requires a GPU stays FAILED, and the server is
  not ready.
- Out of memory fails the request. After `MOST_REFUSALS` such failures in a row the version fails. It is loaded again
  after a while, like a model that could not be loaded for lack of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_server.core.gpu_fault import GpuFault, named_gpu
from edge_server.core.version_lifecycle import LoadAction
from edge_server.errors import EdgeServerError, OutOfMemory
from edge_server.serving.execution.gpu_state import Gpus, gpus_of
from edge_server.serving.execution.version_interface import ServedVersion
from edge_server.serving.lifecycle.event_queue import ModelEventQueue
from edge_server.serving.lifecycle.model_state import ModelState
from edge_server.serving.lifecycle.reconciler import Reconciler
from edge_server.telemetry.event_bus import GPU_LOST

log = logging.getLogger(__name__)


class GpuFailover:
    """Thread-safe. `on_stranded` is called with the reason when a model that lost its GPU cannot be loaded again. It
    must return at once."""

    def __init__(
        self, reconciler: Reconciler, gpus: Gpus, events: ModelEventQueue, on_stranded: Callable[[str], None]
    ) -> None:
        self._reconciler = reconciler
        self._gpus = gpus
        self._events = events
        self._on_stranded = on_stranded

    def handle_fault(self, version: ServedVersion, fault: GpuFault, error: EdgeServerError) -> None:
        """Handle the error of a run or load that says something about the version's GPU."""
        if not fault.takes_device:
            self._fail_for_memory(version, error)
            return
        named = named_gpu(error)
        devices = gpus_of(version.spec)
        for device_id in [named] if named in devices else devices:
            assert device_id is not None
            self.lose_gpu(device_id, error.message)

    def lose_gpu(self, device_id: int, reason: str) -> None:
        """Fail every version with an instance on a lost GPU. A second call does nothing."""
        if not self._gpus.lose(device_id, reason):
            return
        log.error("GPU %d is lost to this process: %s", device_id, reason)
        words = f"GPU {device_id} is lost to this process: {reason}"
        reconciler = self._reconciler
        with reconciler.changed:
            self._events.add(GPU_LOST, gpu=device_id, reason=reason)
            for model in reconciler.models.values():
                for version in list(model.loaded):
                    if device_id in gpus_of(version.spec) and reconciler.fail(model, version, words):
                        model.lost_gpu.add(version.version)
                        reconciler.proceed(model)
        # Not published here, because this may be the thread of an instance or of the governor.
        reconciler.start_thread("edge-gpu-lost", self._events.publish)

    def on_loaded(self, model: ModelState, version: ServedVersion) -> None:
        """Forget that the version lost its GPU. Under the lock."""
        # It serves again: a later failure, for example of new files, is not the GPU's.
        model.lost_gpu = (model.lost_gpu & model.desired.versions.keys()) - {version.version}
        lost = self._gpus.lost()
        device_id = next((gpu for gpu in gpus_of(version.spec) if gpu in lost), None)
        # Lost while the version was opened: `lose_gpu` did not see it among the loaded versions.
        if device_id is not None:
            words = f"GPU {device_id} is lost to this process: {lost[device_id]}"
            if self._reconciler.fail(model, version, words):
                model.lost_gpu.add(version.version)

    def on_load_failed(self, model: ModelState, action: LoadAction, cause: EdgeServerError) -> None:
        """Report a model that lost its GPU and could not be loaded elsewhere. Under the lock."""
        if model.lost_gpu:
            self._on_stranded(f"model '{model.name}' version {action.version}: {cause.message}")

    def _fail_for_memory(self, version: ServedVersion, error: EdgeServerError) -> None:
        words = (
            f"model '{version.name}' version {version.version} finds no memory on its GPU, again and again: "
            f"{error.message}"
        )
        reconciler = self._reconciler
        with reconciler.changed:
            model = reconciler.models[version.name]
            if reconciler.fail(model, version, words):
                reconciler.record_failure(
                    model, LoadAction(version.version, version.fingerprint), version.generation, OutOfMemory(words)
                )
                reconciler.proceed(model)
