"""TensorRT's runtime without a GPU: engines that were truly built are "executed" by onnxruntime, on the ONNX file that
they were built from, in the memory of the fake driver.

`install` puts it in the place of `Runtime` in a real TensorRT package. Which file a plan was built from is found in the
JSON files below the folders of FAKE_ENGINES: {"plan_sha256": ..., "path": ..., "profiles": [{name: [min, opt, max]}],
"formats": {name: TensorFormat}}; a tensor without a format is linear.
FAKE_DLA_CORES is the number of DLA cores, 0 without it. FAKE_ONE_CONTEXT_A_PROFILE is set for TensorRT 8: an execution
context of an engine with variable shapes keeps others from its profile. FAKE_ENGINE_FAULT changes what engines do:
`wrong` answers are off by one, `crash` ends the process, `refuse` fails a run, `no graph` breaks a capture, `no graph
of 4` one with so many rows.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import signal
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

_TYPES = {
    "tensor(float)": ("FLOAT", "f4"), "tensor(float16)": ("HALF", "f2"), "tensor(int32)": ("INT32", "i4"),
    "tensor(int64)": ("INT64", "i8"), "tensor(int8)": ("INT8", "i1"), "tensor(uint8)": ("UINT8", "u1"),
    "tensor(bool)": ("BOOL", "?"),
}  # fmt: skip


def install(trt: Any, library: str) -> None:
    """Replace what a TensorRT package executes with. `library` is the fake driver's file."""
    driver = ctypes.CDLL(library)
    driver.fake_cuda_is_capturing.argtypes = [ctypes.c_void_p]
    driver.fake_cuda_break_capture.argtypes = [ctypes.c_void_p]
    driver.fake_cuda_is_known.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    driver.fake_cuda_is_device.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    driver.fake_cuda_record.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self._logger = logger
            self._dla_core = -1
            assert driver.cuInit(0) == 0, "a true one would have ended the process"

        @property
        def num_DLA_cores(self) -> int:
            return _dla_cores()

        @property
        def DLA_core(self) -> int:
            return self._dla_core

        @DLA_core.setter
        def DLA_core(self, core: int) -> None:
            # A true one logs an error, and keeps what it had.
            self._dla_core = core if 0 <= core < _dla_cores() else self._dla_core

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> EngineDouble | None:
            found = _find(hashlib.sha256(serialized_engine).hexdigest())
            if found is None:
                self._logger.log(trt.ILogger.ERROR, "Serialization assertion failed: magic tag does not match")
                return None
            return EngineDouble(trt, driver, self._logger, found, self._dla_core)

    real_builder = trt.Builder

    class Builder:
        """The real builder of a machine with FAKE_DLA_CORES; what it builds is for the GPU."""

        def __init__(self, logger: Any) -> None:
            self._real = real_builder(logger)

        @property
        def num_DLA_cores(self) -> int:
            return _dla_cores()

        def create_builder_config(self) -> BuilderConfigDouble:
            return BuilderConfigDouble(trt, self._real.create_builder_config())

        def build_serialized_network(self, network: Any, config: BuilderConfigDouble) -> Any:
            return self._real.build_serialized_network(network, config.real)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    trt.Runtime, trt.Builder = Runtime, Builder


def _dla_cores() -> int:
    return int(os.environ.get("FAKE_DLA_CORES", "0"))


class BuilderConfigDouble:
    """A real trt.IBuilderConfig, except for its DLA."""

    OWN = ("trt", "real", "default_device_type", "DLA_core")

    def __init__(self, trt: Any, real: Any) -> None:
        self.trt, self.real = trt, real
        self.default_device_type, self.DLA_core = trt.DeviceType.GPU, -1

    def can_run_on_DLA(self, layer: Any) -> bool:
        """Return whether the layer computes in a type that a DLA has, and is one of those that it has."""
        kinds, types = self.trt.LayerType, self.trt.DataType
        return self.default_device_type == self.trt.DeviceType.DLA and (
            layer.type in (kinds.CONVOLUTION, kinds.ACTIVATION, kinds.ELEMENTWISE, kinds.POOLING, kinds.SCALE)
            and layer.get_output(0).dtype in (types.HALF, types.INT8)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.real, name, value)


def register(
    folder: Path,
    plan: bytes,
    onnx: Path,
    profiles: list[dict[str, list[list[int]]]],
    formats: Mapping[str, str] | None = None,
) -> None:
    """Register the file that a plan was built from, and the formats of its inputs and outputs."""
    digest = hashlib.sha256(plan).hexdigest()
    facts = {"plan_sha256": digest, "path": str(onnx), "profiles": profiles, "formats": dict(formats or {})}
    (folder / f"{digest}.json").write_text(json.dumps(facts))


def _find(digest: str) -> dict[str, Any] | None:
    for folder in os.environ.get("FAKE_ENGINES", "").split(os.pathsep):
        for path in Path(folder).rglob("*.json") if folder else ():
            try:
                data = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if data.get("plan_sha256") == digest:
                return dict(data)
    return None


