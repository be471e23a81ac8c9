"""A server that answers with what it was sent, and a client of bare frames."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hpack import Encoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame, RstStreamFrame, SettingsFrame

from edge_server.frontends.http2.frames import PREFACE
from edge_server.frontends.http2.headers import encode_headers
from edge_server.frontends.http2.limits import Limits
from edge_server.frontends.http2.server import Http2Server
from edge_server.frontends.http2.stream import Stream

HEAD = encode_headers([(b":status", b"200")])
TRAILERS = encode_headers([(b"x-status", b"0")])
REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/echo"), (b":authority", b"test")]


class Echo:
    """Answers a request with its payload, once that is whole."""

    def __init__(self, stream: Stream, seen: Seen) -> None:
        self.stream = stream
        self.seen = seen
        self.payload = b""
        self.memory: memoryview | None = None

    def on_data(self, data: memoryview, is_end: bool) -> None:
        self.payload += bytes(data)
        self._go_on(len(data), is_end)

    def target(self, size: int) -> memoryview | None:
        self.memory = memoryview(bytearray(size))
        return self.memory

    def on_filled(self, count: int, is_end: bool) -> None:
        assert self.memory is not None
        self.payload += bytes(self.memory[:count])
        self._go_on(count, is_end)

    def _go_on(self, count: int, is_end: bool) -> None:
        self.stream.consume(count)
        if is_end and not self.seen.holds_answers:
            self.stream.respond(HEAD, (self.payload,), TRAILERS)

    def on_sent(self) -> None:
        pass

    def on_reset(self, code: int) -> None:
        self.seen.resets.append(code)
        self.seen.was_reset.set()

    def on_tick(self, now_s: float) -> None:
        pass


class Seen:
    """What the server of a test has seen."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.resets: list[int] = []
        self.was_reset = threading.Event()
        self.holds_answers = False

    def on_stream(self, stream: Stream) -> Echo:
        self.streams.append(stream)
        return Echo(stream, self)


class Client:
    """One connection; frames are hyperframe's, header blocks hpack's."""

    def __init__(self, port: int, *, greets: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.encoder = Encoder()
        self._rest = b""
        if greets:
            self.socket.sendall(PREFACE + SettingsFrame(0).serialize())

    def send(self, *items: Frame | bytes) -> None:
        self.socket.sendall(b"".join(item if isinstance(item, bytes) else item.serialize() for item in items))

    def headers(self, stream_id: int, *more: tuple[bytes, bytes], flags: tuple[str, ...] = ("END_HEADERS",)) -> bytes:
        block = self.encoder.encode([*REQUEST, *more])
        return HeadersFrame(stream_id, block, flags=flags).serialize()

    def request(self, stream_id: int, payload: bytes) -> bytes:
        return self.headers(stream_id) + DataFrame(stream_id, payload, flags=["END_STREAM"]).serialize()

    def frames(self) -> Iterator[Frame]:
        """Yield what the server sends, until it closes the connection."""
        while True:
            while len(self._rest) >= 9:
                frame, size = Frame.parse_frame_header(memoryview(self._rest[:9]))
                if len(self._rest) < 9 + size:
                    break
                frame.parse_body(memoryview(self._rest[9 : 9 + size]))
                self._rest = self._rest[9 + size :]
                yield frame
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionResetError:
                return
            if not data:
                return
            self._rest += data

    def until(self, kind: type[Frame], stream_id: int | None = None) -> Frame:
        for frame in self.frames():
            if isinstance(frame, kind) and stream_id in (None, frame.stream_id):
                return frame
        raise AssertionError(f"the connection was closed before a {kind.__name__} came")

    def answer(self, stream_id: int) -> bytes | int:
        """Return the payload of a stream's answer, or the code of its reset."""
        payload = b""
        for frame in self.frames():
            if frame.stream_id == stream_id:
                if isinstance(frame, RstStreamFrame):
                    return frame.error_code
                if isinstance(frame, DataFrame):
                    payload += bytes(frame.data)
                if "END_STREAM" in frame.flags:
                    return payload
        raise AssertionError("the connection was closed before the answer was whole")

    def close(self) -> None:
        self.socket.close()


Serve = Callable[..., int]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def serve(seen: Seen) -> Iterator[Serve]:
    servers: list[Http2Server] = []

    def start(**limits: float) -> int:
        servers.append(Http2Server(seen.on_stream, Limits(**limits)))  # type: ignore[arg-type]
        return servers[-1].start("127.0.0.1", 0)

    start.servers = servers  # type: ignore[attr-defined]
    yield start
    for server in servers:
        server.stop(0)


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(port: int, **options: bool) -> Client:
        clients.append(Client(port, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
