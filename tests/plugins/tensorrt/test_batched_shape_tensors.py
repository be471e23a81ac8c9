"""Shape tensors of a model that batches, from config.pbtxt and requests to the engine and back.

The model is the one of Triton's own tests: Y is X resized to S, N is the shape of Y; the engine's S and N have three
values, the batch size first. The builder is TensorRT's own, the strict double executes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.batch import BatchPlan
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BadModelConfig, InvalidRequest, LoadError
from edge_server.plugins.tensorrt.builds.builder import make_requests, run_requests, runtime_inputs
from edge_server.plugins.tensorrt.builds.onnx_to_engine import BuildEnvironment, build_engine
from edge_server.plugins.tensorrt.builds.verify_engine import verify_engine
from edge_server.plugins.tensorrt.engine_options import engine_order
from edge_server.plugins.tensorrt.engine_order import Range
from edge_server.plugins.tensorrt.library_adapter import load_library
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

onnx = pytest.importorskip("onnx")
helper, TensorProto = onnx.helper, onnx.TensorProto

CONFIG = """
backend: "tensorrt_rtx"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ -1, -1 ] }
input { name: "S" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "N" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true }
"""
BOUNDS = {"min": "X:1x1x1,S:1x1x1", "opt": "X:8x4x4,S:8x8x8", "max": "X:8x16x16,S:8x32x32"}
TWO = {
    "min": "X:1x1x1,S:1x1x1,X:1x1x1,S:1x33x33",
    "opt": "X:8x4x4,S:8x8x8,X:8x4x4,S:8x40x40",
    "max": "X:8x16x16,S:8x32x32,X:8x16x16,S:8x64x64",
}

Make = Callable[..., ModelFile]


def parameters(bounds: dict[str, str]) -> str:
    return "".join(
        f'parameters {{ key: "trt_profile_{which}_shapes" value {{ string_value: "{text}" }} }}\n'
        for which, text in bounds.items()
    )


def resolved(folder: Path, config: str, *, auto_complete: bool = True) -> Any:
    (folder / "config.pbtxt").write_text(config)
    model = Scanner([folder.parent]).find(folder.name)
    assert model is not None
    return resolve(model, 1, ResolveOptions(gpu_count=1, auto_complete=auto_complete))


@pytest.fixture
def resizing(write_onnx: Callable[..., ModelFile]) -> ModelFile:
    nodes = [
        helper.make_node("Resize", ["X", "", "", "S"], ["Y"], mode="nearest"),
        helper.make_node("Shape", ["Y"], ["N"]),
    ]
    return write_onnx(
        nodes,
        [("X", TensorProto.FLOAT, ["n", "h", "w"]), ("S", TensorProto.INT64, [3])],
        [("Y", TensorProto.FLOAT, ["n", "a", "b"]), ("N", TensorProto.INT64, [3])],
    )


@pytest.fixture
def make_plan(gpu: Any, host: Any, resizing: ModelFile, tmp_path: Path) -> Make:
    """Return a function that builds the engine from the ONNX file and its configuration, and makes a plan of it."""

    def make(bounds: dict[str, str] = BOUNDS) -> ModelFile:
        found = resolved(resizing.model_dir, CONFIG + parameters(bounds))
        library = load_library("tensorrt_rtx")
        order = engine_order(found.spec, found.file, 0, library.name, library.version, {})
        folder = tmp_path / "plans" / "1"
        built = build_engine(
            order, BuildEnvironment(folder, (8, 6), tmp_path / "timing.cache"), library, lambda *_: None, lambda: False
        )
        plan = built.plan.rename(folder / "model.plan")
        host["N"] = []
        host["S"] = [tuple(list(one) for one in three(profile["S"])) for profile in order.profiles]
        shapes = [{"X": [list(one) for one in three(profile["X"])]} for profile in order.profiles]
        gpu.register(plan.read_bytes(), resizing.path, shapes)
        return ModelFile(plan, folder.parent, 1)

    return make


def three(one: Range) -> tuple[tuple[int, ...], ...]:
    return one.least, one.best, one.most


def pictures(count: int, first: float = 0) -> np.ndarray:
    return (np.arange(count * 16, dtype="f4") + first).reshape(count, 4, 4)


def request(count: int, size: tuple[int, int], first: float = 0) -> Request:
    images, values = pictures(count, first), np.array(size, np.int64)
    return Request("plans", {"X": Tensor("X", DType.FP32, images), "S": Tensor("S", DType.INT64, values)})


def served(file: ModelFile, config: str = CONFIG) -> tuple[Any, Any]:
    """Return the resolved specification and a session, as the server has them."""
    found = resolved(file.model_dir, config)
    return found.spec, load_backend("tensorrt_rtx").open(OpenJob(found.spec, found.file, "plans_0_0", 0))


def run(spec: Any, session: Any, requests: list[Request]) -> list[dict[str, np.ndarray]]:
    """Check, join, run and share out, as the server does."""
    check, plan = RequestCheck(spec), BatchPlan(spec)
    rows = [check.count_items(one) for one in requests]
    assert len({check.merge_key(one) for one in requests}) == 1
    outputs = session.run(plan.gather(requests), plan.output_names(requests))
    return [{item.name: item.array for item in answer} for answer in plan.scatter(outputs, requests, rows)]


@pytest.mark.parametrize("is_integrated", [False, True], ids=["a GPU of its own memory", "a board"])
def test_requests_with_equal_shape_values_run_as_one_batch_and_get_their_own_items(
    is_integrated: bool, gpu: Any, make_plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_integrated:
        monkeypatch.setenv("FAKE_CUDA_INTEGRATED", "1")
    before = gpu.live()
    spec, session = served(make_plan())
    for counts, size in (([1], (8, 8)), ([2, 1, 4], (4, 12)), ([8], (32, 32)), ([3, 3], (4, 4))):
        requests = [request(count, size, first=100 * place) for place, count in enumerate(counts)]
        for asked, count, answer in zip(requests, counts, run(spec, session, requests), strict=True):
            images = asked.inputs["X"].array
            np.testing.assert_array_equal(answer["Y"], images.repeat(size[0] // 4, 1).repeat(size[1] // 4, 2))
            assert answer["N"].tolist() == [list(size)] * count
    session.close()
    assert gpu.live() == before


def test_the_batch_size_is_read_from_a_tensor_that_has_one(make_plan: Make) -> None:
    spec, session = served(make_plan())
    asked = request(5, (8, 8))
    asked = Request("plans", dict(reversed(asked.inputs.items())))
    (answer,) = run(spec, session, [asked])
    assert answer["Y"].shape == (5, 8, 8)
    session.close()


@pytest.mark.parametrize("size", [(0, 8), (33, 8), (8, -1), (2**40, 8)])
def test_shape_values_outside_the_profile_are_refused_with_values_and_bounds(
    size: tuple[int, int], gpu: Any, make_plan: Make
) -> None:
    before = gpu.live()
    spec, session = served(make_plan())
    words = rf"input 'S' of values \[2, {size[0]}, {size[1]}\] \(it takes \[1, 1, 1\] to \[8, 32, 32\]\)"
    with pytest.raises(InvalidRequest, match=words):
        run(spec, session, [request(2, size)])
    assert run(spec, session, [request(2, (8, 8))])[0]["N"].tolist() == [[8, 8]] * 2
    session.close()
    assert gpu.live() == before


def test_shape_values_select_the_profile(make_plan: Make) -> None:
    spec, session = served(make_plan(TWO))
    for size in ((8, 8), (40, 64), (32, 4), (36, 36)):
        (answer,) = run(spec, session, [request(3, size)])
        assert answer["Y"].shape == (3, *size)
    said = r"it takes \[1, 1, 1\] to \[8, 32, 32\]; or \[1, 33, 33\] to \[8, 64, 64\]"
    with pytest.raises(InvalidRequest, match=said):
        run(spec, session, [request(3, (8, 40))])
    session.close()


def test_a_plan_completes_its_configuration_with_shape_values(make_plan: Make) -> None:
    """Expected by Triton's own test of auto-complete for the same engine, no_config_shape_tensor."""
    spec, session = served(make_plan(), 'backend: "tensorrt_rtx"')
    assert spec.max_batch_size == 8
    assert [(item.name, item.dims, item.is_shape_tensor) for item in (*spec.inputs, *spec.outputs)] == [
        ("X", (-1, -1), False),
        ("S", (2,), True),
        ("Y", (-1, -1), False),
        ("N", (2,), True),
    ]
    assert spec.dynamic_batching is not None
    assert run(spec, session, [request(2, (8, 4)), request(1, (8, 4))])[1]["N"].tolist() == [[8, 4]]
    session.close()


