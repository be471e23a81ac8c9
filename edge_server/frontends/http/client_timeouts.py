"""How fast a client has to be. Who sends or takes nothing, or next to nothing, gives its place to others.

An honest client over a thin link is far above these bounds: 20 kB/s is forty times the rate that is asked for.
"""

from __future__ import annotations

import asyncio
import socket

from edge_server.errors import InvalidRequest

STALL_S = 60.0
"""How long a client may send nothing of a request that it began, or take nothing of what was sent to it; how long a
head may take; and the span over which a body's rate is looked at. nginx's time-outs, stated."""

MIN_BYTES_PER_S = 500
"""The least rate of a body that is not all there yet, over each `STALL_S`; that of Apache's mod_reqtimeout."""

_TCP_INFO_BYTES = 192
_ACKED = slice(120, 128)
"""Where `tcpi_bytes_acked` lies in Linux's struct tcp_info (linux/tcp.h, since Linux 4.1)."""


class ClosingRefusal(InvalidRequest):
    """A refusal after which the connection is of no further use: an unread or unreadable body is on it."""


class StalledBody(ClosingRefusal):
    """The client stopped sending in the middle, or nearly: 408."""


def stalled_text(filled: int, size: int | None, stall_s: float) -> str:
    return f"request body stalled after {_progress(filled, size)}: none came for {stall_s:g} s"


def slow_text(filled: int, size: int | None, stall_s: float) -> str:
    return (
        f"request body is too slow after {_progress(filled, size)}: less than {MIN_BYTES_PER_S} bytes/s came "
        f"for {stall_s:g} s"
    )


def _progress(filled: int, size: int | None) -> str:
    return f"{filled} bytes" if size is None else f"{filled} of {size} bytes"


class ReadProgress:
    """Whether the peer takes what is sent to it; looked at from time to time, and only while something is left over."""

    __slots__ = ("_mark", "_ticks")

    def __init__(self) -> None:
        self._mark = -1
        self._ticks = 0

    def stalled_ticks(self, transport: asyncio.Transport) -> int:
        """Return for how many looks in a row the peer has taken nothing of what waits for it."""
        if not transport.get_write_buffer_size():
            self._mark, self._ticks = -1, 0
            return 0
        mark = _taken(transport)
        self._ticks = self._ticks + 1 if mark == self._mark else 0
        self._mark = mark
        return self._ticks


def _taken(transport: asyncio.Transport) -> int:
    """Return a number that changes when the peer takes something: the bytes that it acknowledged, if that is known."""
    connection = transport.get_extra_info("socket")
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (OSError, AttributeError):
        info = b""
    # Some bytes were acknowledged before any could be left over. Where none were, the system does not count them.
    acked = int.from_bytes(info[_ACKED], "little")
    return acked or transport.get_write_buffer_size()
