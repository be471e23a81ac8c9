"""Clients that attack the connection, and what they make the server hold: it continues to answer others, and its cost
is bounded.

The fate of the hostile connection is not tested where the protocol leaves it open: what ends it is tested with the
transport, in tests/frontends/http2 and tests/frontends/grpc. The server here has a budget of 64 MiB for messages. Its
peak memory is compared, because it must be bounded at all times and not only at the end.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from edge_server.protocol import messages
from tests.e2e.grpc_wire.wire import INFER, STREAM_INFER, Target, framed, numbers, repeat
from tests.kit.eventually import eventually
from tests.kit.server import serve

MIB = 1 << 20
BUDGET_BYTES = 64 * MIB
SLACK_BYTES = 136 * MIB
"""Beyond the budget: memory that glibc keeps for the next requests, and requests of the honest client."""

PROMISE = b"\0" + struct.pack(">I", 1 << 30)
"""The first bytes of a message of a gigabyte."""


@pytest.fixture(scope="module")
def narrow_server(wire_models: Path) -> Iterator[Target]:
    """A server that may hold little."""
    with serve(wire_models, f"--http-max-body-bytes-in-flight={BUDGET_BYTES}") as server:
        yield Target(server, "http2")
        server.stop_cleanly()


@pytest.fixture
def narrow(narrow_server: Target) -> Iterator[Target]:
    try:
        # So that what any request makes the server allocate once is there.
        narrow_server.assert_right(narrow_server.connect().call("ModelInfer", numbers(count=MIB)), count=MIB)
        yield narrow_server
    finally:
        narrow_server.close()


# -- more of something than anybody needs


def flood_of_streams(target: Target, count: int, make: Callable[[Any, int], list[Any]]) -> None:
    """Send `count` times what `make(wire, stream)` returns, over one connection."""
    wire = target.connect()
    wire.flood(b"".join(part.serialize() for _ in range(count) for part in make(wire, wire.new_stream())))


def calls_that_are_reset(target: Target) -> None:
    """Complete calls, each reset at once: CVE-2023-44487."""
    body = framed(numbers("slow"))
    flood_of_streams(
        target,
        3000,
        lambda wire, stream: [
            wire.head(stream), DataFrame(stream, body, flags=["END_STREAM"]), RstStreamFrame(stream, 8),
        ],
    )  # fmt: skip


def calls_that_the_server_resets(target: Target) -> None:
    """Each by a window that overflows."""
    flood_of_streams(target, 3000, lambda wire, stream: [wire.head(stream), WindowUpdateFrame(stream, 2**31 - 1)])


def calls_that_never_end(target: Target) -> None:
    flood_of_streams(target, 5000, lambda wire, stream: [wire.head(stream)])


def calls_to_unknown_methods(target: Target) -> None:
    flood_of_streams(target, 5000, lambda wire, stream: [wire.head(stream, f"/a/{stream}", ends=True)])


def streams_of_many_connections(target: Target) -> None:
    for _ in range(20):
        flood_of_streams(
            target,
            100,
            lambda wire, stream: [wire.head(stream, STREAM_INFER), DataFrame(stream, framed(numbers()))],
        )


def a_header_block_that_never_ends(target: Target) -> None:
    wire = target.connect()
    head = wire.head(wire.new_stream())
    head.flags.discard("END_HEADERS")
    more = ContinuationFrame(1, b"\x00\x01y\x7f\xe0\x06" + b"v" * 991).serialize()
    wire.flood(head.serialize() + more * 10_000)


def small_header_blocks_that_decode_to_huge_ones(target: Target) -> None:
    """An entry of 3,900 bytes in the table, named four thousand times in every block of four kilobytes."""
    wire = target.connect()
    wire.send(wire.head(wire.new_stream(), INFER, ("y-long", "v" * 3_900)))
    fields = [(":method", "POST"), (":scheme", "http"), (":path", INFER)]
    for _ in range(50):
        block = wire.encoder.encode(fields) + b"\xbe" * 4_000
        wire.flood(HeadersFrame(wire.new_stream(), block, flags=["END_HEADERS"]).serialize())


def settings_that_move_every_window(target: Target) -> None:
    wire = target.connect()
    wire.send(wire.head(wire.new_stream()))
    wire.flood((SettingsFrame(0, settings={4: 0}).serialize() + SettingsFrame(0, settings={4: 1}).serialize()) * 40_000)


def headers_that_change_with_each_call(target: Target) -> None:
    """A server's header cache must not grow with the number of header blocks."""
    for _ in range(20):
        wire = target.connect()
        for _ in range(50):
            target.assert_right(wire.call("ModelInfer", numbers(), [("y-call", os.urandom(500).hex())]))


def connections_that_open_and_close(target: Target) -> None:
    for _ in range(500):
        target.connect(greets=False).close()
    for _ in range(200):
        with contextlib.closing(target.connect()) as wire:
            wire.send(wire.head(wire.new_stream()))


def messages_that_never_come(target: Target) -> None:
    """Four hundred times a gigabyte."""
    for _ in range(8):
        flood_of_streams(target, 50, lambda wire, stream: [wire.head(stream), DataFrame(stream, PROMISE + b"x" * 100)])


