"""Clients that attack the connection: the server continues to answer others, and its cost is bounded.

`holds` limits the memory and processor time of a case. The fate of the hostile connection is not tested where the
protocol leaves it open; the rules of the protocol are tested with the transport.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import hpack
import pytest
from grpc import StatusCode
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.kit.eventually import eventually

MIB = 1 << 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(193))


def raw(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """Return a frame put together by hand, whatever is wrong with it."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


@pytest.fixture
def bounded(target: Any) -> Iterator[Any]:
    """The server, which may spend little on what the test does, and comes to rest while the connections are open."""
    with target.holds(memory_bytes=64 * MIB, processor_s=6):
        yield target
        target.assert_serves()
    target.assert_settles()


# -- data that is not HTTP/2


OTHER_PROTOCOLS = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/1.1 that asks for HTTP/2": b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
    "HTTP/1.1 with a body": b"POST /v2/models/same/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    + bytes(100_000),
    "TLS": CLIENT_HELLO,
    "nothing but zeros": bytes(100_000),
    "nothing but ones": b"\xff" * 100_000,
    "SSH": b"SSH-2.0-OpenSSH_9.7\r\n",
    "a preface with one letter wrong": PREFACE.replace(b"SM", b"SN") + raw(4, 0, 0),
    "no SETTINGS after the preface": PREFACE + raw(6, 0, 0, bytes(8)),
}


