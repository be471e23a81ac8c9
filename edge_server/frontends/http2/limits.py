"""Limits of the HTTP/2 server on what one client may use, such as header size and connection time."""

from __future__ import annotations

from typing import NamedTuple

STREAM_WINDOW_BYTES = 4 << 20
"""Bytes that a client may send on a stream before more is granted. A camera frame fits without a pause."""

CONNECTION_WINDOW_BYTES = 256 << 20
"""The same for all streams of a connection together. The memory budget, not this window, bounds the memory in use."""

TURN_CALLS = 64
TURN_S = 0.008
MIN_CALLS_PER_TURN = 4
MIN_SECONDS_PER_TURN = 0.00025
TURN_BYTES = 16 << 20
MIN_BYTES_PER_TURN = 64 << 10
"""Calls that are opened, the time that is spent, and the bytes of large messages that are received (some milliseconds)
in one turn of the reading thread before it looks for other input. The connections that have input share them equally,
but each has at least `MIN_CALLS_PER_TURN`, `MIN_SECONDS_PER_TURN` and `MIN_BYTES_PER_TURN`. Connections with more input
than their share wait for the next turn."""

MAX_FREE_UPDATES = 1 << 16
"""WINDOW_UPDATE frames that DATA and streams may have paid for in advance, see ConnectionAccount."""

MAX_UNREAD_ANSWERS = 4096
"""PING and SETTINGS acknowledgements that may wait for a client that does not read."""

MAX_RESET_IDS = 4096
"""Reset streams that a connection remembers. Frames that were already under way to them are no error."""

QUEUED_BYTES = 64 << 20
"""Response bytes that may wait for a connection's windows or its socket. Above it, new streams are refused."""

OUTPUT_BYTES = 1 << 20
"""Bytes in a connection's output above which streams keep the rest in their queues."""


GOAWAY_S = 5.0
"""Longest time that a client may take to acknowledge the PING behind the first GOAWAY, until when its new streams are
accepted. The same as in grpc-go."""


class Http2Limits(NamedTuple):
    """Limits that the server's owner sets. Times are in seconds; 0 for an age or a keepalive time means none.

    `max_header_list_bytes` is announced to clients. A larger list, up to four times as large, is marked
    `HeaderBlock.is_too_large` for the owner to refuse. A still larger one, and one of many, ends the connection.
    `keepalive_*`, `max_ping_strikes` and `min_ping_interval_s` are gRPC's channel arguments of those names.
    `control_rate` bounds the useless frames (SETTINGS, PING, empty DATA, PRIORITY, needless WINDOW_UPDATE, header lists
    that are too large) per second that a client may send over time, and likewise its cancelled streams. `stall_s` is
    how long a client may read nothing, or stop within a header block.
    """

    max_connections: int = 4096
    max_streams: int = 1024
    max_header_list_bytes: int = 64 << 10
    handshake_s: float = 10.0
    stall_s: float = 60.0
    tick_s: float = 1.0
    keepalive_time_s: float = 7200.0
    keepalive_timeout_s: float = 20.0
    permits_keepalive_without_streams: bool = False
    max_pings_without_data: int = 2
    min_ping_interval_s: float = 300.0
    max_ping_strikes: int = 2
    max_age_s: float = 0.0
    max_age_grace_s: float = 0.0
    control_rate: float = 1000.0
