"""Backend `openvino`: ONNX, OpenVINO IR (model.xml with model.bin), TensorFlow Lite and SavedModels.

Keys in config.pbtxt's `parameters` (server-wide ones through `--backend-config=openvino,KEY=value`):

- `precision`: `f32` (default on the CPU: a model computes what it says), `bf16`, `f16`, `int8` (insists that the file
  is quantised), `auto` (OpenVINO chooses; bf16 on CPUs with AMX). `HINT_BF16` YES: bf16 where the device has it.
- `TARGET_DEVICE`: CPU (default), GPU, NPU, AUTO:GPU,CPU ..., see `openvino_devices`. What is compiled for any but the
  CPU is kept in the server's `MODEL_CACHE_DIR`, unless the model names a `CACHE_DIR`.
- `CPU_EXTENSION_PATH`: a library of custom operators.
- `SKIP_OV_DYNAMIC_BATCHSIZE` YES: compile for exactly max_batch_size rows; `ENABLE_BATCH_PADDING` YES then fills
  smaller batches up with zeros. `RESHAPE_IO_LAYERS` YES: give the inputs the configuration's dims.
- `ENABLE_MMAP` YES: map weights instead of reading them; halves the memory peak of loading, but a file then overwritten
  in place kills the server.
- `PERFORMANCE_HINT`, `NUM_STREAMS`, `INFERENCE_NUM_THREADS`, `CACHE_DIR` and any other property in capitals are handed
  to OpenVINO as they are.

All instances of a version share one compiled model, with an infer request each and as many streams as there are
instances, so that they run side by side and weights are held once. One instance, the default, has one stream with all
cores: the shortest time for a single request.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from edge_server.backends.base import Backend, ModelFile, ModelSignature, OpenJob, SessionInfo
from edge_server.backends.openvino_compiled_properties import in_force, precision_in_force
from edge_server.backends.openvino_devices import head_of
from edge_server.backends.openvino_import import import_openvino
from edge_server.backends.openvino_model_reader import GraphReader, exceptions, file_to_read
from edge_server.backends.openvino_options import CompileOptions, planned
from edge_server.backends.openvino_session import Compiled, OpenVinoLibrary, OpenVinoSession
from edge_server.backends.openvino_tensor_info import bf16_names, declared, dims, positions
from edge_server.backends.runtime_library import (
    SharedModels,
    file_title,
    fingerprint,
    import_runtime,
    is_batchable,
    load_error,
)
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.errors import LoadError


def make(name: str) -> OpenVinoBackend:
    return OpenVinoBackend(name)


class OpenVinoBackend(Backend):
    """The OpenVINO library, its one Core, and the compiled models that instances share."""

    default_filename = "model.xml"

    def __init__(self, name: str) -> None:
        self.name = name
        self._ov = import_openvino()
        frontend = import_runtime("openvino.frontend", "FrontEndManager")
        self._core = self._ov.Core()
        self._reader = GraphReader(self._ov.__version__, self._core, frontend)
        self._library = OpenVinoLibrary(self._ov, exceptions(frontend))
        self._failures = self._library.failures
        self._properties: dict[str, set[str]] = {}
        self._shared: SharedModels[Compiled] = SharedModels()

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature:
        model = self._reader.read(file, parameters.get("CPU_EXTENSION_PATH", ""), is_mapped=True)
        inputs = tuple(InputSpec(*declared(file, "input", port)) for port in model.inputs)
        outputs = tuple(OutputSpec(*declared(file, "output", port)) for port in model.outputs)
        return ModelSignature(inputs, outputs, is_batchable(inputs, outputs))

    def open(self, job: OpenJob) -> OpenVinoSession:
        path = file_to_read(job.file)
        plan = planned(job, self._core)
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
            return OpenVinoSession(self._library, job.spec.name, info, compiled, request, rows, give_back)
        self._shared.give_back(key)
        raise failure

    def _compile(self, job: OpenJob, plan: CompileOptions) -> Compiled:
        model = self._reader.read(job.file, plan.extension, plan.is_mapped)
        properties = dict(plan.properties)
        supported = self._supported(job, head_of(plan.device))
        # A key of Triton's that OpenVINO's CPU plugin has dropped; harmless, and old configurations carry it.
        ignored = {"COMPILATION_NUM_THREADS"} & properties.keys() - supported
        for key in ignored:
            del properties[key]
        if "ENABLE_CPU_PINNING" in supported:
            properties.setdefault("ENABLE_CPU_PINNING", "NO")
        try:
            self._reshape(model, job.spec, plan)
            compiled = self._core.compile_model(model, plan.device, properties)
            precision = precision_in_force(compiled)
            options = {**dict.fromkeys(ignored, "ignored: not offered by this OpenVINO"), **in_force(compiled)}
        except self._failures as error:
            failure = load_error(job.file, "openvino", error)
        else:
            if plan.precision == "int8" and precision != "int8":
                raise LoadError(f"{file_title(job.file)}: precision int8 was asked for, but the file is not quantised")
            # The graph's own ports: compiling gives names to those that have none.
            inputs, outputs = positions(model.inputs), positions(model.outputs)
            bf16 = bf16_names((*model.inputs, *model.outputs))
            return Compiled(compiled, inputs, outputs, bf16, precision, {**dict(plan.properties), **options})
        raise failure

    def _supported(self, job: OpenJob, device: str) -> set[str]:
        """Return the names of a device's properties. Raises LoadError when there is no such device."""
        try:
            if device not in self._properties:  # asked for once: each answer leaks kilobytes in OpenVINO's binding
                self._properties[device] = set(self._core.get_property(device, "SUPPORTED_PROPERTIES"))
            return self._properties[device]
        except self._failures:
            found = ", ".join(self._core.available_devices)
        raise LoadError(f"model '{job.spec.name}': openvino finds no device '{device}' here; it finds: {found}")

    def _reshape(self, model: Any, spec: ModelSpec, plan: CompileOptions) -> None:
        """Set input shapes as planned; open a fixed leading dimension when the model is to batch."""
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
