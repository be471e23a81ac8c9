"""Adapter to the libraries TensorRT 8.5 to 11, its lean runtime, and TensorRT for RTX, which hides their differences.

All of them have the API of named tensors, which came with 8.5. Each difference is in one method.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from edge_server.backends.cuda.cuda_driver import start_fault
from edge_server.backends.runtime_errors import import_runtime
from edge_server.core.tensor import DType
from edge_server.errors import BackendMissing
from edge_server.plugins.tensorrt.engine_order import Profile, Range

_TYPES = {
    "BF16": DType.BF16, "BOOL": DType.BOOL, "FLOAT": DType.FP32, "HALF": DType.FP16, "INT32": DType.INT32,
    "INT64": DType.INT64, "INT8": DType.INT8, "UINT8": DType.UINT8,
}  # fmt: skip
"""Name of a trt.DataType -> DType. FP8 and the 4-bit types are never inputs or outputs."""

_KEPT_LINES = 8

_START_FAULT = re.compile(r"CUDA initialization failure|createInfer\w+: Error Code")
"""Line of a factory of TensorRT that has made no object. Since 8.5 the first is a warning, before it was an error."""

_CUDA_CODE = re.compile(r"(?:CUDA initialization failure with error:?|\(cudaError) (\d+)")
"""A cudaError_t in what TensorRT logs."""


class EngineFault(Exception):
    """TensorRT refused. The message is the text that it logged."""


class StartFault(EngineFault):
    """CUDA or TensorRT does not start in this process."""


class ShapeFault(EngineFault):
    """No profile of the engine takes the shapes, or the values of shape tensors, that a client sent."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output of an engine. `shape` has -1 for a variable dimension. `is_on_host`: it is a shape tensor,
    whose values TensorRT needs on the host.

    `format` is the name of a trt.TensorFormat. Other formats than LINEAR may store dimension `vector_dim` in vectors of
    `vector_size` elements; -1 and 1 if they store single elements.
    """

    name: str
    is_input: bool
    dtype: DType
    shape: tuple[int, ...]
    is_on_host: bool
    format: str = "LINEAR"
    vector_dim: int = -1
    vector_size: int = 1

    @property
    def is_linear(self) -> bool:
        """Whether the elements are row-major in memory, without gaps."""
        return self.format == "LINEAR"

    def format_fault(self, reason: str) -> EngineFault:
        """Return the error for a format that cannot be converted. `reason` ends the sentence "it has the format X"."""
        side = "in" if self.is_input else "out"
        return EngineFault(
            f"tensor '{self.name}' has the format {self.format}, {reason}; build the plan with a linear {side}put "
            f"(trtexec --{side}putIOFormats=fp16:chw, or ITensor.allowed_formats = 1 << int(TensorFormat.LINEAR))"
        )


class TensorRTLibrary:
    """The `tensorrt` package. Created once in a process. Several threads may use it."""

    name = "tensorrt"
    needs = "Builder"

    def __init__(self) -> None:
        # Not every pip finds an extra by a name with underscores.
        self.trt: Any = import_runtime(self.name, self.needs, self.name.replace("_", "-"))
        self.version: str = getattr(self.trt, "__version__", "of unknown version")
        if not hasattr(self.trt.ICudaEngine, "get_tensor_name"):
            raise BackendMissing(f"{self.name} {self.version} is too old: 8.5 is the first that is supported")
        self.logger = make_logger(self.trt)
        self._lock = threading.Lock()
        self._runtimes: dict[int | None, Any] = {}
        """A runtime for each DLA core, as TensorRT has it, and one without."""
        self.allows_host_code = False
        """Whether plans are opened that hold code for this process, as version-compatible ones do. It is only set."""

    @property
    def major(self) -> int:
        head = self.version.split(".")[0]
        return int(head) if head.isdecimal() else 0

    def create(self, factory: str) -> Any:
        """Return a new `Runtime` or `Builder`. Raises StartFault with TensorRT's own line, and the cause and the cure
        if they are known: pybind11 says only that there is no object."""
        # Some versions log the reason as a warning.
        with self.logger.captured(with_warnings=True) as log, contextlib.suppress(TypeError):
            made = getattr(self.trt, factory)(self.logger)
            if not _START_FAULT.search(log.text()):
                return made
            # The lean runtime 11.4 returns an address that is no object: any use ends the process, also freeing it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        cause = _cause_of(log.text())
        said = f"it logged: {log.text() or 'nothing'}"
        raise StartFault(f"{self.name} {self.version} does not start: " + (f"{cause} ({said})" if cause else said))

    # -- building -----------------------------------------------------------------------------------------------------

    @property
    def has_builder(self) -> bool:
        return hasattr(self.trt, "Builder")

    @property
    def builds_types_of_file(self) -> bool:
        """Whether the file decides the precision, because networks are always strongly typed."""
        return not hasattr(self.trt.BuilderFlag, "FP16")

    def make_network(self, builder: Any) -> Any:
        """Return an empty network with an explicit batch dimension, which is the only kind since 10."""
        flags = getattr(self.trt, "NetworkDefinitionCreationFlag", None)
        explicit = getattr(flags, "EXPLICIT_BATCH", None) if self.major < 10 else None
        return builder.create_network(0 if explicit is None else 1 << int(explicit))

    def set_target(self, config: Any, capability: tuple[int, int]) -> None:
        """Build for a GPU of this compute capability. Does nothing here: this library builds for the present GPU.

        Raises EngineFault for one that the library does not know.
        """

    def has_timing_cache(self) -> bool:
        """Return whether a timing cache shortens the next build."""
        return True

    # -- executing ----------------------------------------------------------------------------------------------------

    def deserialise(self, plan: bytes, dla_core: int | None = None) -> Any:
        """Return the engine of a plan. Call it within the device's context.

        Layers that were built for a DLA run on `dla_core`. Raises EngineFault, also if there is no such core.
        """
        with self._lock:
            runtime = self._runtimes.get(dla_core)
            if runtime is None:
                runtime = self.create("Runtime")
                if dla_core is not None:
                    check_dla_core(dla_core, runtime.num_DLA_cores)
                    runtime.DLA_core = dla_core
                self._runtimes[dla_core] = runtime
            if self.allows_host_code:
                runtime.engine_host_code_allowed = True
            with self.logger.captured() as errors:
                engine = runtime.deserialize_cuda_engine(plan)
            if engine is None:
                said = errors.text() or "it was made by another version, for another GPU, or is damaged"
                # TensorRT for RTX makes a runtime without CUDA, and fails here.
                if cause := _cause_of(said):
                    raise StartFault(f"{cause} (it logged: {said})")
                raise EngineFault(said + self._refusal_hint(said))
        return engine

    def _refusal_hint(self, said: str) -> str:
        """Return advice for a plan that was refused, to end the error message."""
        if "EngineHostCodeAllowed" in said:
            return (
                "; the plan is version compatible and holds code that would run in this process: if you trust all "
                "plans of this server, start it with --backend-config=tensorrt,version-compatible=true"
            )
        # "Version tag does not match", "an old deserialization call on a newer plan file": they name no cure.
        if "Serialization" in said or "plan file" in said:
            return (
                f"; a plan is for one version of TensorRT (here {self.name} {self.version}) and one kind of GPU: build "
                "it on this machine, or give the ONNX file as model.onnx"
            )
        return ""

    def load_plugins(self, paths: tuple[str, ...]) -> None:
        """Register the plugins of TensorRT itself, and of the given libraries. Raises EngineFault."""
        if hasattr(self.trt, "init_libnvinfer_plugins"):
            self.trt.init_libnvinfer_plugins(self.logger, "")
        for path in paths:
            with self.logger.captured() as errors:
                handle = self.trt.get_plugin_registry().load_library(path)
            if handle is None:
                raise EngineFault(
                    f"the plugin library '{path}' does not load: {errors.text() or 'no reason was given'}"
                )

    def tensors(self, engine: Any) -> tuple[TensorInfo, ...]:
        """Return the engine's inputs and outputs. Raises EngineFault for an element type that requests cannot carry."""
        found = []
        for number in range(engine.num_io_tensors):
            name = engine.get_tensor_name(number)
            kind = engine.get_tensor_dtype(name).name
            if kind not in _TYPES:
                raise EngineFault(f"tensor '{name}' has elements of type {kind}, which requests cannot carry")
            found.append(
                TensorInfo(
                    name=name,
                    is_input=engine.get_tensor_mode(name) == self.trt.TensorIOMode.INPUT,
                    dtype=_TYPES[kind],
                    shape=tuple(int(size) for size in engine.get_tensor_shape(name)),
                    is_on_host=engine.get_tensor_location(name) == self.trt.TensorLocation.HOST,
                    **_format_of(engine, name),
                )
            )
        return tuple(found)

    def profiles(self, engine: Any, inputs: tuple[TensorInfo, ...]) -> tuple[Profile, ...]:
        """Return the shapes that each profile of the engine allows. Shape tensors are left out."""
        found = []
        for number in range(max(engine.num_optimization_profiles, 1)):
            profile: dict[str, Range] = {}
            for item in inputs:
                if item.is_on_host:
                    continue
                if min(item.shape, default=0) >= 0:
                    profile[item.name] = Range(item.shape, item.shape, item.shape)
                else:
                    shapes = engine.get_tensor_profile_shape(item.name, number)
                    least, best, most = (tuple(int(size) for size in shape) for shape in shapes)
                    profile[item.name] = Range(least, best, most)
            found.append(profile)
        return tuple(found)

    @property
    def profile_sharing(self) -> Any:
        """The preview feature of 8.6 that lets execution contexts share a profile; None in versions that have none."""
        return getattr(getattr(self.trt, "PreviewFeature", None), "PROFILE_SHARING_0806", None)

    def shares_profiles(self, engine: Any, *, is_built_here: bool) -> bool:
        """Return whether several execution contexts of an engine may use one profile.

        Always since TensorRT 10. Before, only with `profile_sharing`, of which a user's plan does not tell, or if no
        shape varies.
        """
        if self.major >= 10 or (is_built_here and self.profile_sharing is not None):
            return True
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        return all(
            min(tuple(engine.get_tensor_shape(name)), default=0) >= 0
            and engine.get_tensor_location(name) != self.trt.TensorLocation.HOST
            for name in names
        )

    def value_profiles(self, engine: Any, inputs: tuple[TensorInfo, ...]) -> tuple[Profile, ...]:
        """Return the values that each profile allows in shape tensors, if the engine reports them."""
        names = [item.name for item in inputs if item.is_on_host]
        found = []
        for number in range(max(engine.num_optimization_profiles, 1)):
            profile: dict[str, Range] = {}
            for name in names if hasattr(engine, "get_tensor_profile_values") else ():
                try:
                    values = engine.get_tensor_profile_values(number, name)
                except TypeError:
                    # The bindings have the arguments in this order, the documentation has the other.
                    values = engine.get_tensor_profile_values(name, number)
                if len(values) == 3:
                    profile[name] = Range(*(tuple(int(value) for value in one) for one in values))
            found.append(profile)
        return tuple(found)

    def strides(self, context: Any, item: TensorInfo) -> tuple[int, ...]:
        """Return the strides of a tensor in the context, in elements, or in vectors if its format has vectors.

        Call it after the shapes of the inputs are set. Raises EngineFault if TensorRT does not know them.
        """
        # Unknown ones are Dims of -1 dimensions: they have no len(), and no elements.
        strides = tuple(int(step) for step in context.get_tensor_strides(item.name))
        if len(strides) != len(item.shape) or min(strides, default=-1) < 0:
            raise item.format_fault("and TensorRT does not say where its elements are")
        return strides

    def scratch_bytes(self, engine: Any) -> int:
        """Return the device memory in bytes that an execution context needs during a run."""
        size = getattr(engine, "device_memory_size_v2", None)
        return int(engine.device_memory_size if size is None else size)

    def make_context(self, engine: Any, *, has_own_memory: bool) -> Any:
        """Return an execution context. Without memory of its own, call `set_context_memory` before it runs.

        Raises EngineFault.
        """
        strategies = getattr(self.trt, "ExecutionContextAllocationStrategy", None)
        with self.logger.captured() as errors:
            if has_own_memory:
                context = engine.create_execution_context()
            elif strategies is not None:
                context = engine.create_execution_context(strategies.USER_MANAGED)
            else:
                context = engine.create_execution_context_without_device_memory()
        if context is None:
            raise EngineFault(errors.text() or "no execution context could be made")
        return context

    def set_context_memory(self, context: Any, address: int, byte_count: int) -> None:
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(address, byte_count)
        else:
            context.device_memory = address

    def make_output_allocator(
        self, allocate: Callable[[int], int], set_shape: Callable[[tuple[int, ...]], None]
    ) -> Any:
        """Return an output allocator. It calls `allocate` with a number of bytes, then `set_shape` with the shape.

        `allocate` returns an address, or 0 without memory: TensorRT then ends the run with an error.
        """
        base: Any = self.trt.IOutputAllocator

        class Allocator(base):  # type: ignore[misc]  # a base that is known at run time only
            def __init__(self) -> None:
                base.__init__(self)

            def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
                return allocate(int(size))

            def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
                return allocate(int(size))

            def notify_shape(self, name: str, shape: Any) -> None:
                set_shape(tuple(int(size) for size in shape))

        return Allocator()


