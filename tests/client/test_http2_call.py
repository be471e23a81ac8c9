"""The client's own HTTP/2 against servers that send what a real one seldom does. Each is a script on a bare socket."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path

import grpc
import pytest
from hpack import Decoder, Encoder

from edge_server.client import http2_call
from edge_server.client.http2_call import Http2ClientCall
from edge_server.client.server_connection import ServerEndpoint, Tls
from edge_server.client.stream_errors import StreamError
from edge_server.http2 import frames

PATIENCE_S = 60.0
GREETING = frames.encode_settings({})
OK_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]


class Peer:
    """The server's side of one connection."""

    def __init__(self, sock: socket.socket, file: BufferedReader) -> None:
        self._sock = sock
        self._file = file
        assert self._file.read(len(frames.PREFACE)) == frames.PREFACE

    def send(self, *pieces: bytes) -> None:
        self._sock.sendall(b"".join(pieces))

    def headers(self, fields: list[tuple[str, str]], flags: int = frames.END_HEADERS) -> None:
        self.send(frames.encode_frame(frames.HEADERS, flags, 1, Encoder().encode(fields)))

    def message(self, data: bytes, *, is_compressed: bool = False) -> bytes:
        return bytes((is_compressed,)) + len(data).to_bytes(4, "big") + data

    def finish(self) -> None:
        self.headers([("grpc-status", "0")], frames.END_HEADERS | frames.END_STREAM)

    def frame(self, wanted: int) -> tuple[int, bytes]:
        """Return flags and payload of the next frame of that type, and skip the others."""
        while True:
            high, low, kind, flags, _ = frames.HEADER.unpack(self._file.read(9))
            payload = self._file.read(high << 8 | low)
            if kind == wanted:
                return flags, payload

    def is_closed(self) -> bool:
        return not self._file.read(1)


Script = Callable[[Peer], None]
Call = Callable[..., Http2ClientCall]


@pytest.fixture(params=["plain", "tls"])
def call(request: pytest.FixtureRequest, pem: tuple[Path, Path]) -> Iterator[Call]:
    """Return a call to a server that runs a script; the client sends `sent`, and then ends its side, or what is added
    to `messages`."""
    threads, errors = [], []
    key, cert = pem
    tls = Tls(cert, server_name="camera.local") if request.param == "tls" else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])

    def accept(listener: socket.socket) -> socket.socket:
        sock = listener.accept()[0]
        return sock if tls is None else context.wrap_socket(sock, server_side=True)

    def make(
        script: Script,
        *sent: bytes,
        messages: list[bytes] | None = None,
        is_finished: Callable[[], bool] | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Http2ClientCall:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            with listener, accept(listener) as sock, sock.makefile("rb") as file:
                sock.settimeout(PATIENCE_S)
                try:
                    script(Peer(sock, file))
                    # Closed with unread data, the kernel would reset the connection, and the client lose what was sent.
                    with contextlib.suppress(OSError):  # the client may have left
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(65536):
                            pass
                except Exception as error:  # noqa: BLE001 - raised by the test's end
                    errors.append(error)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        left = list(sent) if messages is None else messages
        return Http2ClientCall(
            ServerEndpoint(f"127.0.0.1:{listener.getsockname()[1]}", tls, metadata=metadata),
            "/a/b",
            lambda: (left.pop(0),) if left else None,
            is_finished or (lambda: not left),
            lambda: True,
        )

    yield make
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == []


def refused(call: Http2ClientCall) -> StreamError:
    with pytest.raises(StreamError) as caught:
        list(call)
    return caught.value


def test_a_message_waits_for_the_servers_windows(call: Call) -> None:
    sent = bytes(range(256)) * 400  # more than the first window of 65,535 bytes
    received = bytearray()

    def script(peer: Peer) -> None:
        peer.send(GREETING)
        peer.headers(OK_HEADERS)
        flags = 0
        while not flags & frames.END_STREAM:
            flags, payload = peer.frame(frames.DATA)
            assert len(payload) <= frames.DEFAULT_FRAME_BYTES
            received.extend(payload)
            if payload:
                peer.send(*(frames.encode_window_update(stream, len(payload)) for stream in (0, 1)))
        peer.finish()

    assert list(call(script, sent)) == []
    assert received[5:] == sent


def test_a_message_is_sent_whole_when_the_server_reads_late(call: Call) -> None:
    sent = bytes(16 << 20)
    may_read = threading.Event()
    received = bytearray()

    def script(peer: Peer) -> None:
        peer.send(frames.encode_settings({frames.INITIAL_WINDOW_SIZE: 2**31 - 1}))
        peer.send(frames.encode_window_update(0, 2**30))
        peer.headers(OK_HEADERS)
        peer.send(frames.encode_frame(frames.DATA, 0, 1, peer.message(b"here")))
        assert may_read.wait(PATIENCE_S)
        flags = 0
        while not flags & frames.END_STREAM:
            flags, payload = peer.frame(frames.DATA)
            received.extend(payload)
        peer.finish()

    answers = iter(call(script, sent))
    assert next(answers) == b"here"
    may_read.set()
    assert list(answers) == []
    assert received[5:] == sent


def test_messages_are_put_together_from_any_frames(call: Call) -> None:
    def script(peer: Peer) -> None:
        peer.send(GREETING)
        block = Encoder().encode(OK_HEADERS)
        padded = bytes((3,)) + bytes(5) + block[:4] + bytes(3)
        peer.send(frames.encode_frame(frames.HEADERS, frames.PADDED | frames.HAS_PRIORITY, 1, padded))
        peer.send(frames.encode_frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[4:]))
        data = peer.message(b"one") + peer.message(b"") + peer.message(b"three")
        for at in range(len(data)):
            peer.send(frames.encode_frame(frames.DATA, frames.PADDED, 1, bytes((2,)) + data[at : at + 1] + bytes(2)))
        peer.finish()

    assert list(call(script)) == [b"one", b"", b"three"]


