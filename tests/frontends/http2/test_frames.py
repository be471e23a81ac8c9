"""RFC 9113, section by section, with frames that are right and wrong."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from edge_server.frontends.http2 import server as http2_server
from edge_server.http2.frames import PREFACE, Http2ErrorCode

Serve = Callable[..., Any]


def raw(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


SETTINGS = SettingsFrame().serialize()


def test_first_comes_settings_of_the_server_3_4(serve: Serve) -> None:
    client = serve().connect()
    frame = client.receive()
    assert isinstance(frame, SettingsFrame)
    assert "ACK" not in frame.flags
    assert isinstance(client.receive(), WindowUpdateFrame)
    assert "ACK" in client.until(SettingsFrame).flags


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r", b"\0"])
def test_anything_but_the_preface_ends_the_connection_3_4(serve: Serve, data: bytes) -> None:
    client = serve().connect(says_hello=False)
    client.send(data)
    while client.receive() is not None:
        pass


@pytest.mark.parametrize("first", [raw(6, 0, 0, bytes(8)), raw(1, 5, 1, b"\x82"), raw(0, 0, 1, b"x")])
def test_the_first_frame_must_be_settings_3_4(serve: Serve, first: bytes) -> None:
    client = serve().connect(says_hello=False)
    client.send(PREFACE, first)
    assert client.goaway_code() == Http2ErrorCode.PROTOCOL_ERROR


WRONG = {
    "6.1 DATA on the connection": (raw(0, 0, 0, b"x"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.1 DATA on an idle stream": (raw(0, 0, 5, b"x"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.1 DATA on an even stream": (raw(0, 0, 2, b"x"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.1 padding longer than its frame": (raw(0, 8, 1, b"\x05xxxx"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.1 padded DATA without payload": (raw(0, 8, 1), Http2ErrorCode.FRAME_SIZE_ERROR),
    "6.2 HEADERS on the connection": (raw(1, 4, 0, b"\x82"), Http2ErrorCode.PROTOCOL_ERROR),
    "5.1.1 HEADERS on an even stream": (raw(1, 4, 2, b"\x82"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.2 HEADERS with too much padding": (raw(1, 0xC, 3, b"\x05\x82"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.2 padded HEADERS without payload": (raw(1, 0xC, 3), Http2ErrorCode.PROTOCOL_ERROR),
    "6.2 HEADERS with half a priority": (raw(1, 0x24, 3, b"\0\0\0"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.3 PRIORITY on the connection": (raw(2, 0, 0, bytes(5)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.3 PRIORITY of 4 bytes on an idle stream": (raw(2, 0, 9, bytes(4)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "6.4 RST_STREAM on the connection": (raw(3, 0, 0, bytes(4)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.4 RST_STREAM on an idle stream": (raw(3, 0, 7, bytes(4)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.4 RST_STREAM of 3 bytes": (raw(3, 0, 1, bytes(3)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "6.5 SETTINGS on a stream": (raw(4, 0, 1), Http2ErrorCode.PROTOCOL_ERROR),
    "6.5 SETTINGS of 5 bytes": (raw(4, 0, 0, bytes(5)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "6.5 SETTINGS with ACK and payload": (raw(4, 1, 0, bytes(6)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "6.5.2 ENABLE_PUSH of 2": (raw(4, 0, 0, struct.pack(">HI", 2, 2)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.5.2 window of 2^31": (raw(4, 0, 0, struct.pack(">HI", 4, 1 << 31)), Http2ErrorCode.FLOW_CONTROL_ERROR),
    "6.5.2 frame size of 100": (raw(4, 0, 0, struct.pack(">HI", 5, 100)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.5.2 frame size of 2^24": (raw(4, 0, 0, struct.pack(">HI", 5, 1 << 24)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.6 PUSH_PROMISE": (raw(5, 4, 1, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.7 PING on a stream": (raw(6, 0, 1, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.7 PING of 7 bytes": (raw(6, 0, 0, bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "6.8 GOAWAY on a stream": (raw(7, 0, 1, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.8 GOAWAY of 7 bytes": (raw(7, 0, 0, bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "6.9 WINDOW_UPDATE of 0 on the connection": (raw(8, 0, 0, bytes(4)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of 3 bytes": (raw(8, 0, 0, bytes(3)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "6.9 WINDOW_UPDATE on an idle stream": (raw(8, 0, 9, b"\0\0\0\1"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.9.1 window of the connection too large": (raw(8, 0, 0, b"\x7f\xff\xff\xff"), Http2ErrorCode.FLOW_CONTROL_ERROR),
    "6.10 CONTINUATION alone": (raw(9, 4, 1, b"\x82"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.10 PING within a header block": (raw(1, 0, 3, b"\x82") + raw(6, 0, 0, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.10 WINDOW_UPDATE within a header block": (
        raw(1, 0, 3, b"\x82") + raw(8, 0, 1, b"\0\0\0\1"),
        Http2ErrorCode.PROTOCOL_ERROR,
    ),
    "6.10 DATA within a header block": (raw(1, 0, 3, b"\x82") + raw(0, 0, 1, b"x"), Http2ErrorCode.PROTOCOL_ERROR),
    "6.10 CONTINUATION of another": (raw(1, 0, 3, b"\x82") + raw(9, 4, 1, b""), Http2ErrorCode.PROTOCOL_ERROR),
    "5.1.1 HEADERS on a lower stream than before": (
        raw(1, 4, 9, b"\x82") + raw(1, 4, 7, b"\x82"),
        Http2ErrorCode.STREAM_CLOSED,
    ),
    "5.5 an unknown frame within a header block": (
        raw(1, 0, 3, b"\x82") + raw(0xEE, 0, 3, b"?"),
        Http2ErrorCode.PROTOCOL_ERROR,
    ),
    "4.2 HEADERS of 64 KiB and more": (raw(1, 4, 3, bytes(70000)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "6.5.2 first of two windows of 2^31": (
        raw(4, 0, 0, struct.pack(">HIHI", 4, 1 << 31, 4, 100)),
        Http2ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "4.2 control frame of 64 KiB and more": (raw(2, 0, 1, bytes(70000)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "4.3 headers that cannot be decoded": (raw(1, 4, 3, b"\xff\xff\xff\xff\x0f"), Http2ErrorCode.COMPRESSION_ERROR),
}


@pytest.mark.parametrize("updates", [0, 3])
@pytest.mark.parametrize("name", WRONG)
def test_violations_that_end_the_connection(serve: Serve, name: str, updates: int) -> None:
    """Also behind WINDOW_UPDATE frames, of which the connection handles several at once."""
    server = serve()
    client = server.connect()
    client.send(client.headers(1, path="/wait"))
    stream = server.next_stream()
    data, code = WRONG[name]
    client.send(*[window(1, 1)] * updates, data)
    assert client.goaway_code() == code
    assert stream.is_reset.wait(server.WAIT_S)
    assert [event for event in stream.events if event[0] == "reset"] == [("reset", Http2ErrorCode.CANCEL)]


STREAM_WRONG = {
    "6.9 WINDOW_UPDATE of 0": (raw(8, 0, 1, bytes(4)), Http2ErrorCode.PROTOCOL_ERROR),
    "6.9.1 window too large": (raw(8, 0, 1, b"\x7f\xff\xff\xff"), Http2ErrorCode.FLOW_CONTROL_ERROR),
    "6.3 PRIORITY of 4 bytes": (raw(2, 0, 1, bytes(4)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "5.1 DATA after the end": (raw(0, 1, 1, b"x") + raw(0, 0, 1, b"y"), Http2ErrorCode.STREAM_CLOSED),
}


@pytest.mark.parametrize("updates", [0, 3])
@pytest.mark.parametrize("name", STREAM_WRONG)
def test_violations_that_end_the_stream_5_4_2(serve: Serve, name: str, updates: int) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, path="/wait"))
    stream = server.next_stream()
    data, code = STREAM_WRONG[name]
    client.send(*[window(1, 1)] * updates, data)
    assert client.until(RstStreamFrame, 1).error_code == code
    assert stream.is_reset.wait(server.WAIT_S)
    client.send(client.headers(3), DataFrame(3, b"abc", flags=["END_STREAM"]))
    assert client.response(3) == b"abc"


def test_headers_after_the_end_end_the_stream_5_1(serve: Serve) -> None:
    client = serve().connect()
    client.send(client.headers(1, "END_STREAM", path="/wait"), client.headers(1, "END_STREAM"))
    assert client.until(RstStreamFrame, 1).error_code == Http2ErrorCode.STREAM_CLOSED
    client.check_alive()


def test_headers_on_a_closed_stream_end_the_connection_5_1(serve: Serve) -> None:
    client = serve().connect()
    client.send(client.headers(1), DataFrame(1, b"a", flags=["END_STREAM"]))
    assert client.response(1) == b"a"
    client.send(client.headers(1))
    assert client.goaway_code() == Http2ErrorCode.STREAM_CLOSED


def test_frames_on_their_way_to_a_stream_that_was_reset_are_ignored_5_1(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, path="/wait"))
    server.next_stream().stream.reset(Http2ErrorCode.CANCEL)
    client.until(RstStreamFrame, 1)
    # The table of the decoder must follow trailers that nobody takes.
    trailers = client.headers(1, "END_STREAM", fields=[("x-new", "in the table")])
    client.send(*[DataFrame(1, b"small")] * 3000, window(1, 9), trailers)
    fields = [*server.REQUEST, ("x-new", "in the table")]
    client.send(client.headers(3, fields=fields), DataFrame(3, b"abc", flags=["END_STREAM"]))
    assert client.response(3) == b"abc"
    server_stream = server.next_stream()
    assert (b"x-new", b"in the table") in server_stream.stream.headers.pairs


def window(stream_id: int, count: int) -> WindowUpdateFrame:
    return WindowUpdateFrame(stream_id, count)


def test_more_streams_than_allowed_are_refused_5_1_2(serve: Serve) -> None:
    client = serve(max_streams=2).connect()
    client.send(*(client.headers(number, path="/wait") for number in (1, 3, 5)), DataFrame(5, b"x" * 300))
    assert client.until(RstStreamFrame).error_code == Http2ErrorCode.REFUSED_STREAM
    assert client.frames[-1].stream_id == 5
    client.send(RstStreamFrame(1, Http2ErrorCode.CANCEL), client.headers(7), DataFrame(7, b"z", flags=["END_STREAM"]))
    assert client.response(7) == b"z"


def test_priority_is_ignored_5_3(serve: Serve) -> None:
    client = serve().connect()
    headers = client.headers(1, "PRIORITY")
    headers.depends_on, headers.stream_weight = 1, 5
    client.send(PriorityFrame(9, depends_on=9), headers, DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert client.response(1) == b"abc"


def test_unknown_frames_settings_and_flags_are_ignored_5_5(serve: Serve) -> None:
    client = serve().connect({0x99: 7})
    client.send(raw(0xEE, 0xFF, 0, b"?"), raw(0xEE, 0, 77, b"?"))
    client.send(client.headers(1).serialize(), raw(0, 1 | 0xF6, 1, b"abc"))
    assert client.response(1) == b"abc"


def test_each_window_update_of_a_row_raises_its_window_6_9(serve: Serve) -> None:
    server = serve()
    client = server.connect({4: 10})
    ids = range(1, 41, 2)
    client.send(*(client.headers(number, path="/wait") for number in ids))
    streams = [server.next_stream().stream for _ in ids]
    waiting, others = streams[:10], streams[10:]
    for stream in waiting:
        stream.send(server.HEAD, (bytes(5000),))
    assert sum(len(client.until(DataFrame).data) for _ in waiting) == 10 * len(waiting)
    row = [window(number, 4990) for number in ids]
    client.send(*row, window(0, 90_000))
    assert sum(len(client.until(DataFrame).data) for _ in waiting) == 4990 * len(waiting)
    client.check_alive()
    for stream in others:
        stream.send(server.HEAD, (bytes(5001),))
    assert sum(len(client.until(DataFrame).data) for _ in others) == 5000 * len(others)


def test_the_reserved_bit_is_ignored_4_1_and_6_9(serve: Serve) -> None:
    client = serve().connect({4: 0})
    reserved = 1 << 31
    client.send(client.headers(1), raw(0, 1, reserved | 1, b"abc"), raw(8, 0, 1, (reserved | 3).to_bytes(4, "big")))
    assert client.response(1) == b"abc"


def test_frames_that_may_come_late_are_ignored_5_1(serve: Serve) -> None:
    """After both sides have ended the stream: RST_STREAM, WINDOW_UPDATE, PRIORITY and, of a slow client, DATA."""
    client = serve().connect()
    client.send(client.headers(1), DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert client.response(1) == b"abc"
    client.send(RstStreamFrame(1, Http2ErrorCode.CANCEL), window(1, 5), PriorityFrame(1, depends_on=0))
    client.check_alive()


def test_unknown_error_codes_are_as_any_other_7(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, path="/wait"), client.headers(3))
    echo = server.next_stream()
    client.send(RstStreamFrame(1, 0xFFFFFFFF), GoAwayFrame(0, error_code=0xFFFFFFFE))
    assert echo.is_reset.wait(server.WAIT_S)
    client.send(DataFrame(3, b"abc", flags=["END_STREAM"]))
    assert client.response(3) == b"abc"


def test_open_streams_are_served_after_the_clients_goaway_6_8(serve: Serve) -> None:
    client = serve().connect()
    client.send(client.headers(1), GoAwayFrame(0), DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert client.response(1) == b"abc"


def test_the_end_of_the_connection_by_an_error_names_the_last_stream_5_4_1(serve: Serve) -> None:
    client = serve().connect()
    client.send(client.headers(1, path="/wait"), client.headers(5, path="/wait"), raw(6, 0, 1, bytes(8)))
    assert client.until(GoAwayFrame).last_stream_id == 5


@pytest.mark.parametrize("size", [0, 100])
def test_a_smaller_header_table_is_acknowledged_in_the_next_block_6_5_2(serve: Serve, size: int) -> None:
    """RFC 7541 section 4.2: the decoder insists on it."""
    client = serve().connect({1: size})
    client.decoder.max_allowed_table_size = size
    for number in (1, 3):
        client.send(client.headers(number), DataFrame(number, b"abc", flags=["END_STREAM"]))
        assert client.response(number) == b"abc"


def test_padding_is_dropped_6_1_and_6_2(serve: Serve) -> None:
    client = serve().connect()
    headers = client.headers(1, "PADDED")
    headers.pad_length = 200
    pads = zip(b"ABC", (0, 1, 255), strict=True)
    data = [DataFrame(1, bytes([octet]), pad_length=pad, flags=["PADDED"]) for octet, pad in pads]
    client.send(headers, *data, DataFrame(1, b"", pad_length=3, flags=["PADDED", "END_STREAM"]))
    assert client.response(1) == b"ABC"


def test_padding_opens_its_window_again_6_9_1(serve: Serve) -> None:
    client = serve().connect()
    client.send(client.headers(1, path="/wait"), DataFrame(1, b"x", pad_length=255, flags=["PADDED"]))
    client.check_alive()
    updates = [frame for frame in client.frames if isinstance(frame, WindowUpdateFrame) and frame.stream_id]
    assert sum(frame.window_increment for frame in updates) == 257


def test_data_of_a_stream_that_was_reset_opens_the_window_of_the_connection_again_6_9(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, path="/wait"))
    server.next_stream().stream.reset(Http2ErrorCode.CANCEL)
    client.until(RstStreamFrame, 1)
    data = DataFrame(1, bytes(16384)).serialize() * 256
    for _ in range(17):  # A quarter of the window, and a little more.
        client.send(data)
    assert client.until(WindowUpdateFrame, 0).window_increment >= 64 << 20


def test_settings_and_pings_are_acknowledged_6_5_and_6_7(serve: Serve) -> None:
    client = serve().connect()
    client.send(SettingsFrame(settings={4: 100}), PingFrame(0, b"12345678"))
    assert client.until(PingFrame).opaque_data == b"12345678"
    assert sum(isinstance(frame, SettingsFrame) and "ACK" in frame.flags for frame in client.frames) == 2


def test_a_header_block_may_be_continued_6_10(serve: Serve) -> None:
    client = serve().connect()
    block = client.headers(1).data
    parts = [block[start : start + 3] for start in range(0, len(block), 3)]
    client.send(HeadersFrame(1, parts[0]), *(ContinuationFrame(1, part) for part in parts[1:-1]))
    client.send(ContinuationFrame(1, parts[-1], flags=["END_HEADERS"]), DataFrame(1, b"a", flags=["END_STREAM"]))
    assert client.response(1) == b"a"


def test_drain_asks_once_and_serves_what_comes_6_8(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.check_alive()
    server.http2.begin_drain()
    server.http2.begin_drain()
    assert client.until(GoAwayFrame).last_stream_id == 2**31 - 1
    client.send(client.headers(1), DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert client.response(1) == b"abc"
    late = server.connect()
    late.check_alive()
    late.send(late.headers(1), DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert late.response(1) == b"abc"
    late.check_alive()
    client.check_alive()
    counts = [len([frame for frame in each.frames if isinstance(frame, GoAwayFrame)]) for each in (client, late)]
    assert counts == [1, 0], "a client that connects later is asked at the end"


def test_the_last_goaway_after_a_drain_waits_for_streams_of_clients_that_did_not_know_6_8(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.check_alive()
    server.http2.begin_drain()
    stopping = threading.Thread(target=server.http2.stop_accepting)
    stopping.start()
    client.acknowledge_goaway(client.headers(1), DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert client.response(1) == b"abc"
    assert client.until(GoAwayFrame).last_stream_id == 1
    stopping.join()


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_new_connection_is_asked_before_the_last_goaway_6_8(serve: Serve, is_draining: bool) -> None:
    """Its first stream may be under way, and Go's client repeats none whose body it has sent."""
    server = serve()
    if is_draining:
        server.http2.begin_drain()
        server.call(int)
    client = server.connect()
    client.check_alive()
    stopping = threading.Thread(target=server.http2.stop_accepting)
    stopping.start()
    client.acknowledge_goaway(client.headers(1), DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert client.response(1) == b"abc"
    assert client.until(GoAwayFrame).last_stream_id == 1
    stopping.join()


@pytest.mark.parametrize(("timeout_s", "early_s", "late_s"), [(600, 4.9, 5.1), (2, 1.9, 2.1)])
def test_a_client_that_never_acknowledges_delays_the_last_goaway_within_bounds_6_8(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, timeout_s: float, early_s: float, late_s: float
) -> None:
    began_s, passed_s = time.monotonic(), 0.0
    monkeypatch.setattr(http2_server, "time", SimpleNamespace(monotonic=lambda: began_s + passed_s))
    server = serve()
    client = server.connect()
    client.check_alive()
    stopping = threading.Thread(target=server.http2.stop_accepting, args=(timeout_s,))
    stopping.start()
    assert client.until(GoAwayFrame).last_stream_id == 2**31 - 1
    passed_s = early_s
    client.send(client.headers(1), DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert client.response(1) == b"abc"
    passed_s = late_s
    assert client.until(GoAwayFrame).last_stream_id == 1
    stopping.join()


def test_stop_ignores_new_streams_and_waits_for_open_ones_6_8(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1))
    server.next_stream()
    stopping = threading.Thread(target=server.http2.stop_accepting)
    stopping.start()
    client.acknowledge_goaway()
    assert client.until(GoAwayFrame).last_stream_id == 1
    stopping.join()
    client.send(client.headers(3), DataFrame(3, b"no", flags=["END_STREAM"]), window(3, 5), raw(3, 0, 3, bytes(4)))
    client.send(DataFrame(1, b"yes", flags=["END_STREAM"]))
    assert client.response(1) == b"yes"
    server.http2.stop(server.WAIT_S)
    assert client.receive() is None
    server.http2.stop(0)


def test_output_waits_for_both_windows_6_9(serve: Serve) -> None:
    client = serve().connect({4: 10})
    client.send(client.headers(1), DataFrame(1, b"x" * 70000, flags=["END_STREAM"]))
    assert len(client.until(DataFrame).data) == 10
    # Section 6.9.2: the window becomes negative, and is raised above 0 again.
    client.send(SettingsFrame(settings={4: 0}), window(1, 10))
    client.check_alive()
    client.send(window(1, 3))
    assert len(client.until(DataFrame).data) == 3
    client.send(window(1, 1 << 20))
    left = 65535 - 13
    while left:
        left -= len(client.until(DataFrame).data)
    client.check_alive()
    client.send(window(0, 1 << 20))
    assert len(client.response(1)) == 70000 - 65535


def test_more_than_the_window_ends_the_connection_6_9_1(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, path="/wait"))
    stream = server.next_stream()
    stream.stream.granted = 5
    client.send(DataFrame(1, b"123456"))
    assert client.goaway_code() == Http2ErrorCode.FLOW_CONTROL_ERROR