def test_is_shape_tensor_is_completed_too(make_plan: Make) -> None:
    spec, session = served(make_plan(), CONFIG.replace("is_shape_tensor: true", ""))
    assert [item.is_shape_tensor for item in (*spec.inputs, *spec.outputs)] == [False, True, False, True]
    session.close()


def test_without_auto_complete_a_missing_is_shape_tensor_is_refused(make_plan: Make) -> None:
    file = make_plan()
    expected = "input 'S' is_shape_tensor: expected true, because it is one in the model"
    with pytest.raises(BadModelConfig, match=expected):
        resolved(file.model_dir, CONFIG.replace("is_shape_tensor: true", "", 1), auto_complete=False)


def test_is_shape_tensor_on_another_tensor_is_refused_at_load(gpu: Any, host: Any, make_plan: Make) -> None:
    file = make_plan()
    del host["N"]
    before = gpu.live()
    with pytest.raises(LoadError, match="output 'N' is no shape tensor, the configuration says is_shape_tensor: true"):
        served(file)
    assert gpu.live() == before


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("dims: [ 2 ]", "dims: [ 3 ]", r"input 'S' dims: expected \[2\], .*beside the batch size, given \[3\]"),
        ("dims: [ 2 ]", "dims: [ -1 ]", r"input 'S' dims: expected \[2\], .*given \[-1\]"),
        ("dims: [ 2 ]", "dims: [ 1, 2 ]", r"input 'S' dims: expected \[2\], .*given \[1, 2\]"),
    ],
)
def test_dims_other_than_those_of_the_shape_values_are_refused(
    wrong: str, right: str, message: str, make_plan: Make
) -> None:
    file = make_plan()
    with pytest.raises(BadModelConfig, match=message):
        resolved(file.model_dir, CONFIG.replace(wrong, right))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"S:8x32x32": "S:8x32"}, "expected min <= opt <= max"),
        (
            {"S:1x1x1": "S:1x1", "S:8x8x8": "S:8x8", "S:8x32x32": "S:32x32"},
            r"expected 2 value\(s\) after the batch size, given \[1, 1\] to \[32, 32\]",
        ),
        (
            {"S:8x8x8": "S:4x8x8", "S:8x32x32": "S:4x32x32"},
            r"expected a first value, the batch size, of 1 to 8, given 1 to 4",
        ),
        (
            {"S:1x1x1": "S:2x1x1"},
            r"expected a first value, the batch size, of 1 to 8, given 2 to 8",
        ),
    ],
)
def test_bounds_without_the_batch_size_are_refused(
    bounds: dict[str, str], message: str, gpu: Any, resizing: ModelFile
) -> None:
    text = parameters(BOUNDS)
    for old, new in bounds.items():
        text = text.replace(old, new)
    found = resolved(resizing.model_dir, CONFIG + text)
    with pytest.raises(BadModelConfig, match=f"profile of input 'S': {message}"):
        engine_order(found.spec, found.file, 0, "tensorrt_rtx", "1.7", {})


