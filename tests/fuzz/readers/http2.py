"""The HTTP/2 server with gRPC's calls on it: no sockets, threads or sleeps.

The server's own loop runs. Its epoll, sockets and clock are replaced: whenever the loop waits, the next instruction of
the input is carried out: a client connects, sends a frame of any kind, reads, or leaves, a handler responds, time
passes. After each turn the accounts are checked, and what a client receives against its own account of the windows.
"""

from __future__ import annotations

import errno
import itertools
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from hpack import Decoder, Encoder
from input_reader import InputReader

from edge_server.config import GrpcConfig
from edge_server.frontends.grpc import http2_transport
from edge_server.frontends.grpc.call import OK, Message, RpcCall, RpcMethod
from edge_server.frontends.grpc.http2_transport import Http2Transport
from edge_server.frontends.http2 import connection as http2_connection
from edge_server.frontends.http2 import connection_account, connection_reader, connection_writer, limits
from edge_server.frontends.http2 import server as http2_server
from edge_server.frontends.http2.connection import Http2Connection
from edge_server.frontends.memory_budget import MemoryBudget
from edge_server.http2 import frames
from edge_server.http2.frames import encode_frame

_BUDGET_BYTES = 200_000
_MAX_PIECE_BYTES = 70_000
"""More than one read of the server: a budget may be exceeded by what came in one piece."""

_CONTROL_RATE = 40.0
_MAX_TURNS = 20_000
_MAX_CLIENTS = 4

_PATHS = ("/unary", "/held", "/stream", "/none")
_SIZES = (0, 1, 5, 300, 4096, 16_384, 20_000, 70_000)


def _header_blocks() -> list[bytes]:
    """Header blocks that need no entry of the table, and some that make one."""
    plain = Encoder()
    plain.header_table_size = 0
    blocks = []
    for path in _PATHS:
        for more in (
            (),
            (("grpc-encoding", "gzip"), ("grpc-timeout", "2S")),
            (("content-length", "12"), ("x-bin", "AAEC"), ("grpc-accept-encoding", "gzip")),
        ):
            fields = [
                (":method", "POST"), (":scheme", "http"), (":path", path), ("te", "trailers"),
                ("content-type", "application/grpc"), *more,
            ]  # fmt: skip
            blocks.append(plain.encode(fields))
    adds = Encoder()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/unary"), ("content-type", "application/grpc")]
    blocks += [adds.encode(fields), adds.encode(fields), plain.encode([("grpc-status", "0")]), b"", b"\x20"]
    blocks.append(adds.encode([*fields, ("x-long", "v" * 900)]))
    blocks.append(bytes((0x80 | 62,)) * 20)
    return blocks


_BLOCKS = _header_blocks()