class LeanLibrary(TensorRTLibrary):
    """The `tensorrt_lean` package, which serves the backend `tensorrt` where the full library is missing. It has no
    builder, and opens version-compatible plans only."""

    name = "tensorrt_lean"
    needs = "Runtime"

    def _refusal_hint(self, said: str) -> str:
        if "EngineHostCodeAllowed" in said:
            return super()._refusal_hint(said)
        return f"; {self.name} opens only plans that were built with the flag VERSION_COMPATIBLE"


class RtxLibrary(TensorRTLibrary):
    """The `tensorrt_rtx` package. It compiles for the GPU when an execution context is created. So engines are built
    for a named target, without a GPU and without timing."""

    name = "tensorrt_rtx"

    def set_target(self, config: Any, capability: tuple[int, int]) -> None:
        if capability == (0, 0):  # no particular GPU
            return
        known = self.trt.ComputeCapability
        named = getattr(known, f"SM{capability[0]}{capability[1]}", None)
        if named is None:
            names = ", ".join(sorted(name for name in dir(known) if name.startswith("SM")))
            raise EngineFault(
                f"{self.name} {self.version} builds no engines for the compute capability {capability[0]}."
                f"{capability[1]} of this GPU, only for {names}: use the library tensorrt"
            )
        config.num_compute_capabilities = 1
        config.set_compute_capability(named, 0)

    def has_timing_cache(self) -> bool:
        return False

    def shares_profiles(self, engine: Any, *, is_built_here: bool) -> bool:
        return True


