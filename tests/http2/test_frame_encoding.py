"""Frames that are cut and put together again, and payloads that are no frame."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.http2 import frames
from edge_server.http2.frames import ConnectionFault, Http2ErrorCode
from edge_server.http2.grpc_calls import PREFIX, take_message
from edge_server.http2.header_blocks import HeaderFrames


@pytest.mark.parametrize("size", [0, 1, 16_384, 16_385, 32_768, 40_000, 65_536])
def test_a_header_block_is_cut_into_frames_and_joined_again(size: int) -> None:
    block = bytes(number % 251 for number in range(size))
    data, joiner = frames.encode_header_frames(7, frames.END_STREAM, block), HeaderFrames()
    found = None
    while data:
        assert found is None
        high, low, kind, flags, stream_id = frames.HEADER.unpack_from(data)
        end = frames.FRAME_HEADER_BYTES + (high << 8 | low)
        joiner.check(kind, stream_id)
        found = joiner.add(kind, flags, stream_id, data[frames.FRAME_HEADER_BYTES : end])
        assert end - frames.FRAME_HEADER_BYTES <= frames.DEFAULT_FRAME_BYTES
        data = data[end:]
    assert (found, joiner.flags & frames.END_STREAM, joiner.stream_id) == (block, frames.END_STREAM, 0)


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 40))
def test_bytes_of_a_queue_are_taken_in_order(queue: list[bytes], most: int) -> None:
    left = deque[bytes | memoryview](queue)
    taken, size = frames.take_pieces(left, most)
    assert size == min(most, sum(map(len, queue))) == sum(map(len, taken))
    assert b"".join(taken) + b"".join(left) == b"".join(queue)


@given(st.lists(st.binary(max_size=20), max_size=5), st.integers(1, 30))
def test_messages_are_taken_from_any_pieces(messages: list[bytes], step: int) -> None:
    data = b"".join(PREFIX.pack(0, len(message)) + message for message in messages)
    received, found = bytearray(), []
    for start in range(0, len(data), step):
        received += data[start : start + step]
        while (message := take_message(received)) is not None:
            found.append(message)
    assert (found, received) == (messages, b"")


@pytest.mark.parametrize(
    ("read", "code"),
    [
        (lambda: frames.read_settings(bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (lambda: frames.read_settings(bytes(6 * 65)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (lambda: frames.read_settings(frames.SETTING.pack(4, 2**31)), Http2ErrorCode.FLOW_CONTROL_ERROR),
        (lambda: frames.read_settings(frames.SETTING.pack(5, 16_383)), Http2ErrorCode.PROTOCOL_ERROR),
        (lambda: frames.read_settings(frames.SETTING.pack(2, 2)), Http2ErrorCode.PROTOCOL_ERROR),
        (lambda: frames.read_uint32("RST_STREAM", bytes(5)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (lambda: frames.read_goaway(bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (lambda: frames.without_padding(frames.DATA, frames.PADDED, b""), Http2ErrorCode.PROTOCOL_ERROR),
        (lambda: frames.without_padding(frames.DATA, frames.PADDED, b"\1"), Http2ErrorCode.PROTOCOL_ERROR),
        (lambda: frames.without_padding(frames.HEADERS, frames.HAS_PRIORITY, bytes(4)), Http2ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_malformed_payloads_are_refused(read: Callable[[], object], code: Http2ErrorCode) -> None:
    with pytest.raises(ConnectionFault) as caught:
        read()
    assert caught.value.code == code
