"""A small convolutional net as an ONNX file, for a first guess at which runtime is the fastest here.

Written byte by byte after onnx.proto3 (github.com/onnx/onnx), so that no library is needed for it. FP32
[1, 3, 224, 224] -> [1, 10], 0.16 billion multiplications: the weight of a light classifier.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

INPUT, OUTPUT = "image", "scores"
INPUT_SHAPE = (1, 3, 224, 224)
OUTPUT_SHAPE = (1, 10)

_CHANNELS = ((3, 24, 2), (24, 48, 2), (48, 96, 2), (96, 96, 1), (96, 128, 2))
"""Of each convolution: channels in, channels out, stride."""
_FLOAT = 1
_ATTRIBUTE_INTS = 7


def sample_model() -> bytes:
    """Return the file; always the same bytes."""
    generator = np.random.default_rng(11)
    nodes, weights, name = b"", b"", INPUT
    for index, (inner, outer, stride) in enumerate(_CHANNELS):
        scale = np.float32((2 / (inner * 9)) ** 0.5)
        kernel = generator.standard_normal((outer, inner, 3, 3), np.float32) * scale
        weights += _text_or_part(5, _tensor(f"w{index}", kernel))
        attributes = (_ints("kernel_shape", (3, 3)), _ints("strides", (stride, stride)), _ints("pads", (1, 1, 1, 1)))
        nodes += _text_or_part(1, _node("Conv", [name, f"w{index}"], f"c{index}", attributes))
        nodes += _text_or_part(1, _node("Relu", [f"c{index}"], f"r{index}"))
        name = f"r{index}"
    nodes += _text_or_part(1, _node("GlobalAveragePool", [name], "pooled"))
    nodes += _text_or_part(1, _node("Flatten", ["pooled"], "flat"))
    weights += _text_or_part(
        5, _tensor("w", generator.standard_normal((_CHANNELS[-1][1], OUTPUT_SHAPE[1]), np.float32))
    )
    nodes += _text_or_part(1, _node("MatMul", ["flat", "w"], OUTPUT))
    graph = nodes + _text_or_part(2, "sample") + weights
    graph += _text_or_part(11, _value(INPUT, INPUT_SHAPE)) + _text_or_part(12, _value(OUTPUT, OUTPUT_SHAPE))
    # ir_version 8 and opset 17 are read by every runtime of the last four years.
    return _number(1, 8) + _text_or_part(7, graph) + _text_or_part(8, _number(2, 17))


def _node(kind: str, inputs: Sequence[str], output: str, attributes: Sequence[bytes] = ()) -> bytes:
    parts = [_text_or_part(1, name) for name in inputs]
    parts += [_text_or_part(2, output), _text_or_part(3, output), _text_or_part(4, kind)]
    return b"".join([*parts, *(_text_or_part(5, attribute) for attribute in attributes)])


def _ints(name: str, values: Sequence[int]) -> bytes:
    return _text_or_part(1, name) + b"".join(_number(8, value) for value in values) + _number(20, _ATTRIBUTE_INTS)


def _tensor(name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    dims = b"".join(_number(1, size) for size in array.shape)
    return dims + _number(2, _FLOAT) + _text_or_part(8, name) + _text_or_part(9, array.astype("<f4").tobytes())


def _value(name: str, shape: Sequence[int]) -> bytes:
    dims = b"".join(_text_or_part(1, _number(1, size)) for size in shape)
    tensor = _number(1, _FLOAT) + _text_or_part(2, dims)
    return _text_or_part(1, name) + _text_or_part(2, _text_or_part(1, tensor))


def _text_or_part(field: int, content: str | bytes) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return struct.pack(f"{len(parts) + 1}B", *parts, value)
