"""Models through OpenVINO: ONNX, OpenVINO's own IR (model.xml with model.bin), TensorFlow Lite and SavedModels.

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

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.base import Array, Backend, ModelFile, OpenJob, Session, SessionInfo, Signature
from edge_server.backends.openvino_devices import checked_device, head_of, involves_accelerator
from edge_server.backends.runtime import (
    SharedModels,
    existing_file,
    file_title,
    fingerprint,
    import_runtime,
    instance_count,
    is_batchable,
    load_error,
    words,
    writable,
    yes_or_no,
)
from edge_server.core.model import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, LoadError
from edge_server.records import dataclass

_TYPES = {
    "bf16": DType.BF16,
    "boolean": DType.BOOL,
    "f16": DType.FP16,
    "f32": DType.FP32,
    "f64": DType.FP64,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i64": DType.INT64,
    "i8": DType.INT8,
    "u16": DType.UINT16,
    "u32": DType.UINT32,
    "u64": DType.UINT64,
    "u8": DType.UINT8,
}
"""OpenVINO's element types. Its string tensors are left out: their memory is freed twice through the Python binding."""

_FRONTENDS = {".onnx": "onnx", ".tflite": "tflite", ".xml": "ir"}
"""Reader by file suffix. Naming it keeps OpenVINO from trying all others on a broken file, which print to stderr."""

_SAVED_MODEL = "saved_model.pb"
"""The file that makes a folder a TensorFlow SavedModel; the folder is what is read."""

_TFLITE_SINCE = (2026, 1)
"""First release known to verify a TensorFlow Lite file before it follows the file's pointers."""

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
_REPORTED = ("NUM_STREAMS", "INFERENCE_NUM_THREADS", "PERFORMANCE_HINT", _HINT, "EXECUTION_DEVICES")
_COMPUTING_LAYERS = frozenset(("Convolution", "Deconvolution", "FullyConnected", "GroupConvolution", "MatMul"))


def make(name: str) -> OpenVinoBackend:
    return OpenVinoBackend(name)


