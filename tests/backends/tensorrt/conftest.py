"""Engines built in this process from ONNX files made to order, and sessions on them with the fake GPU behind."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.backends.tensorrt.session import TensorRTSession


@pytest.fixture
def gpu(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake GPU, in this process, for one test."""
    fake_gpu.install(monkeypatch)
    return fake_gpu


@pytest.fixture
def write_plan(gpu: Any, tmp_path: Path) -> Callable[..., ModelFile]:
    """Return a function that builds an engine with the given profiles ({input: (min, opt, max)}) from an ONNX file."""

    def write(
        onnx: ModelFile, *profiles: dict[str, tuple[list[int], list[int], list[int]]], runs: ModelFile | None = None
    ) -> ModelFile:
        """`runs` is what the double executes in place of what was built."""
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
        gpu.register(
            plan, (runs or onnx).path, [{name: list(three) for name, three in shapes.items()} for shapes in profiles]
        )
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
