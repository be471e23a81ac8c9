"""Fixtures for TensorRT: engines built from generated ONNX files, and sessions on them with the fake GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.plugins.tensorrt.session import TensorRTSession


@pytest.fixture
def gpu(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake GPU, in this process, for one test."""
    fake_gpu.install(monkeypatch)
    return fake_gpu


class HostTensors(dict[str, list[tuple[list[int], list[int], list[int]]]]):
    """Shape tensors -> the minimum, optimum and maximum values of each profile; [] for outputs. `silent`:
    the engine does not report those bounds, it only enforces them."""

    silent = False


@pytest.fixture
def host(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> HostTensors:
    """Have the double treat the tensors named in here as TensorRT does shape tensors."""
    names = HostTensors()
    double = gpu.double

    class Engine(double.EngineDouble):  # type: ignore[misc]
        def get_tensor_location(self, name: str) -> Any:
            return self.trt.TensorLocation.HOST if name in names else self.trt.TensorLocation.DEVICE

        def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
            assert name not in names, "a shape tensor has values in a profile, no shapes"
            return super().get_tensor_profile_shape(name, profile_index)  # type: ignore[no-any-return]

        def get_tensor_profile_values(self, name: int, profile_index: str) -> list[list[int]]:
            # NVIDIA's bindings have exchanged these two names: the number comes first.
            if not isinstance(name, int):
                raise TypeError("incompatible function arguments: the number comes first")
            return [] if names.silent else [list(one) for one in names[profile_index][name]]

        def create_execution_context(self, strategy: Any = None) -> Any:
            return Context(self, has_memory=strategy is None)

    class Context(double.ContextDouble):  # type: ignore[misc]
        def set_input_shape(self, name: str, shape: Any) -> bool:
            if name in names:
                return tuple(shape) == self.engine.get_tensor_shape(name)
            return bool(super().set_input_shape(name, shape))

        def set_tensor_address(self, name: str, memory: int) -> bool:
            if name in names:
                assert not self.engine.driver.fake_cuda_is_device(ctypes.c_void_p(memory), 1), f"{name} is on the GPU"
            return bool(super().set_tensor_address(name, memory))

        def infer_shapes(self) -> list[str]:
            inputs = self.engine.inputs
            return [name for name in inputs if name not in (self.addresses if name in names else self.shapes)]

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            declared = self.engine.get_tensor_shape(name)
            if name in names or min(declared, default=0) >= 0:
                return tuple(declared)
            if name in self.engine.inputs or self.infer_shapes():
                return tuple(super().get_tensor_shape(name))
            given = {key: np.zeros(shape, "f4") for key, shape in self.shapes.items()}
            try:
                given |= {key: self._values(key) for key in self.engine.inputs if key in names}
                return tuple(self.engine.session.run([name], given)[0].shape)
            except Exception:  # noqa: BLE001 - invalid values: TensorRT reports them when it runs
                return tuple(declared)

        def _values(self, name: str) -> np.ndarray:
            shape = self.engine.get_tensor_shape(name)
            least, _, most = names[name][self.profile]
            values = self._memory(name, shape).copy()
            if not all(low <= value <= high for low, value, high in zip(least, values, most, strict=True)):
                self.engine.logger.log(self.engine.trt.ILogger.ERROR, f"{name} {values} is out of its profile")
                raise ValueError(name)
            return values  # type: ignore[no-any-return]

        def _run(self) -> bool:
            for name in names.keys() & self.engine.inputs.keys():
                try:
                    self._values(name)
                except ValueError:
                    return False
                self.shapes[name] = self.engine.get_tensor_shape(name)
            return bool(super()._run())

    monkeypatch.setattr(double, "EngineDouble", Engine)
    return names


@pytest.fixture
def write_plan(gpu: Any, tmp_path: Path) -> Callable[..., ModelFile]:
    """Return a function that builds an engine with the given profiles ({input: (min, opt, max)}) from an ONNX file."""

    def write(
        onnx: ModelFile,
        *profiles: dict[str, tuple[list[int], list[int], list[int]]],
        runs: ModelFile | None = None,
        formats: dict[str, str] | None = None,
    ) -> ModelFile:
        """`runs` is what the double executes in place of what was built, `formats` those of inputs and outputs."""
        import tensorrt_rtx as trt

        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        network = builder.create_network(0)
        assert trt.OnnxParser(network, logger).parse_from_file(str(onnx.path))
        config = builder.create_builder_config()
        for shapes in profiles:
            profile = builder.create_optimization_profile()
            for name, three in shapes.items():
                profile.set_shape(name, *three)
            config.add_optimization_profile(profile)
        plan = bytes(memoryview(builder.build_serialized_network(network, config)))
        path = tmp_path / "plans" / "1" / "model.plan"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(plan)
        ranges = [{name: list(three) for name, three in shapes.items()} for shapes in profiles]
        gpu.register(plan, (runs or onnx).path, ranges, formats)
        return ModelFile(path, path.parent.parent, 1)

    return write


@pytest.fixture
def client_memory() -> Iterator[Callable[[int], Any]]:
    """Allocates GPU memory as a client would: `buffer` is it, `handle` what it registers it with."""
    path = Path(__file__).parents[2] / "memory" / "fake_cuda" / "__init__.py"
    spec = importlib.util.spec_from_file_location("fake_cuda_of_clients", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: list[Any] = []

    def allocate(byte_size: int) -> Any:
        made.append(module.Allocation(byte_size))
        return made[-1]

    yield allocate
    for one in made:
        one.free()


@pytest.fixture
def open_session(job: Callable[..., OpenJob]) -> Callable[..., TensorRTSession]:
    def open_it(file: ModelFile, **more: Any) -> TensorRTSession:
        return load_backend("tensorrt_rtx").open(job(file, backend="tensorrt_rtx", device_id=0, **more))  # type: ignore[return-value]

    return open_it


@pytest.fixture
def double_plan(write_onnx: Callable[..., ModelFile], write_plan: Callable[..., ModelFile]) -> ModelFile:
    """Y = X + X, FP32 [1..8, 4]."""
    import onnx

    x, y = ((name, onnx.TensorProto.FLOAT, ["n", 4]) for name in "XY")
    file = write_onnx([onnx.helper.make_node("Add", ["X", "X"], ["Y"])], [x], [y])
    return write_plan(file, {"X": ([1, 4], [4, 4], [8, 4])})
