"""The rows of the table of settings that say how TensorRT engines are built and kept."""

from __future__ import annotations

from edge_server.config.kinds import BOOLEAN, OPTIONAL_PATH, integer, number
from edge_server.config.setting import Setting

ENGINES = (
    Setting(
        "engines.is_enabled",
        "--engine-builder",
        BOOLEAN,
        "Build TensorRT engines for ONNX models, where there is a TensorRT and a GPU; other runtimes serve meanwhile.",
    ),
    Setting(
        "engines.cache_dir",
        "--engine-cache-dir",
        OPTIONAL_PATH,
        "Folder in which engines are kept; empty: below the service manager's cache folder, or the user's.",
    ),
    Setting(
        "engines.build_timeout_s",
        "--engine-build-timeout-secs",
        number(1, 604_800),
        "Seconds that the build of an engine may take, pauses left out.",
    ),
    Setting(
        "engines.build_memory_mb",
        "--engine-build-memory-mb",
        integer(0, 2**30),
        "MiB that the process which builds an engine may take; 0: any.",
    ),
    Setting(
        "engines.cache_limit_mb",
        "--engine-cache-limit-mb",
        integer(0, 2**30),
        "MiB of engines to keep; beyond it those not used for longest are deleted. 0: keep all.",
    ),
)
