"""HTTP/2 listener of one address, and the threads that read its connections by epoll: one, or several in a Python
without an interpreter lock."""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from edge_server.errors import Refusal
from edge_server.frontends.bound_sockets import bind_sockets, share_address
from edge_server.frontends.connection_limit import ConnectionLimit, LimitedListener, SilentConnection, has_unread_bytes
from edge_server.frontends.http2 import limits
from edge_server.frontends.http2.connection import Http2Connection
from edge_server.frontends.http2.connection_writer import Stream
from edge_server.frontends.http2.limits import Http2Limits
from edge_server.frontends.http2.stream_interface import Http2Timer, ReadingThread, StreamReceiver
from edge_server.http2.frames import FRAME_HEADER_BYTES, ConnectionFault, Http2ErrorCode
from edge_server.http2.header_blocks import MAX_ALL_REMEMBERED_BYTES, MAX_HEADER_BLOCK_BYTES, HeaderMemory

_LOG = logging.getLogger(__name__)

OnStream: TypeAlias = Callable[[ReadingThread, Stream], StreamReceiver]
"""Called on the reading thread when the headers of a request have arrived. Must not block or raise."""

_BUFFER_BYTES = 256 << 10
assert _BUFFER_BYTES > 2 * (MAX_HEADER_BLOCK_BYTES + FRAME_HEADER_BYTES)

_BACKLOG = 1024
_ACCEPTS_IN_A_ROW = 64
"""Connections accepted before open ones are read again."""

_CLEAN_TIMERS_AT = 4096
"""Number of timers at which cancelled ones are removed. Afterwards, twice the number that remained."""

_LAST_INPUT_S = 0.5
"""Longest time to wait for a client to close a connection that ends by GOAWAY."""

_MAX_OUTPUT_WAIT_S = 0.001
"""Longest time that output made on the reading thread waits to be sent together with other output of its connection."""

_MAX_LONE_WAIT_S = 0.00003
"""The same if only one connection has input: until it gets its responses, its client may have nothing to do. This is
about the time of a small request, so that two or three responses are sent together."""

_UPDATES_BEFORE_S = 0.00003
"""Longest time for which the reading thread polls without sleeping after WINDOW_UPDATE frames came alone."""

