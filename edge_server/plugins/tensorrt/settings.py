"""Declarations of the settings of TensorRT engines and their builds."""

from __future__ import annotations

from dataclasses import dataclass

from edge_server.config.setting import BOOLEAN, OPTIONAL_PATH, integer, number, setting

VERSION_COMPATIBLE = "version-compatible"
"""Key of `--backend-config=tensorrt,...`, as in Triton: opens plans that may hold code for the host."""

SHAPE_PARAMETERS = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")
"""Parameters of a model with the least, the best and the greatest shapes of its engine's inputs."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """TensorRT engines built on this machine."""

    is_enabled: bool = setting(
        True,
        "--engine-builder",
        BOOLEAN,
        "Build TensorRT engines for ONNX models if TensorRT and a GPU are present; other runtimes serve until then.",
    )
    cache_dir: str = setting(
        "",
        "--engine-cache-dir",
        OPTIONAL_PATH,
        "Folder of the built engines; empty: in the cache folder of the service manager, or of the user.",
        cache_folder="engines",
    )
    build_timeout_s: float = setting(
        3600.0,
        "--engine-build-timeout-secs",
        number(1, 604_800),
        "Seconds that the build of an engine may take, without pauses.",
    )
    build_memory_mb: int = setting(
        0, "--engine-build-memory-mb", integer(0, 2**30), "Most MiB for the process that builds an engine; 0: no limit."
    )
    cache_limit_mb: int = setting(
        8192,
        "--engine-cache-limit-mb",
        integer(0, 2**30),
        "MiB of engines to keep; beyond it the least recently used are deleted. 0: keep all.",
    )