@pytest.mark.parametrize("words", OTHER_PROTOCOLS)
def test_another_protocol_ends_its_connection(bounded: Any, words: str) -> None:
    wire = bounded.connect(greets=False)
    wire.flood(OTHER_PROTOCOLS[words])
    with contextlib.suppress(OSError):  # closed already
        wire.socket.shutdown(socket.SHUT_WR)
    # Read until the end. An HTTP/1.1 client may get an HTTP/1.1 response.
    with contextlib.suppress(ConnectionError):
        while wire.socket.recv(1 << 16):
            pass


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_end_their_connections(bounded: Any, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        with contextlib.closing(bounded.connect(greets=False)) as wire:
            wire.flood((PREFACE + raw(4, 0, 0) if chance.random() < 0.8 else b"") + chance.randbytes(2_000))


@pytest.mark.parametrize("seed", range(4))
def test_random_frames_end_their_connections(bounded: Any, seed: int) -> None:
    """Frames with right lengths and wrong everything else, so that they get further than random bytes."""
    chance = random.Random(seed)
    for _ in range(20):
        with contextlib.closing(bounded.connect()) as wire:
            head = wire.head(wire.new_stream()).serialize()
            frames = [
                raw(chance.randrange(12), chance.randrange(256), chance.choice([0, 1, 1, 1, 2, 3, 5, 2**31 - 1, 2**31]),
                    chance.randbytes(chance.choice([0, 0, 4, 5, 6, 8, 8, 18, 100])))
                for _ in range(40)
            ]  # fmt: skip
            wire.flood(head + b"".join(frames))


# -- more of something than anybody needs


def reset_calls(target: Any) -> None:
    """Open calls that are complete, and reset each at once: CVE-2023-44487."""
    wire = target.connect()
    body = target.framed(target.numbers("slow"))
    parts = []
    for _ in range(3_000):
        stream = wire.new_stream()
        parts += [wire.head(stream), DataFrame(stream, body, flags=["END_STREAM"]), RstStreamFrame(stream, 8)]
    wire.flood(b"".join(part.serialize() for part in parts))


def test_calls_reset_as_fast_as_they_are_opened(bounded: Any) -> None:
    leaves_room_for_others(bounded)
    reset_calls(bounded)


def test_reset_calls_neither_run_nor_wait(target: Any) -> None:
    reset_calls(target)
    runs = target.server.statistics("slow")["execution_count"]
    # Refused, at worst, until the resets have been read.
    assert eventually(lambda: target.connect().call("ModelInfer", target.numbers("slow")).status is StatusCode.OK)
    # A few were run before their reset came.
    assert target.server.statistics("slow")["execution_count"] - runs <= 3


def leaves_room_for_others(target: Any) -> None:
    if target.transport == "grpcio":
        pytest.skip("a single client may open all calls that grpcio's server serves at once")


def test_calls_that_the_server_resets(bounded: Any) -> None:
    """The other side of rapid reset: each call makes the server reset it, by a window that overflows."""
    leaves_room_for_others(bounded)
    wire = bounded.connect()
    parts = []
    for _ in range(3_000):
        stream = wire.new_stream()
        parts += [wire.head(stream), WindowUpdateFrame(stream, window_increment=2**31 - 1)]
    wire.flood(b"".join(part.serialize() for part in parts))


def test_thousands_of_calls_opened_and_never_ended(bounded: Any) -> None:
    leaves_room_for_others(bounded)
    wire = bounded.connect()
    wire.flood(b"".join(wire.head(wire.new_stream()).serialize() for _ in range(5_000)))
    bounded.assert_serves()


@pytest.mark.parametrize("sends_a_message", [False, True])
def test_thousands_of_streams_opened_and_never_ended_over_many_connections(bounded: Any, sends_a_message: bool) -> None:
    for _ in range(20):
        wire = bounded.connect()
        frames = []
        for _ in range(100):
            stream = wire.new_stream()
            frames.append(wire.head(stream, STREAM_INFER))
            if sends_a_message:
                frames.append(DataFrame(stream, bounded.framed(bounded.numbers())))
        wire.flood(b"".join(frame.serialize() for frame in frames))
    bounded.assert_serves()
    bounded.close()
    # Their places are free again.
    answer = bounded.connect().call(STREAM_INFER, bounded.numbers())
    assert answer.status is not None, answer


@pytest.mark.parametrize("size", [0, 1, 1_000])
def test_a_header_block_that_never_ends(bounded: Any, size: int) -> None:
    wire = bounded.connect()
    head = wire.head(wire.new_stream())
    head.flags.discard("END_HEADERS")
    # An empty name and value, or a long one, again and again.
    block = b"" if size == 0 else b"\x00\x01y\x00" if size == 1 else b"\x00\x01y\x7f\xe0\x06" + b"v" * 991
    more = ContinuationFrame(1, block).serialize()
    wire.flood(head.serialize() + more * (20_000 if size < 1_000 else 10_000))


def test_a_small_header_block_that_decodes_to_a_huge_one(bounded: Any) -> None:
    """An entry of 3,900 bytes in the table, named four thousand times in every block of four kilobytes."""
    wire = bounded.connect()
    head = wire.head(wire.new_stream(), INFER, ("y-long", "v" * 3_900))
    wire.send(head)
    for _ in range(50):
        stream = wire.new_stream()
        block = wire.encoder.encode([(":method", "POST"), (":scheme", "http"), (":path", INFER)]) + b"\xbe" * 4_000
        wire.flood(HeadersFrame(stream, block, flags=["END_HEADERS"]).serialize())


def test_header_blocks_of_many_fields(bounded: Any) -> None:
    wire = bounded.connect()
    fields = [(f"y-{number}", "v") for number in range(2_000)]
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    for _ in range(20):
        stream = wire.new_stream()
        block = encoder.encode([(":method", "POST"), (":scheme", "http"), (":path", INFER), *fields])
        frames = [HeadersFrame(stream, block[:16_000])]
        frames += [ContinuationFrame(stream, block[at : at + 16_000]) for at in range(16_000, len(block), 16_000)]
        frames[-1].flags.add("END_HEADERS")
        wire.flood(b"".join(frame.serialize() for frame in frames))


FLOODS: dict[str, bytes] = {
    "SETTINGS": SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 100_000}).serialize(),
    "empty SETTINGS": SettingsFrame(0).serialize(),
    "SETTINGS that move every window": SettingsFrame(0, settings={4: 0}).serialize()
    + SettingsFrame(0, settings={4: 1}).serialize(),
    "SETTINGS of a table that shrinks and grows": SettingsFrame(0, settings={1: 0}).serialize()
    + SettingsFrame(0, settings={1: 4096}).serialize(),
    "acknowledgements of SETTINGS": SettingsFrame(0, flags=["ACK"]).serialize(),
    "PING": PingFrame(0, b"12345678").serialize(),
    "answers to PING": PingFrame(0, b"12345678", flags=["ACK"]).serialize(),
    "empty DATA": DataFrame(1).serialize(),
    "padded empty DATA": DataFrame(1, pad_length=0, flags=["PADDED"]).serialize(),
    "WINDOW_UPDATE": WindowUpdateFrame(0, window_increment=1).serialize(),
    "WINDOW_UPDATE of a call": WindowUpdateFrame(1, window_increment=1).serialize(),
    "PRIORITY": raw(2, 0, 1, bytes(5)),
    "PRIORITY of calls that are not there": raw(2, 0, 2**31 - 1, bytes(5)),
    "RST_STREAM of a call that is over": raw(3, 0, 1, bytes(4)),
    "frames of no known kind": raw(99, 0, 0, b"?"),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_one_frame(bounded: Any, kind: str) -> None:
    """Nothing that the server sends is read."""
    wire = bounded.connect()
    wire.send(wire.head(wire.new_stream()))
    wire.flood(FLOODS[kind] * 40_000)


