"""Construction of the engine build queue and its parts, on a machine that can build engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from edge_server.config import EngineConfig
from edge_server.plugins.tensorrt.builds.build_process import Bounds
from edge_server.plugins.tensorrt.builds.build_queue import EngineBuildQueue
from edge_server.plugins.tensorrt.builds.builder import ServingCallbacks
from edge_server.plugins.tensorrt.builds.engine_cache import EngineCache, EngineCacheFault
from edge_server.plugins.tensorrt.builds.engine_key import read_gpu_identity
from edge_server.serving.execution.version_interface import ServedVersion
from edge_server.serving.lifecycle.manager import Manager
from edge_server.telemetry.event_bus import PublishEvent

log = logging.getLogger(__name__)

_LEAST_FLOOR_MB = 128


def make_build_queue(
    config: EngineConfig,
    manager: Manager,
    announce: PublishEvent,
    may_build: Callable[[], str],
    lost_gpus: Callable[[], Mapping[int, str]],
    *,
    floor_mb: int,
    root: Path,
) -> EngineBuildQueue | None:
    """Make the build queue; None if engines cannot be stored, which is logged. `root` is the root of sysfs and
    procfs."""
    cache = EngineCache(Path(config.cache_dir), config.cache_limit_mb << 20)
    try:
        cache.open()
    except EngineCacheFault as error:
        log.warning("%s; --engine-cache-dir names another folder. ONNX models are served by other runtimes", error)
        return None

    def serving(name: str, version: int) -> ServedVersion | None:
        return next((item for item in manager.ready_versions(name) if item.version == version), None)

    return EngineBuildQueue(
        cache,
        read_gpu_identity(root),
        Bounds(config.build_timeout_s, config.build_memory_mb << 20, max(floor_mb, _LEAST_FLOOR_MB) << 20),
        ServingCallbacks(
            serving=serving,
            is_settled=lambda name: manager.wait_settled([name], 0),
            renew=manager.renew,
            may_build=may_build,
            announce=announce,
            lost_gpus=lost_gpus,
        ),
    )