HEADERS_WRONG = {
    "8.2 upper case": [("X-A", "1")],
    "8.2.1 blank in a name": [("a b", "1")],
    "8.2.1 blank before a value": [("a", " 1")],
    "8.2.1 line feed in a value": [("a", "1\n2")],
    "8.2.1 NUL in a value": [("a", "1\0")],
    "8.2.2 connection": [("connection", "close")],
    "8.2.2 te": [("te", "gzip")],
    "8.3 unknown pseudo-header": [(":status", "200")],
    "8.3 repeated pseudo-header": [(":path", "/b")],
    "8.2.1 carriage return in a value": [("a", "1\r2")],
    "8.2.1 colon in a name": [("a:b", "1")],
    "8.2.1 empty name": [("", "1")],
    "8.2.2 transfer-encoding": [("transfer-encoding", "chunked")],
    "8.2.2 upgrade": [("upgrade", "h2c")],
    "8.1.1 content-length is no number": [("content-length", "+1")],
    "8.1.1 two content-lengths": [("content-length", "1"), ("content-length", "2")],
    "8.1.1 content-length without DATA": [("content-length", "1")],
}


@pytest.mark.parametrize("name", HEADERS_WRONG)
def test_malformed_requests_end_the_stream(serve: Serve, name: str) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, "END_STREAM", fields=[*server.REQUEST[:4], *HEADERS_WRONG[name]]))
    assert client.until(RstStreamFrame, 1).error_code == Http2ErrorCode.PROTOCOL_ERROR
    client.send(client.headers(3), DataFrame(3, b"abc", flags=["END_STREAM"]))
    assert client.response(3) == b"abc"


