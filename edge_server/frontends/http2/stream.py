"""One HTTP/2 stream: a request and its answer, as the layer above sees it. RFC 9113 section 5.1.

States of a stream that a client opened, and the event that leaves each:

    state                 | client ends its side  | we end ours (`respond`, `finish`) | RST_STREAM, either way
    open                  | half-closed (remote)  | closed, RST_STREAM(NO_ERROR) sent | closed
    half-closed (remote)  | error STREAM_CLOSED   | closed                            | closed
    closed                | DATA is counted for the connection's window and dropped; other frames are ignored, or errors

Ending our side first closes the stream: the rest of the request would be read for nothing (section 8.1). A stream that
is idle (never opened) takes nothing but HEADERS. There is no push, so no reserved state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from edge_server.frontends.http2.frames import ErrorCode
from edge_server.frontends.http2.headers import HeaderBlock

if TYPE_CHECKING:
    from edge_server.frontends.http2.connection import Connection

Pieces: TypeAlias = Sequence[bytes | memoryview]
"""Bytes to be sent, in pieces. Views are of one byte an item, and must not change until they were sent."""


class Receiver(Protocol):
    """Takes what comes on a stream, on the reading thread. Must not block, and must not raise."""

    def on_data(self, data: memoryview, is_end: bool) -> None:
        """Take payload, which is valid during the call only. `is_end`: nothing more comes.

        The client may send as much again once `Stream.consume` was called with the count of bytes.
        """

    def target(self, size: int) -> memoryview | None:
        """Return memory into which up to `size` bytes of payload that follow are received directly, at most that long;
        None to have them by `on_data`."""

    def on_filled(self, count: int, is_end: bool) -> None:
        """Take note that `count` bytes were received into the last target. Else as `on_data`."""

    def on_sent(self) -> None:
        """What was sent has left the stream's queue, after a `Stream.send` that returned False."""

    def on_reset(self, code: int) -> None:
        """The client cancelled the stream, or the connection is lost: nobody waits for the answer. Comes at most once,
        and not after the stream's end."""

    def on_tick(self, now_s: float) -> None:
        """Time passed, about a second since the last call. `now_s` is of time.monotonic."""


class Stream:
    """Made by its connection. The methods may be called from any thread; once the stream is closed they do nothing."""

    __slots__ = (
        "connection", "content_left", "ends_after_queue", "granted", "headers", "id", "is_closed", "is_remote_open",
        "queue", "received", "receiver", "send_window", "stalled_since_s", "wants_sent",
    )  # fmt: skip

    receiver: Receiver

    def __init__(
        self, connection: Connection, stream_id: int, headers: HeaderBlock, send_window: int, receive_window: int
    ):
        self.connection = connection
        self.id = stream_id
        self.headers = headers
        self.is_remote_open = True
        """Whether the client may send more on it."""
        self.is_closed = False
        self.content_left = headers.content_length
        """Bytes that content-length promises and that did not come yet; -1 without it."""
        self.granted = receive_window
        """Bytes that the client may send, from the first on; raised under the connection's lock."""
        self.received = 0
        """Bytes that came; counted by the reading thread alone."""
        self.send_window = send_window
        self.queue: deque[tuple[bytes | memoryview, bool]] | None = None
        """What waits for windows or for the socket: pieces of payload (True), and whole frames (False)."""
        self.stalled_since_s = 0.0
        """When it was first seen that the queue waits for the client; 0 when payload was sent since."""
        self.ends_after_queue = False
        self.wants_sent = False

    @property
    def peer(self) -> tuple[str, int] | str:
        """The client's address and port, or the path of a Unix socket."""
        return self.connection.peer

    def respond(self, head: bytes, body: Pieces, trailers: bytes) -> None:
        """Send a whole response: encoded headers, payload, encoded trailers. Ends the stream."""
        self.connection.send_response(self, head, body, trailers)

    def send(self, head: bytes | None, body: Pieces) -> bool:
        """Send headers if given, then payload. Return whether all of it went to the connection's output; if not,
        `Receiver.on_sent` says when it has."""
        return self.connection.send_data(self, head, body)

    def finish(self, block: bytes) -> None:
        """Send trailers, or headers where none were sent, after what was sent before. Ends the stream."""
        self.connection.send_end(self, block)

    def reset(self, code: ErrorCode) -> None:
        """End the stream by RST_STREAM at once; what was not sent yet is dropped."""
        self.connection.reset_stream(self, code)

    def consume(self, count: int) -> None:
        """Let the client send `count` bytes more."""
        self.connection.grant(self, count)
