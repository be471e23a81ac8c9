"""RFC 9113 and RFC 7541 at the socket: what is served, what ends a stream, what ends a connection."""

from __future__ import annotations

import random
import threading

import pytest
from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from edge_server.frontends.http2.frames import PREFACE, ErrorCode, frame
from edge_server.frontends.http2.headers import HeaderReader, encode_headers

END = ["END_STREAM"]
ALL = ("END_HEADERS", "END_STREAM")


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_535, 65_536, 1 << 20, 3 << 20])
def test_payload_of_any_size_comes_back(serve, connect, size):
    client = connect(serve())
    client.until(SettingsFrame)
    client.send(
        SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 2**31 - 1}),
        WindowUpdateFrame(0, window_increment=2**31 - 1 - 65535),
    )
    payload = random.Random(size).randbytes(size)
    sender = threading.Thread(target=client.send, args=(client.headers(1), frame(0, 1, 1, payload)))
    sender.start()
    assert client.answer(1) == payload
    sender.join()


def test_every_cut_of_the_input_means_the_same(serve, connect):
    port = serve()
    first = connect(port, greets=False)
    text = PREFACE + SettingsFrame(0).serialize() + first.headers(1, (b"x-a", b"b" * 20))
    padded = DataFrame(1, b"some", pad_length=3, flags=["PADDED"]).serialize()
    text += padded + DataFrame(1, b" more", flags=END).serialize() + first.request(3, b"second")
    for cut in range(len(text)):
        client = connect(port, greets=False)
        client.send(text[:cut])
        client.send(text[cut:])
        assert (client.answer(1), client.answer(3)) == (b"some more", b"second"), cut
        client.close()
    client = connect(port, greets=False)
    for octet in text:
        client.send(bytes((octet,)))
    assert (client.answer(1), client.answer(3)) == (b"some more", b"second")


def test_unknown_frames_priority_and_padding_are_passed_over(serve, connect):
    client = connect(serve())
    block = client.encoder.encode([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")])
    head = HeadersFrame(1, block, pad_length=5, depends_on=0, stream_weight=3, flags=[*ALL, "PADDED", "PRIORITY"])
    client.send(frame(0x42, 0xFF, 0, b"grease"), PriorityFrame(7, depends_on=3), head)
    assert client.answer(1) == b""


def test_headers_may_be_continued_and_have_trailers(serve, connect):
    client = connect(serve())
    block = client.encoder.encode([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")])
    client.send(HeadersFrame(1, block[:2]), ContinuationFrame(1, block[2:], flags=["END_HEADERS"]))
    client.send(HeadersFrame(1, client.encoder.encode([(b"x", b"y")]), flags=ALL))
    assert client.answer(1) == b""


@pytest.mark.parametrize(
    "pairs",
    [
        [(b":method", b"GET"), (b":scheme", b"http")],
        [(b":method", b"GET"), (b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b"a", b"b"), (b":path", b"/")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":status", b"200")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"Upper", b"x")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"connection", b"close")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"te", b"gzip")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"a", b"b\nc")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"a", b" b")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"content-length", b"1")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"content-length", b"x")],
    ],
)
def test_a_malformed_request_ends_its_stream_alone(serve, connect, pairs):
    client = connect(serve())
    client.send(HeadersFrame(1, client.encoder.encode(pairs), flags=ALL), client.request(3, b"next"))
    assert (client.answer(1), client.answer(3)) == (ErrorCode.PROTOCOL_ERROR, b"next")


@pytest.mark.parametrize("payload", [b"ab", b"abcd"])
def test_payload_of_another_length_than_content_length_ends_the_stream(serve, connect, payload):
    client = connect(serve())
    client.send(client.headers(1, (b"content-length", b"3")), DataFrame(1, payload, flags=END), client.request(3, b"n"))
    assert (client.answer(1), client.answer(3)) == (ErrorCode.PROTOCOL_ERROR, b"n")


