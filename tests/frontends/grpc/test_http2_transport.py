"""What gRPC's rules make of HTTP/2 headers and DATA, without a network."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.config import GrpcConfig
from edge_server.errors import InvalidRequest, Throttled
from edge_server.frontends.error_status import GrpcStatus
from edge_server.frontends.grpc import http2_transport
from edge_server.frontends.grpc.call import CallStatus, RpcMethod, UnaryHandler, call_status
from edge_server.frontends.grpc.http2_transport import CallHeaders, Http2Call, Http2Transport
from edge_server.frontends.memory_budget import MemoryBudget
from edge_server.http2.header_blocks import HeaderBlock

PATH = b"/test.Service/Method"
FIELDS = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", PATH), (b"content-type", b"application/grpc"))


class Side(UnaryHandler):
    """Keeps what it is given."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.messages: list[memoryview | bytes] = []
        self.has_left = self.is_last = self.takes_all = False

    def on_message(self, message: memoryview | bytes) -> None:
        self.messages.append(message)
        if self.takes_all:
            self.call.receive()

    def on_last_message(self) -> None:
        self.is_last = True

    def on_client_left(self) -> None:
        self.has_left = True


METHODS = {PATH.decode(): RpcMethod(Side, is_stream=False), "/test.Service/Stream": RpcMethod(Side, is_stream=True)}


class Stream:
    """A stream as the HTTP/2 server makes it; records the sent bytes."""

    peer = ("127.0.0.1", 7)

    def __init__(self, fields: tuple[tuple[bytes, bytes], ...] = FIELDS) -> None:
        self.headers = HeaderBlock(fields)
        self.ends: list[bytes] = []
        self.consumed = 0
        self.turn_calls: list[Callable[[], None]] = []

    def finish(self, block: bytes) -> None:
        self.ends.append(block)

    def consume(self, count: int) -> None:
        self.consumed += count

    def run_in_turn(self, call: Callable[[], None]) -> None:
        self.turn_calls.append(call)


def opened(transport: Http2Transport, stream: Any) -> Http2Call:
    return transport._on_stream(transport.server, stream)


def head(*more: tuple[bytes, bytes], fields: tuple[tuple[bytes, bytes], ...] = FIELDS) -> CallHeaders:
    return CallHeaders(HeaderBlock((*fields, *more)), METHODS)


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [(b"1H", 3_600 * 10**9), (b"2M", 120 * 10**9), (b"3S", 3 * 10**9), (b"4m", 4 * 10**6), (b"5u", 5_000), (b"6n", 6)],
)
def test_a_timeout_has_a_unit(text: bytes, expected_ns: int) -> None:
    assert head((b"grpc-timeout", text)).timeout_ns == expected_ns
    assert head((b"grpc-timeout", b"0S")).timeout_ns == 1, "no deadline is another thing than one that has passed"


@pytest.mark.parametrize("text", [b"", b"5", b"S", b"-1S", b"123456789S", b"1.5S", b"1 S", b"1x"])
def test_a_timeout_that_is_none_is_refused(text: bytes) -> None:
    refusal = head((b"grpc-timeout", text)).refusal
    assert refusal is not None
    assert refusal.code is GrpcStatus.INTERNAL


def test_metadata_keeps_repetitions_and_leaves_out_fields_of_the_transport() -> None:
    found = head((b"te", b"trailers"), (b"a", b"1"), (b"a", b"2"), (b"grpc-encoding", b"gzip"), (b"b", b"\xc3\xa9"))
    assert found.metadata == (("a", "1"), ("a", "2"), ("b", "é"))


def test_binary_metadata_may_lack_padding_and_be_joined() -> None:
    assert head((b"x-bin", b"/w"), (b"x-bin", b"AAE=, AA")).metadata == (
        ("x-bin", b"\xff"), ("x-bin", b"\0\1"), ("x-bin", b"\0"),
    )  # fmt: skip
    assert head((b"x-bin", b"A!A=")).refusal is not None


