"""Shape tensors: built by TensorRT for RTX from a configuration that declares them, run on a strict double.

The double enforces TensorRT's rules for them: their values are in host memory, a profile has a range of values instead
of a range of shapes, and tensors that depend on them have no shape before the values are set.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, InvalidRequest, LoadError
from edge_server.plugins.tensorrt.builds.onnx_to_engine import BuildEnvironment, build_engine
from edge_server.plugins.tensorrt.engine_options import engine_order
from edge_server.plugins.tensorrt.engine_order import Range
from edge_server.plugins.tensorrt.library_adapter import load_library
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

onnx = pytest.importorskip("onnx")
helper, TensorProto = onnx.helper, onnx.TensorProto
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64

VALUES = ([1, 1], [8, 4], [32, 32])
"""The least, best and largest values of S below."""

X, S = InputSpec("X", DType.FP32, (-1, 4)), InputSpec("S", DType.INT64, (2,), is_shape_tensor=True)
Y, N = OutputSpec("Y", DType.FP32, (-1, -1)), OutputSpec("N", DType.INT64, (2,), is_shape_tensor=True)

Open = Callable[..., Any]
Plan = Callable[..., ModelFile]


@pytest.fixture
def reshaped(write_onnx: Callable[..., ModelFile]) -> ModelFile:
    """Y = X in the shape that S names."""
    node = helper.make_node("Reshape", ["X", "S"], ["Y"])
    return write_onnx([node], [("X", FLOAT, ["n", 4]), ("S", INT64, [2])], [("Y", FLOAT, ["a", "b"])])


@pytest.fixture
def reshaping(
    host: dict[str, list[Any]], reshaped: ModelFile, write_onnx: Callable[..., ModelFile], write_plan: Plan
) -> ModelFile:
    """A plan that the double runs as Y = X in the shape that S names."""
    host["S"] = [VALUES]
    variant_for = write_onnx(
        [helper.make_node("Relu", ["X"], ["Y"])], [("X", FLOAT, ["n", 4])], [("Y", FLOAT, ["n", 4])], model="stand_in"
    )
    return write_plan(variant_for, {"X": ([1, 4], [8, 4], [8, 4])}, runs=reshaped)


@pytest.fixture
def measuring(host: dict[str, list[Any]], write_onnx: Callable[..., ModelFile], write_plan: Plan) -> ModelFile:
    """A plan that the double runs as Y = max(X, 0), N = the shape of X."""
    host["N"] = []
    ends = ([("X", FLOAT, ["n", 4])], [("Y", FLOAT, ["n", 4])])
    relu = helper.make_node("Relu", ["X"], ["Y"])
    both = write_onnx(
        [relu, helper.make_node("Shape", ["X"], ["N"])], ends[0], [*ends[1], ("N", INT64, [2])], model="both"
    )
    return write_plan(write_onnx([relu], *ends), {"X": ([1, 4], [8, 4], [8, 4])}, runs=both)


def rows(count: int) -> np.ndarray:
    return np.arange(count * 4, dtype="f4").reshape(count, 4)


def asked(*sizes: int, dtype: str = "i8") -> np.ndarray:
    return np.array(sizes, dtype)


@pytest.mark.parametrize("is_integrated", [False, True], ids=["a GPU of its own memory", "a board"])
def test_shape_values_set_the_output_shape_of_each_request(
    is_integrated: bool, gpu: Any, reshaping: ModelFile, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_integrated:
        monkeypatch.setenv("FAKE_CUDA_INTEGRATED", "1")
    before = gpu.live()
    session = open_session(reshaping, inputs=(X, S), outputs=(Y,))
    # The same shape of X with other values, and back: nothing of the previous request remains.
    for count, shape in ((8, (8, 4)), (8, (4, 8)), (8, (32, 1)), (1, (2, 2)), (8, (4, 8))):
        answer = session.run({"X": rows(count), "S": asked(*shape)}, ["Y"])["Y"]
        np.testing.assert_array_equal(answer, rows(count).reshape(shape))
    session.close()
    assert gpu.live() == before


def test_shape_values_of_a_narrower_type_are_widened(reshaping: ModelFile, open_session: Open) -> None:
    narrow = InputSpec("S", DType.INT32, (2,), is_shape_tensor=True)
    session = open_session(reshaping, inputs=(X, narrow), outputs=(Y,))
    answer = session.run({"X": rows(4), "S": asked(2, 8, dtype="i4")}, ["Y"])["Y"]
    np.testing.assert_array_equal(answer, rows(4).reshape(2, 8))
    session.close()


@pytest.mark.parametrize("values", [(0, 4), (33, 1), (-1, 4), (2**62, 2)])
def test_shape_values_outside_the_profile_fail_only_their_request(
    values: tuple[int, int], gpu: Any, reshaping: ModelFile, open_session: Open
) -> None:
    before = gpu.live()
    session = open_session(reshaping, inputs=(X, S), outputs=(Y,))
    said = (
        rf"no profile of the engine takes input 'S' of values \[{values[0]}, {values[1]}\] \(it takes \[1, 1\] to \[32"
    )
    with pytest.raises(InvalidRequest, match=f"model 'plans': tensorrt_rtx: {said}"):
        session.run({"X": rows(8), "S": asked(*values)}, ["Y"])
    np.testing.assert_array_equal(session.run({"X": rows(8), "S": asked(4, 8)}, ["Y"])["Y"], rows(8).reshape(4, 8))
    session.close()
    assert gpu.live() == before


def test_bounds_that_an_engine_does_not_report_are_left_to_tensorrt(
    host: dict[str, list[Any]], reshaping: ModelFile, open_session: Open
) -> None:
    host.silent = True  # type: ignore[attr-defined]
    session = open_session(reshaping, inputs=(X, S), outputs=(Y,))
    with pytest.raises(BackendError, match=r"model 'plans': tensorrt_rtx: .*S .* is out of its profile"):
        session.run({"X": rows(8), "S": asked(33, 1)}, ["Y"])
    np.testing.assert_array_equal(session.run({"X": rows(8), "S": asked(4, 8)}, ["Y"])["Y"], rows(8).reshape(4, 8))
    session.close()


def test_shape_values_that_do_not_match_the_data_fail_their_request(reshaping: ModelFile, open_session: Open) -> None:
    session = open_session(reshaping, inputs=(X, S), outputs=(Y,))
    with pytest.raises(BackendError, match="model 'plans': tensorrt_rtx: "):
        session.run({"X": rows(8), "S": asked(5, 5)}, ["Y"])
    np.testing.assert_array_equal(session.run({"X": rows(8), "S": asked(2, 16)}, ["Y"])["Y"], rows(8).reshape(2, 16))
    session.close()


@pytest.mark.parametrize("is_integrated", [False, True], ids=["a GPU of its own memory", "a board"])
def test_a_shape_output_is_read_from_host_memory(
    is_integrated: bool, gpu: Any, measuring: ModelFile, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_integrated:
        monkeypatch.setenv("FAKE_CUDA_INTEGRATED", "1")
    before = gpu.live()
    session = open_session(measuring, inputs=(X,), outputs=(Y, N))
    for count in (1, 8, 3):
        answer = session.run({"X": -rows(count)}, ["Y", "N"])
        np.testing.assert_array_equal(answer["N"], [count, 4])
        np.testing.assert_array_equal(answer["Y"], np.zeros((count, 4)))
        assert answer["N"].dtype == np.int64
    assert list(session.run({"X": rows(2)}, ["N"])) == ["N"]
    # What was answered is the caller's own: later runs do not change it.
    kept = session.run({"X": rows(5)}, ["N"])["N"]
    session.run({"X": rows(7)}, ["N"])
    np.testing.assert_array_equal(kept, [5, 4])
    session.close()
    assert gpu.live() == before


def test_an_output_is_narrowed_to_its_configured_type(measuring: ModelFile, open_session: Open) -> None:
    narrow = OutputSpec("N", DType.INT32, (2,), is_shape_tensor=True)
    session = open_session(measuring, inputs=(X,), outputs=(Y, narrow))
    answer = session.run({"X": rows(3)}, ["N"])["N"]
    assert answer.dtype == np.int32
    np.testing.assert_array_equal(answer, [3, 4])
    session.close()


def test_runs_that_depend_on_shape_values_use_no_cuda_graph(gpu: Any, reshaping: ModelFile, open_session: Open) -> None:
    config = json.dumps({"optimization": {"cuda": {"graphs": True, "graph_spec": []}}})
    before = gpu.launches()
    session = open_session(reshaping, inputs=(X, S), outputs=(Y,), config_json=config)
    np.testing.assert_array_equal(session.run({"X": rows(8), "S": asked(4, 8)}, ["Y"])["Y"], rows(8).reshape(4, 8))
    np.testing.assert_array_equal(session.run({"X": rows(8), "S": asked(8, 4)}, ["Y"])["Y"], rows(8))
    assert gpu.launches() == before
    session.close()


def test_a_plan_describes_its_shape_tensors(reshaping: ModelFile, host: dict[str, list[Any]]) -> None:
    signature = load_backend("tensorrt_rtx").inspect(reshaping, {})
    assert signature is not None
    assert [(item.name, item.dims, item.is_shape_tensor) for item in signature.inputs] == [
        ("X", (-1, 4), False),
        ("S", (2,), True),
    ]


CONFIG = """
backend: "tensorrt_rtx"
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }
input { name: "S" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, -1 ] }
"""
BOUNDS = """
parameters { key: "trt_profile_min_shapes" value { string_value: "X:1x4,S:1x1" } }
parameters { key: "trt_profile_opt_shapes" value { string_value: "X:8x4,S:8x4" } }
parameters { key: "trt_profile_max_shapes" value { string_value: "X:8x4,S:32x32" } }
"""


def resolved(file: ModelFile, config: str) -> Any:
    (file.model_dir / "config.pbtxt").write_text(config)
    model = Scanner([file.model_dir.parent]).find(file.model_dir.name)
    assert model is not None
    return resolve(model, 1, ResolveOptions(gpu_count=1))


def test_an_engine_is_built_and_served_for_a_model_with_a_shape_tensor(
    gpu: Any, host: dict[str, list[Any]], reshaped: ModelFile, tmp_path: Path
) -> None:
    """From config.pbtxt and the ONNX file on; the builder is TensorRT's own."""
    found = resolved(reshaped, CONFIG + BOUNDS)
    assert [item.is_shape_tensor for item in found.spec.inputs] == [False, True]
    library = load_library("tensorrt_rtx")
    order = engine_order(found.spec, found.file, 0, library.name, library.version, {})
    assert order.profiles == ({"X": Range((1, 4), (8, 4), (8, 4)), "S": Range((1, 1), (8, 4), (32, 32))},)
    site = BuildEnvironment(tmp_path, (8, 6), tmp_path / "timing.cache")
    built = build_engine(order, site, library, lambda phase, percent: None, lambda: False)
    host["S"] = [VALUES]
    gpu.register(built.plan.read_bytes(), reshaped.path, [{"X": [[1, 4], [8, 4], [8, 4]]}])
    file = ModelFile(built.plan, tmp_path, 1)
    session = load_backend("tensorrt_rtx").open(OpenJob(found.spec, file, "made_0_0", 0))
    answer = session.run({"X": rows(8), "S": asked(2, 16)}, ["Y"])["Y"]  # type: ignore[union-attr]
    np.testing.assert_array_equal(answer, rows(8).reshape(2, 16))
    session.close()


def test_a_shape_tensor_without_bounds_is_refused_with_the_missing_ones(gpu: Any, reshaped: ModelFile) -> None:
    found = resolved(reshaped, CONFIG.replace("-1, 4 ]", "8, 4 ]"))
    words = r"input 'S' has values that are shapes \(\[2\]\): TensorRT must be told their bounds, by .*trt_profile_min"
    with pytest.raises(LoadError, match=words):
        engine_order(found.spec, found.file, 0, "tensorrt_rtx", "1.7", {})