@pytest.mark.parametrize(
    "attack",
    [
        calls_that_are_reset, calls_that_the_server_resets, calls_that_never_end, calls_to_unknown_methods,
        streams_of_many_connections, a_header_block_that_never_ends, small_header_blocks_that_decode_to_huge_ones,
        settings_that_move_every_window, headers_that_change_with_each_call, connections_that_open_and_close,
        messages_that_never_come,
    ],
)  # fmt: skip
def test_an_attack_costs_little_and_others_are_served(narrow: Target, attack: Callable[[Target], None]) -> None:
    with narrow.holds(memory_bytes=64 * MIB, processor_s=6):
        attack(narrow)
    narrow.close()
    # Their places are free again. Refused, at worst, until resets have been read.
    assert eventually(lambda: narrow.connect().call(STREAM_INFER, numbers()).status is StatusCode.OK)


def test_reset_calls_neither_run_nor_wait(narrow: Target) -> None:
    calls_that_are_reset(narrow)
    runs = narrow.server.statistics("slow")["execution_count"]
    assert eventually(lambda: narrow.connect().call("ModelInfer", numbers("slow")).status is StatusCode.OK)
    # A few were run before their reset came.
    assert narrow.server.statistics("slow")["execution_count"] - runs <= 3


# -- memory


def incomplete_messages_of_many_connections(target: Target) -> None:
    honest = target.connect()
    for _ in range(16):
        wire = target.connect()
        stream = wire.new_stream()
        wire.send(wire.head(stream))
        wire.push(stream, PROMISE + bytes(18 * MIB))
        target.assert_right(honest.call("ModelInfer", numbers(count=1000)), count=1000)


def data_beyond_the_window(target: Target) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream), DataFrame(stream, PROMISE))
    wire.flood(DataFrame(stream, bytes(16_384)).serialize() * (300 * MIB // 16_384))


def streams_to_a_slow_model(target: Target) -> None:
    """Large requests to a model that takes one at a time: reading has to wait."""
    body = framed(numbers("slow", count=2 * MIB)) * 24
    for _ in range(4):
        wire = target.connect()
        stream = wire.new_stream()
        wire.send(wire.head(stream, STREAM_INFER))
        wire.push(stream, body)


def responses_that_are_not_read(target: Target) -> None:
    """Twelve responses of four mebibytes to each of eight clients that do not open their windows."""
    body = framed(numbers(count=4 * MIB))
    for _ in range(8):
        wire = target.connect(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0})
        for _ in range(12):
            stream = wire.new_stream()
            wire.send_if_open(wire.head(stream))
            if wire.push(stream, body) < len(body):
                break
            wire.send_if_open(DataFrame(stream, flags=["END_STREAM"]))


def a_stream_of_responses_that_are_not_read(target: Target) -> None:
    wire = target.connect(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 100})
    stream = wire.new_stream()
    wire.send(wire.head(stream, STREAM_INFER))
    wire.push(stream, framed(repeat(range(10_000))) * 10)


def a_message_that_decompresses_to_a_huge_one(target: Target) -> None:
    """512 MiB of zeros."""
    packer = zlib.compressobj(9, wbits=31)
    head = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    # After such a flush equal input gives equal output, so that one piece can be repeated.
    bomb = head + (packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)) * 511
    wire = target.connect()
    answer = wire.finish(wire.send_call(bomb, metadata=[("grpc-encoding", "gzip")], flag=1))
    assert answer.status in (StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE, StatusCode.INVALID_ARGUMENT)


@pytest.mark.parametrize(
    "attack",
    [
        incomplete_messages_of_many_connections, data_beyond_the_window,
        pytest.param(streams_to_a_slow_model, marks=pytest.mark.full),
        pytest.param(responses_that_are_not_read, marks=pytest.mark.full),
        a_stream_of_responses_that_are_not_read, a_message_that_decompresses_to_a_huge_one,
    ],
)  # fmt: skip
def test_memory_is_bounded_and_others_are_served(narrow: Target, attack: Callable[[Target], None]) -> None:
    with narrow.holds(memory_bytes=BUDGET_BYTES + SLACK_BYTES, processor_s=10):
        attack(narrow)
    narrow.assert_right(narrow.connect().call("ModelInfer", numbers(count=MIB)), count=MIB)


@pytest.mark.soak
def test_memory_is_freed_after_a_message_of_hundreds_of_mebibytes(wire_models: Path) -> None:
    with serve(wire_models) as server, contextlib.closing(Target(server, "http2")) as target:
        infer = target.channel().unary_unary(INFER)
        infer(numbers(count=MIB), timeout=60)
        before = server.resident_bytes()
        for count in (300 * MIB, 700 * MIB):
            answer = messages.ModelInferResponse.FromString(infer(numbers(count=count), timeout=100))
            assert len(answer.raw_output_contents[0]) == count
            del answer
        target.assert_serves()
        assert eventually(lambda: server.resident_bytes() - before < 100 * MIB), server.resident_bytes() - before