def test_metadata_that_is_equal_is_kept_once() -> None:
    """Blocks of a few bytes may name an entry of the table many times."""
    values = [value for _, value in head(*[(b"a", b"v" * 4000)] * 15).metadata]
    assert len(values) == 15
    assert len(set(map(id, values))) == 1


def test_headers_of_calls_that_need_no_metadata_hold_no_copies() -> None:
    block = HeaderBlock((*FIELDS, *[(b"a", b"v" * 4000)] * 15))
    tracemalloc.start()
    try:
        kept = [CallHeaders(block, METHODS) for _ in range(64)]
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / len(kept) < 2000


def test_a_header_list_that_is_too_large_gets_431() -> None:
    assert CallHeaders(HeaderBlock(FIELDS, is_too_large=True), METHODS).http_status == 431


def test_a_streams_messages_are_delivered_in_its_connections_turns(transport: Http2Transport) -> None:
    """A frame of many small messages does not keep the reading thread from other connections."""
    stream = Stream((*FIELDS[:2], (b":path", b"/test.Service/Stream"), FIELDS[3]))
    transport.server.thread_id = http2_transport.threading.get_ident()
    call = opened(transport, stream)
    side = call._handler
    assert isinstance(side, Side)
    side.takes_all = True
    count = 100
    call.on_data(memoryview(framed(*[b"x"] * count)), False)
    turns = 0
    while stream.turn_calls:
        before = len(side.messages)
        stream.turn_calls.pop(0)()
        assert len(side.messages) - before <= 8
        turns += 1
    assert len(side.messages) == count
    assert turns >= count // 8 - 1


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        (b"content-type", b"application/grpc+proto", 200), (b"content-type", b"application/grpc;x=y", 200),
        (b"content-type", b"application/grpcx", 415), (b"content-type", b"text/html", 415), (b":method", b"PUT", 405),
    ],
)  # fmt: skip
def test_requests_that_are_not_grpc_get_an_http_status(name: bytes, value: bytes, status: int) -> None:
    fields = tuple((key, value if key == name else given) for key, given in FIELDS)
    assert head(fields=fields).http_status == status


def test_unknown_methods_and_encodings_are_unimplemented() -> None:
    for found in (head(fields=((b":path", b"/no"), *FIELDS[:2], FIELDS[3])), head((b"grpc-encoding", b"br"))):
        assert found.refusal is not None
        assert found.refusal.code is GrpcStatus.UNIMPLEMENTED


@pytest.fixture
def transport() -> Http2Transport:
    return Http2Transport([METHODS], GrpcConfig(), 64, 4, MemoryBudget(1 << 30, 1 << 30))


def framed(*messages: bytes, flag: int = 0) -> bytes:
    return b"".join(bytes((flag,)) + len(message).to_bytes(4, "big") + message for message in messages)


@given(st.lists(st.binary(max_size=9000), min_size=1, max_size=4), st.data())
def test_messages_are_taken_out_of_frames_that_cut_them_anywhere(messages: list[bytes], data: st.DataObject) -> None:
    transport = Http2Transport([METHODS], GrpcConfig(), 8, 4, MemoryBudget(1 << 30, 1 << 30))
    stream = Stream((*FIELDS[:2], (b":path", b"/test.Service/Stream"), FIELDS[3]))
    call = opened(transport, stream)
    transport.server.thread_id = http2_transport.threading.get_ident()
    side = call._handler
    assert isinstance(side, Side)
    wire = framed(*messages)
    while wire:
        count = data.draw(st.integers(1, len(wire)))
        part, wire = wire[:count], wire[count:]
        target = call.target(len(part)) if data.draw(st.booleans()) else None
        if target is not None:
            filled = min(len(target), len(part))
            target[:filled] = part[:filled]
            part = part[filled:]
            call.on_filled(filled, not part and not wire)
        if part:
            call.on_data(memoryview(part), not wire)
        call.receive()
    for _ in messages:
        call.receive()
    assert [bytes(message) for message in side.messages] == messages
    assert side.is_last
    assert transport.budget.held == 0
    assert not stream.ends


