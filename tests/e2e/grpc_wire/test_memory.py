"""Memory that clients make the server hold: incomplete messages, unread responses and huge messages.

The server of these tests has a budget of 64 MiB for messages. Its peak memory is compared, because it must be
bounded at all times and not only at the end.
"""

from __future__ import annotations

import contextlib
import gzip
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hyperframe.frame import DataFrame, SettingsFrame

from edge_server.protocol import messages
from tests.kit.eventually import eventually
from tests.kit.server import serve

MIB = 1 << 20
BUDGET_BYTES = 64 * MIB
SLACK_BYTES = 136 * MIB
"""Beyond the budget: memory that glibc keeps for the next requests, and requests of the honest client."""

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture(scope="session")
def narrow_server(
    wire_models: Path, transport: str, transport_flags: tuple[str, ...], make_target: Callable[..., Any]
) -> Iterator[Any]:
    """A server that may hold little."""
    if transport == "grpcio":
        pytest.skip("grpcio's core holds whatever it is sent")
    with serve(wire_models, f"--http-max-body-bytes-in-flight={BUDGET_BYTES}", *transport_flags) as server:
        yield make_target(server, transport)
        server.stop_cleanly()


@pytest.fixture
def narrow(narrow_server: Any) -> Iterator[Any]:
    try:
        # So that what any request makes the server allocate once is there.
        narrow_server.assert_right(
            narrow_server.connect().call("ModelInfer", narrow_server.numbers(count=MIB)), count=MIB
        )
        with narrow_server.holds(memory_bytes=BUDGET_BYTES + SLACK_BYTES, processor_s=10):
            yield narrow_server
            narrow_server.assert_serves()
        narrow_server.assert_settles()
    finally:
        narrow_server.close()


def begin(target: Any, size: int, sent: int, path: str = INFER) -> Any:
    """Return a connection on which at most `sent` bytes of a message of `size` bytes were sent."""
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, path))
    wire.ping()
    wire.push(stream, b"\0" + struct.pack(">I", size) + bytes(sent - 5))
    return wire


@pytest.mark.parametrize("path", [INFER, pytest.param(STREAM_INFER, marks=pytest.mark.full)])
def test_memory_of_incomplete_messages_is_bounded_and_others_are_served(narrow: Any, path: str) -> None:
    honest = narrow.connect()
    for _ in range(16):
        begin(narrow, 1 << 30, 18 * MIB, path)
        narrow.assert_right(honest.call("ModelInfer", narrow.numbers(count=1000)), count=1000)
    narrow.assert_right(honest.call("ModelInfer", narrow.numbers(count=MIB)), count=MIB)


def test_memory_of_incomplete_messages_of_one_connection_is_bounded(narrow: Any) -> None:
    wire = narrow.connect()
    streams = [wire.new_stream() for _ in range(20)]
    for stream in streams:
        wire.send_if_open(wire.head(stream))
        if not wire.push(stream, b"\0" + struct.pack(">I", 1 << 30) + bytes(18 * MIB)):
            break
    narrow.assert_serves()


def test_a_client_that_ignores_the_flow_control_window_is_bounded(narrow: Any) -> None:
    wire = narrow.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream), DataFrame(stream, b"\0" + struct.pack(">I", 1 << 30)))
    wire.flood(DataFrame(stream, bytes(16_384)).serialize() * (300 * MIB // 16_384))
    narrow.assert_serves()


@pytest.mark.full
def test_memory_of_requests_waiting_for_a_slow_model_is_bounded(narrow: Any) -> None:
    """Streams of large requests to a model that takes one at a time: reading has to wait."""
    body = narrow.framed(narrow.numbers("slow", count=2 * MIB)) * 24
    for _ in range(4):
        wire = narrow.connect()
        stream = wire.new_stream()
        wire.send(wire.head(stream, STREAM_INFER))
        wire.push(stream, body)
    narrow.assert_serves()
    narrow.close()


@pytest.mark.full
def test_memory_of_unread_responses_is_bounded(narrow: Any) -> None:
    """Twelve responses of four mebibytes to each of eight clients that do not open their windows."""
    body = narrow.framed(narrow.numbers(count=4 * MIB))
    for _ in range(8):
        wire = narrow.connect(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0})
        for _ in range(12):
            stream = wire.new_stream()
            wire.send_if_open(wire.head(stream))
            if wire.push(stream, body) < len(body):
                break
            wire.send_if_open(DataFrame(stream, flags=["END_STREAM"]))
    narrow.assert_serves()


def test_unread_responses_pause_the_stream_that_produces_them(narrow: Any) -> None:
    wire = narrow.connect(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 100})
    stream = wire.new_stream()
    wire.send(wire.head(stream, STREAM_INFER))
    wire.push(stream, narrow.framed(narrow.repeat(range(10_000))) * 10)
    narrow.assert_serves()


