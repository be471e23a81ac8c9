"""Writer of a small convolutional network as an ONNX file, by which `doctor` compares the speed of runtimes.

It is encoded directly according to onnx.proto3 (github.com/onnx/onnx), so no library is needed. FP32
[1, 3, 224, 224] -> [1, 10], 0.16 billion multiplications, like a light classifier.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

INPUT, OUTPUT = "image", "scores"
INPUT_SHAPE = (1, 3, 224, 224)
OUTPUT_SHAPE = (1, 10)

_CHANNELS = ((3, 24, 2), (24, 48, 2), (48, 96, 2), (96, 96, 1), (96, 128, 2))
"""Input channels, output channels and stride of each convolution."""
_FLOAT = 1
_ATTRIBUTE_INTS = 7


def sample_model() -> bytes:
    """Return the bytes of the file, which are always the same."""
    generator = np.random.default_rng(11)
    nodes, weights, name = b"", b"", INPUT
    for index, (inner, outer, stride) in enumerate(_CHANNELS):
        scale = np.float32((2 / (inner * 9)) ** 0.5)
        kernel = generator.standard_normal((outer, inner, 3, 3), np.float32) * scale
        weights += _bytes_field(5, _tensor(f"w{index}", kernel))
        attributes = (_ints("kernel_shape", (3, 3)), _ints("strides", (stride, stride)), _ints("pads", (1, 1, 1, 1)))
        nodes += _bytes_field(1, _node("Conv", [name, f"w{index}"], f"c{index}", attributes))
        nodes += _bytes_field(1, _node("Relu", [f"c{index}"], f"r{index}"))
        name = f"r{index}"
    nodes += _bytes_field(1, _node("GlobalAveragePool", [name], "pooled"))
    nodes += _bytes_field(1, _node("Flatten", ["pooled"], "flat"))
    weights += _bytes_field(5, _tensor("w", generator.standard_normal((_CHANNELS[-1][1], OUTPUT_SHAPE[1]), np.float32)))
    nodes += _bytes_field(1, _node("MatMul", ["flat", "w"], OUTPUT))
    graph = nodes + _bytes_field(2, "sample") + weights
    graph += _bytes_field(11, _value(INPUT, INPUT_SHAPE)) + _bytes_field(12, _value(OUTPUT, OUTPUT_SHAPE))
    # All runtimes of the last four years can read ir_version 8 and opset 17.
    return _number_field(1, 8) + _bytes_field(7, graph) + _bytes_field(8, _number_field(2, 17))


def _node(kind: str, inputs: Sequence[str], output: str, attributes: Sequence[bytes] = ()) -> bytes:
    parts = [_bytes_field(1, name) for name in inputs]
    parts += [_bytes_field(2, output), _bytes_field(3, output), _bytes_field(4, kind)]
    return b"".join([*parts, *(_bytes_field(5, attribute) for attribute in attributes)])


def _ints(name: str, values: Sequence[int]) -> bytes:
    return (
        _bytes_field(1, name)
        + b"".join(_number_field(8, value) for value in values)
        + _number_field(20, _ATTRIBUTE_INTS)
    )


def _tensor(name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    dims = b"".join(_number_field(1, size) for size in array.shape)
    return dims + _number_field(2, _FLOAT) + _bytes_field(8, name) + _bytes_field(9, array.astype("<f4").tobytes())


def _value(name: str, shape: Sequence[int]) -> bytes:
    dims = b"".join(_bytes_field(1, _number_field(1, size)) for size in shape)
    tensor = _number_field(1, _FLOAT) + _bytes_field(2, dims)
    return _bytes_field(1, name) + _bytes_field(2, _bytes_field(1, tensor))


def _bytes_field(field: int, content: str | bytes) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _number_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return struct.pack(f"{len(parts) + 1}B", *parts, value)