_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Http2Reader:
    """Reads HTTP/2 connections by epoll, all on one thread: the reading thread.

    `memory_share` is its part of the memory that the connections of a server share.
    """

    def __init__(
        self, on_stream: OnStream, settings: Http2Limits | None, tls: ssl.SSLContext | None, memory_share: float
    ) -> None:
        self.limits = settings or Http2Limits()
        self.on_stream = on_stream
        self.tls = tls
        """For new connections."""
        self.is_draining = False
        """Whether clients are asked to open streams elsewhere."""
        self._is_ending = False
        """Whether no further connections come, apart from handshakes that have begun."""
        self._accepted: deque[tuple[socket.socket, tuple[str, int] | str]] = deque()
        """Sockets that the server has accepted on another thread, with their clients."""
        self._connections: dict[int, Http2Connection] = {}
        self._handshakes: dict[int, tuple[ssl.SSLSocket, tuple[str, int] | str, float]] = {}
        self._ended: dict[int, socket.socket] = {}
        """Connections whose output has ended, until their clients close them. What they still send is dropped: the
        kernel resets a connection that is closed with unread data, and a client may lose GOAWAY by that."""
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._wake_lock = threading.Lock()
        self._timers: list[tuple[float, int, Http2Timer]] = []
        self._timer_numbers = itertools.count()
        self._clean_timers_at = _CLEAN_TIMERS_AT
        self._is_over = False
        self._stop_at_s = 0.0
        self.thread = threading.Thread(target=self._run, name="http2", daemon=True)

        # For connections.
        self.buffer = bytearray(_BUFFER_BYTES)
        """Receive buffer that all connections share in turn."""
        self.view = memoryview(self.buffer)
        self.now_s = time.monotonic()
        self.thread_id = 0
        self.has_lone_updates = False
        """Whether a connection has just received WINDOW_UPDATE frames and nothing else."""
        self._are_updates_followed = False
        """Whether other input came soon after the last ones of these."""
        self.unsent: list[int] = []
        """File descriptors of connections with output made on the reading thread, to be sent at the end of its turn."""
        self.waiting: deque[int] = deque()
        """The same of connections with input beyond their share of a turn, or that TLS has decrypted: epoll does not
        report it."""
        self.long_waiting: deque[int] = deque()
        """The same after a second share, or with input that takes long."""
        self.max_output_wait_s = _MAX_OUTPUT_WAIT_S
        self.calls_per_turn = limits.TURN_CALLS
        self.seconds_per_turn = limits.TURN_S
        self.bytes_per_turn = limits.TURN_BYTES
        """The calls that a connection may open, the time that it may use, and the bytes of a large message that it may
        receive, before others are served."""
        self.header_memory = HeaderMemory(int(MAX_ALL_REMEMBERED_BYTES * memory_share))

    def start_thread(self) -> None:
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self.thread.start()

    # -- from any thread --------------------------------------------------------------------------------------------

    def serve(self, sock: socket.socket, peer: tuple[str, int] | str) -> None:
        """Read a connection from now on, and close it in the end."""
        if threading.get_ident() == self.thread_id:
            self._open(sock, peer)
        else:
            self._accepted.append((sock, peer))
            self.run_soon(self._open_accepted)

    def run_soon(self, call: Callable[[], None]) -> None:
        """Call a function on the reading thread after its current work. `call` must not block."""
        self._calls.append(call)
        with self._wake_lock:
            if not self._is_woken:
                self._is_woken = True
                os.eventfd_write(self._wake_fd, 1)

    def call_at(self, when_s: float, call: Callable[[], None]) -> Http2Timer:
        """Call a function on the reading thread at `when_s` in time.monotonic time. From the reading thread only."""
        timer = Http2Timer(call)
        heapq.heappush(self._timers, (when_s, next(self._timer_numbers), timer))
        if len(self._timers) >= self._clean_timers_at:
            self._timers = [item for item in self._timers if item[2].call is not None]
            heapq.heapify(self._timers)
            self._clean_timers_at = max(_CLEAN_TIMERS_AT, 2 * len(self._timers))
        return timer

    def watch(self, fd: int, events: int) -> None:
        """Set the epoll events of a connection. Called by writers, which hold their lock."""
        with contextlib.suppress(OSError):
            self._epoll.modify(fd, events)

    def count_connections(self) -> int:
        return len(self._connections) + len(self._handshakes) + len(self._ended) + len(self._accepted)

    def find_silent(self, listener: LimitedListener) -> list[SilentConnection]:
        """Return the silent connections of `listener` that are read here, see LimitedListener."""
        handshakes = [
            SilentConnection(False, until_s - self.limits.handshake_s, listener, (self, tls))
            for tls, _, until_s in list(self._handshakes.values())
        ]
        return handshakes + [
            SilentConnection(item.account.last_stream_id > 0, item.reader.last_received_s, listener, (self, item))
            for item in list(self._connections.values())
            if not item.stream_count
        ]

    # -- the reading thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.thread_id = threading.get_ident()
        poll = self._epoll.poll
        connections = self._connections
        next_tick_s = time.monotonic() + self.limits.tick_s
        while not self._is_over:
            wait_s = 0.0 if self.waiting or self.long_waiting or self._calls else next_tick_s - self.now_s
            if self._timers:
                wait_s = min(wait_s, self._timers[0][0] - self.now_s)
            if self.has_lone_updates:
                events = self._poll_after_updates(wait_s)
            else:
                events = poll(wait_s if wait_s > 0 else 0.0)
            self.now_s = time.monotonic()
            self.max_output_wait_s = _MAX_LONE_WAIT_S if len(events) == 1 else _MAX_OUTPUT_WAIT_S
            if len(events) > 1 or self.calls_per_turn < limits.TURN_CALLS:
                self._divide_turn(len(events))
            for fd, kinds in events:
                connection = connections.get(fd)
                if connection is not None:
                    connection.on_event(kinds)
                elif fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    with self._wake_lock:
                        self._is_woken = False  # before the calls are read
                elif fd in self._handshakes:
                    self.guarded(partial(self._shake_hands, fd))
                elif fd in self._ended:
                    self._drop_input(fd)
                else:
                    self._on_listener_event(fd)
            if self.waiting or self.long_waiting:
                self._serve_waiting()
            if self._calls:
                self._make_calls()
            while self._timers and self._timers[0][0] <= self.now_s:
                call = heapq.heappop(self._timers)[2].call
                if call is not None:
                    self.guarded(call)
            if self.now_s >= next_tick_s:
                next_tick_s = self.now_s + self.limits.tick_s
                self._tick()
            while self.unsent:
                self._send_unsent()
        self._close_all()

    def _poll_after_updates(self, wait_s: float) -> list[tuple[int, int]]:
        """Return the next epoll events, after WINDOW_UPDATE frames came alone.

        gRPC's C++ library sends those of a stream's response by themselves, about 20 us before the next message of a
        client that sends one message at a time. To sleep between the two costs more than to poll. The client of a
        camera sends its next message much later: the thread sleeps if nothing came soon the last time.
        """
        self.has_lone_updates = False
        poll, monotonic = self._epoll.poll, time.monotonic
        begun_s = monotonic()
        events = poll(0.0)
        while not events and self._are_updates_followed and monotonic() - begun_s < _UPDATES_BEFORE_S:
            events = poll(0.0)
        if not events and wait_s > 0:
            events = poll(wait_s)
        # Twice the time, as the thread may have slept.
        self._are_updates_followed = bool(events) and monotonic() - begun_s < 2 * _UPDATES_BEFORE_S
        return events

    def _divide_turn(self, count: int) -> None:
        """Set the share of each of `count` connections in a turn."""
        self.calls_per_turn = max(limits.MIN_CALLS_PER_TURN, limits.TURN_CALLS // max(1, count))
        self.seconds_per_turn = max(limits.MIN_SECONDS_PER_TURN, limits.TURN_S / max(1, count))
        self.bytes_per_turn = max(limits.MIN_BYTES_PER_TURN, limits.TURN_BYTES // max(1, count))

    def _serve_waiting(self) -> None:
        """Serve the connections whose input was not handled completely: each one in the queue once, then those in the
        second queue in turn, for the time of a turn."""
        self._divide_turn(len(self.waiting))
        for _ in range(len(self.waiting)):
            self._continue(self.waiting.popleft())
        end_s = time.monotonic() + limits.TURN_S
        while self.long_waiting:
            self._divide_turn(len(self.long_waiting))
            self._continue(self.long_waiting.popleft())
            if self.now_s >= end_s:
                break

    def _continue(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is not None and connection.is_waiting:  # else it is a new one of the same number
            connection.on_event(0, is_turn=True)
        self.now_s = time.monotonic()

    def run_in_turn(self, fd: int, call: Callable[[], None]) -> None:
        """Call a function in the next turn of a connection, unless it is closed. From the reading thread only."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.run_in_turn(call)

    def guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # noqa: BLE001 - the thread's boundary
            # The thread serves all connections: see Http2Connection.on_event.
            _LOG.exception("unexpected error in a call on the thread that reads HTTP/2")

    def _make_calls(self) -> None:
        for _ in range(len(self._calls)):
            self.guarded(self._calls.popleft())

    def _send_unsent(self) -> None:
        unsent, self.unsent = self.unsent, []
        for fd in unsent:
            connection = self._connections.get(fd)
            if connection is not None and connection.writer.is_unsent:
                connection.on_event(0)

    def drop(self, fd: int, fault: ConnectionFault | None = None) -> None:
        """Close a connection. Send the reason to the client if there is one.

        Without an error, the client is waited for: it may send calls until it has read GOAWAY.
        """
        connection = self._connections.get(fd)
        if connection is None:
            return
        if fault is not None and fault.text:
            connection.fail(fault)
            _LOG.info("the HTTP/2 connection of %s is closed: %s", connection.peer, fault.text)
        del self._connections[fd]
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        kept = connection.close(keeps_input=fault is not None and fault.code == Http2ErrorCode.NO_ERROR)
        if kept is not None:
            self._ended[kept.fileno()] = kept
            self._epoll.register(kept.fileno(), select.EPOLLIN)
            self.call_at(self.now_s + _LAST_INPUT_S, partial(self._close_ended, kept))

    def _drop_input(self, fd: int) -> None:
        """Drop what a client sends on a connection that has ended, and close it after its last byte."""
        try:
            if self._ended[fd].recv_into(self.view):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._close_ended(self._ended[fd])

    def _close_ended(self, kept: socket.socket) -> None:
        if self._ended.get(kept.fileno()) is kept:
            del self._ended[kept.fileno()]
            self._epoll.unregister(kept.fileno())
            kept.close()

    def _tick(self) -> None:
        """Check the timeouts of connections."""
        for connection in list(self._connections.values()):
            try:
                connection.tick(self.now_s)
            except ConnectionFault as fault:
                self.drop(connection.fd, fault)
            except Exception:  # noqa: BLE001 - the thread's boundary
                # As in Http2Connection.on_event.
                _LOG.exception("unexpected error on the connection of %s", connection.peer)
                self.drop(connection.fd, ConnectionFault(Http2ErrorCode.INTERNAL_ERROR, "internal error"))
        for fd, (_, _, until_s) in list(self._handshakes.items()):
            if self.now_s >= until_s:
                self._end_handshake(fd).close()

    # -- new connections

    def _on_listener_event(self, fd: int) -> None:
        """Accept the connections of a listener, which only a server has."""

    def _open_accepted(self) -> None:
        self._open(*self._accepted.popleft())

    def _open(self, sock: socket.socket, peer: tuple[str, int] | str) -> None:
        try:
            if not isinstance(peer, str):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is None:
                self._add(Http2Connection(self, sock, peer, is_tls=False))
                return
            tls = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            _LOG.info("the connection of %s is lost: %s", peer, error)
            sock.close()
            return
        self._handshakes[tls.fileno()] = (tls, peer, self.now_s + self.limits.handshake_s)
        self._epoll.register(tls.fileno(), select.EPOLLIN)
        self._shake_hands(tls.fileno())

    def _add(self, connection: Http2Connection) -> None:
        self._epoll.register(connection.fd, select.EPOLLIN)
        self._connections[connection.fd] = connection
        if self._is_ending:
            connection.begin_going_away()
        connection.writer.flush()

    def close_if_silent(self, connection: Http2Connection | ssl.SSLSocket, since_s: float) -> bool:
        """Close a connection if it has been silent since, and has received no bytes. Return False if not."""
        if isinstance(connection, ssl.SSLSocket):
            if connection.fileno() not in self._handshakes:
                return False
            self._end_handshake(connection.fileno()).close()
            return True
        is_open = self._connections.get(connection.fd) is connection
        if not is_open or connection.stream_count or connection.reader.last_received_s != since_s:
            return False
        if connection.is_waiting or has_unread_bytes(connection.fd):
            return False
        # With GOAWAY a client knows that a call which it has just sent was not processed, and may send it again.
        connection.fail(ConnectionFault(Http2ErrorCode.NO_ERROR, "the connection is silent, and others wait"))
        self.drop(connection.fd)
        return True

    def _shake_hands(self, fd: int) -> None:
        tls, peer, _ = self._handshakes[fd]
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self._epoll.modify(fd, select.EPOLLIN)
            return
        except ssl.SSLWantWriteError:
            self._epoll.modify(fd, select.EPOLLOUT)
            return
        except OSError as error:
            _LOG.info("the TLS handshake of %s failed: %s", peer, error)
            self._end_handshake(fd).close()
            return
        self._end_handshake(fd)
        if tls.selected_alpn_protocol() != "h2":  # RFC 9113 section 3.2
            _LOG.info("the TLS client %s does not offer the protocol h2", peer)
            tls.close()
            return
        connection = Http2Connection(self, tls, peer, is_tls=True)
        self._add(connection)
        connection.on_event(select.EPOLLIN)

    def _end_handshake(self, fd: int) -> ssl.SSLSocket:
        self._epoll.unregister(fd)
        return self._handshakes.pop(fd)[0]

    # -- the end

    def ask_clients_to_leave(self) -> None:
        self.is_draining = True
        for connection in list(self._connections.values()):
            connection.begin_going_away()

    def end_streams(self, timeout_s: float, then: Callable[[], None]) -> None:
        """Ask every client to open its next streams elsewhere. Call `then` when no client opens any more, or
        `timeout_s` has passed. On the reading thread."""
        self._is_ending = True
        self.ask_clients_to_leave()
        self._end_going_away(self.now_s + min(timeout_s, limits.GOAWAY_S), then)

    def end_thread(self, grace_s: float) -> None:
        """Do as `end_streams`, wait for open streams, close those that are left after `grace_s` in all, and end the
        thread. On the reading thread."""
        self._stop_at_s = self.now_s + grace_s
        self.end_streams(grace_s, self._look_whether_over)

    def _end_going_away(self, until_s: float, then: Callable[[], None]) -> None:
        """Send the last GOAWAY when no client opens further streams, or the time has passed. Call `then` after it.

        A client that ends its TLS handshake may have sent a stream with it.
        """
        connections = list(self._connections.values())
        is_open = bool(self._handshakes) or any(connection.may_open_streams for connection in connections)
        if is_open and self.now_s < until_s:
            self.call_at(self.now_s + 0.005, partial(self._end_going_away, until_s, then))
            return
        for fd in list(self._handshakes):
            self._end_handshake(fd).close()
        for connection in connections:
            connection.end_going_away()
        then()

    def _look_whether_over(self) -> None:
        """End the thread when no stream is open, all output is sent and the clients have closed their connections, or
        the grace time has passed. Otherwise check again."""
        for connection in list(self._connections.values()):
            if not connection.is_busy:
                self.drop(connection.fd, ConnectionFault(Http2ErrorCode.NO_ERROR, ""))
        self._is_over = self.now_s >= self._stop_at_s or not (self._connections or self._ended)
        if not self._is_over:
            self.call_at(min(self._stop_at_s, self.now_s + 0.01), self._look_whether_over)

    def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            self.drop(connection.fd)
        for fd in list(self._handshakes):
            self._end_handshake(fd).close()
        for kept in list(self._ended.values()):
            self._close_ended(kept)
        self._make_calls()  # a thread may wait for one of them
        while self._accepted:
            self._accepted.popleft()[0].close()
        self.close_files()

    def close_files(self) -> None:
        """Close the files of a reader whose thread was not started, or ends."""
        if not self._epoll.closed:
            self._epoll.close()
            with self._wake_lock:
                self._is_woken = True  # the file descriptor's number may be reused from now on
                os.close(self._wake_fd)


class Http2Server(Http2Reader):
    """HTTP/2 server for one address. Call `start` once, then `stop` once.

    `on_stream` is called for each new stream, see `stream_interface.StreamReceiver`. `tls` must offer "h2" by ALPN.
    `connection_limit` is that of all listeners' connections, see LimitedListener. The server reads connections itself,
    and accepts those of `thread_count - 1` further readers.
    """

    name = "gRPC"

    def __init__(
        self,
        on_stream: OnStream,
        settings: Http2Limits | None = None,
        tls: ssl.SSLContext | None = None,
        connection_limit: ConnectionLimit | None = None,
        thread_count: int = 1,
    ) -> None:
        super().__init__(on_stream, settings, tls, 1 / thread_count)
        others = (Http2Reader(on_stream, settings, tls, 1 / thread_count) for _ in range(thread_count - 1))
        self.readers: tuple[Http2Reader, ...] = (self, *others)
        self.max_connections = self.limits.max_connections
        self._connection_limit = connection_limit or ConnectionLimit()
        self._listeners: dict[int, socket.socket] = {}
        self._postponed: dict[socket.socket, tuple[socket.socket, tuple[str, int] | str, float]] = {}
        """Listening socket -> the connection that waits for room, its client, and the time at which it was accepted."""

    def start(self, address: str, port: int, *, reuses_port: bool = False, accepts: bool = True) -> int:
        """Bind an address ("unix:PATH" for a Unix socket), start serving, and return the port; 0 for a Unix socket.

        `accepts` False: clients are refused until `accept_connections`. Raises OSError when the address is not
        available; nothing is left open then.
        """
        try:
            for item in bind_sockets(address, port, reuses_port=reuses_port):
                item.setblocking(False)
                self._listeners[item.fileno()] = item
                if item.family != socket.AF_UNIX:
                    port = item.getsockname()[1]
            if accepts:
                self.accept_connections()
        except OSError:
            self._close_all_files()
            raise
        self._connection_limit.add(self)
        for reader in self.readers:
            reader.start_thread()
        return port

    def accept_connections(self) -> None:
        """Listen, after `start` without `accepts`. Not while another thread stops the server.

        Raises OSError if another program listens at the address by now.
        """
        for fd, item in self._listeners.items():
            if item.family != socket.AF_UNIX:
                share_address(item)
            item.listen(_BACKLOG)
            self._epoll.register(fd, select.EPOLLIN)

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Use another context for new connections. Does nothing without TLS."""
        for reader in self.readers:
            if reader.tls is not None:
                reader.tls = context

    def begin_drain(self) -> None:
        """Ask every client to open its next streams elsewhere. Open streams, and new ones that come anyway, are served.

        Clients that connect later are asked by `stop_accepting`. Asked at once, they would connect again for each of
        their streams, and Go's client may lose a request that it opens while it reads GOAWAY.
        """
        for reader in self.readers:
            reader.run_soon(reader.ask_clients_to_leave)

    def stop_accepting(self, timeout_s: float = limits.GOAWAY_S) -> None:
        """Stop accepting connections and streams. Open streams continue. *Blocking*, for `timeout_s` at most.

        Streams of open connections are accepted until their clients have acknowledged that they shall open none, or
        `limits.GOAWAY_S` have passed since they were asked.
        """
        if self.thread.is_alive():
            ended = threading.Semaphore(0)
            self.run_soon(lambda: self._stop_accepting(timeout_s, ended.release))
            for reader in self.readers:
                while reader.thread.is_alive() and not ended.acquire(timeout=0.1):
                    pass  # `stop` may end the thread meanwhile

    def stop(self, grace_s: float) -> None:
        """Stop accepting as `stop_accepting` does, wait for open streams, and close those that are left after `grace_s`
        in all. *Blocking.*"""
        if not self.thread.is_alive():
            self._close_all_files()
            return
        self.run_soon(lambda: self._begin_stop(grace_s))
        for reader in self.readers:
            reader.thread.join()

    # -- for the limit of connections

    @property
    def connection_count(self) -> int:
        return sum(reader.count_connections() for reader in self.readers)

    def silent_connections(self) -> list[SilentConnection]:
        return [silent for reader in self.readers for silent in reader.find_silent(self)]

    def close_silent(self, silent: SilentConnection, on_closed: Callable[[], None]) -> bool:
        reader, connection = silent.connection

        def close_there() -> None:
            reader.close_if_silent(connection, silent.since_s)
            on_closed()

        if reader is not self:
            reader.run_soon(close_there)
            return True  # probably: its thread is not waited for
        if not self.close_if_silent(connection, silent.since_s):
            return False
        on_closed()
        return True

    # -- the reading thread of this server

    def _on_listener_event(self, fd: int) -> None:
        if fd in self._listeners:
            self.guarded(partial(self._accept, self._listeners[fd]))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_IN_A_ROW):
            postponed = self._postponed.pop(listener, None)
            if postponed is None:
                try:
                    sock, where = listener.accept()
                except BlockingIOError:
                    return
                except OSError as error:
                    if error.errno in _NO_RESOURCE:
                        self._pause(listener, self._connection_limit.accept_failed(self, error))
                    return
                sock.setblocking(False)
                postponed = sock, where if isinstance(where, str) else (where[0], where[1]), self.now_s
            sock, peer, accepted_s = postponed
            try:
                wait_s = self._connection_limit.admit(self, accepted_s)
            except Refusal:
                sock.close()
                continue
            if wait_s:
                self._postponed[listener] = postponed
                self._pause(listener, wait_s)
                return
            min(self.readers, key=Http2Reader.count_connections).serve(sock, peer)

    def _pause(self, listener: socket.socket, wait_s: float) -> None:
        """Leave new connections in the kernel's queue for a time."""
        self._epoll.modify(listener.fileno(), 0)
        self.call_at(self.now_s + wait_s, partial(self._resume, listener))

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() in self._listeners:
            self._epoll.modify(listener.fileno(), select.EPOLLIN)
            self._accept(listener)

    def _stop_accepting(self, timeout_s: float, then: Callable[[], None]) -> None:
        """Close the listeners. Call `then` for each reader, on its thread, when its clients open no more streams."""
        self._stop_listening()
        for reader in self.readers:
            reader.run_soon(partial(reader.end_streams, timeout_s, then))

    def _begin_stop(self, grace_s: float) -> None:
        self._stop_listening()
        for reader in self.readers:
            reader.run_soon(partial(reader.end_thread, grace_s))

    def _stop_listening(self) -> None:
        for listener in list(self._listeners.values()):
            self._accept(listener)  # the kernel resets the connections that wait in its queue
        self._close_listeners()

    def _close_listeners(self) -> None:
        self._connection_limit.remove(self)
        for sock, _, _ in self._postponed.values():
            sock.close()
        self._postponed.clear()
        for fd, item in self._listeners.items():
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            item.close()
        self._listeners.clear()

    def _close_all(self) -> None:
        self._close_listeners()
        super()._close_all()

    def _close_all_files(self) -> None:
        for item in self._listeners.values():
            item.close()
        self._listeners.clear()
        for reader in self.readers:
            reader.close_files()
