"""Interfaces between an HTTP/2 connection and its neighbours: `StreamReceiver` gets the events of one stream,
`ReadingThread` reads the socket.

RFC 9113 section 5.1.

States of a client-opened stream, and the event that leaves each:

    state                 | client ends its side  | we end ours (`respond`, `finish`) | RST_STREAM, either way
    open                  | half-closed (remote)  | closed, RST_STREAM(NO_ERROR) sent | closed
    half-closed (remote)  | error STREAM_CLOSED   | closed                            | closed
    closed                | DATA is counted for the connection's window and dropped; other frames are ignored, or errors

Ending our side first closes the stream, because reading the rest of the request is useless (section 8.1). An idle
stream (never opened) accepts only HEADERS. There is no push, so no reserved state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from edge_server.frontends.http2.limits import Http2Limits
from edge_server.http2.frames import ConnectionFault
from edge_server.http2.header_blocks import HeaderMemory

Pieces: TypeAlias = Sequence[bytes | memoryview]
"""Bytes to send, in pieces. Views have one-byte items and must not change until they are sent."""


class StreamReceiver(Protocol):
    """Receives the client's data of a stream, on the reading thread. Must not block or raise."""

    def on_data(self, data: memoryview, is_end: bool) -> None:
        """Receive payload, which is valid during the call only. `is_end`: no more follows.

        The client may send as many bytes again after `Stream.consume` is called with their count.
        """

    def target(self, size: int) -> memoryview | None:
        """Return memory of at most `size` bytes to receive the next payload directly, or None to receive it by
        `on_data`."""

    def on_filled(self, count: int, is_end: bool) -> None:
        """Handle `count` bytes that were received into the last target. Otherwise as `on_data`."""

    def on_sent(self) -> None:
        """Handle that the stream's queue is empty, after a `Stream.send` that returned False."""

    def on_reset(self, code: int) -> None:
        """Handle that the client cancelled the stream or the connection is lost: the response is no longer wanted.
        Called at most once, and not after the stream's end."""

    def on_tick(self, now_s: float) -> None:
        """Handle the passing of time, about once a second. `now_s` is in time.monotonic time."""


class NoReceiver:
    """Replaces the receiver of a closed stream. This breaks the reference cycle between stream and receiver, so both,
    and a message of any size, are freed at once."""

    def on_data(self, data: memoryview, is_end: bool) -> None:
        pass

    def target(self, size: int) -> memoryview | None:
        return None

    def on_filled(self, count: int, is_end: bool) -> None:
        pass

    def on_sent(self) -> None:
        pass

    def on_reset(self, code: int) -> None:
        pass

    def on_tick(self, now_s: float) -> None:
        pass


class Http2Timer:
    """Call scheduled for a time. Created by `ReadingThread.call_at`."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Drop the call, from any thread. Does nothing after the call was made."""
        self.call = None


class ReadingThread(Protocol):
    """The thread that reads a connection, as the connection and its streams use it. `waiting`, `long_waiting` and
    `unsent` hold file descriptors of connections, see Http2Reader. `on_stream` is called with the thread and a new
    `Stream`."""

    limits: Http2Limits
    is_draining: bool
    now_s: float
    thread_id: int
    has_lone_updates: bool
    buffer: bytearray
    view: memoryview
    waiting: deque[int]
    long_waiting: deque[int]
    unsent: list[int]
    max_output_wait_s: float
    calls_per_turn: int
    seconds_per_turn: float
    bytes_per_turn: int
    header_memory: HeaderMemory
    on_stream: Callable[[ReadingThread, Any], StreamReceiver]

    def run_soon(self, call: Callable[[], None]) -> None:
        """Call a function on the reading thread after its current work."""

    def call_at(self, when_s: float, call: Callable[[], None]) -> Http2Timer:
        """Call a function on the reading thread at `when_s` in time.monotonic time. From that thread only."""

    def guarded(self, call: Callable[[], None]) -> None:
        """Call a function and log its exceptions."""

    def run_in_turn(self, fd: int, call: Callable[[], None]) -> None:
        """Call a function in the next turn of a connection. From the reading thread only."""

    def watch(self, fd: int, events: int) -> None:
        """Wait for these epoll events of a connection."""

    def drop(self, fd: int, fault: ConnectionFault | None = None) -> None:
        """Close a connection."""
