"""Reader of ONNX files: weight types, inputs and outputs, also of damaged files."""

from __future__ import annotations

import time
from pathlib import Path

from edge_server.backends import onnx_file_info


def encode_varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def field(number: int, content: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


def weight(kind: int, dims: bytes) -> bytes:
    """Return a ModelProto's graph with one initializer."""
    return field(7, field(5, field(1, dims) + encode_varint(2 << 3) + encode_varint(kind)))


def test_the_precision_is_weighted_by_elements(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(
        weight(10, encode_varint(3) + encode_varint(4))
        + weight(1, encode_varint(11))
        + weight(1, encode_varint(5) + encode_varint(0))
    )
    assert onnx_file_info.arithmetic(path) == "f16"


def test_a_file_with_a_hundred_thousand_dims_is_read_quickly(tmp_path: Path) -> None:
    """Their product has 6 million bits: multiplied out, it held the interpreter's lock for a minute."""
    path = tmp_path / "model.onnx"
    path.write_bytes(weight(1, encode_varint(2**63 - 1) * 100_000))
    before_s = time.thread_time()
    assert onnx_file_info.arithmetic(path) == "f32"
    assert time.thread_time() - before_s < 30
