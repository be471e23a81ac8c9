"""Loader of the backend `openvino`: compiles ONNX, OpenVINO IR, TensorFlow Lite and SavedModel files for a device.

Keys in config.pbtxt's `parameters` (server-wide ones through `--backend-config=openvino,KEY=value`):

- `precision`: `f32` (default on the CPU), `bf16`, `f16`, `int8` (requires a quantised file), `auto` (OpenVINO chooses;
  bf16 on CPUs with AMX). `HINT_BF16` YES: bf16 if the device has it.
- `TARGET_DEVICE`: CPU (default), GPU, NPU, AUTO:GPU,CPU ..., see `devices`. Models compiled for other devices
  are cached in the server's `MODEL_CACHE_DIR`, unless the model sets a `CACHE_DIR`.
- `CPU_EXTENSION_PATH`: a library of custom operators.
- `SKIP_OV_DYNAMIC_BATCHSIZE` YES: compile for exactly max_batch_size rows; `ENABLE_BATCH_PADDING` YES then pads
  smaller batches with zeros. Models of max_batch_size 1 are always compiled so, because a fixed shape takes a tenth
  less processor time. `RESHAPE_IO_LAYERS` YES: set the inputs to the configuration's dims.
- `ENABLE_MMAP` YES: map weights instead of reading them. This halves the memory peak of a load, but the server crashes
  if the file is overwritten in place.
- `CPU_RUNTIME_CACHE_CAPACITY`: compiled layers to keep for input sizes, 100 by default.
- `PERFORMANCE_HINT`, `NUM_STREAMS`, `INFERENCE_NUM_THREADS`, `CACHE_DIR` and any other property in capitals are passed
  to OpenVINO unchanged.

All instances of a version share one compiled model. Each has its own infer request, and there are as many streams as
instances. So they run in parallel, and weights are in memory once. One instance, the default, has one stream with all
cores, which gives the shortest time for a single request.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from edge_server.backends import onnx_file_info
from edge_server.backends.base import Backend, ModelFile, ModelSignature, OpenJob, SessionInfo
from edge_server.backends.describe_model import MIXED_ROWS_NOTE, bounded_metadata, is_batchable
from edge_server.backends.openvino.devices import queryable_device
from edge_server.backends.openvino.lean_import import import_openvino
from edge_server.backends.openvino.model_reader import (
    GraphReader,
    bf16_names,
    convolution_inputs,
    declared_tensor,
    dims,
    exception_classes,
    file_to_read,
    metadata_texts,
    positions,
    wide_tensors,
)
from edge_server.backends.openvino.options import CompileOptions, compile_options
from edge_server.backends.openvino.session import CompiledModel, OpenVinoSession
from edge_server.backends.runtime_errors import file_title, import_runtime, load_error
from edge_server.backends.shared_models import SharedModels, fingerprint
from edge_server.backends.tflite_metadata import read_tflite_metadata
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.errors import LoadError

_HINT = "INFERENCE_PRECISION_HINT"
_REPORTED = ("NUM_STREAMS", "INFERENCE_NUM_THREADS", "PERFORMANCE_HINT", _HINT, "EXECUTION_DEVICES")
_COMPUTING_LAYERS = frozenset(("Convolution", "Deconvolution", "FullyConnected", "GroupConvolution", "MatMul"))


def make(name: str) -> OpenVinoBackend:
    return OpenVinoBackend(name)


class OpenVinoBackend(Backend):
    """The OpenVINO library, its Core, and the compiled models that instances share."""

    default_filename = "model.xml"
    may_end_process = True
    """By 1 of 300 ONNX files in which a byte was changed, 2 of 300 IR files, and 11 of 603 ONNX files of one node with
    too few inputs (2026.4)."""
    needs_every_input = True
    no_gpu_reason = (
        "computes on the device that its parameter TARGET_DEVICE names, and on no NVIDIA GPU; leave instance_group "
        "out, or let onnxruntime run an ONNX file"
    )
    """Triton's backend refuses every kind but KIND_CPU."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ov = import_openvino()
        frontend = import_runtime("openvino.frontend", "FrontEndManager")
        self._core = self._ov.Core()
        self._reader = GraphReader(self._ov.__version__, self._core, frontend)
        self._failures = exception_classes(frontend)
        self._properties: dict[str, set[str]] = {}
        self._shared: SharedModels[CompiledModel] = SharedModels()

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature:
        model = self._reader.read_graph(file, parameters.get("CPU_EXTENSION_PATH", ""), is_mapped=True)
        inputs = tuple(InputSpec(*declared_tensor(file, "input", port)) for port in model.inputs)
        outputs = tuple(OutputSpec(*declared_tensor(file, "output", port)) for port in model.outputs)
        metadata = bounded_metadata(metadata_texts(model))
        if file.path.suffix == ".tflite":
            metadata = {**metadata, **read_tflite_metadata(file.path)}
        warnings: tuple[str, ...] = ()
        if tensors := wide_tensors(model):
            warnings = (
                f"openvino computes in at most 32 bits, so numbers of {', '.join(tensors)} that need more give wrong "
                "answers; onnxruntime computes an ONNX file in all bits",
            )
        batchable = is_batchable(inputs, outputs)
        notes: tuple[str, ...] = ()
        if batchable and file.path.suffix == ".onnx" and onnx_file_info.mixes_rows(file_to_read(file)):
            batchable, notes = False, (MIXED_ROWS_NOTE,)
        return ModelSignature(inputs, outputs, batchable, metadata=metadata, notes=notes, warnings=warnings)

    def open(self, job: OpenJob) -> OpenVinoSession:
        path = file_to_read(job.file)
        plan = compile_options(job, self._core)
        key: Hashable = (fingerprint(path), plan)
        compiled = self._shared.take(key, lambda: self._compile(job, plan))
        try:
            request = compiled.model.create_infer_request()
        except self._failures as error:
            failure = load_error(job.file, "openvino", error)
        else:
            runtime = f"openvino {self._ov.__version__.split('-')[0]}"
            info = SessionInfo(
                runtime, plan.device, compiled.precision, compiled.options, is_bound=False, only_computes=True
            )
            rows = plan.batch_rows if plan.is_padded else 0
            give_back = partial(self._shared.give_back, key)
            return OpenVinoSession(
                job.spec.name, info, compiled, request, rows, give_back, self._failures, self._ov.Tensor
            )
        self._shared.give_back(key)
        raise failure

    def _compile(self, job: OpenJob, plan: CompileOptions) -> CompiledModel:
        model = self._reader.read_graph(job.file, plan.extension, plan.is_mapped)
        properties = dict(plan.properties)
        device = queryable_device(plan.device)
        if device not in self._properties:  # read once: each call leaks kilobytes in OpenVINO's binding
            names: Any = None
            with contextlib.suppress(*self._failures):
                names = self._core.get_property(device, "SUPPORTED_PROPERTIES")
            if names is None:
                found = ", ".join(self._core.available_devices)
                raise LoadError(f"model '{job.spec.name}': openvino finds no device '{device}' here; it finds: {found}")
            self._properties[device] = set(names)
        supported = self._properties[device]
        # A key of Triton that OpenVINO's CPU plugin no longer has. It is harmless, and old configurations contain it.
        ignored = {"COMPILATION_NUM_THREADS"} & properties.keys() - supported
        for key in ignored:
            del properties[key]
        if "ENABLE_CPU_PINNING" in supported:
            properties.setdefault("ENABLE_CPU_PINNING", "NO")
        try:
            self._reshape(model, job.spec, plan)
            compiled = self._core.compile_model(model, plan.device, properties)
            precision = _precision_in_force(compiled)
            options = {
                **dict.fromkeys(ignored, "ignored: not offered by this OpenVINO"),
                **_properties_in_force(compiled),
            }
        except self._failures as error:
            failure = load_error(job.file, "openvino", error)
        else:
            if plan.precision == "int8" and precision != "int8":
                raise LoadError(f"{file_title(job.file)}: precision int8 was asked for, but the file is not quantised")
            # From the graph, not from the compiled model: compiling adds names.
            inputs, outputs = positions(model.inputs), positions(model.outputs)
            bf16 = bf16_names((*model.inputs, *model.outputs))
            in_place = convolution_inputs(model) - bf16 if device == "CPU" else frozenset[str]()
            all_options = {**dict(plan.properties), **options}
            return CompiledModel(compiled, inputs, outputs, bf16, in_place, precision, all_options)
        raise failure

    def _reshape(self, model: Any, spec: ModelSpec, plan: CompileOptions) -> None:
        """Set the input shapes of the options. Make a fixed leading dimension variable if the model batches."""
        if plan.shapes:
            named = positions(model.inputs)
            model.reshape({named[name]: self._ov.PartialShape(list(shape)) for name, shape in plan.shapes})
            return
        if spec.max_batch_size == 0:
            return
        rows = plan.batch_rows or -1
        shapes = {index: list(dims(port)) for index, port in enumerate(model.inputs)}
        if any(shape[:1] not in ([-1], [rows]) or (rows != -1 and shape[:1] == [-1]) for shape in shapes.values()):
            model.reshape({index: self._ov.PartialShape([rows, *shape[1:]]) for index, shape in shapes.items()})