def test_headers_are_sent_in_frames_that_every_server_accepts(call: Call) -> None:
    blocks = []

    def script(peer: Peer) -> None:
        blocks.extend(peer.frame(kind) for kind in (frames.HEADERS, frames.CONTINUATION, frames.CONTINUATION))
        peer.send(GREETING)
        peer.headers(OK_HEADERS)
        peer.finish()

    assert list(call(script, metadata=(("x-token", "t" * 40_000),))) == []
    assert [flags for flags, _ in blocks] == [0, 0, frames.END_HEADERS]
    assert max(len(block) for _, block in blocks) <= frames.DEFAULT_FRAME_BYTES
    fields = dict(Decoder().decode(b"".join(block for _, block in blocks)))
    assert (fields[":path"], len(fields["x-token"])) == ("/a/b", 40_000)


def test_empty_messages_and_empty_pieces_are_sent(call: Call) -> None:
    received = bytearray()

    def script(peer: Peer) -> None:
        peer.send(GREETING)
        peer.headers(OK_HEADERS)
        flags = 0
        while not flags & frames.END_STREAM:
            flags, payload = peer.frame(frames.DATA)
            received.extend(payload)
        peer.finish()

    assert list(call(script, b"", b"one", b"")) == []
    assert bytes(received) == bytes(5) + b"\0\0\0\0\3one" + bytes(5)


def test_a_call_that_was_closed_before_it_connected_ends_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        closed = Http2ClientCall(ServerEndpoint(address), "/a/b", lambda: None, lambda: False, lambda: False)
        closed.close()
        assert "closed by this client" in str(refused(closed))


def test_nothing_is_sent_into_a_call_that_ended_while_nobody_read(call: Call) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.send(GREETING)
        peer.headers(OK_HEADERS)
        peer.send(frames.encode_frame(frames.DATA, 0, 1, peer.message(b"one")))
        assert may_end.wait(PATIENCE_S)
        # A PING must be answered, and must not take a message along.
        peer.send(frames.encode_frame(frames.PING, 0, 0, bytes(8)), frames.encode_window_update(1, 1))
        peer.headers([("grpc-status", "14"), ("grpc-message", "restart")], frames.END_HEADERS | frames.END_STREAM)
        has_ended.set()

    messages: list[bytes] = []
    made = call(script, messages=messages, is_finished=lambda: False)
    assert next(made) == b"one"
    may_end.set()
    assert has_ended.wait(PATIENCE_S)
    messages.append(b"two")
    made.pump()
    assert messages == [b"two"]
    assert "restart" in str(refused(made))


def test_messages_that_come_together_with_an_error_are_read_before_it(call: Call) -> None:
    def script(peer: Peer) -> None:
        peer.send(
            GREETING,
            frames.encode_frame(frames.HEADERS, frames.END_HEADERS, 1, Encoder().encode(OK_HEADERS)),
            frames.encode_frame(frames.DATA, 0, 1, peer.message(b"one") + peer.message(b"two")),
            frames.encode_frame(frames.RST_STREAM, 0, 1, bytes(4)),
        )

    made = call(script)
    assert [next(made), next(made)] == [b"one", b"two"]
    assert "reset the stream" in str(refused(made))


def test_a_ping_is_answered(call: Call) -> None:
    answers = []

    def script(peer: Peer) -> None:
        peer.send(GREETING, frames.encode_frame(frames.PING, 0, 0, b"12345678"))
        answers.append(peer.frame(frames.PING))
        peer.headers(OK_HEADERS)
        peer.finish()

    assert list(call(script)) == []
    assert answers == [(frames.ACK, b"12345678")]