class _Clock:
    """Each look at the clock takes a little time, so that work by the clock ends."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        self.now_s += 2e-6
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


class _Handler:
    """Echoes at once, or keeps requests until an instruction answers them."""

    def __init__(self, server: _Server, call: RpcCall, path: str) -> None:
        self.call, self.path = call, path
        self._server = server
        self._has_left = False
        self._has_ended = False
        self._has_responded = False
        server.handlers.append(self)

    def on_message(self, message: Message) -> None:
        if self.path == "/unary":
            self.call.respond([bytes(message)])
        elif self.path == "/stream":
            self.call.send([message])
            self.call.receive()

    def on_last_message(self) -> None:
        assert not self._has_ended, "the last message came twice"
        self._has_ended = True
        if self.path == "/stream":
            self.call.end(OK)

    def on_sent(self) -> None:
        assert self.path == "/stream"

    def on_woken(self) -> None:
        pass

    def on_client_left(self) -> None:
        assert not self._has_left, "the client left twice"
        self._has_left = True

    def on_server_stopping(self) -> None:
        self.call.end(OK)

    def act(self, size: int) -> None:
        if self.path == "/held" and not self._has_responded:
            self._has_responded = True  # a unary call has one response, and its handler must send no other
            self.call.respond([b"r" * size])
        elif self.path == "/stream":
            self.call.send([b"s" * size])


class _Socket:
    """A client's connection as the server sees it, and the client's own account of it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.incoming: deque[bytes] = deque()
        self.has_left = self.is_closed = False
        self.room = 1 << 30
        """Bytes that the client still takes."""
        self._sent = bytearray()
        self._received = bytearray()
        self._has_preface = False
        self.ends_by_error = False
        self._unacknowledged: deque[dict[int, int]] = deque()
        self._initial_window = frames.DEFAULT_WINDOW_BYTES
        self._frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._window = frames.DEFAULT_WINDOW_BYTES
        self._streams: dict[int, list[int]] = {}
        """Raised window less what came, and 0 open, 1 has headers, 2 ended, by stream."""
        self._data_sent = self._granted = self._answers = 0
        self._decoder = Decoder()
        self._block = b""

    # -- as the server's socket

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *_: object) -> None: ...

    def shutdown(self, how: int) -> None:
        assert how == socket.SHUT_WR
        assert not self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def recv_into(self, view: memoryview) -> int:
        if not self.incoming:
            if self.has_left:
                return 0
            raise BlockingIOError
        piece = self.incoming.popleft()
        count = min(len(piece), len(view))
        view[:count] = piece[:count]
        if count < len(piece):
            self.incoming.appendleft(piece[count:])
        return count

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int, None, int, None]:
        count = 0
        for view in views:
            if not self.incoming and count:
                break
            filled = self.recv_into(view)
            count += filled
            if filled < len(view):
                break
        return count, None, 0, None

    def send(self, data: bytes | memoryview) -> int:
        if self.has_left:
            raise ConnectionResetError(errno.ECONNRESET, "the client has left")
        count = min(len(data), self.room)
        if not count:
            raise BlockingIOError
        self.room -= count
        self._received += data[:count]
        try:
            self._read_frames()
        except Exception as error:  # noqa: BLE001 - raised by the harness, not within the server
            _ERRORS.errors.append(error)
        return count

    def sendmsg(self, pieces: Sequence[bytes | memoryview]) -> int:
        return self.send(b"".join(pieces))

    # -- as the client

    def deliver(self, data: bytes, pieces: Iterable[bytes]) -> None:
        self.incoming.extend(pieces)
        self._sent += data
        if not self._has_preface and len(self._sent) >= len(frames.PREFACE):
            self._has_preface = True
            if not self._sent.startswith(frames.PREFACE):
                self.ends_by_error = True
            del self._sent[: len(frames.PREFACE)]
        while self._has_preface and len(self._sent) >= 9:
            size, kind, flags, stream_id = _head(self._sent)
            if len(self._sent) < 9 + size:
                break
            self._note_sent(kind, flags, stream_id, bytes(self._sent[9 : 9 + size]))
            del self._sent[: 9 + size]
        # Of an incomplete DATA frame, the server may count what came.
        self._in_part = max(0, len(self._sent) - 9)

    _in_part = 0

    def _note_sent(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.DATA:
            self._data_sent += len(payload)
        elif kind == frames.HEADERS:
            self._streams.setdefault(stream_id, [0, 0])
        elif kind == frames.WINDOW_UPDATE and len(payload) == 4:
            count = int.from_bytes(payload, "big") & 0x7FFFFFFF
            if not stream_id:
                self._window += count
            elif stream_id in self._streams:
                self._streams[stream_id][0] += count
        elif kind == frames.SETTINGS and not flags & frames.ACK and len(payload) % 6 == 0:
            self._unacknowledged.append(dict(frames.SETTING.iter_unpack(payload)))

    def _read_frames(self) -> None:
        received = self._received
        while len(received) >= 9:
            size, kind, flags, stream_id = _head(received)
            if len(received) < 9 + size:
                return
            payload = bytes(received[9 : 9 + size])
            del received[: 9 + size]
            assert size <= self._frame_bytes, f"a frame of {size} bytes, allowed are {self._frame_bytes}"
            self._note_received(kind, flags, stream_id, payload)

    def _note_received(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        assert not self._block or kind == frames.CONTINUATION, "a frame within a header block"
        if kind == frames.SETTINGS:
            if flags & frames.ACK:
                self._answers += 1
                settings = self._unacknowledged.popleft()
                self._initial_window = settings.get(frames.INITIAL_WINDOW_SIZE, self._initial_window)
                self._frame_bytes = settings.get(frames.MAX_FRAME_SIZE, self._frame_bytes)
                if frames.HEADER_TABLE_SIZE in settings:
                    self._decoder.max_allowed_table_size = settings[frames.HEADER_TABLE_SIZE]
        elif kind == frames.PING:
            self._answers += bool(flags & frames.ACK)
        elif kind == frames.WINDOW_UPDATE:
            if not stream_id:
                self._granted += int.from_bytes(payload, "big")
        elif kind == frames.RST_STREAM:
            if stream_id in self._streams:
                assert self._streams[stream_id][1] != 3, f"stream {stream_id} was reset twice"
                self._streams[stream_id][1] = 3
        elif kind in (frames.DATA, frames.HEADERS, frames.CONTINUATION):
            stream = self._streams[stream_id]
            assert stream[1] < 2, f"frame {kind} after the end of stream {stream_id}"
            if kind == frames.DATA:
                assert stream[1] == 1, "DATA before HEADERS"
                stream[0] -= len(payload)
                self._window -= len(payload)
                if payload:
                    assert self._window >= 0, "more DATA than the connection's window"
                    assert stream[0] + self._initial_window >= 0, f"more DATA than the window of stream {stream_id}"
            else:
                self._block += payload
                if flags & frames.END_HEADERS:
                    block, self._block = self._block, b""
                    self._decoder.decode(block)
                    stream[1] = 1
            if flags & frames.END_STREAM:
                stream[1] = 2

    def check(self, now_s: float) -> None:
        """Check the sums of what the server sent."""
        allowed = limits.CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES
        assert self._granted <= allowed + self._data_sent + self._in_part, (
            "a window was raised for bytes that never came"
        )
        assert self._answers <= _CONTROL_RATE * (2 + now_s - 1000.0), "more answers than the control rate allows"


def _head(data: bytearray) -> tuple[int, int, int, int]:
    high, low, kind, flags, stream_id = frames.HEADER.unpack_from(data)
    return high << 8 | low, kind, flags, stream_id & 0x7FFFFFFF


class _Listener:
    def __init__(self, server: _Server) -> None:
        self._server = server
        self.waiting: deque[_Socket] = deque()

    def accept(self) -> tuple[_Socket, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.popleft(), ("192.0.2.1", 1234)

    def fileno(self) -> int:
        return 3

    def close(self) -> None: ...


class _Epoll:
    """The selector of the server's loop, which executes the input's instructions."""

    def __init__(self) -> None:
        self.closed = False
        self.events: dict[int, int] = {}
        self.on_wait: Callable[[float], list[tuple[int, int]]] = lambda wait_s: []

    def register(self, fd: int, events: int) -> None:
        assert fd not in self.events
        self.events[fd] = events

    def modify(self, fd: int, events: int) -> None:
        self.events[fd]  # a KeyError for an unknown one
        self.events[fd] = events

    def unregister(self, fd: int) -> None:
        del self.events[fd]

    def poll(self, wait_s: float = -1.0) -> list[tuple[int, int]]:
        return self.on_wait(wait_s)

    def close(self) -> None:
        self.closed = True


class _Errors(logging.Handler):
    """Records the errors that a thread's boundary logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException | str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.errors.append(error or record.getMessage())


_ERRORS = _Errors()
_CLOCK = _Clock()
_THREAD_WORK: deque[Callable[[], None]] = deque()
_IDENT = [1]
"""The thread that runs now: 1 is the reading thread, 2 another one."""


class _Thread:
    """A thread that runs when the loop next waits."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **_: object) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        _THREAD_WORK.append(lambda: self._target(*self._args))

    def is_alive(self) -> bool:
        return True


_THREADING = SimpleNamespace(get_ident=lambda: _IDENT[0], Lock=threading.Lock, Thread=_Thread)
_SELECT = SimpleNamespace(
    epoll=_Epoll, EPOLLIN=select.EPOLLIN, EPOLLOUT=select.EPOLLOUT, EPOLLHUP=select.EPOLLHUP, EPOLLERR=select.EPOLLERR
)
for _module in (
    http2_connection, connection_account, connection_reader, connection_writer, http2_server, http2_transport
):  # fmt: skip
    _module.time = _CLOCK  # type: ignore[attr-defined]
    _module.monotonic = _CLOCK.monotonic  # type: ignore[attr-defined]
    _module.threading = _THREADING  # type: ignore[attr-defined]
http2_server.select = _SELECT  # type: ignore[attr-defined]
# An event without a waiter: the loop checks its calls before each wait.
http2_server.os = SimpleNamespace(  # type: ignore[attr-defined]
    eventfd=lambda *_: 4, eventfd_write=lambda *_: None, eventfd_read=lambda *_: 1, close=lambda _: None,
    EFD_NONBLOCK=0, EFD_CLOEXEC=0,
)  # fmt: skip


class _Server:
    """The server, and the input's instructions."""

    def __init__(self, data: bytes) -> None:
        self.input = InputReader(data)
        self.handlers: list[_Handler] = []
        self.clients: list[_Socket] = []
        self._turns = 0
        self._fds = itertools.count(10)
        _CLOCK.now_s = 1000.0
        _THREAD_WORK.clear()
        _IDENT[0] = 1
        self.budget = MemoryBudget(_BUDGET_BYTES, _BUDGET_BYTES, _CLOCK.monotonic)
        methods = {path: RpcMethod(self._opener(path), path == "/stream") for path in _PATHS[:3]}
        config = GrpcConfig(compression_level=("none", "low")[self.input.byte() & 1], max_connection_age_ms=600_000)
        self.transport = Http2Transport([methods], config, max_calls=6, max_streams=3, budget=self.budget)
        server = self.transport.server
        server.limits = server.limits._replace(
            control_rate=_CONTROL_RATE, max_connections=_MAX_CLIENTS - 1, keepalive_time_s=100.0
        )
        self.http2 = server
        self._listener = _Listener(self)
        server._listeners[3] = self._listener  # type: ignore[assignment]
        self.epoll: _Epoll = server._epoll  # type: ignore[assignment]
        self.epoll.register(3, select.EPOLLIN)
        self.epoll.on_wait = self._on_wait
        self._connect()

    def _opener(self, path: str) -> Callable[[RpcCall], _Handler]:
        return lambda call: _Handler(self, call, path)

    def run(self) -> None:
        self.http2._run()
        for client in self.clients:
            assert client.is_closed or client in self._listener.waiting
        transport = self.transport
        self._run_threads()
        while self.http2._calls:
            self.http2._calls.popleft()()
        assert not transport.calls | transport.active | transport.streams, "calls outlive their connections"
        assert self.budget.held == 0, f"{self.budget.held} bytes are held for calls that are over"
        self._raise_errors()

    # -- what happens while the loop waits

    def _on_wait(self, wait_s: float) -> list[tuple[int, int]]:
        self._turns += 1
        assert self._turns < _MAX_TURNS, "the loop turns without end"
        self._raise_errors()
        self._check_accounts()
        self._run_threads()
        events = self._events()
        if events or wait_s <= 0:
            return events
        if not self.input.left:
            self.http2._is_over = True
            return []
        self._instruct()
        return self._events()

    def _run_threads(self) -> None:
        _IDENT[0] = 2
        while _THREAD_WORK:
            _THREAD_WORK.popleft()()
        _IDENT[0] = 1

    def _events(self) -> list[tuple[int, int]]:
        found = []
        for client in self.clients:
            watched = self.epoll.events.get(client.fileno(), 0)
            kinds = select.EPOLLIN if client.incoming or client.has_left else 0
            kinds |= select.EPOLLOUT if client.room or client.has_left else 0
            if kinds & watched:
                found.append((client.fileno(), kinds & watched))
        if self._listener.waiting and self.epoll.events.get(3):
            found.append((3, select.EPOLLIN))
        return found

    def _connect(self) -> _Socket:
        client = _Socket(next(self._fds))
        self.clients.append(client)
        self._listener.waiting.append(client)
        self._send(client, frames.PREFACE + encode_frame(frames.SETTINGS, 0, 0))
        return client

    @staticmethod
    def _send(client: _Socket, data: bytes, pieces: Iterable[bytes] | None = None) -> None:
        if data:
            client.deliver(data, (data,) if pieces is None else pieces)

    def _instruct(self) -> None:
        """Carry out one instruction."""
        take = self.input
        operation = take.byte()
        client = self.clients[(operation >> 5) % len(self.clients)]
        kind = operation & 0x1F
        if client.has_left or client.is_closed:
            kind = max(kind, 20)
        if kind < 8:  # a frame of any kind
            payload = take.take(take.byte())
            self._send_frame(client, (0, 1, 2, 3, 4, 6, 8, 9)[kind], take.byte(), payload)
        elif kind < 12:  # headers that a request could have
            self._send_frame(client, frames.HEADERS, take.byte(), take.choice(_BLOCKS))
        elif kind < 15:  # DATA with a message, or a part of it
            size = take.choice(_SIZES)
            flag = take.byte()
            message = bytes((flag & 1,)) + (size - (flag >> 4)).to_bytes(5, "big", signed=True)[1:] + b"m" * size
            self._send_frame(client, frames.DATA, take.byte(), message[flag >> 1 & 7 :])
        elif kind == 15:  # window updates and settings
            value = (1 << (take.byte() & 31)) + take.byte() - 1
            if take.byte() & 1:
                payload = frames.SETTING.pack(take.byte() % 8, value & 0xFFFFFFFF)
                self._send(client, encode_frame(frames.SETTINGS, 0, 0, payload))
            else:
                self._send_frame(client, frames.WINDOW_UPDATE, take.byte(), frames.UINT32.pack(value & 0x7FFFFFFF))
        elif kind == 16:  # many small frames
            data = encode_frame(take.byte() % 11, take.byte(), take.byte(), take.take(take.byte() & 15)) * take.byte()
            self._send(client, data)
        elif kind == 17:  # any bytes
            self._send(client, data := take.take(take.byte()), take.cut(data))
        elif kind == 18:
            client.room = take.choice((0, 1, 9, 1000, 100_000, 1 << 30))
        elif kind == 19:
            client.has_left = True
        elif kind < 23:
            _CLOCK.now_s += take.choice((0.0, 0.0005, 0.01, 1.0, 2.5, 21.0, 61.0, 650.0))
        elif kind < 27:
            self._act(take)
        elif kind == 27 and len(self.clients) < _MAX_CLIENTS:
            self._connect()
        elif kind == 28:
            self.http2.begin_drain()
        elif kind == 29:
            self.http2.run_soon(lambda: self.http2._stop_accepting(5.0, lambda: None))

    def _send_frame(self, client: _Socket, kind: int, choice: int, payload: bytes) -> None:
        """`choice` has the stream in three bits, flags in three, and whether the frame comes in pieces."""
        stream_id = (1, 3, 5, 7, 9, 11, 0, 2)[choice & 7]
        flags = (0, frames.END_STREAM)[choice >> 3 & 1] | (frames.END_HEADERS, 0)[choice >> 4 & 1]
        if choice >> 5 & 1:
            flags |= self.input.byte()
        data = encode_frame(kind, flags, stream_id, payload)
        self._send(client, data, self.input.cut(data) if choice & 0x40 else None)

    def _act(self, take: InputReader) -> None:
        if not self.handlers:
            return
        handler = take.choice(self.handlers)
        choice = take.byte()
        _IDENT[0] = 1 + (choice & 1)
        if choice & 0x80:
            handler.call.end(OK)
        elif choice & 0x40:
            if handler.path == "/stream":
                handler.call.receive()
        else:
            handler.act((choice >> 1 & 15) ** 4 * 2)
        _IDENT[0] = 1

    # -- the accounts

    def _raise_errors(self) -> None:
        if _ERRORS.errors:
            error, _ERRORS.errors = _ERRORS.errors[0], []
            raise error if isinstance(error, BaseException) else AssertionError(error)

    def _check_accounts(self) -> None:
        for connection in self.http2._connections.values():
            self._check_connection(connection)
        self._check_queues()
        for client in self.clients:
            client.check(_CLOCK.now_s)
        calls = self.transport.calls
        assert len(calls) <= 8 * 6 + 1
        held = sum(call.filled for call in calls)
        # A call that is over leaves the budget by a call of the loop.
        is_settled = not self.http2._calls
        assert self.budget.held == held if is_settled else self.budget.held >= held, (
            f"the budget holds {self.budget.held} bytes, the calls {held}"
        )
        assert held <= _BUDGET_BYTES + _MAX_PIECE_BYTES * 2, f"{held} bytes are held"

    def _check_queues(self) -> None:
        """A connection with input that was not handled is in one queue once, and no other one is."""
        server = self.http2
        connections = server._connections.values()
        queued = [fd for fd in (*server.waiting, *server.long_waiting) if fd in server._connections]
        assert len(queued) == len(set(queued))
        for connection in connections:
            reader = connection.reader
            assert connection.is_waiting == (connection.fd in queued)
            assert connection.is_waiting or not (reader._is_cut or reader.turn_calls), "input is forgotten"
        memory = server.header_memory
        assert memory.reader_count == len(connections)
        assert memory.used_bytes == sum(each.reader.headers.remembered.used_bytes for each in connections)

    @staticmethod
    def _check_connection(connection: Http2Connection) -> None:
        account, writer = connection.account, connection.writer
        streams = writer.streams
        assert len(streams) <= writer.server.limits.max_streams
        assert writer.output_bytes == sum(map(len, writer.output)), "output is not what is counted"
        queued = 0
        for stream_id, stream in streams.items():
            assert stream.id == stream_id
            assert not stream.is_closed
            queued += sum(map(len, stream.queue or ()))
            room = stream.granted - stream.received
            # The room for padding is given back before the padding comes.
            assert 0 <= room <= limits.STREAM_WINDOW_BYTES + 256, (
                f"the client may send {room} bytes on stream {stream_id}"
            )
            assert stream.send_window <= frames.MAX_WINDOW_BYTES
        assert writer.queued_bytes == queued, f"{writer.queued_bytes} bytes counted, {queued} queued"
        assert set(writer.blocked) <= set(streams)
        assert writer.send_window >= 0
        assert len(account.reset_ids) <= limits.MAX_RESET_IDS
        assert -100 <= account._control_credit <= _CONTROL_RATE
        assert -1 <= account._reset_credit <= _CONTROL_RATE
        assert len(connection.reader._rest) <= len(writer.server.buffer)


logging.getLogger("edge_server.frontends").addHandler(_ERRORS)
logging.getLogger("edge_server.frontends").setLevel(logging.ERROR)
logging.getLogger("edge_server.frontends").propagate = False


def seeds() -> Iterable[bytes]:
    _block = {path: index * 3 for index, path in enumerate(_PATHS)}
    for path in _PATHS:
        # A request with its message, and the response.
        yield bytes((0, 8, 0, _block[path], 12, 3, 1, 8, 24, 0, 30))
        # In pieces, with small windows, and a client that reads little.
        yield bytes((1, 15, 4, 0, 1, 4, 18, 2, 8, 0, _block[path] + 1, 12, 5, 0, 0x48, 3, 9, 0, 18, 5, 15, 12, 0, 0, 0))
    yield bytes((0, 8, 0, 0, 12, 4, 1, 0x20, 8, 16, 8, 0, 0, 4, 200))
    yield bytes((0, 8, 0, 3, 8, 1, 3, 8, 2, 3, 12, 7, 1, 8, 12, 7, 1, 9, 23, 0, 30, 24, 1, 31, 22, 6, 19))
    yield bytes((0, 8, 16, 3, 7, 3, 0x20, 0, 0, 3, 4, 0, 0, 0, 8, 1, 28, 27, 0x28, 0, 3, 29, 22, 5, 22, 6))
    yield bytes((0, 17, 60, *frames.PREFACE, *range(30)))


def check(data: bytes) -> None:
    server = _Server(data)
    server.run()
