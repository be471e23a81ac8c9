"""Parser of a model's options for onnxruntime: threads, memory, optimisation, providers, precision.

The docstring of `backend` lists the keys.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_server.backends import onnx_file_info
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.backends.cuda import cuda_driver
from edge_server.backends.describe_model import precision_of_tensors
from edge_server.backends.onnxruntime import providers
from edge_server.backends.onnxruntime.providers import Pairs
from edge_server.backends.option_parsers import whole_number, yes_or_no
from edge_server.backends.runtime_errors import load_error
from edge_server.cgroup_limits import usable_cores
from edge_server.errors import LoadError

LOG_FATAL = 4
"""Log severity with which onnxruntime writes nothing to stderr. Errors are raised as exceptions anyway."""

_ENTRY_PREFIXES = ("session.", "optimization.", "mlas.", "ep.")
_SPINNING = "session.intra_op.allow_spinning"
_SPIN_DURATION = "session.intra_op.spin_duration_us"
_FIRST_WITH_SPIN_DURATION = (1, 26)
_SPIN_US = 30
"""How long a thread of the pool waits awake for the work of the next operator. In a small network the gaps are shorter,
and to wake a sleeping thread for each operator took a fifth of the rate. Between requests the threads sleep."""
_ARM_BF16 = "mlas.enable_gemm_fastmath_arm64_bfloat16"
_FIRST_WITH_TF32 = (1, 18)
_LEVEL = "optimization.graph.level"
_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a session. Instances with equal options and the same file share one. None and 0 are defaults."""

    intra_threads: int
    inter_threads: int
    is_parallel: bool
    graph_level: str
    arena: bool | None
    pattern: bool | None
    entries: Pairs
    providers: tuple[tuple[str, Pairs], ...]

    def as_text(self) -> dict[str, str]:
        """Return the options for the log, status and metrics."""
        text = {
            "intra_op_thread_count": str(self.intra_threads),
            "inter_op_thread_count": str(self.inter_threads),
            "execution_mode": "1" if self.is_parallel else "0",
            "graph_optimization": self.graph_level,
            **dict(self.entries),
        }
        if self.arena is not None:
            text["enable_mem_arena"] = str(int(self.arena))
        if self.pattern is not None:
            text["enable_mem_pattern"] = str(int(self.pattern))
        return text


def configured_options(job: OpenJob, merged: Mapping[str, str], ort: Any) -> Options:
    """Return the configured options. `ort` is the module onnxruntime. Raises LoadError."""
    no_gpu = "" if job.device_id is None else cuda_driver.unavailable_reason()
    version = tuple(map(int, re.findall(r"\d+", ort.__version__)[:2]))
    model = job.spec.name
    level = job.spec.optimization.graph_level
    if level is None:
        level = whole_number(model, merged, _LEVEL, 0, least=-1)
    if level not in _LEVELS:
        raise LoadError(f"model '{model}': {_LEVEL} must be -1 (basic), 1 (extended) or 2 (none), got {level}")
    threads = whole_number(model, merged, "intra_op_thread_count", 0)
    return Options(
        intra_threads=threads or usable_cores(),
        inter_threads=whole_number(model, merged, "inter_op_thread_count", 0),
        is_parallel=whole_number(model, merged, "execution_mode", 0) == 1,
        graph_level=_LEVELS[level],
        arena=yes_or_no(model, merged, "enable_mem_arena", True) if "enable_mem_arena" in merged else None,
        pattern=yes_or_no(model, merged, "enable_mem_pattern", True) if "enable_mem_pattern" in merged else None,
        entries=tuple(sorted(_session_entries(merged, version).items())),
        providers=providers.configured_providers(
            job, merged, ort.get_available_providers(), gpu=no_gpu, knows_tf32=version >= _FIRST_WITH_TF32
        ),
    )


def _session_entries(merged: Mapping[str, str], version: tuple[int, ...]) -> dict[str, str]:
    """Return the configured entries of a session, and how long its threads spin unless they say it."""
    entries = {key: value for key, value in merged.items() if key.startswith(_ENTRY_PREFIXES) and key != _LEVEL}
    if _SPINNING not in entries:
        if version >= _FIRST_WITH_SPIN_DURATION:
            entries.setdefault(_SPIN_DURATION, str(_SPIN_US))
        else:
            # Without a limit, threads spin for milliseconds after each request.
            entries[_SPINNING] = "0"
    return entries


def with_precision(job: OpenJob, merged: Mapping[str, str], path: Path, options: Options) -> tuple[str, Options]:
    """Return the arithmetic in use, and the options for it. Raises LoadError if the configured one is impossible."""
    in_weights = _arithmetic(job.file, path)
    asked = merged.get("precision", "f32").strip().lower()
    in_file = providers.precision_of(options.providers) or in_weights or precision_of_tensors(job.spec)
    if asked in ("f32", "auto") or asked == in_weights:
        return in_file, options
    on_arm = platform.machine() == "aarch64"
    if asked == "bf16" and on_arm:
        return "bf16", replace(options, entries=tuple(sorted({**dict(options.entries), _ARM_BF16: "1"}.items())))
    offered = ["f32 or auto (the file as it is)", *([in_weights] if in_weights else []), *(["bf16"] if on_arm else [])]
    raise LoadError(
        f"model '{job.spec.name}': onnxruntime cannot run '{job.file.path.name}' in precision '{asked}' "
        f"on {platform.machine()}; it offers {', '.join(offered)}"
    )


def _arithmetic(file: ModelFile, path: Path) -> str | None:
    """Return the arithmetic of the weights in a file, None if it has none. Raises LoadError."""
    try:
        return onnx_file_info.arithmetic(path)
    except (ValueError, OSError) as error:
        failure = load_error(file, "onnxruntime", error)
    raise failure


def session_options(ort: Any, wanted: Options) -> Any:
    """Return the options as onnxruntime's SessionOptions, without the providers. `ort` is the module onnxruntime.

    Raises onnxruntime's exceptions, for entries that are too long.
    """
    options = ort.SessionOptions()
    options.log_severity_level = LOG_FATAL
    options.intra_op_num_threads = wanted.intra_threads
    options.inter_op_num_threads = wanted.inter_threads
    modes = ort.ExecutionMode
    options.execution_mode = modes.ORT_PARALLEL if wanted.is_parallel else modes.ORT_SEQUENTIAL
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, wanted.graph_level)
    if wanted.arena is not None:
        options.enable_cpu_mem_arena = wanted.arena
    if wanted.pattern is not None:
        options.enable_mem_pattern = wanted.pattern
    for entry, value in wanted.entries:
        options.add_session_config_entry(entry, value)
    return options
