"""Answers as bytes: all types come back as they were, and anything else is refused, never believed."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from edge_server.core.request_response import Response
from edge_server.core.tensor import DType, Tensor
from edge_server.serving.cache.cached_response import CorruptEntry, to_cached_response
from edge_server.serving.cache.serialization import pack, unpack

shapes = some.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DType))
    shape = draw(shapes)
    if dtype is DType.BYTES:
        array = np.empty(shape, object)
        count = array.size
        array.reshape(-1)[:] = draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count))
    else:
        array = draw(some.arrays(dtype.numpy, shape))
    return Tensor(draw(st.text(min_size=1, max_size=8)), dtype, array)


parameters = st.dictionaries(
    st.text(max_size=5), st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text(max_size=9))
)


@given(st.lists(tensors(), max_size=3), parameters)
def test_serialized_responses_come_back_unchanged(outputs: list, given_parameters: dict) -> None:
    answer = to_cached_response(Response("m", 1, "", tuple(outputs), given_parameters))
    found = unpack(pack(answer))
    assert [(item.name, item.dtype, item.array.shape) for item in found.outputs] == [
        (item.name, item.dtype, item.array.shape) for item in outputs
    ]
    for got, expected in zip(found.outputs, outputs, strict=True):
        assert got.array.dtype == expected.dtype.numpy
        if expected.dtype is DType.BYTES:
            assert got.array.tolist() == expected.array.tolist()
        else:
            assert got.array.tobytes() == expected.array.tobytes()
        assert not got.array.flags.writeable
    assert dict(found.parameters) == given_parameters
    assert found.size_bytes == answer.size_bytes


GOOD = pack(
    to_cached_response(Response("m", 1, "", (Tensor("OUT", DType.FP32, np.ones((2, 3), np.float32)),), {"p": 1}))
)


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_one_wrong_byte_anywhere_is_found(at: int, change: int) -> None:
    data = bytearray(GOOD)
    data[at] ^= change
    with pytest.raises(CorruptEntry):
        unpack(bytes(data))


@given(st.integers(0, len(GOOD) - 1))
def test_an_entry_that_was_cut_off_is_found(length: int) -> None:
    with pytest.raises(CorruptEntry):
        unpack(GOOD[:length])


@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_an_answer_or_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptEntry):
        unpack(data)


def forged(head: object, rest: bytes = b"", length: int | None = None) -> bytes:
    """Return an entry whose checksum is right and whose content is not."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    body = (len(text) if length is None else length).to_bytes(4, "little") + text + rest
    return b"EDGEANS1" + hashlib.blake2b(body, digest_size=16).digest() + body


def one(**more: object) -> dict:
    output = {"name": "OUT", "datatype": "FP32", "shape": [1], "bytes": 4, **more}
    return {"parameters": {}, "outputs": [output]}


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "data",
    [
        forged(b"{"),
        forged(b"\xff\xfe"),
        forged([]),
        forged({"outputs": []}),
        forged({"outputs": 3, "parameters": {}}),
        forged({"outputs": [7], "parameters": {}}),
        forged({"outputs": [], "parameters": {"p": [1]}}),
        forged({"outputs": [], "parameters": []}),
        forged({"outputs": [], "parameters": {}}, b"more"),
        forged({"outputs": [], "parameters": {}}, length=2**32 - 1),
        forged(one(), b"123"),
        forged(one(), b"12345"),
        forged(one(shape=[2]), b"1234"),
        forged(one(shape=[-1]), b"1234"),
        forged(one(shape=[True]), b"1234"),
        forged(one(shape=[1.0]), b"1234"),
        forged(one(shape=[2**62, 2**62]), b"1234"),
        forged(one(shape=[1] * 500), b"1234"),
        forged(one(bytes=-4), b"1234"),
        forged(one(datatype="FP128"), b"1234"),
        forged(one(datatype=[]), b"1234"),
        forged(one(name=3), b"1234"),
        forged(one(datatype="BYTES", bytes=3), b"123"),
        forged(one(datatype="BYTES"), b"\xff\xff\xff\xff"),
        forged(one(datatype="BYTES", shape=[2]), b"\0\0\0\0"),
        forged(b"[" * 100_000),
        forged(one(datatype="BYTES", shape=[2**40], bytes=8), b"\0" * 8),
        forged(one(datatype="BYTES", shape=[0, 2**70], bytes=0)),
        forged(one(shape=[0, 2**70], bytes=0)),
        forged(one(datatype="BOOL", shape=[4]), b"\1\0\1\2"),
        forged({"outputs": [], "parameters": {"p": 2**64}}),
    ],
    ids=range(31),
)
def test_a_forged_entry_is_refused_without_a_crash(data: bytes) -> None:
    with pytest.raises(CorruptEntry):
        unpack(data)
