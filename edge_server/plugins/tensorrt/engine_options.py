"""Parser of the options in a model's configuration that say how TensorRT builds the model's engine. They and the
model's file decide what is built. Pure.

Keys in `parameters` of config.pbtxt (for all models with `--backend-config=tensorrt,key=value`), named as in
onnxruntime's TensorRT provider where it has them:

- `precision`: `fp32` (also `f32`; default) uses the types of the file, without TF32; `fp16` (`f16`) uses half precision
  where it is faster; `int8` needs a file with QuantizeLinear and DequantizeLinear; `best` uses whatever is fastest.
  TensorRT 11 and TensorRT for RTX build the types of the file: an fp16 engine needs an fp16 file there.
- `trt_profile_min_shapes`, `..._opt_...`, `..._max_...`: see `optimization_profiles`;
- `trt_max_workspace_size`: bytes; `trt_builder_optimization_level`: 0 to 5;
- `trt_dla_enable`, `trt_dla_core`: use a Jetson's deep learning accelerator (DLA) for the layers that it can run, else
  the GPU. Needs precision fp16, int8 or best. Triton's `secondary_devices` of an instance group names a core too;
- `trt_extra_plugin_lib_paths`: shared libraries with plugins, separated by semicolons, below the model's folder;
- `engine_tolerance`: see `verify_engine`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from edge_server.backends.option_parsers import whole_number, yes_or_no
from edge_server.core.model_spec import ModelFile, ModelSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig, LoadError
from edge_server.plugins.tensorrt.engine_order import EngineOrder, Range
from edge_server.plugins.tensorrt.optimization_profiles import configured_profiles

PRECISIONS = {
    "fp32": "fp32", "f32": "fp32", "auto": "fp32", "fp16": "fp16", "f16": "fp16", "int8": "int8", "best": "best",
}  # fmt: skip
"""Allowed values of `precision` -> the canonical value."""

ENGINE_ONLY_PRECISIONS = ("fp32", "fp16", "f16", "best")
"""Values of `precision` that the runtimes replacing an engine do not know, or cannot use on a CPU."""

TOLERANCES = {"fp32": 1e-3, "fp16": 2e-2, "int8": 5e-2, "best": 5e-2}
"""Largest difference from the serving runtime's output, as a fraction of its largest magnitude."""


def engine_order(
    spec: ModelSpec, file: ModelFile, device_id: int, library: str, library_version: str, settings: Mapping[str, str]
) -> EngineOrder:
    """Return the engine order for a complete specification. `settings` are the options for all models.

    Raises LoadError if no engine can be built for it.
    """
    merged = {**settings, **spec.parameters}
    word = merged.get("precision", "fp32").strip().lower()
    if word not in PRECISIONS:
        known = ", ".join(dict.fromkeys(PRECISIONS.values()))
        raise LoadError(f"model '{spec.name}': {library} has no precision '{word[:40]}'; it has {known}")
    types = {item.name: item.dtype for item in spec.inputs} | {item.name: item.dtype for item in spec.outputs}
    text = next((name for name, dtype in types.items() if dtype is DType.BYTES), None)
    if text is not None:
        raise LoadError(f"model '{spec.name}': tensor '{text}' holds strings, which {library} does not compute with")
    precision = PRECISIONS[word]
    if precision == "fp32" and model_dla_core(spec, settings) is not None:
        raise BadModelConfig(
            f"model '{spec.name}': trt_dla_enable: a DLA computes in fp16 and int8 only, but the precision is fp32, so "
            "that all layers would run on the GPU; set the parameter precision to fp16, or to int8 for a quantised file"
        )
    return EngineOrder(
        model=spec.name,
        version=file.version,
        path=file.path,
        library=library,
        library_version=library_version,
        device_id=device_id,
        precision=precision,
        profiles=configured_profiles(spec),
        options=_build_options(spec, file, merged, model_dla_core(spec, settings)),
        tolerance=_tolerance(spec, merged, precision),
        spec=spec,
    )


def model_dla_core(spec: ModelSpec, settings: Mapping[str, str]) -> int | None:
    """Return the DLA core that an engine is built for, None for no DLA. Raises BadModelConfig."""
    merged = {**settings, **spec.parameters}
    if yes_or_no(spec.name, merged, "trt_dla_enable", "trt_dla_core" in merged):
        return whole_number(spec.name, merged, "trt_dla_core", 0, 0)
    return next(iter(group_dla_cores(spec).values()), None)


def group_dla_cores(spec: ModelSpec) -> dict[str, int]:
    """Return the DLA cores that instance groups name, by the group's name: secondary_devices, of one kind only."""
    groups = json.loads(spec.config_json).get("instance_group", [])
    return {
        group.get("name", ""): int(device.get("device_id", 0))
        for group in groups
        for device in group.get("secondary_devices", [])[:1]
    }


def _build_options(spec: ModelSpec, file: ModelFile, merged: Mapping[str, str], dla_core: int | None) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, least in (("trt_max_workspace_size", 1), ("trt_builder_optimization_level", 0)):
        if key in merged:
            options[key] = str(whole_number(spec.name, merged, key, 0, least))
    if dla_core is not None:
        options.update(trt_dla_enable="1", trt_dla_core=str(dla_core))
    plugins = [part.strip() for part in merged.get("trt_extra_plugin_lib_paths", "").split(";") if part.strip()]
    if plugins:
        options["trt_extra_plugin_lib_paths"] = ";".join(str(plugin_path(spec.name, file, name)) for name in plugins)
    return options


def plugin_path(model: str, file: ModelFile, name: str) -> Path:
    """Return a plugin library's path. It must lie in the model's folder: it runs in this process, and is checked with
    the model's other files. Raises BadModelConfig."""
    path = (file.model_dir / name).resolve()
    if not path.is_relative_to(file.model_dir.resolve()) or not path.is_file():
        raise BadModelConfig(
            f"model '{model}': trt_extra_plugin_lib_paths: expected a file in the model's folder, given '{name[:200]}'"
        )
    return path


def _tolerance(spec: ModelSpec, merged: Mapping[str, str], precision: str) -> float:
    text = merged.get("engine_tolerance")
    if text is None:
        return TOLERANCES[precision]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise LoadError(
            f"model '{spec.name}': parameter engine_tolerance must be a number of 0 to 1, got '{text[:80]}'"
        )
    return value


def order_to_json(order: EngineOrder) -> dict[str, object]:
    """Return the order as JSON for another process."""
    return {
        **order.recipe(),
        "model": order.model,
        "version": order.version,
        "path": str(order.path),
        "device_id": order.device_id,
        "tolerance": order.tolerance,
    }


def order_from_json(data: Mapping[str, object]) -> EngineOrder:
    """Return the order that `order_to_json` wrote."""
    known: dict[str, object] = dict(data)
    profiles = known.pop("profiles")
    assert isinstance(profiles, list)
    return EngineOrder(
        path=Path(str(known.pop("path"))),
        profiles=tuple(
            {name: Range(*(tuple(shape) for shape in shapes)) for name, shapes in profile.items()}
            for profile in profiles
        ),
        **known,  # type: ignore[arg-type]  # written by this package
    )