def bombs() -> dict[str, bytes]:
    """Messages of 512 MiB of zeros, compressed."""
    made = {}
    for encoding, bits in (("gzip", 31), ("deflate", 15)):
        packer = zlib.compressobj(9, wbits=bits)
        head = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
        # After such a flush equal input gives equal output, so that one piece can be repeated.
        made[encoding] = head + (packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)) * 511
    return made


@pytest.mark.parametrize("encoding", ["gzip", pytest.param("deflate", marks=pytest.mark.full)])
def test_a_small_message_that_decompresses_to_a_huge_one_is_refused(narrow: Any, encoding: str) -> None:
    wire = narrow.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, INFER, ("grpc-encoding", encoding)))
    wire.send_data(stream, narrow.framed(bombs()[encoding], 1))
    answer = wire.finish(stream)
    assert answer.status is not None, answer
    assert answer.status.name in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "INVALID_ARGUMENT")
    narrow.assert_right(narrow.connect().call("ModelInfer", narrow.numbers()))


@pytest.mark.full
def test_a_message_beyond_the_budget_is_refused_by_its_announced_length(narrow: Any) -> None:
    wire = narrow.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream))
    wire.send(DataFrame(stream, b"\0" + struct.pack(">I", 2**31 - 1) + b"x"))
    begin(narrow, 2**31 - 1, BUDGET_BYTES * 2)
    narrow.assert_serves()


def compressed_echo(target: Any, count: int) -> None:
    wire = target.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream, INFER, ("grpc-encoding", "gzip")))
    wire.send_data(stream, target.framed(gzip.compress(target.numbers(count=count), 1), 1))
    target.assert_right(wire.finish(stream), count=count)


@pytest.mark.full
def test_sequential_calls_leak_no_memory(target: Any) -> None:
    """Each on a connection of its own, refused ones and compressed ones among them."""
    for round_number in range(2):
        bound = 400 * MIB if round_number == 0 else 16 * MIB
        with target.holds(memory_bytes=bound, processor_s=20):
            for _ in range(60):
                with contextlib.closing(target.connect()) as wire:
                    target.assert_right(wire.call("ModelInfer", target.numbers(count=100_000)), count=100_000)
                    assert wire.call("ModelInfer", target.numbers("nobody")).status is not None
                    assert wire.call("Nonsense", bytes(10_000)).status is not None
                compressed_echo(target, 10_000)


@pytest.mark.soak
def test_memory_is_freed_after_a_message_of_hundreds_of_mebibytes(
    wire_models: Path, transport: str, transport_flags: tuple[str, ...], make_target: Any
) -> None:
    if transport == "grpcio":
        pytest.skip("grpcio's core keeps what it had")
    with serve(wire_models, *transport_flags) as server, contextlib.closing(make_target(server, transport)) as target:
        infer = target.channel().unary_unary(INFER)
        infer(target.numbers(count=MIB), timeout=60)
        before = server.resident_bytes()
        for count in (300 * MIB, 700 * MIB):
            request = messages.ModelInferRequest(model_name="same")
            request.inputs.add(name="INPUT0", datatype="UINT8", shape=[1, count])
            request.raw_input_contents.append(bytes(count))
            answer = messages.ModelInferResponse.FromString(infer(request.SerializeToString(), timeout=100))
            assert len(answer.raw_output_contents[0]) == count
            del request, answer
        target.assert_serves()
        assert eventually(lambda: server.resident_bytes() - before < 100 * MIB), server.resident_bytes() - before
