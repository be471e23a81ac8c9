"""Deep learning accelerators, on a double that has as many cores as FAKE_DLA_CORES says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import LoadError
from edge_server.plugins.tensorrt.builds.build_process import Bounds, BuildControl, build_job, run_child
from edge_server.plugins.tensorrt.builds.onnx_to_engine import BuildEnvironment, BuildFault, build_engine
from edge_server.plugins.tensorrt.engine_order import EngineOrder, Range
from edge_server.plugins.tensorrt.library_adapter import load_library

onnx = pytest.importorskip("onnx")
helper, TensorProto = onnx.helper, onnx.TensorProto

IN, OUT = (InputSpec("X", DType.FP32, (4,)),), (OutputSpec("Y", DType.FP32, (4,)),)
RANGE = {"X": ([1, 4], [4, 4], [8, 4])}


def graph(write_onnx: Callable[..., ModelFile], element: int = TensorProto.FLOAT) -> ModelFile:
    """Y = softmax(relu(X)): a DLA has the activation, and no softmax over the rows."""
    nodes = [helper.make_node("Relu", ["X"], ["R"]), helper.make_node("Softmax", ["R"], ["Y"], axis=-1)]
    return write_onnx(nodes, [("X", element, ["n", 4])], [("Y", element, ["n", 4])])


@pytest.fixture
def plan(write_onnx: Callable[..., ModelFile], write_plan: Callable[..., ModelFile]) -> ModelFile:
    return write_plan(graph(write_onnx), RANGE)


def open_on(plan: ModelFile, parameters: dict[str, str], *cores: int, instance: str = "plans_0_0") -> Any:
    """Open an instance of a model whose groups, named plans, plans_1 and so on, name these DLA cores."""
    names = ["plans", *(f"plans_{number}" for number in range(1, len(cores)))]
    groups = [
        {"name": name, "secondary_devices": [{"kind": "KIND_NVDLA", "device_id": str(core)}]}
        for name, core in zip(names, cores, strict=False)
    ]
    spec = ModelSpec(
        "plans", "tensorrt_rtx", "", 8, IN, OUT,
        tuple(InstanceGroup(name, InstanceKind.GPU, 1, (0,)) for name in names),
        parameters=parameters, config_json=json.dumps({"instance_group": groups}),
    )  # fmt: skip
    return load_backend("tensorrt_rtx").open(OpenJob(spec, plan, instance, 0))


def core_of(session: Any) -> int:
    return int(session._engine.dla_core)


def test_an_engine_runs_on_the_dla_core_that_its_model_or_its_instance_group_names(
    plan: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DLA_CORES", "2")
    sessions = [
        open_on(plan, {}),
        open_on(plan, {"trt_dla_core": "1"}),
        open_on(plan, {"trt_dla_enable": "true"}),
        open_on(plan, {}, 0, 1),
        open_on(plan, {}, 0, 1, instance="plans_1_0_0"),
    ]
    assert [core_of(session) for session in sessions] == [-1, 1, 0, 0, 1]
    assert [session.info.options.get("dla_core") for session in sessions] == [None, "1", "0", "0", "1"]
    # Instances on one core share the engine; another core has another, made by another runtime.
    assert sessions[1]._engine is sessions[4]._engine
    assert sessions[2]._engine is sessions[3]._engine
    for session in sessions:
        given = np.ones((2, 4), "f4")
        np.testing.assert_allclose(session.run({"X": given}, ["Y"])["Y"], np.full((2, 4), 0.25), rtol=1e-6)
        session.close()


@pytest.mark.parametrize(
    ("cores", "reason"),
    [
        ("0", r"there is no DLA core 2 .*finds none here: Orin Nano, .*JetPack 7\.2 has no DLA compiler, .*nvdla"),
        ("2", r"there is no DLA core 2 .*the cores here are 0 to 1"),
    ],
)
def test_a_dla_core_that_is_not_there_is_refused(
    cores: str, reason: str, gpu: Any, plan: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DLA_CORES", cores)
    before = gpu.live()
    with pytest.raises(LoadError, match=reason):
        open_on(plan, {"trt_dla_core": "2"})
    assert gpu.live() == before


def order(file: ModelFile, core: str = "1") -> EngineOrder:
    profile = {"X": Range((1, 4), (4, 4), (8, 4))}
    options = {"trt_dla_enable": "1", "trt_dla_core": core}
    return EngineOrder("made", 1, file.path, "tensorrt_rtx", "1.7", 0, "best", (profile,), options)


@pytest.mark.parametrize(("element", "count"), [(TensorProto.FLOAT16, 1), (TensorProto.FLOAT, 0)])
def test_a_build_counts_the_layers_that_the_dla_can_run(
    element: int, count: int, gpu: Any, write_onnx: Callable[..., ModelFile], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FAKE_DLA_CORES", "2")
    environment = BuildEnvironment(tmp_path, (8, 6), tmp_path / "timing")
    library = load_library("tensorrt_rtx")
    built = build_engine(
        order(graph(write_onnx, element)), environment, library, lambda *_: None, is_cancelled=lambda: False
    )
    assert built.dla_layers is not None
    found, layers = built.dla_layers
    assert (found, layers >= 2) == (count, True)


def test_a_build_for_a_dla_core_that_is_not_there_ends_with_the_reason(
    gpu: Any, write_onnx: Callable[..., ModelFile], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FAKE_DLA_CORES", "1")
    environment = BuildEnvironment(tmp_path, (8, 6), tmp_path / "timing")
    with pytest.raises(BuildFault, match=r"no DLA core 1 .*the cores here are 0 to 0") as raised:
        build_engine(
            order(graph(write_onnx)), environment, load_library("tensorrt_rtx"), lambda *_: None, lambda: False
        )
    assert raised.value.is_final


def test_the_process_that_builds_reports_the_layers(
    gpu: Any, write_onnx: Callable[..., ModelFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in gpu.environment(FAKE_DLA_CORES="2").items():
        monkeypatch.setenv(name, value)
    job = build_job(order(graph(write_onnx, TensorProto.FLOAT16)), tmp_path, tmp_path / "timing", None)
    control = BuildControl(lambda: "", lambda: "", lambda *_: None, lambda _: None)
    outcome = run_child(job, Bounds(timeout_s=100.0), control)
    assert (outcome.end, outcome.reason) == ("built", "")
    found, layers = outcome.facts["dla_layers"]
    assert (found, layers >= 2) == (1, True)