def _cause_of(logged: str) -> str:
    """Return the usual cause and the cure of the error of CUDA that TensorRT logged, "" if none is known."""
    code = _CUDA_CODE.search(logged)
    return start_fault(int(code[1])) if code else ""


def check_dla_core(core: int, count: int) -> None:
    """Raise EngineFault if TensorRT, which finds `count` DLA cores here, does not find this one."""
    if core < count:
        return
    why = (
        f"the cores here are 0 to {count - 1}"
        if count
        else "TensorRT finds none here: Orin Nano, Thor and graphics cards have no DLA, only the TensorRT of JetPack "
        "knows those of other boards, JetPack 7.2 has no DLA compiler, and a container needs /dev/nvhost-ctrl-nvdla*"
    )
    raise EngineFault(f"there is no DLA core {core} (parameter trt_dla_core, or secondary_devices): {why}")


def _format_of(engine: Any, name: str) -> dict[str, Any]:
    """Return the last fields of a TensorInfo. Raises EngineFault if they differ between the engine's profiles."""

    def ask(method: Callable[..., Any]) -> set[Any]:
        try:
            return {method(name, number) for number in range(max(engine.num_optimization_profiles, 1))}
        except TypeError:  # TensorRT 8.5 has one format for all profiles
            return {method(name)}

    try:
        formats = sorted(item.name for item in ask(engine.get_tensor_format))
    except TypeError:
        # The lean runtime's bindings lack TensorFormat. The text is that of ICudaEngine::getTensorFormatDesc.
        texts = ask(engine.get_tensor_format_desc)
        formats = sorted("LINEAR" if re.match("row.major linear", text.lower()) else text for text in texts)
    if formats == ["LINEAR"]:
        return {}
    dims, sizes = ask(engine.get_tensor_vectorized_dim), ask(engine.get_tensor_components_per_element)
    if len(formats) + len(dims) + len(sizes) > 3:
        raise EngineFault(
            f"tensor '{name}' has the formats {' and '.join(formats)} in its profiles, or vectors of different sizes; "
            "build the plan with one format for all profiles"
        )
    dim = dims.pop()
    return {"format": formats[0], "vector_dim": dim, "vector_size": sizes.pop() if dim >= 0 else 1}


