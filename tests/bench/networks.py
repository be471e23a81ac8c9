"""Convolutional networks of a stated cost, made of random weights: time depends on shapes, not on what they learned."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Channels and stride of the four stages of ResNet-18, two blocks each (He et al., 2015, table 1)."""


class _Graph:
    """Nodes and weights, as they are added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)

    def add(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        scale = (2 / np.prod(shape[1:])) ** 0.5  # keeps the size of what flows through, as trained weights do
        values = (self._random.standard_normal(shape) * scale).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def convolve(self, x: str, channels: tuple[int, int], size: int, stride: int) -> str:
        came, made = channels
        edge = size // 2
        weight, bias = self.weight(made, came, size, size), self.weight(made)
        return self.add("Conv", x, weight, bias, strides=[stride] * 2, pads=[edge] * 4)

    def block(self, x: str, channels: tuple[int, int], stride: int) -> str:
        made = channels[1]
        y = self.add("Relu", self.convolve(x, channels, 3, stride))
        y = self.convolve(y, (made, made), 3, 1)
        if channels[0] != made or stride != 1:
            x = self.convolve(x, channels, 1, stride)
        return self.add("Relu", self.add("Add", x, y))


def resnet18() -> onnx.ModelProto:
    """Return ResNet-18 with its normalisation folded: FP32 "input" [N, 3, 224, 224] to "logits" [N, 1000]."""
    graph = _Graph()
    x = graph.add("Relu", graph.convolve("input", (3, 64), 7, 2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    came = 64
    for made, stride in STAGES:
        for channels, step in (((came, made), stride), ((made, made), 1)):
            x = graph.block(x, channels, step)
        came = made
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    graph.nodes.append(helper.make_node("Gemm", [x, graph.weight(512, 1000), graph.weight(1000)], ["logits"]))
    given = [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, 224, 224])]
    made_info = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 1000])]
    made_graph = helper.make_graph(graph.nodes, "resnet18", given, made_info, graph.weights)
    model = helper.make_model(made_graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model