def test_a_flood_of_empty_calls(bounded: Any) -> None:
    wire = bounded.connect()
    wire.flood(b"".join(wire.head(wire.new_stream(), ends=True).serialize() for _ in range(5_000)))


def test_a_flood_of_calls_to_unknown_methods(bounded: Any) -> None:
    wire = bounded.connect()
    wire.flood(b"".join(wire.head(wire.new_stream(), f"/a/{n}", ends=True).serialize() for n in range(5_000)))


def test_valid_calls_with_ever_changing_headers(bounded: Any) -> None:
    """A server's header cache must not grow with the number of header blocks."""
    for number in range(20):
        wire = bounded.connect()
        for count in range(50):
            metadata = [("y-call", f"{number}-{count}-" + os.urandom(500).hex())]
            bounded.assert_right(wire.call("ModelInfer", bounded.numbers(), metadata=metadata))


def test_connections_that_open_and_close(bounded: Any) -> None:
    for _ in range(500):
        bounded.connect(greets=False).close()
    for _ in range(200):
        with contextlib.closing(bounded.connect()) as wire:
            wire.send(wire.head(wire.new_stream()))


# -- clients that stop reading or sending


def test_a_call_with_a_zero_window_waits_while_others_are_served(bounded: Any) -> None:
    wire = bounded.connect(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    streams = [wire.new_stream() for _ in range(20)]
    for stream in streams:
        wire.send(wire.head(stream))
        wire.send_data(stream, bounded.framed(bounded.numbers(count=1000)))
    bounded.assert_serves()
    bounded.assert_settles()
    # One octet at a time for one of them, everything at once for the others.
    first, *rest = streams
    while not wire.answers[first].is_ended:
        wire.send(WindowUpdateFrame(first, window_increment=1))
        before = len(wire.answers[first].data)
        while len(wire.answers[first].data) == before and not wire.answers[first].is_ended:
            assert wire.read() is not None
    bounded.assert_right(wire.answers[first], count=1000)
    wire.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 65_535}))
    for stream in rest:
        bounded.assert_right(wire.finish(stream), count=1000)


def test_a_window_that_is_reduced_and_restored(bounded: Any) -> None:
    """A setting may make the window of an open call negative."""
    wire = bounded.connect(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 100})
    stream = wire.new_stream()
    wire.send(wire.head(stream))
    wire.send_data(stream, bounded.framed(bounded.numbers(count=5000)))
    while len(wire.answers[stream].data) < 100:
        assert wire.read() is not None
    wire.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}))
    wire.send(WindowUpdateFrame(stream, window_increment=50))
    wire.ping()
    assert len(wire.answers[stream].data) == 100, "its window is 50 below nothing"
    wire.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 65_535}))
    bounded.assert_right(wire.finish(stream), count=5000)


