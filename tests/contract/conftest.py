"""Fixtures for the backend contract: small models, each in its runtime's format, created once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
helper, TensorProto, numpy_helper = onnx.helper, onnx.TensorProto, onnx.numpy_helper


def _save(path: Path, nodes: list, inputs: list, outputs: list, initializers: list) -> Path:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    # Old enough for every runtime that the project supports.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="session")
def add_sub_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, each FP32 [N, 16], with 4 MB of weights it adds as 0."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 16]) for name in ("INPUT0", "INPUT1")]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 16]) for name in ("OUTPUT0", "OUTPUT1")]
    nodes = [
        helper.make_node("MatMul", ["INPUT0", "wide"], ["high"]),
        helper.make_node("MatMul", ["high", "narrow"], ["nothing"]),
        helper.make_node("Add", ["INPUT0", "nothing"], ["left"]),
        helper.make_node("Add", ["left", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["left", "INPUT1"], ["OUTPUT1"]),
    ]
    weights = [
        numpy_helper.from_array(np.ones((16, 32_768), dtype="f4"), "wide"),
        numpy_helper.from_array(np.zeros((32_768, 16), dtype="f4"), "narrow"),
    ]
    return _save(tmp_path_factory.mktemp("add_sub") / "1" / "model.onnx", nodes, tensors, results, weights)


@pytest.fixture(scope="session")
def slow_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP32 X [1, 1] -> Y [1, 1] = 0 X through tens of milliseconds of matrix products."""
    given = [helper.make_tensor_value_info("X", TensorProto.FLOAT, [1, 1])]
    results = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [1, 1])]
    nodes = [helper.make_node("Expand", ["X", "shape"], ["m0"])]
    nodes += [helper.make_node("MatMul", [f"m{i}", f"m{i}"], [f"m{i + 1}"]) for i in range(40)]
    nodes.append(helper.make_node("ReduceMean", ["m40"], ["Y"], keepdims=1))
    shape = [numpy_helper.from_array(np.array([512, 512]), "shape")]
    return _save(tmp_path_factory.mktemp("slow") / "1" / "model.onnx", nodes, given, results, shape)


def build_plan(fake_gpu: Any, onnx_path: Path, folder: Path, most_rows: int) -> Path:
    """Build an engine in this process, and register its source with the fake GPU."""
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, logger).parse_from_file(str(onnx_path))
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    shapes: dict[str, list[list[int]]] = {}
    for item in (network.get_input(i) for i in range(network.num_inputs)):
        fixed, *rest = item.shape
        shapes[item.name] = [[rows if fixed == -1 else fixed, *rest] for rows in (1, most_rows, most_rows)]
        profile.set_shape(item.name, *shapes[item.name])
    config.add_optimization_profile(profile)
    plan = bytes(memoryview(builder.build_serialized_network(network, config)))
    path = folder / "1" / "model.plan"
    path.parent.mkdir()
    path.write_bytes(plan)
    fake_gpu.register(plan, onnx_path, [shapes])
    return path


@pytest.fixture(scope="session")
def add_sub_plan(fake_gpu: Any, add_sub_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`add_sub_onnx` as an engine of 1 to 8 rows."""
    return build_plan(fake_gpu, add_sub_onnx, tmp_path_factory.mktemp("add_sub_plan"), 8)


@pytest.fixture(scope="session")
def slow_plan(fake_gpu: Any, slow_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`slow_onnx` as an engine."""
    return build_plan(fake_gpu, slow_onnx, tmp_path_factory.mktemp("slow_plan"), 1)


class LiteGraph:
    """A TensorFlow Lite model with one subgraph, put together tensor by tensor."""

    def __init__(self) -> None:
        self.schema: Any = pytest.importorskip("ai_edge_litert.schema_py_generated")
        self.graph = self.schema.SubGraphT(tensors=[], operators=[], inputs=[], outputs=[])
        self.model = self.schema.ModelT(version=3, operatorCodes=[], subgraphs=[self.graph], buffers=[])
        self.model.buffers.append(self.schema.BufferT())

    def tensor(self, name: str, shape: list[int], data: np.ndarray | None = None, role: str = "") -> int:
        """Add a tensor and return its number; -1 is a dimension of any size."""
        kinds = {"f": self.schema.TensorType.FLOAT32, "i": self.schema.TensorType.INT32}
        one = self.schema.TensorT(name=name, shape=[max(1, size) for size in shape], buffer=0)
        one.shapeSignature = list(shape)
        one.type = kinds["f" if data is None else data.dtype.kind]
        if data is not None:
            one.buffer = len(self.model.buffers)
            self.model.buffers.append(self.schema.BufferT(data=np.frombuffer(data.tobytes(), dtype="u1")))
        self.graph.tensors.append(one)
        number = len(self.graph.tensors) - 1
        if role:
            getattr(self.graph, role).append(number)
        return number

    def operator(self, name: str, options: str, inputs: list[int], output: int, version: int = 1) -> None:
        code = self.schema.OperatorCodeT(builtinCode=getattr(self.schema.BuiltinOperator, name), version=version)
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        self.model.operatorCodes.append(code)
        one = self.schema.OperatorT(opcodeIndex=len(self.model.operatorCodes) - 1, inputs=inputs, outputs=[output])
        one.builtinOptionsType = getattr(self.schema.BuiltinOptions, options)
        one.builtinOptions = getattr(self.schema, options + "T")()
        self.graph.operators.append(one)

    def save(self, folder: Path) -> Path:
        flatbuffers = pytest.importorskip("flatbuffers")
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        path = folder / "1" / "model.tflite"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(builder.Output()))
        return path


