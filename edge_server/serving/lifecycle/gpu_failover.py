"""When a GPU fails: its models are given up at once, with the reason, and brought up where else they may run.

- A lost device, or a sticky CUDA error: nothing on that GPU works any more in this process. Every version with an
  instance on it becomes FAILED, and is loaded again. No GPU that is lost is opened, so a model whose runtime was chosen
  from several falls to the next one, and one that leaves the kind of its instances open goes to the CPU. What states a
  GPU, or a runtime that needs one, stays FAILED, and the server is not ready.
- Out of memory costs the request. `MOST_REFUSALS` in a row, with nothing answered between, fail the version; it is
  loaded again after a while, as after a load that found no memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_server.core.gpu_fault import GpuFault, named_gpu
from edge_server.core.version_lifecycle import LoadAction, VersionState
from edge_server.errors import EdgeServerError, OutOfMemory
from edge_server.serving.lifecycle.gpu_state import Gpus, gpus_of
from edge_server.serving.lifecycle.model_state import ModelState
from edge_server.serving.lifecycle.reconciler import Reconciler
from edge_server.serving.routing.version_interface import ServedVersion
from edge_server.telemetry.event_bus import GPU_LOST

log = logging.getLogger(__name__)


class GpuFailover(Reconciler):
    """The part of the manager that knows of GPUs. Its methods may be called from any thread."""

    on_stranded: Callable[[str], None] = staticmethod(lambda reason: None)
    """Called, with the reason, when a model that lost its GPU cannot be brought up again. Must return at once."""

    def use_gpus(self, gpus: Gpus) -> None:
        """Have loads ask and measure these GPUs; called before anything is loaded."""
        self._loader.gpus = gpus
        self._loader.on_gpu_fault = self.note_gpu_fault

    def note_gpu_fault(self, version: ServedVersion, fault: GpuFault, error: EdgeServerError) -> None:
        """Take in what an error in a run, or in a load, said of the version's GPU."""
        if not fault.takes_device:
            self._give_up_for_memory(version, error)
            return
        named = named_gpu(error)
        devices = gpus_of(version.spec)
        for device_id in [named] if named in devices else devices:
            assert device_id is not None
            self.lose_gpu(device_id, error.message)

    def lose_gpu(self, device_id: int, reason: str) -> None:
        """Give up every version with an instance on a GPU that does not work any more. A second call does nothing."""
        if not self._loader.gpus.lose(device_id, reason):
            return
        log.error("GPU %d is lost to this process: %s", device_id, reason)
        words = f"GPU {device_id} is lost to this process: {reason}"
        with self._changed:
            self._news.add(GPU_LOST, gpu=device_id, reason=reason)
            for model in self._models.values():
                for version in list(model.living):
                    if device_id in gpus_of(version.spec) and self._stop_for_good(model, version, words):
                        model.lost_gpu.add(version.version)
                        self._proceed(model)
        # Not told here: this may be an instance's thread, or the governor's.
        self._start("edge-gpu-lost", self._news.tell)

    def _give_up_for_memory(self, version: ServedVersion, error: EdgeServerError) -> None:
        words = (
            f"model '{version.name}' version {version.version} finds no memory on its GPU, again and again: "
            f"{error.message}"
        )
        with self._changed:
            model = self._models[version.name]
            if self._stop_for_good(model, version, words):
                self._note_failure(
                    model, LoadAction(version.version, version.fingerprint), version.generation, OutOfMemory(words)
                )
                self._proceed(model)

    def _stop_for_good(self, model: ModelState, version: ServedVersion, reason: str) -> bool:
        """Take a version out of service, under the lock. False when it was not in service."""
        if version.state is not VersionState.READY or self._is_closed:
            return False
        self._router.publish(model, without=version)
        version.stop_for_good(reason)
        # Not one of the threads that `close` waits for: closing what was on a lost GPU may never end.
        self._start("edge-bury", lambda: self._bury(model, version))
        return True

    def _bury(self, model: ModelState, version: ServedVersion) -> None:
        self._news.tell()
        version.bury()
        with self._changed:
            model.living.remove(version)
            self._proceed(model)

    def _take_in(self, model: ModelState, version: ServedVersion) -> None:
        super()._take_in(model, version)
        # It is up again: what fails to load from now on, as the next files may, says nothing of the GPU.
        model.lost_gpu = (model.lost_gpu & model.wish.versions.keys()) - {version.version}
        lost = self._loader.gpus.lost()
        device_id = next((gpu for gpu in gpus_of(version.spec) if gpu in lost), None)
        # Lost while it was being opened: `lose_gpu` did not see it among what lives.
        if device_id is not None:
            words = f"GPU {device_id} is lost to this process: {lost[device_id]}"
            if self._stop_for_good(model, version, words):
                model.lost_gpu.add(version.version)

    def _note_failure(self, model: ModelState, action: LoadAction, generation: int, cause: EdgeServerError) -> None:
        super()._note_failure(model, action, generation, cause)
        if model.lost_gpu:
            self.on_stranded(f"model '{model.name}' version {action.version}: {cause.message}")