@dataclass(frozen=True, slots=True)
class _Plan:
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


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled model with what is known about it."""

    model: Any
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    bf16: frozenset[str]
    """Tensors whose elements numpy lacks, and which travel as bit patterns."""
    precision: str
    options: Mapping[str, str]


class OpenVinoBackend(Backend):
    """The OpenVINO library, its one Core, and the compiled models that instances share."""

    default_filename = "model.xml"

    def __init__(self, name: str) -> None:
        self.name = name
        self._ov = import_runtime("openvino", "Core")
        frontend = import_runtime("openvino.frontend", "FrontEndManager")
        self._core = self._ov.Core()
        self._version = tuple(int(part) for part in re.findall(r"\d+", self._ov.__version__)[:2])
        self._frontends = frontend.FrontEndManager()
        self._failures = _exceptions(frontend)
        self._reading = threading.Lock()
        self._extensions: set[str] = set()
        self._properties: dict[str, set[str]] = {}
        self._shared: SharedModels[_Compiled] = SharedModels()

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Exception classes that the library raises."""
        return self._failures

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> Signature:
        model = self._read(file, parameters.get("CPU_EXTENSION_PATH", ""), is_mapped=True)
        inputs = tuple(InputSpec(*_declared(file, "input", port)) for port in model.inputs)
        outputs = tuple(OutputSpec(*_declared(file, "output", port)) for port in model.outputs)
        return Signature(inputs, outputs, is_batchable(inputs, outputs))

    def open(self, job: OpenJob) -> OpenVinoSession:
        path = existing_file(job.file, _inner_name(job.file))
        plan = self._plan(job)
        key: Hashable = (fingerprint(path), plan)
        compiled = self._shared.take(key, lambda: self._compile(job, plan))
        try:
            request = compiled.model.create_infer_request()
        except self._failures as error:
            failure = load_error(job.file, "openvino", error)
        else:
            runtime = f"openvino {self._ov.__version__.split('-')[0]}"
            info = SessionInfo(runtime, plan.device, compiled.precision, compiled.options)
            merged = {**job.settings, **job.spec.parameters}
            pads = yes_or_no(job.spec.name, merged, "ENABLE_BATCH_PADDING", False)
            return OpenVinoSession(self, job.spec, info, key, compiled, request, plan.batch_rows if pads else 0)
        self._shared.give_back(key)
        raise failure

    def give_back(self, key: Hashable) -> None:
        self._shared.give_back(key)

    def tensor(self, array: Array, is_bf16: bool) -> Any:
        """Return an OpenVINO tensor over the array's own memory."""
        if is_bf16:
            return self._ov.Tensor(array, self._ov.Shape(array.shape), self._ov.Type.bf16)
        return self._ov.Tensor(array, shared_memory=True)

    def _read(self, file: ModelFile, extension: str, is_mapped: bool) -> Any:
        """Read a model file into OpenVINO's graph. Raises LoadError."""
        path = existing_file(file, _inner_name(file))
        try:
            with self._reading:
                if extension and extension not in self._extensions:
                    self._core.add_extension(extension)
                    self._extensions.add(extension)
                model = self._convert(path, bool(extension), is_mapped)
        except self._failures as error:
            failure = load_error(file, "openvino", error)
        else:
            if not model.outputs:
                raise LoadError(f"{file_title(file)}: openvino finds no graph in it")
            return model
        raise failure

    def _convert(self, path: Path, has_extensions: bool, is_mapped: bool) -> Any:
        framework, source = _FRONTENDS.get(path.suffix), path
        if path.name == _SAVED_MODEL:
            framework, source = "tf", path.parent
        if framework == "tflite" and self._version < _TFLITE_SINCE:
            since = ".".join(map(str, _TFLITE_SINCE))
            raise ValueError(f"TensorFlow Lite needs openvino {since}; this one crashes on a damaged file")
        if framework is None or has_extensions:
            self._core.set_property({"ENABLE_MMAP": is_mapped})
            return self._core.read_model(str(source))
        frontend = self._frontends.load_by_framework(framework)
        return frontend.convert(frontend.load(str(source), is_mapped))

    def _plan(self, job: OpenJob) -> _Plan:
        spec, merged = job.spec, {**job.settings, **job.spec.parameters}
        default_device = "CPU" if job.device_id is None else f"GPU.{job.device_id}"
        asked = merged.get("TARGET_DEVICE", default_device)
        # Not asked for the CPU, the rule: the list costs a look at every plugin.
        device = "CPU" if asked == "CPU" else checked_device(spec.name, asked, self._core.available_devices)
        properties = {key: value for key, value in merged.items() if _PROPERTY.fullmatch(key) and key not in _OWN_KEYS}
        if involves_accelerator(device) and merged.get("MODEL_CACHE_DIR"):
            properties.setdefault("CACHE_DIR", merged["MODEL_CACHE_DIR"])
        precision = self._asked_precision(job, merged, device)
        if precision in ("bf16", "f16", "f32") or (precision == "int8" and device == "CPU"):
            properties.setdefault(_HINT, "f32" if precision == "int8" else precision)
        _set_parallelism(properties, device, instance_count(spec))
        skips = yes_or_no(spec.name, merged, "SKIP_OV_DYNAMIC_BATCHSIZE", False)
        rows = spec.max_batch_size if skips else 0
        takes_dims = yes_or_no(spec.name, merged, "RESHAPE_IO_LAYERS", False)
        shapes = tuple((one.name, _full_shape(spec, one, rows)) for one in spec.inputs) if takes_dims else ()
        extension = merged.get("CPU_EXTENSION_PATH", "")
        is_mapped = yes_or_no(spec.name, merged, "ENABLE_MMAP", False)
        return _Plan(device, tuple(sorted(properties.items())), precision, extension, is_mapped, shapes, rows)

    def _asked_precision(self, job: OpenJob, merged: Mapping[str, str], device: str) -> str:
        """Return f32, bf16, f16, int8 or auto. Raises LoadError when the device does not have it."""
        model = job.spec.name
        here = self._precisions(device) if device == "CPU" else ("f32", "bf16", "f16", "int8", "auto")
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

    def _precisions(self, device: str) -> tuple[str, ...]:
        capabilities = self._core.get_property(device, "OPTIMIZATION_CAPABILITIES")
        extra = [name for name, capability in _CAPABILITIES.items() if capability in capabilities]
        return ("f32", *extra, "int8", "auto")

    def _compile(self, job: OpenJob, plan: _Plan) -> _Compiled:
        model = self._read(job.file, plan.extension, plan.is_mapped)
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
            precision = _precision_in_force(compiled)
            options = {**dict.fromkeys(ignored, "ignored: not offered by this OpenVINO"), **_in_force(compiled)}
        except self._failures as error:
            failure = load_error(job.file, "openvino", error)
        else:
            if plan.precision == "int8" and precision != "int8":
                raise LoadError(f"{file_title(job.file)}: precision int8 was asked for, but the file is not quantised")
            # The graph's own ports: compiling gives names to those that have none.
            inputs, outputs = _positions(model.inputs), _positions(model.outputs)
            ports = (*model.inputs, *model.outputs)
            bf16 = frozenset(name for port in ports if _type_name(port) == "bf16" for name in _names(port))
            return _Compiled(compiled, inputs, outputs, bf16, precision, {**dict(plan.properties), **options})
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

    def _reshape(self, model: Any, spec: ModelSpec, plan: _Plan) -> None:
        """Set input shapes as planned; open a fixed leading dimension when the model is to batch."""
        if plan.shapes:
            named = _positions(model.inputs)
            model.reshape({named[name]: self._ov.PartialShape(list(shape)) for name, shape in plan.shapes})
            return
        if spec.max_batch_size == 0:
            return
        rows = plan.batch_rows or -1
        shapes = {index: list(_dims(port)) for index, port in enumerate(model.inputs)}
        if any(shape[:1] not in ([-1], [rows]) or (rows != -1 and shape[:1] == [-1]) for shape in shapes.values()):
            model.reshape({index: self._ov.PartialShape([rows, *shape[1:]]) for index, shape in shapes.items()})


