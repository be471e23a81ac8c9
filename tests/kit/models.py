"""Model repositories of small models, and values of each type for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.kit.model_folder import model_folder, parameters

BUNDLED = Path(__file__).parents[2] / "model_repository"
COFFEE = Path(__file__).parents[1] / "data" / "coffee.jpg"

DTYPES = {
    "BOOL": "BOOL", "UINT8": "UINT8", "UINT16": "UINT16", "UINT32": "UINT32", "UINT64": "UINT64",
    "INT8": "INT8", "INT16": "INT16", "INT32": "INT32", "INT64": "INT64",
    "FP16": "FP16", "BF16": "BF16", "FP32": "FP32", "FP64": "FP64", "BYTES": "STRING",
}  # fmt: skip
"""Every data type: its name on the wire -> its name in config.pbtxt, without TYPE_."""


def identity_config(
    datatype: str = "INT32", dims: str = "-1", *, inputs: int = 1, batch: int = 8, more: str = ""
) -> str:
    """Return the config.pbtxt of a model that gives INPUTn back as OUTPUTn."""
    kind = f"TYPE_{DTYPES[datatype]}"
    lines = ['backend: "identity"', f"max_batch_size: {batch}"]
    for index in range(inputs):
        lines.append(f'input {{ name: "INPUT{index}" data_type: {kind} dims: [{dims}] }}')
        lines.append(f'output {{ name: "OUTPUT{index}" data_type: {kind} dims: [{dims}] }}')
    return "\n".join([*lines, more])


def identity_body() -> dict[str, Any]:
    """Return an inference request of one row to a model of `identity_config`."""
    return {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [7]}]}


def add_sub_body(value: float) -> dict[str, Any]:
    """Return an inference request of one row to a model of `Repository.add_sub`: INPUT0 is `value`, INPUT1 is 1."""
    pairs = (("INPUT0", value), ("INPUT1", 1.0))
    return {"inputs": [{"name": name, "datatype": "FP32", "shape": [1, 16], "data": [x] * 16} for name, x in pairs]}


def picture_sum_config(side: int = 8, **more: object) -> str:
    """Return the config.pbtxt of a model of pictures whose answer SUM is the sum of a picture's values; `more` are
    parameters such as stub_delay_ms."""
    return f"""
backend: "stub"
max_batch_size: 1
input {{ name: "IN" data_type: TYPE_FP32 dims: [3, {side}, {side}] }}
output {{ name: "SUM" data_type: TYPE_FP32 dims: [1] }}
{parameters(stub_op="sum", image_color="rgb", image_scale=1, **more)}"""


REPEAT = """
backend: "repeat"
model_transaction_policy { decoupled: true }
max_batch_size: 0
input { name: "IN" data_type: TYPE_INT32 dims: [-1] }
input { name: "DELAY" data_type: TYPE_UINT32 dims: [-1] }
input { name: "WAIT" data_type: TYPE_UINT32 dims: [1] }
output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
output { name: "IDX" data_type: TYPE_UINT32 dims: [1] }
"""

LABELLED = """
backend: "identity"
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] label_filename: "labels.txt" }
"""


FAILING = """
parameters { key: "stub_fail" value { string_value: "true" } }
parameters { key: "warmup_probe" value { string_value: "false" } }
"""

STUB_TENSORS = """
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }
"""


class Repository:
    """A model repository being written.

    >>> repository.add("same", identity_config())
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self,
        name: str,
        config: str = "",
        version: int = 1,
        model: onnx.ModelProto | None = None,
        files: Mapping[str, str | bytes] = MappingProxyType({}),
    ) -> Path:
        """Write a model as `model_folder` does, an ONNX model among the files."""
        graph = {} if model is None else {f"{version}/model.onnx": model.SerializeToString()}
        return model_folder(self.path / name, config, {**graph, **files}, version=version)

    def add_sub(self, name: str = "add_sub", config: str = "", version: int = 1) -> Path:
        """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, FP32 [batch, 16]."""
        return self.add(name, config, version, add_sub_model())


def add_sub_model() -> onnx.ModelProto:
    tensors = {
        key: helper.make_tensor_value_info(key, TensorProto.FLOAT, ["batch", 16])
        for key in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")
    }
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        "add_sub",
        [tensors["INPUT0"], tensors["INPUT1"]],
        [tensors["OUTPUT0"], tensors["OUTPUT1"]],
    )
    return finish(graph)


def conv_model(channels: int = 8) -> onnx.ModelProto:
    """A small convolutional net: FP32 [batch, 3, 32, 32] -> FP32 [batch, 10], seeded weights."""
    generator = np.random.default_rng(7)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(generator.standard_normal(shape, np.float32) * 0.2, name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "w0", "b0"], ["c0"], kernel_shape=[3, 3], strides=[2, 2]),
            helper.make_node("Relu", ["c0"], ["r0"]),
            helper.make_node("GlobalAveragePool", ["r0"], ["p0"]),
            helper.make_node("Flatten", ["p0"], ["f0"]),
            helper.make_node("Gemm", ["f0", "w1", "b1"], ["scores"]),
        ],
        "conv",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])],
        [weight("w0", channels, 3, 3, 3), weight("b0", channels), weight("w1", channels, 10), weight("b1", 10)],
    )
    return finish(graph)


def finish(graph: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.checker.check_model(model)
    return model


def sample_values(datatype: str) -> np.ndarray:
    if datatype == "BYTES":
        texts = [b"", b"a", "grüß".encode(), b"\x00\xff\xfe", b"x" * 300, b"1", b"\n", b'"', b"\\", b"last"]
        return np.array(texts, dtype=object).reshape(2, 5)
    if datatype == "BOOL":
        return np.array([[True, False, True, True, False], [False, False, True, False, True]])
    if datatype in ("FP16", "BF16", "FP32", "FP64"):
        kind = {"FP16": np.float16, "BF16": ml_dtypes.bfloat16, "FP32": np.float32, "FP64": np.float64}[datatype]
        return np.array([[0.0, -0.0, 1.5, -2.25, 1024], [0.5, -1, 3, 96, -0.125]], dtype=kind)
    kind = np.dtype(datatype.lower())
    limits = np.iinfo(kind)
    return np.array([[limits.min, limits.max, 0, 1, 2], [3, 4, 5, limits.max - 1, limits.min + 1]], dtype=kind)
