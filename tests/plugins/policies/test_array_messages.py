"""MessagePack messages with arrays: what openpi's client sends, and what a hostile one may send."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest

msgpack = pytest.importorskip("msgpack", reason="needs msgpack, of the extra policies")
messages = pytest.importorskip("edge_server.plugins.policies.array_messages")

CLIENTS_MESSAGE = bytes.fromhex(
    "82ad6f62736572766174696f6e2f7384c40b5f5f6e6461727261795f5fc3c40464617461c408"
    "0000803f00000040c4056474797065a33c6634c40573686170659102a670726f6d7074a2676f"
)
"""{"observation/s": np.float32([1, 2]), "prompt": "go"}, as openpi-client 0.1.2 packs it."""


GROOT_MESSAGE = bytes.fromhex(
    "83a17385c4026e64c3c40474797065a33c6634c4046b696e64c400c40573686170659102c40464617461c4080000803f00000040"
    "a16e83c4026e64c2c40474797065a33c6932c40464617461c4020700a16283c4026e64c2c40474797065a37c6231c40464617461c40101"
)
"""{"s": np.float32([1, 2]), "n": np.int16(7), "b": np.bool_(True)}, as msgpack-numpy 0.4.8 packs it for GR00T."""


def array(**changes: Any) -> dict[bytes, Any]:
    found = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return {**found, **{key.encode(): value for key, value in changes.items()}}


def plain(**changes: Any) -> dict[bytes, Any]:
    found = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2], b"data": b"\0" * 8}
    return {**found, **{key.encode(): value for key, value in changes.items()}}


def test_a_message_of_the_client_is_read() -> None:
    found = messages.read_message(CLIENTS_MESSAGE)
    assert found["observation/s"].tolist() == [1.0, 2.0]
    assert found["observation/s"].dtype == np.float32
    assert found["prompt"] == "go"


def test_a_message_of_groots_latest_client_is_read() -> None:
    found = messages.read_message(GROOT_MESSAGE)
    assert found["s"].tolist() == [1.0, 2.0]
    assert (found["n"], found["n"].dtype, bool(found["b"])) == (7, np.int16, True)


@pytest.mark.parametrize("dtype", ["|b1", "|u1", "<i2", ">i4", "<f2", "<f4", ">f8", "<u8"])
def test_arrays_and_numbers_come_back_as_they_were(dtype: str) -> None:
    values = np.arange(6).reshape(2, 3).astype(dtype)
    found = messages.read_message(messages.write_message({"a": values, "n": values[1, 1], "l": [1, 2.5, None]}))
    assert found["a"].tolist() == values.tolist()
    assert found["a"].dtype.isnative
    assert found["n"] == values[1, 1]
    assert found["l"] == [1, 2.5, None]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (array(dtype="|O"), "expected the type of numbers, as '<f4' or '|u1', given '|O'"),
        (array(dtype="<U1"), "'<U1'; texts are sent as strings, not arrays"),
        (array(dtype="<c8"), "expected the type of numbers"),
        (array(dtype="<f4,<f4"), "expected the type of numbers"),
        (array(dtype="V8"), "expected the type of numbers"),
        (array(dtype=7), "expected the type of numbers"),
        (array(shape=[3]), "expected 12 bytes for an array [3] of float32, given 8 bytes"),
        (array(shape=[-2]), "expected the shape of an array, at most 8 numbers, given [-2]"),
        (array(shape=[1 << 40, 1 << 40]), "bytes for an array"),
        (array(shape=[1] * 9), "expected the shape of an array"),
        (array(shape="2"), "expected the shape of an array"),
        (array(data="text"), "given a value of type str"),
        ({b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}, "expected a number that float32 holds, given x"),
        ({b"__npgeneric__": True, b"data": [0], b"dtype": "<f4"}, "expected a number that float32 holds"),
        (plain(type="|O", kind=b"O", data=b"cos\nsystem\n."), "expected the type of numbers"),
        (plain(type=[["a", "<f4"]], kind=b"V"), "expected the type of numbers"),
        (plain(shape=[3]), "expected 12 bytes for an array [3] of float32, given 8 bytes"),
        (plain(shape=None), "expected the shape of an array"),
        (plain(nd=False), "expected 4 bytes for an array [] of float32, given 8 bytes"),
        ({b"nd": True}, "expected the type of numbers"),
    ],
)
def test_a_wrong_array_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        messages.read_message(msgpack.packb({"a": value}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",  # a map of 4,294,967,295 values
        b"\x81\xa1a\xdd\xff\xff\xff\xff",  # a list as long
        b"\x81\xa1a\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x81\xa1a" + b"\x91" * 5000 + b"\0",  # lists in lists
        b"\x81\x91\x00\x00",  # a list as a key
        b"\x81\xa1a\xd4\x01\x00",  # an extension type
        b"\x81\xa1\xff\x00",  # a key that is not UTF-8
        msgpack.packb({"a": 1}) + b"\0",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="expected a message in MessagePack"):
        messages.read_message(data)


def test_a_message_is_a_map() -> None:
    with pytest.raises(InvalidRequest, match="expected a map in MessagePack, given a value of type list"):
        messages.read_message(msgpack.packb([1]))


def test_values_are_counted_over_all_lists() -> None:
    lists = [[0] * 60_000] * 4
    with pytest.raises(InvalidRequest, match=f"more than {messages.MAX_VALUES} values in lists and maps"):
        messages.read_message(msgpack.packb({"a": lists}))


def test_a_message_is_bounded() -> None:
    with pytest.raises(InvalidRequest, match="expected a message of at most 33554432 bytes"):
        messages.read_message(b"\0" * (messages.MAX_MESSAGE_BYTES + 1))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        messages.read_message(b"\x82" + data)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 1, 2, 3), (0, 4)])
@pytest.mark.parametrize("dtype", ["|u1", "<f4", ">f8", "|b1"])
def test_arrays_of_groot_come_back_as_they_were(shape: tuple[int, ...], dtype: str) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    for array in (values, np.asfortranarray(values)):
        found = messages.read_message(messages.write_groot_message({"a": array}))["a"]
        assert found.tolist() == array.tolist()
        assert found.shape == array.shape


def test_a_longer_head_of_numpy_is_read() -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.float32([1, 2]), version=(2, 0))
    assert messages.read_message(msgpack.packb({"a": {"__ndarray_class__": True, "as_npy": file.getvalue()}}))[
        "a"
    ].tolist() == [1, 2]


def test_a_head_of_numpy_with_long_numbers_is_refused() -> None:
    head = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1" * 108 + b"x"
    with pytest.raises(InvalidRequest, match=re.escape("expected an array of numbers as a file of numpy.save")):
        messages.read_message(msgpack.packb({"a": {"__ndarray_class__": True, "as_npy": head}}))


@pytest.mark.parametrize(
    ("message", "token"),
    [
        ({"endpoint": "ping", "api_token": "abc"}, "abc"),
        ({"api_token": "abc", "data": {"api_token": "inner"}}, "abc"),
        ({"data": [{"api_token": "inner"}], "endpoint": "ping"}, None),
        ({"api_token": 5, "data": b"api_token"}, None),
        ({"api_token": ["abc"]}, None),
        ({b"api_token": "abc", 7: 1}, None),
        ({"a": np.zeros(3), "b": [1.5, None, True, {"c": b"d" * 70_000}], "api_token": "ä" * 200}, "ä" * 200),
    ],
)
def test_one_text_of_a_message_is_found(message: Any, token: str | None) -> None:
    assert messages.find_text(memoryview(messages.write_message(message)), "api_token") == token


def test_no_other_value_of_a_message_is_made_while_one_text_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    unpacker = msgpack.Unpacker

    class Watched:
        def __init__(self, *given: Any, **more: Any) -> None:
            self._inner = unpacker(*given, **more)

        def unpack(self) -> Any:
            made.append(self._inner.unpack())
            return made[-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    monkeypatch.setattr(msgpack, "Unpacker", Watched)
    message = {"endpoint": "get_action", "data": {"x": [np.zeros((4, 4)), "text"]}, 5: [1], "api_token": "abc"}
    messages.find_text(memoryview(messages.write_message(message)), "api_token")
    assert made == ["endpoint", "data", "api_token", "abc"]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300))
def test_the_text_of_any_bytes_is_found_or_they_are_refused(data: bytes) -> None:
    for start in (b"", b"\x82", b"\x81\xa9api_token"):
        with contextlib.suppress(InvalidRequest):
            messages.find_text(memoryview(start + data), "api_token")
