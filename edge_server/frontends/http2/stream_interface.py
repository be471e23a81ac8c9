"""HTTP/2 stream as the layer above sees it: a request and its response. RFC 9113 section 5.1.

States of a stream that a client opened, and the event that leaves each:

    state                 | client ends its side  | we end ours (`respond`, `finish`) | RST_STREAM, either way
    open                  | half-closed (remote)  | closed, RST_STREAM(NO_ERROR) sent | closed
    half-closed (remote)  | error STREAM_CLOSED   | closed                            | closed
    closed                | DATA is counted for the connection's window and dropped; other frames are ignored, or errors

Ending our side first closes the stream: the rest of the request would be read for nothing (section 8.1). A stream that
is idle (never opened) takes nothing but HEADERS. There is no push, so no reserved state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

Pieces: TypeAlias = Sequence[bytes | memoryview]
"""Bytes to be sent, in pieces. Views are of one byte an item, and must not change until they were sent."""


class StreamReceiver(Protocol):
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
        """The client cancelled the stream, or the connection is lost: the answer is not wanted any more. Comes at most
        once, and not after the stream's end."""

    def on_tick(self, now_s: float) -> None:
        """Time passed, about a second since the last call. `now_s` is of time.monotonic."""


class NoReceiver:
    """Takes the place of a stream's receiver when the stream is closed: the two, which refer to each other, are freed
    at once then, and with them a message of any size."""

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