class Layout:
    """Where a format has the elements of a tensor {..., C, H, W} (or {..., C, D, H, W}), as the C arrays in the
    documentation of nvinfer1::TensorFormat."""

    def __init__(self, form: str, shape: tuple[int, ...], itemsize: int) -> None:
        channel = len(shape) - (4 if form in ("DHWC8", "DHWC", "CDHW32") else 3)
        lanes = int(form.lstrip("CDHW") or 1) if form != "DLA_HWC4" and form != "DLA_LINEAR" else 1
        if form == "DLA_HWC4":
            assert shape[channel] in (1, 3, 4)
            lanes = 1 if shape[channel] == 1 else 4
        self.vectorized_dim = channel if lanes > 1 else -1
        self.components = lanes
        vectors = list(shape)
        vectors[channel] = -(-shape[channel] // lanes)
        if form == "DLA_LINEAR":
            vectors[-1] = -(-shape[-1] * itemsize // 64) * 64 // itemsize
        elif form == "DLA_HWC4":
            vectors[-1] = -(-shape[-1] * itemsize * lanes // 32) * 32 // itemsize // lanes
        # The order of the C array's subscripts, without the place in a vector, which comes last.
        order = list(range(len(shape)))
        if "HWC" in form:
            order.append(order.pop(channel))
        self.strides = [0] * len(shape)
        step = 1
        for axis in reversed(order):
            self.strides[axis] = step
            step *= vectors[axis]
        self.count = step * lanes
        at = np.indices(shape, sparse=True)
        self.offsets = sum(
            (at[axis] // (lanes if axis == channel else 1)) * self.strides[axis] * lanes for axis in order
        ) + (at[channel] % lanes)


class EngineDouble:
    """The used part of trt.ICudaEngine."""

    device_memory_size_v2 = 4096

    def __init__(self, trt: Any, driver: Any, logger: Any, found: dict[str, Any], dla_core: int) -> None:
        self.trt, self.driver, self.logger, self.dla_core = trt, driver, logger, dla_core
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(found["path"], options, providers=["CPUExecutionProvider"])
        self.profiles = found["profiles"] or [{}]
        self.contexts: weakref.WeakSet[ContextDouble] = weakref.WeakSet()
        self.formats: dict[str, str] = found.get("formats", {})
        self.inputs = {node.name: node for node in self.session.get_inputs()}
        self.outputs = {node.name: node for node in self.session.get_outputs()}
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = len(self.profiles)

    def _node(self, name: str) -> Any:
        return self.inputs.get(name) or self.outputs[name]

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode.INPUT if name in self.inputs else self.trt.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(self.trt.DataType, _TYPES[self._node(name).type][0])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self._node(name).shape)

    def get_tensor_location(self, name: str) -> Any:
        return self.trt.TensorLocation.DEVICE

    def _layout(self, name: str, shape: tuple[int, ...]) -> Layout | None:
        """Return where the elements of a tensor are; None if it is linear."""
        form = self.formats.get(name, "LINEAR")
        return None if form == "LINEAR" else Layout(form, shape, np.dtype(_TYPES[self._node(name).type][1]).itemsize)

    def get_tensor_format(self, name: str, profile_index: int = 0) -> Any:
        assert 0 <= profile_index < self.num_optimization_profiles
        return getattr(self.trt.TensorFormat, self.formats.get(name, "LINEAR"))

    def get_tensor_vectorized_dim(self, name: str, profile_index: int = 0) -> int:
        layout = self._layout(name, tuple(max(size, 1) for size in self.get_tensor_shape(name)))
        return -1 if layout is None else layout.vectorized_dim

    def get_tensor_components_per_element(self, name: str, profile_index: int = 0) -> int:
        layout = self._layout(name, tuple(max(size, 1) for size in self.get_tensor_shape(name)))
        return 1 if layout is None else layout.components

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.profiles[profile_index][name]]

    def create_execution_context(self, strategy: Any = None) -> ContextDouble:
        return ContextDouble(self, has_memory=strategy is None)


class UnknownDims:
    """trt.Dims of -1 dimensions, as TensorRT returns it for a shape that is not known: Python refuses such a length."""

    def __len__(self) -> int:
        return -1

    def __getitem__(self, index: int) -> int:
        raise IndexError


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int)
_numbers = itertools.count()
_recorded: dict[int, Any] = {}


@_CALLBACK
def _replay(number: int) -> None:
    _recorded[number]()


class ContextDouble:
    """The used part of trt.IExecutionContext."""

    def __init__(self, engine: EngineDouble, *, has_memory: bool) -> None:
        self.engine = engine
        self.has_memory = has_memory
        self.profile = 0 if self._may_have(0) else -1
        engine.contexts.add(self)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert self.engine.driver.fake_cuda_is_device(memory, size)
        self.has_memory = True

    @property
    def active_optimization_profile(self) -> int:
        return self.profile

    def _may_have(self, number: int) -> bool:
        shapes = (self.engine.get_tensor_shape(name) for name in self.engine.inputs)
        is_dynamic = any(min(shape, default=0) < 0 for shape in shapes)
        others = (one.profile for one in self.engine.contexts if one is not self)
        if not (os.environ.get("FAKE_ONE_CONTEXT_A_PROFILE") and is_dynamic and number in others):
            return True
        said = f"Profile {number} has been chosen by another IExecutionContext. Use another profileIndex"
        self.engine.logger.log(self.engine.trt.ILogger.ERROR, said)
        return False

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not self._may_have(profile_index):
            return False
        self.profile, self.shapes = profile_index, {}
        return 0 <= profile_index < len(self.engine.profiles)

    def set_input_shape(self, name: str, shape: Any) -> bool:
        if self.profile < 0:
            self.engine.logger.log(self.engine.trt.ILogger.ERROR, "setInputShape: mOptimizationProfile >= 0 failed")
            return False
        least, _, most = self.engine.profiles[self.profile].get(name, [shape, shape, shape])
        given = tuple(shape)
        if len(given) != len(most) or not all(a <= b <= c for a, b, c in zip(least, given, most, strict=True)):
            self.engine.logger.log(
                self.engine.trt.ILogger.ERROR, f"setInputShape: {name} {given} is out of its profile"
            )
            return False
        self.shapes[name] = given
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        known: dict[str, int] = {}
        for given, shape in self.shapes.items():
            known.update(
                {k: v for k, v in zip(self.engine._node(given).shape, shape, strict=True) if isinstance(k, str)}
            )
        return tuple(size if isinstance(size, int) else known.get(size, -1) for size in self.engine._node(name).shape)

    def get_tensor_strides(self, name: str) -> Any:
        shape = self.get_tensor_shape(name)
        if min(shape, default=0) < 0:
            return UnknownDims()
        layout = self.engine._layout(name, shape)
        if layout is None:
            return [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        return list(layout.strides)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        self.allocators[name] = output_allocator
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        if not self.has_memory or os.environ.get("FAKE_ENGINE_FAULT") == "refuse":
            self.engine.logger.log(self.engine.trt.ILogger.ERROR, "enqueueV3: told to refuse, or has no memory")
            return False
        if self.engine.driver.fake_cuda_is_capturing(stream_handle):
            rows = next(iter(self.shapes.values()))[0]
            if os.environ.get("FAKE_ENGINE_FAULT") in ("no graph", f"no graph of {rows}"):
                self.engine.driver.fake_cuda_break_capture(stream_handle)
                self.engine.logger.log(self.engine.trt.ILogger.ERROR, "enqueueV3: operation not permitted in a capture")
                return False
            number = next(_numbers)
            _recorded[number] = self._run
            replay = ctypes.cast(_replay, ctypes.c_void_p)
            assert self.engine.driver.fake_cuda_record(stream_handle, replay, number) == 0
            return True
        return self._run()

    def _run(self) -> bool:
        fault = os.environ.get("FAKE_ENGINE_FAULT")
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        given = {name: self._read(name, self.shapes[name]) for name in self.engine.inputs}
        try:
            results = self.engine.session.run(list(self.engine.outputs), given)
        except Exception as error:  # noqa: BLE001 - whatever onnxruntime raises, TensorRT would log and refuse
            self.engine.logger.log(self.engine.trt.ILogger.ERROR, f"enqueueV3: {error}")
            return False
        for name, result in zip(self.engine.outputs, results, strict=True):
            if name in self.allocators:
                size = max(result.nbytes, 1)
                address = self.allocators[name].reallocate_output_async(name, 0, size, 256, 0)
                if not address:
                    return False
                self.addresses[name] = address
                self.allocators[name].notify_shape(name, result.shape)
            self._write(name, result + 1 if fault == "wrong" else result)
        return True

    def _read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        layout = self.engine._layout(name, shape)
        if layout is None:
            return self._memory(name, shape).copy()
        memory = self._memory(name, (layout.count,))
        padding = np.ones(layout.count, bool)
        padding[layout.offsets] = False
        # TensorRT may compute with the places that fill up a vector: what is not zero there spoils the result.
        return memory[layout.offsets] + memory.dtype.type(memory[padding].any())  # type: ignore[no-any-return]

    def _write(self, name: str, values: np.ndarray) -> None:
        layout = self.engine._layout(name, values.shape)
        if layout is None:
            self._memory(name, values.shape)[...] = values
            return
        memory = self._memory(name, (layout.count,))
        memory[...] = 77
        memory[layout.offsets] = values

    def _memory(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        dtype = np.dtype(_TYPES[self.engine._node(name).type][1])
        size = int(np.prod(shape)) * dtype.itemsize
        address = self.addresses[name]
        assert size == 0 or self.engine.driver.fake_cuda_is_known(address, size), f"{name}: {size} bytes are not there"
        return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)