def connection_errors():
    C = ErrorCode
    yield "no settings first", [PingFrame(0, bytes(8))], C.PROTOCOL_ERROR, False
    yield "data on stream 0", [frame(0, 0, 0, b"x")], C.PROTOCOL_ERROR, True
    yield "data on an idle stream", [DataFrame(1, b"x")], C.PROTOCOL_ERROR, True
    yield "even stream", [frame(1, 5, 2, b"\x82\x86\x84")], C.PROTOCOL_ERROR, True
    yield "headers on stream 0", [frame(1, 5, 0, b"\x82\x86\x84")], C.PROTOCOL_ERROR, True
    yield "reset of an idle stream", [RstStreamFrame(1)], C.PROTOCOL_ERROR, True
    yield "window of an idle stream", [WindowUpdateFrame(1, window_increment=1)], C.PROTOCOL_ERROR, True
    yield "push", [PushPromiseFrame(1, promised_stream_id=2)], C.PROTOCOL_ERROR, True
    yield "continuation alone", [ContinuationFrame(1, b"")], C.PROTOCOL_ERROR, True
    yield "interrupted block", [frame(1, 0, 1, b"\x82"), PingFrame(0, bytes(8))], C.PROTOCOL_ERROR, True
    yield "padding too long", [frame(1, 0xD, 1, b"\x09\x82")], C.PROTOCOL_ERROR, True
    yield "bad block", [frame(1, 5, 1, b"\xff\xff\xff\xff\xff\xff")], C.COMPRESSION_ERROR, True
    yield "index of no entry", [frame(1, 5, 1, b"\xbf")], C.COMPRESSION_ERROR, True
    yield "settings of 5 bytes", [frame(4, 0, 0, bytes(5))], C.FRAME_SIZE_ERROR, True
    yield "settings on a stream", [frame(4, 0, 1, b"")], C.PROTOCOL_ERROR, True
    yield "ack with payload", [frame(4, 1, 0, bytes(6))], C.FRAME_SIZE_ERROR, True
    yield "push setting", [SettingsFrame(0, {2: 2})], C.PROTOCOL_ERROR, True
    yield "window setting", [SettingsFrame(0, {4: 2**31})], C.FLOW_CONTROL_ERROR, True
    yield "frame setting", [SettingsFrame(0, {5: 100})], C.PROTOCOL_ERROR, True
    yield "ping of 7 bytes", [frame(6, 0, 0, bytes(7))], C.FRAME_SIZE_ERROR, True
    yield "ping on a stream", [frame(6, 0, 1, bytes(8))], C.PROTOCOL_ERROR, True
    yield "short goaway", [frame(7, 0, 0, bytes(7))], C.FRAME_SIZE_ERROR, True
    yield "window of 0", [frame(8, 0, 0, bytes(4))], C.PROTOCOL_ERROR, True
    yield "window overflow", [WindowUpdateFrame(0, window_increment=2**31 - 1)], C.FLOW_CONTROL_ERROR, True
    yield "short reset", [frame(3, 0, 1, bytes(3))], C.FRAME_SIZE_ERROR, True
    yield "pings", [PingFrame(0, bytes(8))] * 5, C.ENHANCE_YOUR_CALM, True
    yield "settings", [SettingsFrame(0)] * 1500, C.ENHANCE_YOUR_CALM, True
    yield "empty frames", [frame(1, 4, 1, b"\x83\x86\x84"), *[frame(0, 0, 1)] * 1500], C.ENHANCE_YOUR_CALM, True
    yield "continuations", [frame(1, 0, 1, b"\x82"), *[frame(9, 0, 1)] * 20], C.ENHANCE_YOUR_CALM, True
    resets = [part for i in range(1, 3001, 2) for part in (frame(1, 4, i, b"\x83\x86\x84"), frame(3, 0, i, bytes(4)))]
    yield "rapid reset", resets, C.ENHANCE_YOUR_CALM, True


@pytest.mark.parametrize(("sent", "code", "greets"), [pytest.param(*c[1:], id=c[0]) for c in connection_errors()])
def test_an_error_of_the_connection_ends_it(serve, connect, sent, code, greets):
    port = serve()
    client = connect(port, greets=greets)
    client.send(*(() if greets else (PREFACE,)), *sent)
    assert client.until(GoAwayFrame).error_code == code
    other = connect(port)
    other.send(other.request(1, b"others are served"))
    assert other.answer(1) == b"others are served"


def test_streams_beyond_the_limit_are_refused(serve, connect, seen):
    seen.holds_answers = True
    client = connect(serve(max_streams=2))
    client.send(client.request(1, b"a"), client.request(3, b"b"), client.request(5, b"c"))
    assert client.answer(5) == ErrorCode.REFUSED_STREAM
    client.send(RstStreamFrame(1, 8), RstStreamFrame(3, 8))
    assert seen.was_reset.wait(20)


def test_frames_on_their_way_to_a_reset_stream_are_dropped(serve, connect, seen):
    seen.holds_answers = True
    client = connect(serve())
    client.send(client.headers(1), DataFrame(1, b"x"), PingFrame(0, bytes(8)))
    client.until(PingFrame)
    seen.streams[0].reset(ErrorCode.CANCEL)
    assert client.answer(1) == ErrorCode.CANCEL
    seen.holds_answers = False
    client.send(frame(0, 0, 1, bytes(1 << 20)), HeadersFrame(1, b"", flags=ALL), client.request(3, b"next"))
    assert client.answer(3) == b"next"