@pytest.mark.parametrize("left_out", [":method", ":scheme", ":path"])
def test_requests_without_a_pseudo_header_end_the_stream_8_3_1(serve: Serve, left_out: str) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, fields=[field for field in server.REQUEST if field[0] != left_out]))
    assert client.until(RstStreamFrame, 1).error_code == Http2ErrorCode.PROTOCOL_ERROR


ORDER_WRONG = {
    "8.3 pseudo-header after a regular field": [(":method", "POST"), (":scheme", "http"), ("a", "1"), (":path", "/")],
    "8.3.1 empty path": [(":method", "POST"), (":scheme", "http"), (":path", "")],
    "8.5 CONNECT, which only a proxy serves": [(":method", "CONNECT"), (":authority", "x:1")],
}


@pytest.mark.parametrize("name", ORDER_WRONG)
def test_requests_that_are_not_for_this_server_end_the_stream(serve: Serve, name: str) -> None:
    client = serve().connect()
    client.send(client.headers(1, fields=ORDER_WRONG[name]))
    assert client.until(RstStreamFrame, 1).error_code == Http2ErrorCode.PROTOCOL_ERROR
    client.check_alive()


@pytest.mark.parametrize(("length", "data", "is_right"), [(3, b"abc", True), (4, b"abc", False), (2, b"abc", False)])
def test_content_length_is_checked_8_1_1(serve: Serve, length: int, data: bytes, is_right: bool) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, fields=[*server.REQUEST, ("content-length", str(length))]))
    client.send(DataFrame(1, data[:1]), DataFrame(1, data[1:], flags=["END_STREAM"]))
    if is_right:
        assert client.response(1) == data
    else:
        assert client.until(RstStreamFrame, 1).error_code == Http2ErrorCode.PROTOCOL_ERROR


def test_trailers_end_a_request_8_1(serve: Serve) -> None:
    client = serve().connect()
    client.send(client.headers(1), DataFrame(1, b"abc"), client.headers(1, "END_STREAM", fields=[("x", "y")]))
    assert client.response(1) == b"abc"


@pytest.mark.parametrize(("flags", "field"), [((), ("x", "y")), (("END_STREAM",), (":path", "/"))])
def test_malformed_trailers_end_the_stream_8_1(serve: Serve, flags: tuple[str, ...], field: tuple[str, str]) -> None:
    client = serve().connect()
    client.send(client.headers(1), client.headers(1, *flags, fields=[field]))
    assert client.until(RstStreamFrame, 1).error_code == Http2ErrorCode.PROTOCOL_ERROR
    client.check_alive()


def test_an_answer_before_the_end_closes_the_stream_8_1(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, path="/wait"))
    server.next_stream().stream.respond(server.HEAD, (b"early",), server.TRAILERS)
    assert client.response(1) == b"early"
    assert client.until(RstStreamFrame, 1).error_code == Http2ErrorCode.NO_ERROR
    client.send(DataFrame(1, b"late"), DataFrame(1, b"", flags=["END_STREAM"]))
    client.check_alive()