class OpenVinoSession(Session):
    """One infer request of a shared compiled model."""

    def __init__(
        self,
        backend: OpenVinoBackend,
        spec: ModelSpec,
        info: SessionInfo,
        key: Hashable,
        compiled: _Compiled,
        request: Any,
        padded_rows: int,
    ) -> None:
        self.info = info
        self._backend = backend
        self._failures = backend.failures
        self._model = spec.name
        self._key = key
        self._request = request
        self._inputs = compiled.inputs
        self._outputs = compiled.outputs
        self._padded_rows = padded_rows
        self._bf16 = compiled.bf16

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        try:
            return self._infer(inputs, outputs)
        except self._failures as error:
            said = words(error)
        # Raised outside the handler: the runtime's exception would keep its frames, and the batch with them, alive.
        raise BackendError(f"model '{self._model}': openvino failed: {said}")

    def _infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        rows = 0
        held = []
        for name, given in inputs.items():
            array = given
            if self._padded_rows and len(array) < self._padded_rows:
                rows, array = len(array), _padded(array, self._padded_rows)
            ready = writable(array)
            tensor = self._backend.tensor(ready, name in self._bf16)
            held.append((array, ready, tensor))
            self._request.set_input_tensor(self._inputs[name], tensor)
        # Results share the request's own memory, which the next run overwrites: hand out copies.
        results = list(self._request.infer(share_outputs=True).values())
        found = {
            name: np.array(results[self._outputs[name]][:rows] if rows else results[self._outputs[name]])
            for name in outputs
        }
        found.update({name: found[name].view(DType.BF16.numpy) for name in found.keys() & self._bf16})
        return found

    def close(self) -> None:
        self._request = None
        self._backend.give_back(self._key)


def _padded(array: Array, rows: int) -> Array:
    padded = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)
    padded[: len(array)] = array
    return padded


