"""Engine options of a model: everything that decides an engine, except the model's bytes and the machine.

Keys in config.pbtxt's `parameters` (server-wide ones through `--backend-config=tensorrt,key=value`), named as in
onnxruntime's TensorRT provider where it has them:

- `precision`: `fp32` (also `f32`; default) the types of the file, without TF32; `fp16` (`f16`) half precision where it
  is faster; `int8` a file with QuantizeLinear and DequantizeLinear in it; `best` whatever is fastest. TensorRT 11 and
  TensorRT for RTX build the types that the file has: an fp16 engine needs an fp16 file there.
- `trt_profile_min_shapes`, `..._opt_...`, `..._max_...`: see `profiles`;
- `trt_max_workspace_size`: bytes; `trt_builder_optimization_level`: 0 to 5;
- `trt_dla_enable`, `trt_dla_core`: run on a Jetson's deep learning accelerator what can be, the rest on the GPU;
- `trt_extra_plugin_lib_paths`: shared libraries with plugins, separated by semicolons, below the model's folder;
- `engine_tolerance`: see `verify`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_server.backends.runtime_library import whole_number, yes_or_no
from edge_server.backends.tensorrt.optimization_profiles import profiles_of
from edge_server.core.model_spec import ModelFile, ModelSpec
from edge_server.core.tensor import DType
from edge_server.core.tensorrt_engine import EngineOrder, Range
from edge_server.errors import BadModelConfig, LoadError

PRECISIONS = {
    "fp32": "fp32", "f32": "fp32", "auto": "fp32", "fp16": "fp16", "f16": "fp16", "int8": "int8", "best": "best",
}  # fmt: skip
"""What `precision` may say -> the one word for it."""

ONLY_OURS = ("fp32", "fp16", "f16", "best")
"""Words for `precision` that runtimes standing in for an engine do not know, or cannot obey on a CPU."""

TOLERANCES = {"fp32": 1e-3, "fp16": 2e-2, "int8": 5e-2, "best": 5e-2}
"""Largest difference from the serving runtime's answer, as a part of its largest magnitude."""


def order_of(
    spec: ModelSpec, file: ModelFile, device_id: int, library: str, library_version: str, settings: Mapping[str, str]
) -> EngineOrder:
    """Return the order for a complete specification; `settings` are those for all models.

    Raises LoadError for one that no engine can be built for.
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
    return EngineOrder(
        model=spec.name,
        version=file.version,
        path=file.path,
        library=library,
        library_version=library_version,
        device_id=device_id,
        precision=precision,
        profiles=profiles_of(spec),
        options=_options(spec, file, merged),
        tolerance=_tolerance(spec, merged, precision),
        spec=spec,
    )


def _options(spec: ModelSpec, file: ModelFile, merged: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, least in (("trt_max_workspace_size", 1), ("trt_builder_optimization_level", 0), ("trt_dla_core", 0)):
        if key in merged:
            options[key] = str(whole_number(spec.name, merged, key, 0, least))
    if yes_or_no(spec.name, merged, "trt_dla_enable", False):
        options["trt_dla_enable"] = "1"
        options.setdefault("trt_dla_core", "0")
    plugins = [part.strip() for part in merged.get("trt_extra_plugin_lib_paths", "").split(";") if part.strip()]
    if plugins:
        options["trt_extra_plugin_lib_paths"] = ";".join(str(plugin_path(spec.name, file, name)) for name in plugins)
    return options


def plugin_path(model: str, file: ModelFile, name: str) -> Path:
    """Return a plugin library's path. Only what lies in the model's folder is loaded: it runs in this process, and was
    checked with the model's other files. Raises BadModelConfig."""
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
    """Return the order for another process."""
    return {
        **order.recipe(),
        "model": order.model,
        "version": order.version,
        "path": str(order.path),
        "device_id": order.device_id,
        "tolerance": order.tolerance,
    }


def order_from_json(data: Mapping[str, object]) -> EngineOrder:
    """Return the order from the JSON of `order_to_json`."""
    known: dict[str, object] = dict(data)
    profiles = known.pop("profiles")
    assert isinstance(profiles, list)
    return EngineOrder(
        path=Path(str(known.pop("path"))),
        profiles=tuple(
            {name: Range(*(tuple(shape) for shape in shapes)) for name, shapes in profile.items()}
            for profile in profiles
        ),
        **known,  # type: ignore[arg-type]  # as written, by this package
    )