def test_the_end_of_a_large_message_is_aligned(transport: Http2Transport) -> None:
    for size in range(5000, 5020):
        call = opened(transport, Stream())
        call.on_data(memoryview(framed(bytes(size))), True)
        side = call._handler
        assert isinstance(side, Side)
        array = np.frombuffer(side.messages[0], np.uint8)
        assert (array.__array_interface__["data"][0] + size) % 16 == 0
        assert side.messages[0].readonly  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "wire",
    [
        b"", b"\0\0", framed(b"abc")[:-1], framed(b"abc", b"d"), framed(b"abc", flag=1), framed(b"abc", flag=2),
        b"\0\xff\xff\xff\xff",
    ],
)  # fmt: skip
def test_a_unary_call_without_exactly_one_whole_message_is_refused(transport: Http2Transport, wire: bytes) -> None:
    stream = Stream()
    call = opened(transport, stream)
    call.on_data(memoryview(wire), True)
    assert len(stream.ends) == 1
    assert b"grpc-status" in stream.ends[0]
    assert isinstance(call._handler, Side)
    assert call._handler.messages == []
    assert call._handler.has_left
    assert not transport.calls


def test_a_handler_hears_once_that_its_client_left(transport: Http2Transport) -> None:
    """The status of a call that is refused may wait for the client, which then resets the stream."""
    call = opened(transport, Stream())
    side = call._handler
    assert isinstance(side, Side)
    call.abort(CallStatus(GrpcStatus.CANCELLED))
    assert side.has_left
    side.has_left = False
    call.on_reset(8)
    assert not side.has_left


def test_messages_on_their_way_hold_no_more_than_the_budget(transport: Http2Transport) -> None:
    transport.budget.total = 10_000
    transport.server.thread_id = http2_transport.threading.get_ident()
    streams = [Stream() for _ in range(3)]
    calls = [opened(transport, stream) for stream in streams]
    for call, count in zip(calls, (1000, 6000, 2000), strict=True):
        call.on_data(memoryview(framed(bytes(9000))[:count]), False)
    calls[0].on_data(memoryview(bytes(2000)), False)
    assert [len(stream.ends) for stream in streams] == [0, 1, 0], "the one that holds most is refused"
    calls[0].on_data(memoryview(bytes(6000 + 5)), True)
    side = calls[0]._handler
    assert isinstance(side, Side)
    assert len(side.messages[0]) == 9000


def test_a_message_that_does_not_come_is_given_up(transport: Http2Transport) -> None:
    streams = [Stream(), Stream()]
    silent, slow = (opened(transport, stream) for stream in streams)
    slow.on_data(memoryview(framed(bytes(1 << 20))[: 1 << 16]), False)
    now_s = transport.server.now_s
    for call in (silent, slow):
        call.on_tick(now_s + 59)
    assert [stream.ends for stream in streams] == [[], []]
    silent.on_tick(now_s + 61)
    slow.on_tick(now_s + 61)
    assert [len(stream.ends) for stream in streams] == [1, 0]
    slow.on_tick(now_s + 200)
    assert [len(stream.ends) for stream in streams] == [1, 1]


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_decompressed_messages_are_bounded_and_complete(encoding: str, compress: Any) -> None:
    data = bytes(3 << 20)
    packed = bytearray(compress(data))
    assert bytes(http2_transport._inflated(packed, encoding, len(data))) == data
    with pytest.raises(Throttled):
        http2_transport._inflated(packed, encoding, len(data) - 1)
    with pytest.raises(InvalidRequest, match="end is missing"):
        http2_transport._inflated(packed[:-1], encoding, len(data))
    with pytest.raises(InvalidRequest, match=encoding):
        http2_transport._inflated(bytearray(b"none"), encoding, len(data))


def test_a_status_is_percent_encoded() -> None:
    block = http2_transport._encoded_status(CallStatus(GrpcStatus.INTERNAL, "100% \né~"), is_alone=False)
    assert b"grpc-message\x11100%25 %0A%C3%A9~" in block
    long = call_status(InvalidRequest("☺" * 50_000))
    assert len(http2_transport._encoded_status(long, is_alone=True)) < 8000
