"""Engines built on a machine with an NVIDIA GPU and TensorRT give onnxruntime's outputs. Skipped on other machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import Backend, ModelFile, OpenJob, Session
from edge_server.backends.cuda import cuda_driver
from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec
from edge_server.core.output_difference import compare_arrays
from edge_server.core.tensor import DType
from edge_server.errors import BackendError
from edge_server.plugins.tensorrt.backend import make
from edge_server.plugins.tensorrt.builds.onnx_to_engine import BuildEnvironment, build_engine
from edge_server.plugins.tensorrt.engine_options import TOLERANCES
from edge_server.plugins.tensorrt.engine_order import EngineOrder, Profile, Range
from edge_server.plugins.tensorrt.library_adapter import load_library

CLASSIFIER = Path(__file__).parent.parent / "model_repository" / "efficientnet_lite0" / "1" / "model.onnx"


def profile(*rows: int) -> Profile:
    least, best, most = ((count, 3, 224, 224) for count in rows)
    return {"input": Range(least, best, most)}


@pytest.fixture
def plan(library: str, tmp_path: Path) -> Callable[..., ModelFile]:
    """Return a function that builds an engine on this GPU."""

    def make(onnx: Path = CLASSIFIER, *profiles: Profile, precision: str = "fp32") -> ModelFile:
        loaded = load_library(library)
        order = EngineOrder("hil", 1, onnx, library, loaded.version, 0, precision, profiles or (profile(1, 4, 8),))
        folder = tmp_path / "hil" / "1"
        site = BuildEnvironment(folder, cuda_driver.devices()[0].capability, tmp_path / "timing.cache")
        built = build_engine(order, site, loaded, lambda phase, percent: None, lambda: False)
        return ModelFile(built.plan, tmp_path / "hil", 1)

    return make


@pytest.fixture
def open_it(library: str) -> Iterator[Callable[..., Session]]:
    opened: list[Any] = []

    def make(
        file: ModelFile, config: dict[str, Any] | None = None, backend: Backend | None = None, **more: Any
    ) -> Session:
        given: dict[str, Any] = {
            "max_batch_size": 8,
            "inputs": (InputSpec("input", DType.FP32, (3, 224, 224)),),
            "outputs": (OutputSpec("probabilities", DType.FP32, (1000,)),),
            **more,
        }
        spec = ModelSpec(
            name="hil", backend=library, platform="", config_json=json.dumps(config or {}),
            instance_groups=(InstanceGroup("hil", InstanceKind.GPU, 1, (0,)),), **given,
        )  # fmt: skip
        opened.append((backend or load_backend(library)).open(OpenJob(spec, file, "hil_0_0", 0)))
        session: Session = opened[-1]
        return session

    yield make
    for session in opened:
        session.close()


def pictures(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).random((rows, 3, 224, 224), np.float32) * 2 - 1


def expected(inputs: dict[str, np.ndarray], path: Path = CLASSIFIER) -> list[np.ndarray]:
    onnxruntime = pytest.importorskip("onnxruntime")
    found: list[np.ndarray] = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(
        None, inputs
    )
    return found


def check(session: Session, rows: int, tolerance: float = TOLERANCES["fp32"]) -> None:
    given = {"input": pictures(rows)}
    answer = session.run(given, ["probabilities"])["probabilities"]
    assert compare_arrays(expected(given)[0], answer).relative <= tolerance


def test_outputs_equal_those_of_onnxruntime(plan: Callable[..., ModelFile], open_it: Callable[..., Session]) -> None:
    session = open_it(plan())
    for rows in (1, 3, 8, 2):
        check(session, rows)


def test_an_engine_with_the_metadata_of_ultralytics_gives_the_same_outputs(
    library: str, plan: Callable[..., ModelFile], open_it: Callable[..., Session]
) -> None:
    file, text = plan(), json.dumps({"task": "classify", "stride": 1})
    file.path.write_bytes(len(text).to_bytes(4, "little") + text.encode() + file.path.read_bytes())
    signature = load_backend(library).inspect(file, {})
    assert signature is not None
    assert signature.metadata == {"metadata.json": text}
    check(open_it(file), 3)


def test_fp16_outputs_are_within_tolerance(
    library: str, plan: Callable[..., ModelFile], open_it: Callable[..., Session]
) -> None:
    if load_library(library).builds_types_of_file:
        pytest.skip(f"{library} builds the types that the file has")
    check(open_it(plan(precision="fp16")), 4, TOLERANCES["fp16"])


def test_each_profile_accepts_its_shapes(plan: Callable[..., ModelFile], open_it: Callable[..., Session]) -> None:
    session = open_it(plan(CLASSIFIER, profile(1, 1, 2), profile(4, 8, 8)))
    for rows in (1, 8, 2, 4):
        check(session, rows)
    with pytest.raises(BackendError, match="no profile of the engine takes"):
        session.run({"input": pictures(3)}, ["probabilities"])


def test_cuda_graphs_and_launches_give_equal_outputs(
    plan: Callable[..., ModelFile], open_it: Callable[..., Session]
) -> None:
    sizes = [{"batch_size": 1}, {"batch_size": 4}]
    session = open_it(plan(), {"optimization": {"cuda": {"graphs": True, "graph_spec": sizes}}})
    for rows in (1, 2, 3, 4, 7, 1):
        check(session, rows)


def test_an_output_whose_size_depends_on_the_data_is_complete(
    library: str, plan: Callable[..., ModelFile], open_it: Callable[..., Session], tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    if library != "tensorrt":
        pytest.skip("TensorRT for RTX has no NonZero")
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["X"], ["Y"])],
        "finds",
        [helper.make_tensor_value_info("X", kinds.FLOAT, [64])],
        [helper.make_tensor_value_info("Y", kinds.INT64, [1, "found"])],
    )
    path = tmp_path / "finds.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    inputs, outputs = (InputSpec("X", DType.FP32, (64,)),), (OutputSpec("Y", DType.INT64, (1, -1)),)
    session = open_it(plan(path, {}), max_batch_size=0, inputs=inputs, outputs=outputs)
    for positions in ([3], list(range(0, 64, 2)), []):
        given = np.zeros(64, "f4")
        given[positions] = 1
        np.testing.assert_array_equal(session.run({"X": given}, ["Y"])["Y"], [positions])


def test_the_lean_runtime_runs_a_version_compatible_plan(
    open_it: Callable[..., Session], library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library != "tensorrt":
        pytest.skip("TensorRT for RTX has no lean runtime")
    trt: Any = pytest.importorskip("tensorrt")
    pytest.importorskip("tensorrt_lean")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = load_library("tensorrt").make_network(builder)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(CLASSIFIER)), parser.get_error(0)
    shapes = builder.create_optimization_profile()
    shapes.set_shape("input", *((count, 3, 224, 224) for count in (1, 4, 8)))
    config = builder.create_builder_config()
    config.add_optimization_profile(shapes)
    config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    # Without the code of a runtime in it, which needs the operator's word.
    config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    (tmp_path / "hil" / "1").mkdir(parents=True)
    path = tmp_path / "hil" / "1" / "model.plan"
    path.write_bytes(bytes(builder.build_serialized_network(network, config)))

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    backend = make("tensorrt")
    assert not backend.has_builder
    session = open_it(ModelFile(path, tmp_path / "hil", 1), backend=backend)
    for rows in (1, 3, 8):
        check(session, rows)


def test_gpu_memory_is_freed(plan: Callable[..., ModelFile], library: str) -> None:
    file = plan()
    context = cuda_driver.driver().retain_context(0)

    def cycle(count: int) -> int:
        for _ in range(count):
            spec = ModelSpec(
                "hil", library, "", 8, (InputSpec("input", DType.FP32, (3, 224, 224)),),
                (OutputSpec("probabilities", DType.FP32, (1000,)),), (InstanceGroup("hil", InstanceKind.GPU, 1, (0,)),),
            )  # fmt: skip
            session = load_backend(library).open(OpenJob(spec, file, "hil_0_0", 0))
            assert isinstance(session, Session)
            session.run({"input": pictures(1)}, ["probabilities"])
            session.close()
        with context.current():
            return context.free_bytes()

    before = cycle(3)
    after = cycle(20)
    context.close()
    assert before - after < 16 << 20