_LIBRARIES: dict[str, type[TensorRTLibrary]] = {"tensorrt": TensorRTLibrary, "tensorrt_rtx": RtxLibrary}


def load_library(name: str) -> TensorRTLibrary:
    """Import `tensorrt`, or where it is missing its lean runtime, or `tensorrt_rtx`. Raises BackendMissing."""
    try:
        return _LIBRARIES[name]()
    except BackendMissing:
        if name == "tensorrt":
            with contextlib.suppress(BackendMissing):
                return LeanLibrary()
        raise


class CapturedErrors:
    """The last error messages that TensorRT logged within a `with logger.captured()` block; warnings too if asked."""

    def __init__(self, *, with_warnings: bool) -> None:
        self.with_warnings = with_warnings
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def text(self) -> str:
        return "; ".join(self.lines)


def make_logger(trt: ModuleType | Any) -> Any:
    """Return a logger that prints nothing. `with logger.captured() as errors` collects errors in CapturedErrors."""
    base: Any = trt.ILogger

    class Logger(base):  # type: ignore[misc]  # a base that is known at run time only
        def __init__(self) -> None:
            base.__init__(self)
            self._captures: list[CapturedErrors] = []

        def log(self, severity: Any, message: str) -> None:
            for capture in list(self._captures):
                if severity <= (base.Severity.WARNING if capture.with_warnings else base.Severity.ERROR):
                    capture.lines.append(" ".join(message.split()))

        @contextlib.contextmanager
        def captured(self, *, with_warnings: bool = False) -> Iterator[CapturedErrors]:
            capture = CapturedErrors(with_warnings=with_warnings)
            self._captures.append(capture)
            try:
                yield capture
            finally:
                self._captures.remove(capture)

    return Logger()