def _precision_in_force(compiled: Any) -> str:
    """Return the arithmetic of most computing layers; "int8" if any layer computes in it."""
    found: Counter[str] = Counter()
    for layer in compiled.get_runtime_model().get_ops():
        info = layer.get_rt_info()
        if "layerType" in info and info["layerType"].astype(str) in _COMPUTING_LAYERS:
            # The kernel's name ends with its type ("brgconv_avx512_f32"). runtimePrecision is the type of the stored
            # weights, for example f16, which are converted at run time.
            key = "primitiveType" if "primitiveType" in info else "runtimePrecision"
            found[info[key].astype(str).rpartition("_")[2].lower()] += 1
    if found.keys() & {"i8", "u8"}:
        return "int8"
    known = [precision for precision, _ in found.most_common() if precision in ("bf16", "f16", "f32")]
    if known:
        return known[0]
    hint = str(compiled.get_property(_HINT).get_type_name())
    return "as the model says" if hint == "dynamic" else hint


def _properties_in_force(compiled: Any) -> dict[str, str]:
    """Return the properties for log and status that the device has."""
    found = {}
    for name in _REPORTED:
        with contextlib.suppress(RuntimeError):
            value = compiled.get_property(name)
            if hasattr(value, "get_type_name"):
                found[name] = str(value.get_type_name())
            elif isinstance(value, (list, tuple)):
                found[name] = ",".join(map(str, value))
            else:
                found[name] = str(getattr(value, "name", value))
    return found
