"""Shape tensors of a batching model on a machine with an NVIDIA GPU and TensorRT. Skipped on other machines.

The model is the one of Triton's own tests: Y is X resized to S, and N, an output of shapes, is the shape of Y.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.backends.cuda import cuda_driver
from edge_server.core.batch import BatchPlan
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError
from edge_server.plugins.tensorrt.library_adapter import load_library
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

SMALL = ([1, 1, 1], [8, 8, 8], [8, 32, 32])
LARGE = ([1, 33, 33], [8, 40, 40], [8, 64, 64])


def network_of(trt: Any, network: Any) -> None:
    images = network.add_input("X", trt.DataType.FLOAT, (-1, -1, -1))
    layer = network.add_resize(images)
    layer.set_input(
        1, network.add_input("S", trt.DataType.INT64 if hasattr(trt.DataType, "INT64") else trt.int32, (3,))
    )
    shape = network.add_shape(layer.get_output(0)).get_output(0)
    layer.get_output(0).name, shape.name = "Y", "N"
    network.mark_output(layer.get_output(0))
    network.mark_output_for_shapes(shape)


def build_plan(name: str, *bounds: tuple[list[int], list[int], list[int]]) -> Any:
    """Return the memory of an engine for this GPU, with a profile for each bounds of S."""
    library = load_library(name)
    trt = library.trt
    with library.logger.captured() as errors:
        builder = trt.Builder(library.logger)
        network = library.make_network(builder)
        network_of(trt, network)
        config = builder.create_builder_config()
        if name == "tensorrt_rtx" and cuda_driver.unavailable_reason() == "":
            library.set_target(config, cuda_driver.devices()[0].capability)
        for values in bounds:
            profile = builder.create_optimization_profile()
            profile.set_shape("X", (1, 1, 1), (8, 4, 4), (8, 16, 16))
            profile.set_shape_input("S", *values)
            config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        assert plan is not None, errors.text()
    return plan


@pytest.fixture
def serve(library: str, tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Return a function that resolves the model without configured tensors, and opens it."""
    opened: list[Any] = []

    def make(*bounds: tuple[list[int], list[int], list[int]]) -> tuple[Any, Any]:
        folder = tmp_path / "resized"
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.plan").write_bytes(memoryview(build_plan(library, *bounds)))
        (folder / "config.pbtxt").write_text(f'backend: "{library}"')
        model = Scanner([tmp_path]).find("resized")
        assert model is not None
        found = resolve(model, 1, ResolveOptions(gpu_count=1))
        file = ModelFile(folder / "1" / "model.plan", folder, 1)
        opened.append(load_backend(library).open(OpenJob(found.spec, file, "resized_0_0", 0)))
        return found.spec, opened[-1]

    yield make
    for session in opened:
        session.close()


def ask(spec: Any, session: Any, counts: list[int], size: tuple[int, int]) -> list[dict[str, np.ndarray]]:
    """Send requests of so many rows as one batch; check that each answer is the request's own."""
    declared = spec.input("S")
    requests = []
    for place, count in enumerate(counts):
        images = np.random.default_rng(place).random((count, 4, 4), np.float32)
        values = np.array(size, declared.dtype.numpy)
        requests.append(
            Request("resized", {"X": Tensor("X", DType.FP32, images), "S": Tensor("S", declared.dtype, values)})
        )
    check, plan = RequestCheck(spec), BatchPlan(spec)
    assert [check.count_items(one) for one in requests] == counts
    outputs = session.run(plan.gather(requests), plan.output_names(requests))
    answers = [{item.name: item.array for item in answer} for answer in plan.scatter(outputs, requests, counts)]
    for asked, answer in zip(requests, answers, strict=True):
        images = asked.inputs["X"].array
        np.testing.assert_array_equal(answer["Y"], images.repeat(size[0] // 4, 1).repeat(size[1] // 4, 2))
        assert answer["N"].tolist() == [list(size)] * len(images)
    return answers


def test_an_engine_completes_the_configuration_and_runs_batches(serve: Callable[..., tuple[Any, Any]]) -> None:
    spec, session = serve(SMALL)
    assert spec.max_batch_size > 1
    assert [
        (item.name, item.dims, item.is_shape_tensor) for item in sorted(spec.inputs, key=lambda item: item.name)
    ] == [
        ("S", (2,), True),
        ("X", (-1, -1), False),
    ]
    for counts, size in (([1], (8, 8)), ([2, 1], (4, 12)), ([4], (32, 32)), ([1, 1, 1], (8, 8))):
        ask(spec, session, counts, size)


def test_shape_values_select_the_profile_and_values_outside_are_refused(serve: Callable[..., tuple[Any, Any]]) -> None:
    spec, session = serve(SMALL, LARGE)
    for size in ((8, 8), (40, 64), (32, 4), (36, 36)):
        ask(spec, session, [2, 1], size)
    with pytest.raises(BackendError, match=r"input 'S' of values \[1, 8, 40\] \(it takes \[1, 1, 1\] to \[8, 32, 32\]"):
        ask(spec, session, [1], (8, 40))
    ask(spec, session, [1], (8, 8))
