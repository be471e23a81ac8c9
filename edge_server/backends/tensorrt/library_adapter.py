"""Adapter for TensorRT 8.5 to 11 and TensorRT for RTX: hides the differences between their versions.

The API of named tensors, which 8.5 brought, is the same in all of them. What differs stands in one method each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from edge_server.backends.runtime_library import import_runtime
from edge_server.core.tensor import DType
from edge_server.core.tensorrt_engine import Profile, Range
from edge_server.errors import BackendMissing

_TYPES = {
    "BF16": DType.BF16, "BOOL": DType.BOOL, "FLOAT": DType.FP32, "HALF": DType.FP16, "INT32": DType.INT32,
    "INT64": DType.INT64, "INT8": DType.INT8, "UINT8": DType.UINT8,
}  # fmt: skip
"""Name of a trt.DataType -> ours. FP8 and the 4-bit types are never inputs or outputs."""

_KEPT_LINES = 8


class EngineFault(Exception):
    """TensorRT said no; the message is what it logged."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output of an engine. `shape` has -1 where it differs; `is_on_host`: its values are needed to know
    shapes, and lie in the host's memory."""

    name: str
    is_input: bool
    dtype: DType
    shape: tuple[int, ...]
    is_on_host: bool


class TensorRTLibrary:
    """The `tensorrt` package. Made once a process; may be used by several threads."""

    name = "tensorrt"
    needs = "Builder"

    def __init__(self) -> None:
        self.trt: Any = import_runtime(self.name, self.needs)
        self.version: str = getattr(self.trt, "__version__", "of unknown version")
        if not hasattr(self.trt.ICudaEngine, "get_tensor_name"):
            raise BackendMissing(f"{self.name} {self.version} is too old: 8.5 is the first that is supported")
        self.logger = make_logger(self.trt)
        self._lock = threading.Lock()
        self._runtime: Any = None

    @property
    def major(self) -> int:
        head = self.version.split(".")[0]
        return int(head) if head.isdecimal() else 0

    # -- building -----------------------------------------------------------------------------------------------------

    @property
    def builds_types_of_file(self) -> bool:
        """Whether networks are strongly typed only: the file decides the precision."""
        return not hasattr(self.trt.BuilderFlag, "FP16")

    def make_network(self, builder: Any) -> Any:
        """Return an empty network with explicit batch, which is the only kind since 10."""
        flags = getattr(self.trt, "NetworkDefinitionCreationFlag", None)
        explicit = getattr(flags, "EXPLICIT_BATCH", None) if self.major < 10 else None
        return builder.create_network(0 if explicit is None else 1 << int(explicit))

    def target(self, config: Any, capability: tuple[int, int]) -> None:
        """Build for the GPU in the box, which is what this library always does."""

    def has_timing_cache(self) -> bool:
        """Whether a timing cache shortens the next build."""
        return True

    # -- executing ----------------------------------------------------------------------------------------------------

    def deserialise(self, plan: bytes) -> Any:
        """Return the engine. Only with a driver, and the device's context current. Raises EngineFault."""
        with self._lock:
            if self._runtime is None:
                self._runtime = self.trt.Runtime(self.logger)
            with self.logger.heard() as heard:
                engine = self._runtime.deserialize_cuda_engine(plan)
            if engine is None:
                raise EngineFault(heard.words() or "it was made by another version, for another GPU, or is damaged")
        return engine

    def load_plugins(self, paths: tuple[str, ...]) -> None:
        """Register the plugins that ship with TensorRT, and those of these libraries. Raises EngineFault."""
        if hasattr(self.trt, "init_libnvinfer_plugins"):
            self.trt.init_libnvinfer_plugins(self.logger, "")
        for path in paths:
            if self.trt.get_plugin_registry().load_library(path) is None:
                raise EngineFault(f"the plugin library '{path}' does not load")

    def tensors(self, engine: Any) -> tuple[TensorInfo, ...]:
        """Return the engine's inputs and outputs. Raises EngineFault for an element type that requests cannot carry."""
        return tuple(self._tensor(engine, engine.get_tensor_name(i)) for i in range(engine.num_io_tensors))

    def profiles(self, engine: Any, inputs: tuple[TensorInfo, ...]) -> tuple[Profile, ...]:
        """Return the shapes of the engine's profiles. Inputs whose values are shapes are left out."""
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

    def value_profiles(self, engine: Any, inputs: tuple[TensorInfo, ...]) -> tuple[Profile, ...]:
        """Return the values of the engine's profiles for inputs whose values are shapes; others are left out, and
        those of which the engine tells nothing."""
        names = [item.name for item in inputs if item.is_on_host]
        found = []
        for number in range(max(engine.num_optimization_profiles, 1)):
            profile: dict[str, Range] = {}
            for name in names if hasattr(engine, "get_tensor_profile_values") else ():
                try:
                    values = engine.get_tensor_profile_values(number, name)
                except TypeError:
                    # The bindings have the arguments in this order, their documentation has them in the other.
                    values = engine.get_tensor_profile_values(name, number)
                if len(values) == 3:
                    profile[name] = Range(*(tuple(int(value) for value in one) for one in values))
            found.append(profile)
        return tuple(found)

    def scratch_bytes(self, engine: Any) -> int:
        """Return how much device memory a context needs while it runs."""
        size = getattr(engine, "device_memory_size_v2", None)
        return int(engine.device_memory_size if size is None else size)

    def make_context(self, engine: Any, *, has_own_memory: bool) -> Any:
        """Return an execution context; without memory of its own, `give_memory` must come before it runs.

        Raises EngineFault.
        """
        strategies = getattr(self.trt, "ExecutionContextAllocationStrategy", None)
        with self.logger.heard() as heard:
            if has_own_memory:
                context = engine.create_execution_context()
            elif strategies is not None:
                context = engine.create_execution_context(strategies.USER_MANAGED)
            else:
                context = engine.create_execution_context_without_device_memory()
        if context is None:
            raise EngineFault(heard.words() or "no execution context could be made")
        return context

    def give_memory(self, context: Any, address: int, byte_count: int) -> None:
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(address, byte_count)
        else:
            context.device_memory = address

    def make_allocator(self, allocate: Callable[[int], int], notify: Callable[[tuple[int, ...]], None]) -> Any:
        """Return an output allocator: `allocate` is given the bytes wanted, `notify` the shape once it is known.

        `allocate` returns 0 when it cannot: TensorRT then ends the run with an error of its own.
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
                notify(tuple(int(size) for size in shape))

        return Allocator()

    def _tensor(self, engine: Any, name: str) -> TensorInfo:
        kind = engine.get_tensor_dtype(name).name
        if kind not in _TYPES:
            raise EngineFault(f"tensor '{name}' has elements of type {kind}, which requests cannot carry")
        return TensorInfo(
            name=name,
            is_input=engine.get_tensor_mode(name) == self.trt.TensorIOMode.INPUT,
            dtype=_TYPES[kind],
            shape=tuple(int(size) for size in engine.get_tensor_shape(name)),
            is_on_host=engine.get_tensor_location(name) == self.trt.TensorLocation.HOST,
        )


class RtxLibrary(TensorRTLibrary):
    """The `tensorrt_rtx` package. It compiles for the very GPU when a context is made, so that engines are built
    without one, and timing nothing: for a target that is named."""

    name = "tensorrt_rtx"

    def target(self, config: Any, capability: tuple[int, int]) -> None:
        known = self.trt.ComputeCapability
        named = getattr(known, f"SM{capability[0]}{capability[1]}", None)
        if named is None:
            return
        config.num_compute_capabilities = 1
        config.set_compute_capability(named, 0)

    def has_timing_cache(self) -> bool:
        return False


_LIBRARIES: dict[str, type[TensorRTLibrary]] = {"tensorrt": TensorRTLibrary, "tensorrt_rtx": RtxLibrary}


def load_library(name: str) -> TensorRTLibrary:
    """Import one of TENSORRT_LIBRARIES. Raises BackendMissing."""
    return _LIBRARIES[name]()


class _Heard:
    """What was logged while somebody listened."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def words(self) -> str:
        return "; ".join(self.lines)


def make_logger(trt: ModuleType | Any) -> Any:
    """Return a logger that prints nothing and keeps errors for whoever listens: `with logger.heard() as heard`."""
    base: Any = trt.ILogger

    class Logger(base):  # type: ignore[misc]  # a base that is known at run time only
        def __init__(self) -> None:
            base.__init__(self)
            self._listeners: list[_Heard] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= base.Severity.ERROR:
                for listener in list(self._listeners):
                    listener.lines.append(" ".join(message.split()))

        def heard(self) -> Any:
            return _Listening(self._listeners)

    return Logger()


class _Listening:
    def __init__(self, listeners: list[_Heard]) -> None:
        self._listeners = listeners
        self._heard = _Heard()

    def __enter__(self) -> _Heard:
        self._listeners.append(self._heard)
        return self._heard

    def __exit__(self, *details: object) -> None:
        self._listeners.remove(self._heard)
