"""Connections of the HTTP/2 server: cut input, large messages, threads, loss, time, floods and TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from hpack import Decoder, Encoder
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

from edge_server.http2.frames import PREFACE, Http2ErrorCode
from edge_server.http2.header_blocks import encode_headers
from tests.kit.certificates import self_signed

Serve = Callable[..., Any]


def _recorded(encoder: Encoder, fields: list[tuple[str, str]]) -> bytes:
    padded = HeadersFrame(1, encoder.encode(fields), flags=["END_HEADERS", "PADDED", "PRIORITY"], pad_length=2)
    split = encoder.encode([*fields, ("x-more", "yes")])
    frames = [
        SettingsFrame(settings={4: 70000}),
        padded,
        DataFrame(1, b"first", pad_length=3, flags=["PADDED"]),
        HeadersFrame(3, split[:4]),
        ContinuationFrame(3, split[4:], flags=["END_HEADERS"]),
        PingFrame(0, b"12345678"),
        DataFrame(3, b"second", flags=["END_STREAM"]),
        DataFrame(1, b"", pad_length=1, flags=["PADDED", "END_STREAM"]),
    ]
    return PREFACE + b"".join(frame.serialize() for frame in frames)


def _answers(client: Any) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    ended = 0
    while ended < 2:
        frame = client.receive()
        assert frame is not None
        if isinstance(frame, DataFrame):
            found[frame.stream_id] = found.get(frame.stream_id, b"") + frame.data
        ended += "END_STREAM" in frame.flags
    return found


def test_input_may_be_cut_at_every_byte(serve: Serve) -> None:
    server = serve()
    data = _recorded(Encoder(), server.REQUEST)
    for cut in range(1, len(data)):
        client = server.connect(says_hello=False)
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.send(data[:cut])
        server.call(lambda: None)  # the server has read the first part, or reads it with the second
        client.send(data[cut:])
        assert _answers(client) == {1: b"first", 3: b"second"}
        client.close()


def test_input_may_come_byte_by_byte(serve: Serve) -> None:
    server = serve()
    client = server.connect(says_hello=False)
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for octet in _recorded(Encoder(), server.REQUEST):
        client.send(bytes((octet,)))
        server.call(lambda: None)
    assert _answers(client) == {1: b"first", 3: b"second"}


@pytest.mark.parametrize("path", ["/echo", "/target"])
@pytest.mark.parametrize("frame_bytes", [5000, 1 << 20])
def test_large_messages_go_both_ways(serve: Serve, path: str, frame_bytes: int) -> None:
    server = serve()
    client = server.connect({4: (1 << 31) - 1, 5: 1 << 20})
    client.send(WindowUpdateFrame(0, 1 << 30), client.headers(1, path=path))
    message = bytes(range(256)) * 4096 * 3
    parts = [message[start : start + frame_bytes] for start in range(0, len(message), frame_bytes)]
    sender = threading.Thread(
        target=client.send, args=[*(DataFrame(1, part) for part in parts), DataFrame(1, b"", flags=["END_STREAM"])]
    )
    sender.start()
    assert client.response(1) == message
    sender.join()
    events = server.next_stream().events
    is_filled = any(event[0] == "filled" for event in events)
    # Whether small frames come in pieces is for the network to say.
    assert is_filled == (path == "/target") or (frame_bytes == 5000 and not is_filled)


def test_an_independent_client_understands_it(serve: Serve) -> None:
    server = serve()
    sock = server.connect(says_hello=False).socket
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    peer.initiate_connection()
    message = bytes(300_000)
    peer.send_headers(1, server.REQUEST)
    sent, body, has_ended = 0, b"", False
    while not has_ended:
        while sent < len(message) and (room := min(peer.local_flow_control_window(1), peer.max_outbound_frame_size)):
            part = message[sent : sent + room]
            sent += len(part)
            peer.send_data(1, part, end_stream=sent == len(message))
        sock.sendall(peer.data_to_send())
        for event in peer.receive_data(sock.recv(1 << 16)):
            if isinstance(event, h2.events.DataReceived):
                body += event.data
                peer.acknowledge_received_data(event.flow_controlled_length, 1)
            has_ended = has_ended or isinstance(event, h2.events.StreamEnded)
    assert body == message


def test_sends_wait_for_a_slow_reader_and_say_when_they_went(serve: Serve) -> None:
    server = serve()
    client = server.connect({4: (1 << 31) - 1}, receive_buffer=4096)
    client.send(WindowUpdateFrame(0, 1 << 30), client.headers(1, "END_STREAM", path="/more"))
    echo = server.next_stream()
    assert not echo.stream.send(server.HEAD, (bytes(4 << 20),))
    assert client.response(1) == bytes(4 << 20) + b"more"
    assert echo.is_sent.is_set()


def test_answers_from_many_threads(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    numbers = range(1, 401, 2)
    client.send(*(client.headers(number, "END_STREAM", path="/wait") for number in numbers))
    echoes = [server.next_stream() for _ in numbers]

    def answer(part: list[Any]) -> None:
        for echo in part:
            echo.stream.respond(server.HEAD, (str(echo.stream.id).encode(),), server.TRAILERS)

    threads = [threading.Thread(target=answer, args=(echoes[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    found: dict[int, bytes] = {}
    ended = 0
    while ended < len(numbers):
        frame = client.receive()
        if isinstance(frame, DataFrame):
            found[frame.stream_id] = frame.data
        ended += "END_STREAM" in frame.flags
    for thread in threads:
        thread.join()
    assert found == {number: str(number).encode() for number in numbers}


def test_the_loss_of_a_connection_is_reported_to_each_stream_once(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    paths = ["/raise", "/wait", "/wait"]
    client.send(*(client.headers(number, path=path) for number, path in zip((1, 3, 5), paths, strict=True)))
    echoes = [server.next_stream() for _ in paths]
    client.send(RstStreamFrame(5, Http2ErrorCode.NO_ERROR))
    assert echoes[2].is_reset.wait(server.WAIT_S)
    client.close()
    for echo in echoes:
        assert echo.is_reset.wait(server.WAIT_S)
        echo.stream.respond(server.HEAD, (b"nobody",), server.TRAILERS)
        echo.stream.reset(Http2ErrorCode.CANCEL)
    assert [echo.events for echo in echoes] == [[("reset", 8)], [("reset", 8)], [("reset", 0)]]
    other = server.connect()
    other.check_alive()


@pytest.mark.parametrize("is_tls", [False, True])
def test_what_a_client_sends_before_it_reads_the_last_goaway_resets_no_connection_6_8(
    serve: Serve, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_tls: bool
) -> None:
    """A reset may reach a client before GOAWAY, and then it cannot know which calls were not processed."""
    accepting, asking = _contexts(certificate, ["h2"]) if is_tls else (None, None)
    server = serve(tls=accepting)
    client = server.connect(tls=asking)
    client.check_alive()
    drop = server.http2.drop

    def drop_after_a_call(*arguments: Any) -> None:
        client.send(client.headers(1))
        drop(*arguments)

    monkeypatch.setattr(server.http2, "drop", drop_after_a_call)
    stopping = threading.Thread(target=server.http2.stop, args=(server.WAIT_S,))
    stopping.start()
    client.acknowledge_goaway()
    encode_goaway = client.until(GoAwayFrame)
    assert (encode_goaway.last_stream_id, encode_goaway.error_code) == (0, 0)
    assert client.socket.recv(1) == b""
    client.close()
    stopping.join()


@pytest.mark.parametrize("is_tls", [False, True])
def test_connections_that_were_not_accepted_are_served_when_the_server_stops_6_8(
    serve: Serve, certificate: tuple[Path, Path], is_tls: bool
) -> None:
    accepting, asking = _contexts(certificate, ["h2"]) if is_tls else (None, None)
    server = serve(tls=accepting)
    is_done = threading.Event()

    def connect_and_stop() -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", server.port))
        server.http2._stop_accepting(server.WAIT_S, is_done.set)
        return sock

    client = server.connect(tls=asking, connected=server.call(connect_and_stop))
    client.send(client.headers(1))
    client.acknowledge_goaway(DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert client.response(1) == b"abc"
    assert client.until(GoAwayFrame).last_stream_id == 1
    assert is_done.wait(server.WAIT_S)


def test_each_reading_thread_uses_the_newest_certificate(serve: Serve, certificate: tuple[Path, Path]) -> None:
    used: list[str] = []
    old, asking = _contexts(certificate, ["h2"])
    new, _ = _contexts(certificate, ["h2"])
    old.sni_callback = lambda *_: used.append("old")
    new.sni_callback = lambda *_: used.append("new")
    server = serve(tls=old, thread_count=2)
    for context in (old, new):
        server.http2.use_tls(context)
        for client in [server.connect(tls=asking) for _ in range(2)]:
            client.check_alive()
    assert used == ["old"] * 2 + ["new"] * 2


def test_a_tls_handshake_that_goes_on_delays_the_last_goaway_within_bounds(
    serve: Serve, certificate: tuple[Path, Path]
) -> None:
    accepting, asking = _contexts(certificate, ["h2"])
    server = serve(tls=accepting)
    client = server.connect(tls=asking)
    client.check_alive()
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        stopping = threading.Thread(target=server.http2.stop_accepting, args=(0.1,))
        stopping.start()
        client.acknowledge_goaway()
        assert client.until(GoAwayFrame).last_stream_id == 0
        assert silent.recv(1) == b""
        stopping.join()


def test_ticks_timers_and_calls(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.send(client.headers(1, "END_STREAM", path="/tick"))
    assert client.response(1) == b"tick"
    done: list[str] = []
    is_done = threading.Event()

    def plan() -> None:
        now_s = server.http2.now_s
        server.http2.call_at(now_s + 0.02, lambda: (done.append("second"), is_done.set()))
        server.http2.call_at(now_s + 0.01, lambda: done.append("first"))
        server.http2.call_at(now_s, lambda: done.append("never")).cancel()

    server.call(plan)
    assert is_done.wait(server.WAIT_S)
    assert done == ["first", "second"]


def test_a_call_that_fails_does_not_end_the_thread(serve: Serve) -> None:
    server = serve()
    server.http2.run_soon(lambda: 1 // 0)
    server.connect().check_alive()


def test_a_server_that_could_not_start_may_be_stopped(serve: Serve) -> None:
    server = serve()
    other = type(server.http2)(lambda stream: None)
    with pytest.raises(OSError):
        other.start("127.0.0.1", server.port)
    other.stop(0)
    other.run_soon(lambda: None)


def test_idle_connections_give_way_when_there_are_too_many(serve: Serve) -> None:
    server = serve(max_connections=2)
    busy, idle = server.connect(), server.connect()
    busy.send(busy.headers(1))
    server.next_stream()
    idle.check_alive()
    third = server.connect()
    third.check_alive()
    while idle.receive() is not None:
        pass
    busy.send(DataFrame(1, b"still here", flags=["END_STREAM"]))
    assert busy.response(1) == b"still here"


def test_connections_without_a_call_are_closed_before_those_with_one(serve: Serve) -> None:
    server = serve(max_connections=2)
    client, silent = server.connect(), server.connect(says_hello=False)
    client.send(client.headers(1), DataFrame(1, b"hello", flags=["END_STREAM"]))
    assert client.response(1) == b"hello"
    third = server.connect()
    third.check_alive()
    while silent.receive() is not None:
        pass
    client.check_alive()


FLOODS: dict[str, Callable[[Any, int], Any]] = {
    "rapid reset": lambda client, n: client.headers(n).serialize() + RstStreamFrame(n, 8).serialize(),
    "ping": lambda client, n: PingFrame(0, bytes(8)),
    "ping answers": lambda client, n: PingFrame(0, bytes(8), flags=["ACK"]),
    "settings": lambda client, n: SettingsFrame(),
    "settings answers": lambda client, n: SettingsFrame(flags=["ACK"]),
    "empty DATA": lambda client, n: client.headers(n).serialize() + DataFrame(n).serialize() * 2,
    "priority": lambda client, n: PriorityFrame(n, depends_on=0),
    "goaway": lambda client, n: GoAwayFrame(0),
    "unknown frames": lambda client, n: b"\0\0\0\xee\0\0\0\0\0",
    "malformed requests": lambda client, n: client.headers(n, "END_STREAM", fields=[("x", "y")]),
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_end_the_connection(serve: Serve, name: str) -> None:
    server = serve(control_rate=20.0, max_ping_strikes=0)
    client = server.connect()
    client.send(*(FLOODS[name](client, 1 + 2 * number) for number in range(200)))
    assert client.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM
    server.connect().check_alive()


def test_a_flood_of_continuation_ends_the_connection(serve: Serve) -> None:
    client = serve().connect()
    client.send(HeadersFrame(1, b""), *(ContinuationFrame(1, b"") for _ in range(50)))
    assert client.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM


def test_a_window_opened_byte_by_byte_ends_the_connection(serve: Serve) -> None:
    server = serve(control_rate=20.0)
    client = server.connect({4: 0})
    client.send(client.headers(1), DataFrame(1, bytes(1000), flags=["END_STREAM"]))
    client.send(*(WindowUpdateFrame(1, 1) for _ in range(200)))
    assert client.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM


def test_a_stream_whose_window_stays_closed_is_cancelled(serve: Serve) -> None:
    server = serve(stall_s=0.05)
    client = server.connect({4: 0})
    client.send(client.headers(1, "END_STREAM", path="/wait"))
    echo = server.next_stream()
    echo.stream.respond(server.HEAD, (b"x",), server.TRAILERS)
    assert client.until(RstStreamFrame, 1).error_code == Http2ErrorCode.CANCEL
    assert echo.is_reset.wait(server.WAIT_S)
    client.check_alive()


def test_a_client_that_reads_nothing_is_cut(serve: Serve) -> None:
    server = serve(stall_s=0.05)
    client = server.connect({4: (1 << 31) - 1}, receive_buffer=4096)
    client.send(WindowUpdateFrame(0, 1 << 30), client.headers(1, path="/wait"))
    echo = server.next_stream()
    echo.stream.send(server.HEAD, (bytes(32 << 20),))
    assert echo.is_reset.wait(server.WAIT_S)


def test_silent_connections_are_closed(serve: Serve) -> None:
    server = serve(handshake_s=0.02)
    client = server.connect(says_hello=False)
    client.send(PREFACE)
    assert client.goaway_code() == Http2ErrorCode.SETTINGS_TIMEOUT


def test_a_client_that_stops_within_headers_is_cut(serve: Serve) -> None:
    client = serve(stall_s=0.05).connect()
    client.send(HeadersFrame(1, b"\x82"))
    assert client.goaway_code() == Http2ErrorCode.NO_ERROR


def test_a_client_that_does_not_answer_pings_is_cut(serve: Serve) -> None:
    client = serve(keepalive_time_s=0.02, keepalive_timeout_s=0.02, permits_keepalive_without_streams=True).connect()
    while client.receive() is not None:
        pass
    assert any(isinstance(frame, PingFrame) and "ACK" not in frame.flags for frame in client.frames)


def test_old_connections_end(serve: Serve) -> None:
    client = serve(max_age_s=0.02, max_age_grace_s=0.02).connect()
    assert client.until(GoAwayFrame).last_stream_id == 2**31 - 1
    assert client.goaway_code() == Http2ErrorCode.NO_ERROR


def test_pings_without_data_are_struck(serve: Serve) -> None:
    client = serve(max_ping_strikes=2).connect()
    client.send(*[PingFrame(0, bytes(8))] * 4)
    assert client.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM
    assert b"too_many_pings" in next(frame for frame in client.frames if isinstance(frame, GoAwayFrame)).additional_data


def test_pings_after_each_answer_are_not_struck(serve: Serve) -> None:
    client = serve(max_ping_strikes=2).connect()
    for number in range(1, 41, 2):
        client.send(client.headers(number), DataFrame(number, b"a", flags=["END_STREAM"]), PingFrame(0, bytes(8)))
        assert client.response(number) == b"a"
    client.send(client.headers(99), DataFrame(99, b"a", flags=["END_STREAM"]))
    assert client.response(99) == b"a"


def test_the_probes_of_grpcio_are_not_struck(serve: Serve) -> None:
    import grpc

    server = serve(max_ping_strikes=2)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.http2.bdp_probe", 1)]) as channel:
        call = channel.unary_unary("/echo")
        for _ in range(30):
            assert call(bytes(300_000), timeout=server.WAIT_S, wait_for_ready=True) == bytes(300_000)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"), alternative="DNS:localhost")


def _contexts(certificate: tuple[Path, Path], protocols: list[str]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(*certificate)
    accepting.set_alpn_protocols(["h2"])
    asking = ssl.create_default_context(cafile=str(certificate[0]))
    if protocols:
        asking.set_alpn_protocols(protocols)
    return accepting, asking


def test_large_messages_over_tls(serve: Serve, certificate: tuple[Path, Path]) -> None:
    accepting, asking = _contexts(certificate, ["h2"])
    server = serve(tls=accepting)
    for path in ("/echo", "/target"):
        client = server.connect({4: (1 << 31) - 1}, tls=asking)
        client.send(WindowUpdateFrame(0, 1 << 30), client.headers(1, path=path))
        message = bytes(range(256)) * 4096
        client.send(DataFrame(1, message, flags=["END_STREAM"]))
        assert client.response(1) == message


def test_a_tls_handshake_that_does_not_begin_gives_way(serve: Serve, certificate: tuple[Path, Path]) -> None:
    accepting, asking = _contexts(certificate, ["h2"])
    server = serve(tls=accepting, max_connections=1)
    silent = server.connect(says_hello=False)
    server.connect(tls=asking).check_alive()
    assert silent.receive() is None


def test_tls_without_the_protocol_is_refused(serve: Serve, certificate: tuple[Path, Path]) -> None:
    accepting, asking = _contexts(certificate, [])
    server = serve(tls=accepting)
    client = server.connect(tls=asking, says_hello=False)
    assert client.receive() is None


def test_a_renewed_context_is_used_and_plain_clients_are_refused(serve: Serve, certificate: tuple[Path, Path]) -> None:
    accepting, asking = _contexts(certificate, ["h2"])
    server = serve(tls=accepting, handshake_s=0.05)
    silent, plain = server.connect(says_hello=False), server.connect()
    for client in (silent, plain):
        with contextlib.suppress(ConnectionResetError):
            while client.socket.recv(1 << 16):
                pass
    mutual, _ = _contexts(certificate, ["h2"])
    mutual.verify_mode = ssl.CERT_REQUIRED
    mutual.load_verify_locations(certificate[0])
    server.http2.use_tls(mutual)
    asking.load_cert_chain(*certificate)
    server.connect(tls=asking).check_alive()
    without = server.connect(tls=_contexts(certificate, ["h2"])[1], says_hello=False)
    with contextlib.suppress(ssl.SSLError):  # the alert, unless the connection's end came first
        assert without.receive() is None


def test_answers_are_encoded_without_state() -> None:
    fields = [(b":status", b"404"), (b"content-type", b"a/b"), (b"x", b"y" * 300), (b"z", b"")]
    assert Decoder().decode(encode_headers(fields), raw=True) == fields