def test_the_connection_window_is_respected(bounded: Any) -> None:
    wire = bounded.connect(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 2**31 - 1})
    streams = [wire.new_stream() for _ in range(4)]
    for stream in streams:
        wire.send(wire.head(stream))
        wire.send_data(stream, bounded.framed(bounded.numbers(count=30_000)))
    while sum(len(answer.data) for answer in wire.answers.values()) < 65_535:
        assert wire.read() is not None
    wire.ping()
    assert sum(len(answer.data) for answer in wire.answers.values()) == 65_535
    wire.send(WindowUpdateFrame(0, window_increment=1_000_000))
    for stream in streams:
        bounded.assert_right(wire.finish(stream), count=30_000)


def test_frames_do_not_exceed_the_clients_maximum_size(bounded: Any) -> None:
    wire = bounded.connect()
    bounded.assert_right(wire.call("ModelInfer", bounded.numbers(count=200_000)), count=200_000)
    assert max(len(frame.data) for frame in wire.frames if isinstance(frame, DataFrame)) <= 16_384


def test_a_slow_reader_gets_all_data(bounded: Any) -> None:
    wire = bounded.connect(buffer_bytes=4_096)
    streams = [wire.new_stream() for _ in range(8)]
    for stream in streams:
        wire.send(wire.head(stream))
        wire.send_data(stream, bounded.framed(bounded.numbers(count=300_000)))
    bounded.assert_serves()
    bounded.assert_settles()
    for stream in streams:
        bounded.assert_right(wire.finish(stream), count=300_000)


def test_data_of_a_cancelled_call_does_not_stop_its_connection(bounded: Any) -> None:
    """More than the connection's window comes for a call that is over: the window must open again all the same."""
    wire = bounded.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream))
    promised = b"\0" + struct.pack(">I", 64 * MIB)
    wire.send_data(stream, promised + bytes(40_000), ends=False)
    wire.send(RstStreamFrame(stream, 8))
    for _ in range(3):
        # As a client whose data was in flight: it knows the window of the connection, but not that the call has ended.
        other = wire.new_stream()
        wire.send(wire.head(other))
        wire.send_data(other, promised + bytes(60_000), ends=False)
        wire.send(RstStreamFrame(other, 8))
    bounded.assert_right(wire.call("ModelInfer", bounded.numbers(count=200_000)), count=200_000)


def test_data_of_a_refused_call_does_not_stop_its_connection(bounded: Any) -> None:
    """The server answers before it has the message; it still has to read the rest of it."""
    wire = bounded.connect()
    for _ in range(4):
        stream = wire.new_stream()
        wire.send(wire.head(stream, "/nobody/Nothing"))
        while not wire.answers[stream].is_ended and wire._window > 16_384:
            wire.send(DataFrame(stream, bytes(16_384)))
            wire._window -= 16_384
            if wire._window < 32_768:
                wire.read()
        wire.send_if_open(RstStreamFrame(stream, 8))
    bounded.assert_right(wire.call("ModelInfer", bounded.numbers(count=200_000)), count=200_000)


def test_announced_messages_that_are_never_sent_take_no_memory(bounded: Any) -> None:
    """Four hundred times a gigabyte."""
    for _ in range(8):
        wire = bounded.connect()
        for _ in range(50):
            stream = wire.new_stream()
            wire.send(wire.head(stream), DataFrame(stream, b"\0" + struct.pack(">I", 1 << 30) + b"x" * 100))
    bounded.assert_serves()


def test_a_half_closed_connection_is_answered_or_closed(bounded: Any) -> None:
    wire = bounded.connect()
    stream = wire.new_stream()
    wire.send(wire.head(stream))
    wire.send_data(stream, bounded.framed(bounded.numbers("slow")))
    wire.socket.shutdown(socket.SHUT_WR)
    wire.finish(stream)
    wire.rest()
