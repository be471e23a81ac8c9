"""A server whose receivers record their calls, and a client that sends frames of any kind."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
)

from edge_server.frontends.http2.connection_writer import Stream
from edge_server.frontends.http2.limits import Http2Limits
from edge_server.frontends.http2.server import Http2Server
from edge_server.frontends.http2.stream_interface import ReadingThread
from edge_server.http2.frames import PREFACE
from edge_server.http2.header_blocks import encode_headers

HEAD = encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
TRAILERS = encode_headers([(b"grpc-status", b"0")])
REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/echo"), (":authority", "x"), ("te", "trailers")]
WAIT_S = 60.0


class Echo:
    """Answers with what came, when all of it has come; other paths record only. With `/target` payload is received
    into memory of its own."""

    def __init__(self, server: Server, reader: ReadingThread, stream: Stream) -> None:
        self.server = server
        self.reader = reader
        self.stream = stream
        self.path = stream.headers.path.decode()
        self.body = bytearray()
        self.events: list[Any] = []
        self.memory = bytearray(1 << 21 if self.path == "/target" else 0)
        self.is_sent = threading.Event()
        self.is_reset = threading.Event()
        self.has_ended = threading.Event()

    def on_data(self, data: memoryview, is_end: bool) -> None:
        self.body += data
        self.stream.consume(len(data))
        self._ended(is_end)

    def target(self, size: int) -> memoryview | None:
        return memoryview(self.memory)[:size] if self.path == "/target" else None

    def on_filled(self, count: int, is_end: bool) -> None:
        self.events.append(("filled", count))
        self.body += self.memory[:count]
        self.stream.consume(count)
        self._ended(is_end)

    def _ended(self, is_end: bool) -> None:
        if is_end:
            self.has_ended.set()
            if self.path in ("/echo", "/target"):
                self.stream.respond(HEAD, (bytes(self.body),), TRAILERS)

    def on_sent(self) -> None:
        self.is_sent.set()
        if self.path == "/more":
            self.path = "/"
            self.stream.send(None, (b"more",))
            self.stream.finish(TRAILERS)

    def on_reset(self, code: int) -> None:
        self.events.append(("reset", int(code)))
        self.is_reset.set()
        if self.path == "/raise":
            raise ValueError("a receiver that breaks its promise")

    def on_tick(self, now_s: float) -> None:
        if self.path == "/tick":
            self.path = "/"
            self.stream.respond(HEAD, (b"tick",), TRAILERS)


class Server:
    HEAD, TRAILERS, REQUEST, WAIT_S = HEAD, TRAILERS, REQUEST, WAIT_S

    def __init__(self, tls: ssl.SSLContext | None = None, thread_count: int = 1, **settings: Any) -> None:
        self.clients: list[Client] = []
        self.opened: queue.SimpleQueue[Echo] = queue.SimpleQueue()
        limits = Http2Limits(**{"tick_s": 0.02, **settings})
        self.http2 = Http2Server(self._on_stream, limits, tls, thread_count=thread_count)
        self.port = self.http2.start("127.0.0.1", 0)

    def _on_stream(self, reader: ReadingThread, stream: Stream) -> Echo:
        echo = Echo(self, reader, stream)
        self.opened.put(echo)
        return echo

    def connect(self, settings: dict[int, int] | None = None, **details: Any) -> Client:
        self.clients.append(Client(self, settings, **details))
        return self.clients[-1]

    def next_stream(self) -> Echo:
        return self.opened.get(timeout=WAIT_S)

    def call(self, function: Callable[[], Any]) -> Any:
        """Return what a function gives on the reading thread."""
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.http2.run_soon(lambda: results.put(function()))
        return results.get(timeout=WAIT_S)


class Client:
    """Sends frames, valid or not, and reads what comes. It acknowledges nothing by itself."""

    def __init__(
        self,
        server: Server,
        settings: dict[int, int] | None = None,
        *,
        says_hello: bool = True,
        receive_buffer: int = 0,
        tls: ssl.SSLContext | None = None,
        connected: socket.socket | None = None,
    ) -> None:
        self.socket = connected or socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(WAIT_S)
        if connected is None:
            self.socket.connect(("127.0.0.1", server.port))
            # As gRPC's clients do. Without it, a second small packet waits 40 ms for the acknowledgement of the first.
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.frames: list[Frame] = []
        self._rest = b""
        if says_hello:
            self.socket.sendall(PREFACE + SettingsFrame(settings=settings or {}).serialize())

    def send(self, *frames: Frame | bytes) -> None:
        self.socket.sendall(b"".join(frame if isinstance(frame, bytes) else frame.serialize() for frame in frames))

    def headers(self, stream_id: int, *flags: str, fields: Any = REQUEST, path: str = "") -> HeadersFrame:
        if path:
            fields = [(name, path if name == ":path" else value) for name, value in fields]
        return HeadersFrame(stream_id, self.encoder.encode(fields), flags=["END_HEADERS", *flags])

    def receive(self) -> Frame | None:
        """Return the next frame, or None at the end of the connection."""
        while True:
            if len(self._rest) >= 9:
                frame, size = Frame.parse_frame_header(memoryview(self._rest[:9]))
                if len(self._rest) >= 9 + size:
                    frame.parse_body(memoryview(self._rest[9 : 9 + size]))
                    self._rest = self._rest[9 + size :]
                    self.frames.append(frame)
                    return frame
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._rest += data

    def until(self, kind: type[Frame], stream_id: int | None = None) -> Any:
        """Return the next frame of a kind; fail at the end of the connection."""
        while (frame := self.receive()) is not None:
            is_question = isinstance(frame, SettingsFrame | PingFrame) and "ACK" not in frame.flags
            if isinstance(frame, kind) and stream_id in (None, frame.stream_id) and not is_question:
                return frame
        raise AssertionError(f"the connection ended before {kind.__name__}: {self.frames}")

    def response(self, stream_id: int) -> bytes:
        """Return the payload of a response up to its end."""
        body = b""
        while (frame := self.receive()) is not None:
            if frame.stream_id != stream_id:
                continue
            assert not isinstance(frame, RstStreamFrame), frame
            if isinstance(frame, DataFrame):
                body += frame.data
            elif isinstance(frame, HeadersFrame):
                self.decoder.decode(frame.data)
            if "END_STREAM" in frame.flags:
                return body
        raise AssertionError(f"the connection ended before the response: {self.frames}")

    def goaway_code(self) -> int:
        """Return the code of the GOAWAY with which the server ends the connection."""
        code = int(self.until(GoAwayFrame).error_code)
        while self.receive() is not None:
            pass
        return code

    def acknowledge_goaway(self, *late: Frame) -> None:
        """Acknowledge the PING behind the first GOAWAY, after frames that were sent before it was read."""
        assert self.until(GoAwayFrame).last_stream_id == 2**31 - 1
        question = self.receive()
        assert isinstance(question, PingFrame)
        self.send(*late, PingFrame(0, question.opaque_data, flags=["ACK"]))

    def check_alive(self) -> None:
        self.send(PingFrame(0, b"are-you?"))
        while self.until(PingFrame).opaque_data != b"are-you?":
            pass

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        servers.append(Server(**settings))
        return servers[-1]

    yield start
    for server in servers:
        for client in server.clients:
            client.close()
        server.http2.stop(0)