@pytest.fixture(scope="session")
def add_sub_lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `add_sub_onnx`."""
    lite = LiteGraph()
    left, right = (lite.tensor(name, [-1, 16], role="inputs") for name in ("INPUT0", "INPUT1"))
    wide = lite.tensor("wide", [32_768, 16], np.ones((32_768, 16), "f4"))
    narrow = lite.tensor("narrow", [16, 32_768], np.zeros((16, 32_768), "f4"))
    high, nothing, sum_ = (
        lite.tensor("high", [-1, 32_768]),
        lite.tensor("nothing", [-1, 16]),
        lite.tensor("s", [-1, 16]),
    )
    lite.operator("FULLY_CONNECTED", "FullyConnectedOptions", [left, wide, -1], high)
    lite.operator("FULLY_CONNECTED", "FullyConnectedOptions", [high, narrow, -1], nothing)
    lite.operator("ADD", "AddOptions", [left, nothing], sum_)
    lite.operator("ADD", "AddOptions", [sum_, right], lite.tensor("OUTPUT0", [-1, 16], role="outputs"))
    lite.operator("SUB", "SubOptions", [sum_, right], lite.tensor("OUTPUT1", [-1, 16], role="outputs"))
    return lite.save(tmp_path_factory.mktemp("add_sub_lite"))


@pytest.fixture(scope="session")
def slow_lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `slow_onnx`."""
    lite = LiteGraph()
    given = lite.tensor("X", [1, 1], role="inputs")
    last = lite.tensor("m0", [512, 512])
    shape = lite.tensor("shape", [2], np.array([512, 512], "i4"))
    lite.operator("BROADCAST_TO", "BroadcastToOptions", [given, shape], last, version=2)
    for number in range(1, 21):
        result = lite.tensor(f"m{number}", [512, 512])
        lite.operator("BATCH_MATMUL", "BatchMatMulOptions", [last, last], result)
        last = result
    axes = lite.tensor("axes", [2], np.array([0, 1], "i4"))
    lite.operator("MEAN", "ReducerOptions", [last, axes], lite.tensor("Y", [1, 1], role="outputs"))
    lite.graph.operators[-1].builtinOptions.keepDims = True
    return lite.save(tmp_path_factory.mktemp("slow_lite"))


@pytest.fixture(scope="session")
def add_sub_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `add_sub_onnx`, its outputs in a dictionary."""
    torch = pytest.importorskip("torch")

    class AddSub(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("wide", torch.ones(16, 32_768))
            self.register_buffer("narrow", torch.zeros(32_768, 16))

        def forward(self, INPUT0: torch.Tensor, INPUT1: torch.Tensor) -> dict[str, torch.Tensor]:
            left = INPUT0 + INPUT0 @ self.wide @ self.narrow
            return {"OUTPUT0": left + INPUT1, "OUTPUT1": left - INPUT1}

    path = tmp_path_factory.mktemp("add_sub_torch") / "1" / "model.pt"
    path.parent.mkdir()
    example = (torch.zeros(2, 16), torch.zeros(2, 16))
    torch.jit.trace(AddSub(), example, strict=False).save(str(path))
    return path


@pytest.fixture(scope="session")
def slow_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `slow_onnx`."""
    torch = pytest.importorskip("torch")

    class Slow(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, X: torch.Tensor) -> torch.Tensor:
            wide = X.expand(512, 512)
            for _ in range(20):
                wide = wide @ wide
            return wide.mean().reshape(1, 1)

    path = tmp_path_factory.mktemp("slow_torch") / "1" / "model.pt"
    path.parent.mkdir()
    torch.jit.trace(Slow(), torch.zeros(1, 1)).save(str(path))
    return path


def _export_jax(folder: Path, function: Any, **shapes: Any) -> Path:
    jax = pytest.importorskip("jax", reason="jax is not installed: pip install '.[jax]'")
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: pip install '.[jax]'")
    given = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    path = folder / "1" / "model.jaxexport"
    path.parent.mkdir()
    path.write_bytes(jax.export.export(jax.jit(function), platforms=("cpu",))(**given).serialize())
    return path


@pytest.fixture(scope="session")
def add_sub_jax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `add_sub_onnx`."""
    export = pytest.importorskip("jax.export", reason="jax is not installed: pip install '.[jax]'")
    wide, narrow = np.ones((16, 32_768), "f4"), np.zeros((32_768, 16), "f4")

    def add_sub(INPUT0: Any, INPUT1: Any) -> dict[str, Any]:
        left = INPUT0 + INPUT0 @ wide @ narrow
        return {"OUTPUT0": left + INPUT1, "OUTPUT1": left - INPUT1}

    shape = (export.symbolic_shape("rows")[0], 16)
    return _export_jax(tmp_path_factory.mktemp("add_sub_jax"), add_sub, INPUT0=shape, INPUT1=shape)


@pytest.fixture(scope="session")
def slow_jax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `slow_onnx`."""

    def slow(X: Any) -> dict[str, Any]:
        wide = X + np.zeros((512, 512), "f4")
        for _ in range(20):
            wide = wide @ wide
        return {"Y": wide.mean().reshape(1, 1)}

    return _export_jax(tmp_path_factory.mktemp("slow_jax"), slow, X=(1, 1))
