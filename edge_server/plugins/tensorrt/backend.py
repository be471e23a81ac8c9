"""Loader of the backends `tensorrt` and `tensorrt_rtx`: opens engines (`model.plan`), or finds the engine that was
built for an ONNX file.

A plan is valid for one version of the library and one kind of GPU. Ultralytics' `.engine` files are plans with metadata
before the engine. `cc_model_filenames` names a plan for each compute
capability. An ONNX file is served through an engine that this machine built for it; see `engine_options` for the
parameters. Without such an engine opening fails, and the next runtime that reads ONNX serves the model. Meanwhile the
package `builds` builds the engine in a child process, and then reloads the model.

The instances of a version on one GPU share the engine. Each has its own stream and execution context. `profile` of an
instance group restricts it to some of the engine's profiles. CUDA graphs: see `cuda_graphs`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_server.backends import onnx_file_info
from edge_server.backends.base import Backend, ModelFile, ModelSignature, OpenJob, SessionInfo
from edge_server.backends.cuda import cuda_driver
from edge_server.backends.describe_model import bounded_metadata, is_batchable
from edge_server.backends.option_parsers import yes_or_no
from edge_server.backends.runtime_errors import existing_file, file_title, load_error, message_line
from edge_server.backends.shared_models import SharedModels, fingerprint
from edge_server.core.model_spec import InputSpec, InstanceGroup, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import LoadError, OutOfMemory
from edge_server.plugins.tensorrt.cuda_graphs import configured_graph_sizes
from edge_server.plugins.tensorrt.engine_options import engine_order, group_dla_cores, model_dla_core, plugin_path
from edge_server.plugins.tensorrt.engine_source import EngineSource
from edge_server.plugins.tensorrt.library_adapter import EngineFault, load_library
from edge_server.plugins.tensorrt.plan_file import read_plan
from edge_server.plugins.tensorrt.session import EngineUse, TensorRTSession
from edge_server.plugins.tensorrt.settings import VERSION_COMPATIBLE

_TYPES = {
    1: DType.FP32, 2: DType.UINT8, 3: DType.INT8, 4: DType.UINT16, 5: DType.INT16, 6: DType.INT32, 7: DType.INT64,
    8: DType.BYTES, 9: DType.BOOL, 10: DType.FP16, 11: DType.FP64, 12: DType.UINT32, 13: DType.UINT64, 16: DType.BF16,
}  # fmt: skip
"""TensorProto.DataType -> DType."""

_ARITHMETIC = {"fp32": "f32", "fp16": "f16", "int8": "int8", "best": "mixed"}
"""Precision of an engine order -> precision in SessionInfo."""


_NUMBER_AND_GPU = re.compile(r"[0-9]+_[0-9]+")
"""End of an instance's name, after the group's name: the instances of groups "cam" and "cam_wide" both begin "cam_"."""


def make(name: str) -> TensorRTBackend:
    return TensorRTBackend(name)


class TensorRTBackend(Backend):
    """Opens engines, which instances share. Creates no object of TensorRT before a driver was found."""

    default_filename = "model.plan"
    runs_on_gpu = True
    compares_output_sizes = needs_every_input = True
    used_fields = ("cc_model_filenames", "optimization.cuda", "instance_group.secondary_devices")

    def __init__(self, name: str) -> None:
        self.name = name
        self._library = load_library(name)
        self._shared: SharedModels[Any] = SharedModels()

    @property
    def has_builder(self) -> bool:
        """Whether the library can build engines: its lean runtime cannot."""
        return self._library.has_builder

    def allow_host_code(self) -> None:
        """Open version-compatible plans from now on, whose code for the host runs in this process."""
        self._library.allows_host_code = True

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature:
        path = existing_file(file, self.default_filename)
        if path.suffix.lower() == ".onnx":
            return _onnx_signature(file, path)
        _require_gpu(file)
        context = cuda_driver.driver().retain_context(0)
        try:
            with context.current():
                return self._plan_signature(file, path)
        finally:
            context.close()

    def open(self, job: OpenJob) -> TensorRTSession:
        path = existing_file(job.file, self.default_filename)
        if job.device_id is None:
            raise LoadError(
                f"model '{job.spec.name}': {self.name} runs on GPUs, but instance '{job.instance_name}' is one of "
                "KIND_CPU, or there is no GPU"
            )
        _require_gpu(job.file, job.device_id)
        # Not of the model's parameters: its author must not allow it. A child process learns it here.
        if yes_or_no(job.spec.name, job.settings, VERSION_COMPATIBLE, False):
            self.allow_host_code()
        if path.suffix.lower() != ".onnx":
            return self._open_plan(job, path, "as the model says", "")
        # An ONNX file needs an engine that was built for it.
        if not self.has_builder:
            raise LoadError(
                f"model '{job.spec.name}': {self._library.name} builds no engine of an ONNX file: install the full "
                "library (extra tensorrt), or give it a version-compatible plan as model.plan"
            )
        order = engine_order(job.spec, job.file, job.device_id, self.name, self._library.version, job.settings)
        source = job.server.plugin("tensorrt") if job.server is not None else None
        engine = source.find_engine(order) if isinstance(source, EngineSource) else None
        if engine is None:
            raise LoadError(
                f"model '{job.spec.name}' version {job.file.version}: there is no {self.name} engine yet that matches "
                "its file, this box and the installed version"
            )
        types_of_file = onnx_file_info.arithmetic(job.file.path) if order.precision == "fp32" else None
        precision = types_of_file or _ARITHMETIC[order.precision]
        try:
            return self._open_plan(job, engine.path, precision, engine.digest)
        except OutOfMemory:
            raise
        except LoadError as error:
            engine.reject(error.message)
            raise

    def file_for(self, cc_filenames: Mapping[str, str]) -> str:
        devices = cuda_driver.devices() if cc_filenames else ()
        return cc_filenames.get(devices[0].capability_text, "") if devices else ""

    def _open_plan(self, job: OpenJob, path: Path, precision: str, digest: str) -> TensorRTSession:
        assert job.device_id is not None
        text = job.spec.parameters.get("trt_extra_plugin_lib_paths", "")
        plugins = tuple(
            str(plugin_path(job.spec.name, job.file, part.strip())) for part in text.split(";") if part.strip()
        )
        failure: LoadError
        context: cuda_driver.CudaContext | None = None
        try:
            # Everything that checks the configuration comes before anything that must be released.
            sizes = configured_graph_sizes(job.spec)
            group = _group_of(job)
            core = group_dla_cores(job.spec).get(group.name if group else "", model_dla_core(job.spec, job.settings))
            key: Hashable = (fingerprint(path), job.device_id, core)
            device = cuda_driver.devices()[job.device_id]
            use = _engine_use(job, sizes, is_mapped=device.is_integrated, is_plan=not digest)
            context = cuda_driver.driver().retain_context(job.device_id)
            with context.current():
                self._library.load_plugins(plugins)
                engine = self._shared.take(key, partial(self._deserialise, path, core))
                use = replace(use, shares_profiles=self._library.shares_profiles(engine, is_built_here=bool(digest)))
                if not use.shares_profiles and self._shared.holder_count(key) > 1:
                    # Another instance has the engine's profiles: this one needs an engine of its own.
                    self._shared.give_back(key)
                    key = (key, job.instance_name)
                    engine = self._shared.take(key, partial(self._deserialise, path, core))
                options = {
                    "cuda": cuda_driver.driver().access_library,
                    "gpu": f"{device.name} ({device.capability_text})",
                    "memory": "mapped" if use.is_mapped else "page-locked",
                }
                if core is not None:
                    options["dla_core"] = str(core)
                if digest:
                    options["engine"] = digest
                info = SessionInfo(
                    f"{self._library.name} {self._library.version}",
                    f"GPU:{job.device_id}",
                    precision,
                    options,
                    only_computes=True,
                )
                return TensorRTSession(self._library, engine, context, use, info, partial(self._shared.give_back, key))
        except cuda_driver.CudaFault as error:
            kind = OutOfMemory if error.is_out_of_memory else LoadError
            failure = kind(f"{file_title(job.file)}: CUDA: {message_line(error)}")
        except (EngineFault, RuntimeError, TypeError, ValueError, OSError) as error:
            failure = load_error(job.file, self.name, error)
        if context is not None:
            with contextlib.suppress(cuda_driver.CudaFault):
                context.close()
        raise failure

    def _deserialise(self, path: Path, dla_core: int | None) -> Any:
        return self._library.deserialise(read_plan(path)[0], dla_core)

    def _plan_signature(self, file: ModelFile, path: Path) -> ModelSignature:
        """Return the inputs and outputs of a plan. Called within the context."""
        failure: LoadError
        try:
            plan, text = read_plan(path)
            engine = self._library.deserialise(plan)
            metadata = {"metadata.json": text} if text else {}
            tensors = self._library.tensors(engine)
            given = tuple(item for item in tensors if item.is_input)
            inputs = tuple(
                InputSpec(item.name, item.dtype, item.shape, is_shape_tensor=item.is_on_host) for item in given
            )
            outputs = tuple(
                OutputSpec(item.name, item.dtype, item.shape, is_shape_tensor=item.is_on_host)
                for item in tensors
                if not item.is_input
            )
            can_batch = is_batchable(
                [item for item in inputs if not item.is_shape_tensor],
                [item for item in outputs if not item.is_shape_tensor],
            ) and all(len(item.shape) == 1 and item.shape[0] > 1 for item in tensors if item.is_on_host)
            if not can_batch:
                return ModelSignature(inputs, outputs, False, metadata=metadata)
            # In every profile the first size of each shape, and the first value of each shape tensor, is the rows.
            profiles = zip(
                self._library.profiles(engine, given), self._library.value_profiles(engine, given), strict=True
            )
            ranges = [(*shapes.values(), *values.values()) for shapes, values in profiles]
            most_rows = max((min(item.most[0] for item in one) for one in ranges if one), default=None)
            return ModelSignature(inputs, outputs, True, most_rows, metadata)
        except (EngineFault, cuda_driver.CudaFault, RuntimeError, TypeError, ValueError, OSError) as error:
            failure = load_error(file, self.name, error)
        raise failure


def _require_gpu(file: ModelFile, device_id: int = 0) -> None:
    reason = cuda_driver.unavailable_reason()
    if reason:
        raise LoadError(f"{file_title(file)}: it needs a GPU: {reason}")
    count = len(cuda_driver.devices())
    if device_id >= count:
        # CUDA_VISIBLE_DEVICES hides GPUs from CUDA, but not from other libraries.
        raise LoadError(f"{file_title(file)}: it needs GPU {device_id}, but CUDA shows {count} to this process")


def _engine_use(job: OpenJob, sizes: tuple[int, ...], *, is_mapped: bool, is_plan: bool) -> EngineUse:
    spec = job.spec
    tensors: tuple[InputSpec | OutputSpec, ...] = (*spec.inputs, *spec.outputs)
    # For an engine that was built from an ONNX file only the configuration knows: its outputs may lie on the GPU.
    is_checked = is_plan and spec.max_batch_size > 0
    return EngineUse(
        model=spec.name,
        has_rows=spec.max_batch_size > 0,
        dtypes={item.name: item.dtype for item in tensors},
        shape_tensors={item.name: item.is_shape_tensor for item in tensors} if is_checked else {},
        allowed=_profiles_of_group(job),
        graph_sizes=sizes,
        is_mapped=is_mapped,
        device_id=job.device_id or 0,
    )


def _group_of(job: OpenJob) -> InstanceGroup | None:
    """Return the group of the instance."""
    for group in job.spec.instance_groups:
        number = job.instance_name.removeprefix(f"{group.name}_")
        if number != job.instance_name and _NUMBER_AND_GPU.fullmatch(number):
            return group
    return None


def _profiles_of_group(job: OpenJob) -> tuple[int, ...]:
    """Return the profiles of the instance's group, () for all. Raises LoadError."""
    group = _group_of(job)
    if group is None:
        return ()
    wrong = next((text for text in group.profiles if not text.isdecimal()), None)
    if wrong is not None:
        raise LoadError(
            f"model '{job.spec.name}': instance_group '{group.name}' profile: expected a number, given '{wrong}'"
        )
    return tuple(int(text) for text in group.profiles)


def _onnx_signature(file: ModelFile, path: Path) -> ModelSignature:
    failure: LoadError
    try:
        onnx_file_info.external_files(path, file_title(file))
        graph_inputs, graph_outputs = onnx_file_info.declared(path)
        inputs = tuple(InputSpec(*_declared(file, item)) for item in graph_inputs)
        outputs = tuple(OutputSpec(*_declared(file, item)) for item in graph_outputs)
        metadata = bounded_metadata(onnx_file_info.metadata(path))
        return ModelSignature(inputs, outputs, is_batchable(inputs, outputs), metadata=metadata)
    except (ValueError, OSError) as error:
        failure = load_error(file, "the reader of ONNX files", error)
    raise failure


def _declared(file: ModelFile, item: onnx_file_info.GraphTensor) -> tuple[str, DType, tuple[int, ...]]:
    if item.element not in _TYPES:
        raise LoadError(f"{file_title(file)}: tensor '{item.name}' is of a kind that requests cannot carry")
    if item.dims is None:
        raise LoadError(f"{file_title(file)}: the graph does not say how many dimensions tensor '{item.name}' has")
    return item.name, _TYPES[item.element], item.dims