def _exceptions(frontend: Any) -> tuple[type[Exception], ...]:
    """Return all classes that the library raises; those of its readers have no base in common."""
    own = [item for item in vars(frontend).values() if isinstance(item, type) and issubclass(item, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, OSError, MemoryError)


def _inner_name(file: ModelFile) -> str:
    """Return which file a model directory is read from."""
    if (file.path / _SAVED_MODEL).is_file():
        return _SAVED_MODEL
    return "model.onnx" if file.path.suffix == ".onnx" else "model.xml"


def _set_parallelism(properties: dict[str, str], device: str, instances: int) -> None:
    """Choose streams unless the configuration does."""
    if "NUM_STREAMS" in properties:
        properties["NUM_STREAMS"] = properties["NUM_STREAMS"].upper()
    elif "PERFORMANCE_HINT" in properties:
        properties["PERFORMANCE_HINT"] = properties["PERFORMANCE_HINT"].upper()
    elif device == "CPU":
        properties["NUM_STREAMS"] = str(instances)


def _full_shape(spec: ModelSpec, one: InputSpec, rows: int) -> tuple[int, ...]:
    dims = one.dims if one.reshape is None else one.reshape
    return (rows or -1, *dims) if spec.max_batch_size > 0 else dims


def _type_name(port: Any) -> str:
    return str(port.get_element_type().get_type_name())


def _names(port: Any) -> list[str]:
    """Return all names of an input or output, the one for clients first; those without get their layer's name."""
    names = sorted(port.get_names())
    if names:
        return names
    node = port.get_node()
    if node.get_type_name() == "Result":
        node = node.input_value(0).get_node()
    return [str(node.get_friendly_name())]


def _positions(ports: Sequence[Any]) -> dict[str, int]:
    return {name: index for index, port in enumerate(ports) for name in _names(port)}


def _dims(port: Any) -> tuple[int, ...]:
    return tuple(dim.get_length() if dim.is_static else -1 for dim in port.get_partial_shape())


def _declared(file: ModelFile, role: str, port: Any) -> tuple[str, DType, tuple[int, ...]]:
    """Return name, type and dims of one input or output as the file declares it."""
    name, kind = _names(port)[0], _type_name(port)
    if kind not in _TYPES:
        raise LoadError(f"{file_title(file)}: {role} '{name}' is of type {kind}, which this backend cannot carry")
    if port.get_partial_shape().rank.is_dynamic:
        raise LoadError(f"{file_title(file)}: {role} '{name}' has no fixed number of dimensions")
    return name, _TYPES[kind], _dims(port)


def _precision_in_force(compiled: Any) -> str:
    """Return the arithmetic of most layers that compute; "int8" when any of them does, the rest being its frame."""
    found: Counter[str] = Counter()
    for layer in compiled.get_runtime_model().get_ops():
        info = layer.get_rt_info()
        if "layerType" in info and info["layerType"].astype(str) in _COMPUTING_LAYERS:
            # The kernel's name ends in the type it computes in ("brgconv_avx512_f32"); runtimePrecision is that of
            # the weights' storage, f16 for instance, widened on the fly.
            key = "primitiveType" if "primitiveType" in info else "runtimePrecision"
            found[info[key].astype(str).rpartition("_")[2].lower()] += 1
    if found.keys() & {"i8", "u8"}:
        return "int8"
    known = [precision for precision, _ in found.most_common() if precision in ("bf16", "f16", "f32")]
    if known:
        return known[0]
    hint = str(compiled.get_property(_HINT).get_type_name())
    return "as the model says" if hint == "dynamic" else hint


def _in_force(compiled: Any) -> dict[str, str]:
    """Return the runtime's answers to what people ask about first, of those that the device has."""
    found = {}
    for name in _REPORTED:
        with contextlib.suppress(RuntimeError):
            found[name] = _text(compiled.get_property(name))
    return found


def _text(value: Any) -> str:
    if hasattr(value, "get_type_name"):
        return str(value.get_type_name())
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(getattr(value, "name", value))
