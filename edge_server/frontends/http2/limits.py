"""Limits of the HTTP/2 server. Each bounds the cost of one client."""

from __future__ import annotations

from dataclasses import dataclass

STREAM_WINDOW_BYTES = 4 << 20
"""Bytes that a client may send on a stream before more is granted. A camera frame fits without a pause."""

CONNECTION_WINDOW_BYTES = 256 << 20
"""The same for all streams of a connection together. The memory budget, not this window, bounds the memory in use."""

MAX_FRAME_BYTES = (1 << 24) - 1
"""Largest frame that clients may send, RFC 9113 section 4.2. A one-frame message is received in few system calls."""

MAX_HEADER_BLOCK_BYTES = 64 << 10
"""Largest compressed header block, over all its frames. More ends the connection: its compression state is lost."""

MAX_CONTINUATION_FRAMES = 16
"""CONTINUATION frames per header block. Endless empty ones cost processor time (CVE-2024-27316)."""

MAX_REMEMBERED_BLOCKS = 64
MAX_REMEMBERED_BLOCK_BYTES = 2048
"""Header blocks that a connection remembers by their bytes, and the largest size of each."""

MAX_UNREAD_ANSWERS = 4096
"""PING and SETTINGS acknowledgements that may wait for a client that does not read."""

MAX_RESET_IDS = 4096
"""Reset streams that a connection remembers. Frames that were already under way to them are no error."""

QUEUED_BYTES = 64 << 20
"""Response bytes that may wait for a connection's windows or its socket. Above it, new streams are refused."""

OUTPUT_BYTES = 1 << 20
"""Bytes in a connection's output above which streams keep the rest in their queues."""


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Limits that the server's owner sets. Times are in seconds; 0 for an age or a keepalive time means none.

    `max_header_list_bytes` is announced to clients. A larger list, up to four times as large, is marked
    `HeaderBlock.is_too_large` for the owner to refuse; a still larger one ends the connection. `keepalive_*`,
    `max_ping_strikes` and `min_ping_interval_s` are gRPC's channel arguments of those names. `control_rate` bounds the
    useless frames (SETTINGS, PING, empty DATA, PRIORITY) per second that a client may send over time, and likewise its
    cancelled streams. `stall_s` is how long a client may read nothing, or stop within a header block.
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
