"""OpenVINO options of a model's configuration: device, properties, precision, shapes.

The keys are those that the text of `openvino` lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_server.backends.base import OpenJob
from edge_server.backends.openvino_devices import checked_device, involves_accelerator
from edge_server.backends.runtime_library import instance_count, yes_or_no
from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.errors import LoadError

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
_CAPABILITIES = {"bf16": "BF16", "f16": "FP16"}


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How a model is compiled; equal plans for the same file may share one."""

    device: str
    properties: tuple[tuple[str, str], ...]
    precision: str
    extension: str
    is_mapped: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Input shapes to set (-1: any size), empty to keep the file's."""
    batch_rows: int
    """Rows that the model is compiled for, 0 for any number (or a model without a batch dimension)."""
    is_padded: bool
    """Whether smaller batches are filled up to these rows."""


def planned(job: OpenJob, core: Any) -> CompileOptions:
    """Return the plan for one instance; `core` tells what is here. Raises LoadError for what cannot be had."""
    spec, merged = job.spec, {**job.settings, **job.spec.parameters}
    device = _device(job, merged, core)
    precision = _asked_precision(spec.name, merged, device, core)
    skips = yes_or_no(spec.name, merged, "SKIP_OV_DYNAMIC_BATCHSIZE", False)
    rows = spec.max_batch_size if skips else 0
    takes_dims = yes_or_no(spec.name, merged, "RESHAPE_IO_LAYERS", False)
    return CompileOptions(
        device=device,
        properties=tuple(sorted(_properties(spec, merged, device, precision).items())),
        precision=precision,
        extension=merged.get("CPU_EXTENSION_PATH", ""),
        is_mapped=yes_or_no(spec.name, merged, "ENABLE_MMAP", False),
        shapes=tuple((one.name, _full_shape(spec, one, rows)) for one in spec.inputs) if takes_dims else (),
        batch_rows=rows,
        is_padded=yes_or_no(spec.name, merged, "ENABLE_BATCH_PADDING", False),
    )


def _device(job: OpenJob, merged: Mapping[str, str], core: Any) -> str:
    asked = merged.get("TARGET_DEVICE", "CPU" if job.device_id is None else f"GPU.{job.device_id}")
    # Not asked for the CPU, the rule: the list costs a look at every plugin.
    return "CPU" if asked == "CPU" else checked_device(job.spec.name, asked, core.available_devices)


def _properties(spec: ModelSpec, merged: Mapping[str, str], device: str, precision: str) -> dict[str, str]:
    """Return the properties for OpenVINO."""
    properties = {key: value for key, value in merged.items() if _PROPERTY.fullmatch(key) and key not in _OWN_KEYS}
    if involves_accelerator(device) and merged.get("MODEL_CACHE_DIR"):
        properties.setdefault("CACHE_DIR", merged["MODEL_CACHE_DIR"])
    if precision in ("bf16", "f16", "f32") or (precision == "int8" and device == "CPU"):
        properties.setdefault(_HINT, "f32" if precision == "int8" else precision)
    _set_parallelism(properties, device, instance_count(spec))
    return properties


def _set_parallelism(properties: dict[str, str], device: str, instances: int) -> None:
    """Choose streams unless the configuration does."""
    if "NUM_STREAMS" in properties:
        properties["NUM_STREAMS"] = properties["NUM_STREAMS"].upper()
    elif "PERFORMANCE_HINT" in properties:
        properties["PERFORMANCE_HINT"] = properties["PERFORMANCE_HINT"].upper()
    elif device == "CPU":
        properties["NUM_STREAMS"] = str(instances)


def _asked_precision(model: str, merged: Mapping[str, str], device: str, core: Any) -> str:
    """Return f32, bf16, f16, int8 or auto. Raises LoadError when the device does not have it."""
    here = _precisions(core) if device == "CPU" else ("f32", "bf16", "f16", "int8", "auto")
    default = "f32" if device == "CPU" else "auto"
    if yes_or_no(model, merged, "HINT_BF16", False) and "bf16" in here:
        default = "bf16"
    asked = merged.get("precision", default).strip().lower()
    if asked not in here:
        raise LoadError(
            f"model '{model}': openvino does not offer precision '{asked}' on this {device}; "
            f"it offers {', '.join(here)}"
        )
    return asked


def _precisions(core: Any) -> tuple[str, ...]:
    """Return the precisions that the CPU supports. For other devices only compiling shows them."""
    capabilities = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    extra = [name for name, capability in _CAPABILITIES.items() if capability in capabilities]
    return ("f32", *extra, "int8", "auto")


def _full_shape(spec: ModelSpec, one: InputSpec, rows: int) -> tuple[int, ...]:
    dims = one.dims if one.reshape is None else one.reshape
    return (rows or -1, *dims) if spec.max_batch_size > 0 else dims
