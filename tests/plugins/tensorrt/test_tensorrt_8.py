"""TensorRT 8, which TensorRT for RTX stands in for under its name: two execution contexts cannot share a profile."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.tensorrt.backend import make
from edge_server.plugins.tensorrt.library_adapter import load_library

onnx = pytest.importorskip("onnx")
helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT

GRAPHS = json.dumps({"optimization": {"cuda": {"graphs": True}}})


@pytest.fixture
def version_8(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    import tensorrt_rtx

    module = types.ModuleType("tensorrt")
    module.__dict__.update({**vars(tensorrt_rtx), "__version__": "8.6.1", "__name__": "tensorrt"})
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setenv("FAKE_ONE_CONTEXT_A_PROFILE", "1")
    return module


Write = Callable[..., ModelFile]


def doubles(write_onnx: Write, write_plan: Write, rows: str | int) -> ModelFile:
    """Y = X + X, of 1 to 8 rows, or of a fixed number."""
    node = helper.make_node("Add", ["X", "X"], ["Y"])
    profiles = [{"X": ([1, 4], [4, 4], [8, 4])}] if rows == "n" else []
    file = write_onnx([node], [("X", FLOAT, [rows, 4])], [("Y", FLOAT, [rows, 4])])
    return write_plan(file, *profiles)


def open_two(file: ModelFile, rows: str | int, config: str = "{}") -> list[Any]:
    dims, limit = ((4,), 8) if rows == "n" else ((rows, 4), 0)
    spec = ModelSpec(
        "plans", "tensorrt", "", limit, (InputSpec("X", DType.FP32, dims),), (OutputSpec("Y", DType.FP32, dims),),
        (InstanceGroup("plans", InstanceKind.GPU, 2, (0,)),), config_json=config,
    )  # fmt: skip
    backend = make("tensorrt")
    return [backend.open(OpenJob(spec, file, f"plans_{number}_0", 0)) for number in range(2)]


@pytest.mark.parametrize(("rows", "is_shared"), [("n", False), (3, True)])
def test_instances_of_a_dynamic_plan_have_an_engine_each(
    rows: str | int, is_shared: bool, gpu: Any, version_8: Any, write_onnx: Write, write_plan: Write
) -> None:
    before = gpu.live()
    sessions = open_two(doubles(write_onnx, write_plan, rows), rows)
    assert (sessions[0]._engine is sessions[1]._engine) == is_shared
    for session in sessions:
        given = np.arange(12, dtype="f4").reshape(3, 4)
        np.testing.assert_array_equal(session.run({"X": given}, ["Y"])["Y"], given * 2)
        session.close()
    assert gpu.live() == before


def test_a_dynamic_plan_is_served_without_the_graphs_that_need_a_second_context(
    gpu: Any, version_8: Any, write_onnx: Write, write_plan: Write, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = open_two(doubles(write_onnx, write_plan, "n"), "n", GRAPHS)
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2, "one for each instance"
    assert "no CUDA graph for the batch sizes 1, 8, which run without one: tensorrt 8.6.1 allows" in warnings[0]
    for session in sessions:
        np.testing.assert_array_equal(session.run({"X": np.ones((1, 4), "f4")}, ["Y"])["Y"], np.full((1, 4), 2, "f4"))
        session.close()


def test_a_plan_of_fixed_shapes_keeps_its_graphs(
    gpu: Any, version_8: Any, write_onnx: Write, write_plan: Write
) -> None:
    sessions = open_two(doubles(write_onnx, write_plan, 3), 3, GRAPHS)
    before = gpu.launches()
    for session in sessions:
        np.testing.assert_array_equal(session.run({"X": np.ones((3, 4), "f4")}, ["Y"])["Y"], np.full((3, 4), 2, "f4"))
        session.close()
    assert gpu.launches() - before == 2


@pytest.mark.parametrize(
    ("version", "has_feature", "is_built_here", "is_shared"),
    [
        ("8.5.2", False, True, False),
        ("8.6.1", True, True, True),
        ("8.6.1", True, False, False),
        ("10.3.0", True, False, True),
        ("11.4.0", False, False, True),
    ],
)
def test_only_engines_built_here_share_a_profile_below_version_10(
    version: str, has_feature: bool, is_built_here: bool, is_shared: bool, version_8: Any, write_onnx: Write,
    write_plan: Write,
) -> None:  # fmt: skip
    version_8.__version__ = version
    version_8.PreviewFeature = types.SimpleNamespace(**({"PROFILE_SHARING_0806": 1} if has_feature else {}))
    library = load_library("tensorrt")
    engine = library.deserialise(doubles(write_onnx, write_plan, "n").path.read_bytes())
    assert library.shares_profiles(engine, is_built_here=is_built_here) == is_shared