def test_nothing_is_sent_beyond_the_windows(serve, connect):
    client = connect(serve())
    client.send(SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 10}), client.request(1, b"0123456789abcdef"))
    assert bytes(client.until(DataFrame).data) == b"0123456789"
    client.send(SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 12}))
    assert bytes(client.until(DataFrame).data) == b"ab"
    client.send(WindowUpdateFrame(1, window_increment=100))
    assert client.answer(1) == b"cdef"


def test_a_client_that_opens_no_window_loses_its_stream(serve, connect, seen):
    client = connect(serve(stall_s=0.05, tick_s=0.02))
    client.send(SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}), client.request(1, b"answer"))
    assert client.answer(1) == ErrorCode.CANCEL
    assert seen.was_reset.wait(20)


def test_a_client_that_reads_nothing_is_disconnected(serve, connect, seen):
    client = connect(serve(stall_s=0.1, tick_s=0.02))
    client.send(
        SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 2**31 - 1}),
        WindowUpdateFrame(0, window_increment=2**31 - 1 - 65535),
        client.headers(1),
        SettingsFrame(0),
    )
    while not seen.streams:
        client.until(SettingsFrame)
    seen.streams[0].send(encode_headers([(b":status", b"200")]), [bytes(64 << 20)])
    assert seen.was_reset.wait(20)


def test_silent_connections_are_closed(serve, connect):
    port = serve(handshake_s=0.05, tick_s=0.02)
    client = connect(port, greets=False)
    assert [type(item) for item in client.frames()] in ([], [SettingsFrame, WindowUpdateFrame])


def test_keepalive_closes_a_connection_that_does_not_answer(serve, connect):
    port = serve(keepalive_time_s=0.05, keepalive_timeout_s=0.05, tick_s=0.02, permits_keepalive_without_streams=True)
    client = connect(port)
    client.until(PingFrame)
    assert client.until(GoAwayFrame).error_code == ErrorCode.NO_ERROR


def test_an_old_connection_is_asked_to_go_and_closed_when_idle(serve, connect):
    client = connect(serve(max_age_s=0.05, tick_s=0.02))
    assert client.until(GoAwayFrame).last_stream_id == 2**31 - 1
    assert client.until(GoAwayFrame).last_stream_id == 0
    assert list(client.frames()) == []


def test_streams_are_served_while_draining_and_finished_while_stopping(serve, connect, seen):
    seen.holds_answers = True
    client = connect(serve())
    client.send(client.request(1, b"before"), PingFrame(0, bytes(8)))
    client.until(PingFrame)
    serve.servers[0].begin_drain()
    assert client.until(GoAwayFrame).last_stream_id == 2**31 - 1
    client.send(client.request(3, b"while draining"), PingFrame(0, bytes(8)))
    client.until(PingFrame)
    stopping = threading.Thread(target=serve.servers[0].stop, args=(20,))
    stopping.start()
    assert client.until(GoAwayFrame).last_stream_id == 3
    client.send(client.request(5, b"too late"))
    for stream in seen.streams:
        stream.respond(encode_headers([(b":status", b"200")]), (b"answer",), encode_headers([(b"a", b"b")]))
    assert (client.answer(1), client.answer(3)) == (b"answer", b"answer")
    stopping.join()
    assert len(seen.streams) == 2


def test_calls_from_other_threads_are_never_lost(serve, connect):
    serve(tick_s=1000.0)
    server = serve.servers[0]
    for _ in range(2000):
        done = threading.Event()
        server.run_soon(done.set)
        assert done.wait(20)


def test_remembered_blocks_say_what_a_fresh_decoding_says():
    rng = random.Random(7541)
    names = [b":path", b"x-a", b"x-b", b"grpc-timeout", b"cookie", b"content-type"]
    for _ in range(60):
        encoder, reader, reference = Encoder(), HeaderReader(1 << 16), Decoder(1 << 18)
        for _ in range(60):
            if rng.random() < 0.05:
                encoder.header_table_size = rng.choice([0, 64, 4096])
            pairs = [
                (rng.choice(names), rng.choice([b"1", b"two", b"v" * 200]), rng.random() < 0.5)
                for _ in range(rng.randrange(1, 6))
            ]
            # A field that is sensitive is never added to the table.
            block = encoder.encode(pairs, huffman=rng.random() < 0.5)
            found = reader.read(block)
            wanted = reference.decode(block, raw=True)
            assert found.pairs == tuple((name, value) for name, value in wanted if name[:1] != b":")
