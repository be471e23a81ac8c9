"""Callbacks of the server that the engine builds use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_server.core.tensorrt_engine import EngineOrder
from edge_server.serving.execution.version_interface import ServedVersion
from edge_server.telemetry.event_bus import PublishEvent


@dataclass(frozen=True, slots=True)
class ServingCallbacks:
    """All may be called from any thread, and return at once.

    `serving` is the version that serves, None when there is none; `is_settled`: nothing of a model is being loaded;
    `renew` has a version loaded anew, under a mark for the reason, and says whether it will be. `may_build` says why
    nothing is built now, "" when something may be; `lost_gpus` which GPUs are lost to this process, and why.
    """

    serving: Callable[[str, int], ServedVersion | None]
    is_settled: Callable[[str], bool]
    renew: Callable[[str, int, str], bool]
    may_build: Callable[[], str]
    announce: PublishEvent
    lost_gpus: Callable[[], Mapping[int, str]]

    def lost_gpu(self, order: EngineOrder) -> str:
        """Return why the GPU that an engine is for is lost to this process, in a sentence, "" when it is not."""
        reason = self.lost_gpus().get(order.device_id)
        return "" if reason is None else f"GPU {order.device_id} is lost to this process: {reason}"