def test_a_server_that_does_not_answer_a_keepalive_ping_is_left(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_call, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(http2_call, "KEEPALIVE_TIMEOUT_S", 0.5)
    pings = []

    def script(peer: Peer) -> None:
        peer.send(GREETING)
        pings.append(peer.frame(frames.PING))
        assert peer.is_closed()

    error = refused(call(script))
    assert (error.status, error.heals) == ("UNAVAILABLE", True)
    assert "keepalive" in str(error)
    assert pings == [(0, bytes(8))]


def reset(code: int) -> Script:
    return lambda peer: peer.send(GREETING, frames.encode_frame(frames.RST_STREAM, 0, 1, code.to_bytes(4, "big")))


def goes_away(last: int) -> Script:
    def script(peer: Peer) -> None:
        peer.send(GREETING, frames.encode_goaway(last, frames.Http2ErrorCode.NO_ERROR))
        if last:
            peer.headers(OK_HEADERS)
            peer.finish()

    return script


def answers(*fields: tuple[str, str], flags: int = frames.END_HEADERS | frames.END_STREAM) -> Script:
    def script(peer: Peer) -> None:
        peer.send(GREETING)
        peer.headers(list(fields), flags)

    return script


def sends(*pieces: bytes) -> Script:
    def script(peer: Peer) -> None:
        peer.send(GREETING)
        peer.headers(OK_HEADERS)
        peer.send(*pieces)

    return script


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        (lambda peer: peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "UNAVAILABLE", "is it the gRPC port"),
        (lambda peer: peer.send(GREETING), "UNAVAILABLE", "closed"),
        (reset(7), "UNAVAILABLE", "error 7"),
        (reset(8), "CANCELLED", "error 8"),
        (reset(2), "INTERNAL", "error 2"),
        (goes_away(0), "UNAVAILABLE", "ends the connection"),
        (answers((":status", "503")), "UNAVAILABLE", "HTTP status 503"),
        (answers((":status", "404")), "UNIMPLEMENTED", "HTTP status 404"),
        (
            answers(*OK_HEADERS, ("grpc-status", "5"), ("grpc-message", "no %27tiny%27 %E2%82%AC")),
            "NOT_FOUND",
            "no 'tiny' €",
        ),
        (answers(*OK_HEADERS, ("grpc-status", "99")), "UNKNOWN", "no details"),
        (sends(frames.encode_frame(frames.DATA, frames.END_STREAM, 1)), "INTERNAL", "without a status"),
        (sends(frames.encode_frame(frames.DATA, 0, 1, b"\1\0\0\0\0")), "INTERNAL", "compressed"),
        (sends(frames.encode_frame(frames.DATA, frames.PADDED, 1, b"\1")), "INTERNAL", "malformed"),
        (sends(frames.encode_frame(frames.DATA, 0, 3, b"x")), "INTERNAL", "no stream"),
        (sends(frames.encode_frame(frames.PUSH_PROMISE, 0, 1, bytes(4))), "INTERNAL", "no stream"),
        (sends(frames.encode_frame(frames.CONTINUATION, 0, 1)), "INTERNAL", "continues nothing"),
        (sends(frames.encode_frame(frames.SETTINGS, 0, 0, b"xyz")), "INTERNAL", "malformed"),
        (sends(frames.encode_frame_header(1 << 22, frames.DATA, 0, 1)), "INTERNAL", "too large"),
        (sends(frames.encode_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff")), "INTERNAL", "malformed"),
        (
            sends(
                frames.encode_frame(frames.HEADERS, 0, 1, bytes(60_000)),
                frames.encode_frame(frames.CONTINUATION, 0, 1, bytes(60_000)),
            ),
            "INTERNAL",
            "header block is too large",
        ),
        (
            sends(frames.encode_frame(frames.HEADERS, 0, 1), frames.encode_frame(frames.DATA, 0, 1)),
            "INTERNAL",
            "incomplete",
        ),
    ],
)
def test_an_end_with_an_error_has_the_status_that_grpc_gives_it(
    call: Call, script: Script, status: str, text: str
) -> None:
    error = refused(call(script))
    assert error.status == status
    assert text in str(error)


def test_a_call_continues_on_a_connection_that_takes_no_new_calls(call: Call) -> None:
    assert list(call(goes_away(1))) == []


def test_a_refused_connection_may_be_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    error = refused(Http2ClientCall(ServerEndpoint(address), "/a/b", lambda: None, lambda: True, lambda: False))
    assert (error.status, error.heals) == ("UNAVAILABLE", True)


@pytest.mark.parametrize(
    ("endpoint", "needs_grpcio"),
    [
        (ServerEndpoint("localhost:8001"), False),
        (ServerEndpoint("[::1]:8001"), False),
        (ServerEndpoint("unix:/run/edge.sock"), False),
        (ServerEndpoint("localhost:8001", metadata=(("authorization", "Bearer x"),)), False),
        (ServerEndpoint("localhost:8001", metadata=(("x-bin", b"x"),)), True),
        (ServerEndpoint("localhost:8001", metadata=(("x", "a\r\nb"),)), True),
        (ServerEndpoint("localhost:8001", Tls()), False),
        (ServerEndpoint("localhost:8001", credentials=grpc.local_channel_credentials()), True),
        (ServerEndpoint("localhost:8001", options=(("grpc.primary_user_agent", "x"),)), True),
        (ServerEndpoint("dns:///localhost:8001"), True),
        (ServerEndpoint("localhost"), True),
    ],
)
def test_grpcio_connects_where_more_than_http2_is_needed(
    monkeypatch: pytest.MonkeyPatch, endpoint: ServerEndpoint, needs_grpcio: bool
) -> None:
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint.needs_grpcio is needs_grpcio
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert endpoint.needs_grpcio is True
