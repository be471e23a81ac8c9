"""A valid call gets the same response however its bytes are split."""

from __future__ import annotations

import contextlib
from typing import Any

from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


def conversation(target: Any, wire: Any) -> bytes:
    """Return all bytes that a client sends for one call, from the start of its connection."""
    stream = wire.new_stream()
    parts = [SettingsFrame(0), wire.head(stream), DataFrame(stream, target.framed(target.numbers()))]
    return b"".join(
        [PREFACE, *(part.serialize() for part in parts), DataFrame(stream, flags=["END_STREAM"]).serialize()]
    )


def test_a_connection_cut_into_two_pieces_at_every_byte(target: Any) -> None:
    count = len(conversation(target, target.connect(greets=False)))
    wires = [target.connect(greets=False) for _ in range(1, count)]
    rest = []
    for cut, wire in enumerate(wires, 1):
        data = conversation(target, wire)
        wire.send(data[:cut])
        rest.append(data[cut:])
    # A call of another client, so that the server has read the first pieces when the second come.
    target.assert_serves()
    for wire, data in zip(wires, rest, strict=True):
        wire.send(data)
    for wire in wires:
        target.assert_right(wire.finish(1))


def test_a_call_on_a_connection_in_use_cut_at_every_byte(target: Any) -> None:
    """The header tables of both sides are filled by then, so that most fields of the head are one byte."""
    wire, other = target.connect(), target.connect()
    target.assert_right(wire.call("ModelInfer", target.numbers()))
    cut = 1
    while True:
        stream = wire.new_stream()
        body = DataFrame(stream, target.framed(target.numbers(id=str(cut % 10))), flags=["END_STREAM"])
        data = wire.head(stream).serialize() + body.serialize()
        wire.send(data[:cut])
        target.assert_right(other.call("ModelInfer", target.numbers()))
        wire.send(data[cut:])
        target.assert_right(wire.finish(stream), str(cut % 10))
        cut += 1
        if cut == len(data):
            return


def test_a_connection_sent_one_byte_at_a_time(target: Any) -> None:
    wire, other = target.connect(greets=False), target.connect()
    for number, octet in enumerate(conversation(target, wire)):
        wire.send(bytes([octet]))
        if number % 8 == 0:
            target.assert_right(other.call("ModelInfer", target.numbers()))
    target.assert_right(wire.finish(1))


def test_a_large_message_in_pieces_of_any_size(target: Any) -> None:
    for size, count in ((7, 5_000), (4_095, 60_000), (16_384 + 9, 60_000)):
        wire = target.connect()
        stream = wire.new_stream()
        wire.send(wire.head(stream))
        body = target.framed(target.numbers(count=count))
        frames = b"".join(DataFrame(stream, body[at : at + 16_384]).serialize() for at in range(0, len(body), 16_384))
        frames += DataFrame(stream, flags=["END_STREAM"]).serialize()
        for at in range(0, len(frames), size):
            wire.send(frames[at : at + size])
        target.assert_right(wire.finish(stream), count=count)


def test_two_messages_of_a_stream_in_two_frames_cut_at_every_byte(target: Any) -> None:
    body = b"".join(target.framed(target.numbers(id=name)) for name in "ab")
    wire = target.connect()
    for cut in range(len(body) + 1):
        stream = wire.new_stream()
        wire.send(wire.head(stream, STREAM_INFER), DataFrame(stream, body[:cut]))
        wire.send(DataFrame(stream, body[cut:], flags=["END_STREAM"]))
        answer = wire.finish(stream)
        assert answer.status is not None, answer
        assert (answer.status.value[0], len(answer.messages)) == (0, 2)


def test_a_header_block_split_into_continuations_at_every_byte(target: Any) -> None:
    wire = target.connect()
    cut = 0
    while True:
        stream = wire.new_stream()
        block = wire.head(stream, "/inference.GRPCInferenceService/ModelInfer", ("y-cut", "anywhere")).data
        first = HeadersFrame(stream, block[:cut])
        body = DataFrame(stream, target.framed(target.numbers()), flags=["END_STREAM"])
        # A CONTINUATION frame by hand: type 9, flag END_HEADERS.
        follows = len(block[cut:]).to_bytes(3, "big") + b"\x09\x04" + stream.to_bytes(4, "big") + block[cut:]
        wire.send(first, follows, body)
        target.assert_right(wire.finish(stream))
        cut += 1
        if cut > len(block):
            return


def test_a_connection_that_ends_at_any_byte_does_not_disturb_others(target: Any) -> None:
    count = len(conversation(target, target.connect(greets=False)))
    for cut in range(0, count, 3):
        wire = target.connect(greets=False)
        wire.send(conversation(target, wire)[:cut])
        wire.close()
    with contextlib.closing(target.connect()) as wire:
        target.assert_right(wire.call("ModelInfer", target.numbers()))
