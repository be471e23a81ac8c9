"""Time limits for slow clients: closes the connection of a client that sends or reads almost nothing.

A regular client on a slow link is far above these limits: 20 kB/s is forty times the required rate.
"""

from __future__ import annotations

import asyncio
import socket

from edge_server.errors import InvalidRequest

STALL_S = 60.0
"""Maximum pause of a client within a request or while it reads a response, maximum time for a head, and period over
which the rate of a body is measured. nginx has these time-outs too."""

MIN_BYTES_PER_S = 500
"""Minimum rate of a body that is being received, over each `STALL_S`; the limit of Apache's mod_reqtimeout."""

_TCP_INFO_BYTES = 192
_ACKED = slice(120, 128)
"""Position of `tcpi_bytes_acked` in Linux's struct tcp_info (linux/tcp.h, since Linux 4.1)."""


class ClosingRefusal(InvalidRequest):
    """Refusal after which the connection closes: its next bytes are an unread or unreadable body."""


class StalledBody(ClosingRefusal):
    """The client stopped sending within a request, or sends too slowly: 408."""


def stalled_text(filled: int, size: int | None, stall_s: float) -> str:
    """Return the error message for a body that stopped."""
    return f"request body stalled after {_progress(filled, size)}: none came for {stall_s:g} s"


def slow_text(filled: int, size: int | None, stall_s: float) -> str:
    """Return the error message for a body below the lowest rate."""
    return (
        f"request body is too slow after {_progress(filled, size)}: less than {MIN_BYTES_PER_S} bytes/s came "
        f"for {stall_s:g} s"
    )


def _progress(filled: int, size: int | None) -> str:
    return f"{filled} bytes" if size is None else f"{filled} of {size} bytes"


class ReadProgress:
    """Checks at each tick whether the client reads what was sent to it, while the send buffer is not empty."""

    __slots__ = ("_mark", "_ticks")

    def __init__(self) -> None:
        self._mark = -1
        self._ticks = 0

    def stalled_ticks(self, transport: asyncio.Transport) -> int:
        """Return the number of consecutive ticks in which the client read nothing of the send buffer."""
        if not transport.get_write_buffer_size():
            self._mark, self._ticks = -1, 0
            return 0
        connection = transport.get_extra_info("socket")
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except (OSError, AttributeError):
            info = b""
        # The mark changes when the client reads: it is the number of acknowledged bytes or, where the system does not
        # count them (0), the size of the send buffer.
        mark = int.from_bytes(info[_ACKED], "little") or transport.get_write_buffer_size()
        self._ticks = self._ticks + 1 if mark == self._mark else 0
        self._mark = mark
        return self._ticks
