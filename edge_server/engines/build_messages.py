"""Messages to the build process, and the facts about a built engine that the cache stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_server.backends.tensorrt.cuda_driver import CudaDevice
from edge_server.backends.tensorrt.engine_build import PLAN
from edge_server.backends.tensorrt.engine_options import order_to_json
from edge_server.core.tensorrt_engine import EngineOrder


def build_job(order: EngineOrder, folder: Path, timing_cache: Path, device: CudaDevice | None) -> dict[str, object]:
    """Return the job of building an engine into a folder; `device` None: for no GPU in particular."""
    return {
        "task": "build",
        "order": order_to_json(order),
        "folder": str(folder),
        "capability": [0, 0] if device is None else list(device.capability),
        "timing_cache": str(timing_cache),
        # On a board TensorRT would try things out in three quarters of the memory that the models live in.
        "pool_bytes": device.total_bytes // 8 if device is not None and device.is_integrated else 0,
    }


def verify_job(order: EngineOrder, folder: Path, samples: Path) -> dict[str, object]:
    """Return the job of comparing the answers of the engine in a folder with those in a file."""
    return {
        "task": "verify",
        "order": order_to_json(order),
        "plan": str(folder / PLAN),
        "samples": str(samples),
        "has_rows": order.spec is not None and order.spec.max_batch_size > 0,
    }


def facts_of(order: EngineOrder, said: Mapping[str, Any]) -> dict[str, object]:
    """Return the facts that the cache stores of a built engine. `said` is the last message of the process."""
    return {
        "model": order.model,
        "version": order.version,
        "path": str(order.path),
        "profiles": order.recipe()["profiles"],
        "plan_sha256": said["plan_sha256"],
        "bytes": said["bytes"],
        "took_s": said["seconds"],
    }
