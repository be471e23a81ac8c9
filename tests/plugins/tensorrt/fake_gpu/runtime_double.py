"""TensorRT's runtime without a GPU: engines that were truly built are "executed" by onnxruntime, on the ONNX file that
they were built from, in the memory of the fake driver.

`install` puts it in the place of `Runtime` in a real TensorRT package. Which file a plan was built from is found in the
JSON files below the folders of FAKE_ENGINES: {"plan_sha256": ..., "path": ..., "profiles": [{name: [min, opt, max]}]}.
FAKE_ENGINE_FAULT changes what engines do: `wrong` answers are off by one, `crash` ends the process, `refuse` fails a
run.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import signal
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
    driver.fake_cuda_is_known.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    driver.fake_cuda_is_device.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    driver.fake_cuda_record.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self._logger = logger
            assert driver.cuInit(0) == 0, "a true one would have ended the process"

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> EngineDouble | None:
            found = _find(hashlib.sha256(serialized_engine).hexdigest())
            if found is None:
                self._logger.log(trt.ILogger.ERROR, "Serialization assertion failed: magic tag does not match")
                return None
            return EngineDouble(trt, driver, self._logger, found)

    trt.Runtime = Runtime


def register(folder: Path, plan: bytes, onnx: Path, profiles: list[dict[str, list[list[int]]]]) -> None:
    """Register the file that a plan was built from."""
    digest = hashlib.sha256(plan).hexdigest()
    (folder / f"{digest}.json").write_text(json.dumps({"plan_sha256": digest, "path": str(onnx), "profiles": profiles}))


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


class EngineDouble:
    """The used part of trt.ICudaEngine."""

    device_memory_size_v2 = 4096

    def __init__(self, trt: Any, driver: Any, logger: Any, found: dict[str, Any]) -> None:
        self.trt, self.driver, self.logger = trt, driver, logger
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(found["path"], options, providers=["CPUExecutionProvider"])
        self.profiles = found["profiles"]
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

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.profiles[profile_index][name]]

    def create_execution_context(self, strategy: Any = None) -> ContextDouble:
        return ContextDouble(self, has_memory=strategy is None)


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
        self.profile = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert self.engine.driver.fake_cuda_is_device(memory, size)
        self.has_memory = True

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile, self.shapes = profile_index, {}
        return 0 <= profile_index < len(self.engine.profiles)

    def set_input_shape(self, name: str, shape: Any) -> bool:
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
        given = {name: self._memory(name, self.shapes[name]).copy() for name in self.engine.inputs}
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
            self._memory(name, result.shape)[...] = result + 1 if fault == "wrong" else result
        return True

    def _memory(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        dtype = np.dtype(_TYPES[self.engine._node(name).type][1])
        size = int(np.prod(shape)) * dtype.itemsize
        address = self.addresses[name]
        assert size == 0 or self.engine.driver.fake_cuda_is_known(address, size), f"{name}: {size} bytes are not there"
        return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)
