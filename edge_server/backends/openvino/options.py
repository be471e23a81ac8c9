"""Parser of a model's options for OpenVINO: device, properties, precision and shapes.

The docstring of `backend` lists the keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edge_server.backends.base import OpenJob
from edge_server.backends.describe_model import instance_count
from edge_server.backends.openvino.devices import checked_device, involves_accelerator
from edge_server.backends.option_parsers import yes_or_no
from edge_server.cgroup_limits import limited_cores
from edge_server.core.model_spec import ModelSpec
from edge_server.errors import LoadError
from edge_server.record import record

_OWN_KEYS = frozenset(
    (
        "CPU_EXTENSION_PATH",
        "ENABLE_BATCH_PADDING",
        "ENABLE_MMAP",
        "HINT_BF16",
        "MODEL_CACHE_DIR",
        "RESHAPE_IO_LAYERS",
        "SKIP_OV_DYNAMIC_BATCHSIZE",
        "TARGET_DEVICE",
    )
)
_PROPERTY = re.compile(r"[A-Z][A-Z0-9_]+")
_HINT = "INFERENCE_PRECISION_HINT"
_CACHE_CAPACITY = "100"
"""Layers that OpenVINO keeps compiled for shapes that it has seen, for each stream of a model on the CPU. Its own
default is 5000; a model's parameter of the property's name has priority.

Measured with 2026.4.1, 5000 and 100: 1,200 sizes of a picture add 248 and 57 MiB to a net of 3 convolutions, 300 sizes
569 and 20 MiB to one of 50. Processor time of a run: 4.9 and 5.0 ms, 56 and 48 ms with ever new sizes; 14.4 and 15.8 ms
with 8 batch sizes in turn, 49 and 88 ms with 32; 1.8 and 2.2 ms with 64 lengths of a text in turn, 2.5 and 4.6 ms with
128. Capacities of 250 and 500 take the time of 100, and 66 and 80 MiB in the first case.
"""
_CAPABILITIES = {"bf16": "BF16", "f16": "FP16"}


@record(frozen=True, slots=True)
class CompileOptions:
    """Options of a compiled model. Instances with equal options and the same file share one."""

    device: str
    properties: tuple[tuple[str, str], ...]
    precision: str
    extension: str
    is_mapped: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Input shapes to set (-1: any size). Without an entry the file's shape is kept."""
    batch_rows: int
    """Rows that the model is compiled for, 0 for any number or for a model without a batch dimension."""
    is_padded: bool
    """Whether smaller batches are padded to these rows."""


def compile_options(job: OpenJob, core: Any) -> CompileOptions:
    """Return the options for one instance. `core` is OpenVINO's Core. Raises LoadError for impossible options."""
    spec, merged = job.spec, {**job.settings, **job.spec.parameters}
    asked = merged.get("TARGET_DEVICE", "CPU")
    # The list of devices is slow: it loads every plugin. So it is not read for the CPU.
    device = "CPU" if asked == "CPU" else checked_device(spec.name, asked, core.available_devices)
    precision = _configured_precision(spec.name, merged, device, core)
    skips = yes_or_no(spec.name, merged, "SKIP_OV_DYNAMIC_BATCHSIZE", False)
    # Ragged inputs have no row for each request.
    is_ragged = bool(spec.batch_inputs) or any(item.allow_ragged_batch for item in spec.inputs)
    has_one_row = spec.max_batch_size == 1 and not is_ragged
    rows = spec.max_batch_size if skips or has_one_row else 0
    reshapes = yes_or_no(spec.name, merged, "RESHAPE_IO_LAYERS", False)
    return CompileOptions(
        device=device,
        properties=tuple(sorted(_properties(spec, merged, device, precision).items())),
        precision=precision,
        extension=merged.get("CPU_EXTENSION_PATH", ""),
        is_mapped=yes_or_no(spec.name, merged, "ENABLE_MMAP", False),
        shapes=_configured_shapes(spec, rows) if reshapes else (),
        batch_rows=rows,
        is_padded=yes_or_no(spec.name, merged, "ENABLE_BATCH_PADDING", False),
    )


def _properties(spec: ModelSpec, merged: Mapping[str, str], device: str, precision: str) -> dict[str, str]:
    """Return the properties that are passed to OpenVINO."""
    properties = {key: value for key, value in merged.items() if _PROPERTY.fullmatch(key) and key not in _OWN_KEYS}
    if involves_accelerator(device) and merged.get("MODEL_CACHE_DIR"):
        properties.setdefault("CACHE_DIR", merged["MODEL_CACHE_DIR"])
    if precision in ("bf16", "f16", "f32") or (precision == "int8" and device == "CPU"):
        properties.setdefault(_HINT, "f32" if precision == "int8" else precision)
    if "NUM_STREAMS" in properties:
        properties["NUM_STREAMS"] = properties["NUM_STREAMS"].upper()
    elif "PERFORMANCE_HINT" in properties:
        properties["PERFORMANCE_HINT"] = properties["PERFORMANCE_HINT"].upper()
    elif device == "CPU":
        properties["NUM_STREAMS"] = str(instance_count(spec))
    if device == "CPU":
        properties.setdefault("CPU_RUNTIME_CACHE_CAPACITY", _CACHE_CAPACITY)
    if device == "CPU" and (cores := limited_cores()) is not None:
        properties.setdefault("INFERENCE_NUM_THREADS", str(cores))
    return properties


def _configured_shapes(spec: ModelSpec, rows: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shape of each input as the configuration has it, with `rows` items; 0: any number."""
    dims = {item.name: item.dims if item.reshape is None else item.reshape for item in spec.inputs}
    lead = (rows or -1,) if spec.max_batch_size > 0 else ()
    return tuple((name, (*lead, *shape)) for name, shape in dims.items())


def _configured_precision(model: str, merged: Mapping[str, str], device: str, core: Any) -> str:
    """Return f32, bf16, f16, int8 or auto. Raises LoadError if the device does not support it."""
    offered: tuple[str, ...] = ("f32", "bf16", "f16", "int8", "auto")
    if device == "CPU":
        # For other devices only compiling shows it.
        capabilities = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        extra = [name for name, capability in _CAPABILITIES.items() if capability in capabilities]
        offered = ("f32", *extra, "int8", "auto")
    default = "f32" if device == "CPU" else "auto"
    if yes_or_no(model, merged, "HINT_BF16", False) and "bf16" in offered:
        default = "bf16"
    asked = merged.get("precision", default).strip().lower()
    if asked not in offered:
        raise LoadError(
            f"model '{model}': openvino does not offer precision '{asked}' on this {device}; "
            f"it offers {', '.join(offered)}"
        )
    return asked