def test_an_engine_is_verified_with_its_optimal_shape_values(gpu: Any, resizing: ModelFile, make_plan: Make) -> None:
    """The samples that it must answer as the runtime did that serves meanwhile: here onnxruntime."""
    import onnxruntime

    plan = make_plan()
    found = resolved(resizing.model_dir, CONFIG + parameters(BOUNDS))
    library = load_library("tensorrt_rtx")
    order = engine_order(found.spec, found.file, 0, library.name, library.version, {})
    runtime = onnxruntime.InferenceSession(str(resizing.path), providers=["CPUExecutionProvider"])
    check, batches = RequestCheck(found.spec), BatchPlan(found.spec)

    def submit(asked: Request, take: Callable[[Response], None]) -> None:
        rows = check.count_items(asked)
        made = dict(zip(("Y", "N"), runtime.run(["Y", "N"], batches.gather_one(asked)), strict=True))
        take(Response("made", 1, "", batches.scatter_one(made, asked, rows)))

    requests = make_requests(found.spec, order, resizing.model_dir)
    samples = [runtime_inputs(found.spec, asked) for asked in requests]
    expected = run_requests(requests, found.spec, submit)
    assert samples[-1]["S"].tolist() == [8, 8, 8]
    assert expected[-1]["N"].tolist() == [8, 8, 8]
    assert verify_engine(order, plan.path, samples, expected, library, has_rows=True) <= order.tolerance
