"""Convolutional networks of a stated cost, made of random weights: time depends on shapes, not on training."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Channels and stride of the four stages of ResNet-18, two blocks each (He et al., 2015, table 1)."""
BOTTLENECKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, repeats and first stride of MobileNetV2's stages (Sandler et al., 2018, table 2)."""


class _Graph:
    """Nodes and weights, as they are added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)
        self._limits: list[str] = []

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

    def convolve(self, x: str, channels: tuple[int, int], size: int, stride: int, groups: int = 1) -> str:
        came, made = channels
        edge = size // 2
        weight, bias = self.weight(made, came // groups, size, size), self.weight(made)
        return self.add("Conv", x, weight, bias, strides=[stride] * 2, pads=[edge] * 4, group=groups)

    def clip(self, x: str) -> str:
        """Return x within 0 and 6."""
        if not self._limits:
            self._limits = ["zero", "six"]
            for name, value in zip(self._limits, (0, 6), strict=True):
                self.weights.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return self.add("Clip", x, *self._limits)

    def inverted_residual(self, x: str, channels: tuple[int, int], stride: int, expansion: int) -> str:
        came, made = channels
        wide, y = came * expansion, x
        if expansion != 1:
            y = self.clip(self.convolve(y, (came, wide), 1, 1))
        y = self.clip(self.convolve(y, (wide, wide), 3, stride, wide))
        y = self.convolve(y, (wide, made), 1, 1)
        return self.add("Add", x, y) if stride == 1 and came == made else y

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
    return _classify(graph, x, 512, "resnet18")


def mobilenet_v2() -> onnx.ModelProto:
    """Return MobileNetV2 with its normalisation folded: FP32 "input" [N, 3, 224, 224] to "logits" [N, 1000]."""
    graph = _Graph()
    x = graph.clip(graph.convolve("input", (3, 32), 3, 2))
    came = 32
    for expansion, made, repeats, stride in BOTTLENECKS:
        for step in (stride, *[1] * (repeats - 1)):
            x = graph.inverted_residual(x, (came, made), step, expansion)
            came = made
    x = graph.clip(graph.convolve(x, (came, 1280), 1, 1))
    return _classify(graph, x, 1280, "mobilenet_v2")


def _classify(graph: _Graph, x: str, channels: int, name: str) -> onnx.ModelProto:
    """Return the network that ends in 1000 classes of the features `x`."""
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    graph.nodes.append(helper.make_node("Gemm", [x, graph.weight(channels, 1000), graph.weight(1000)], ["logits"]))
    given = [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, 224, 224])]
    made_info = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 1000])]
    made_graph = helper.make_graph(graph.nodes, name, given, made_info, graph.weights)
    model = helper.make_model(made_graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model
