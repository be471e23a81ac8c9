"""Abuse limits of one HTTP/2 connection: counts its streams, pings, cancelled streams and useless frames, and ends the
connection of a client that sends too many.

WINDOW_UPDATE costs the server about as much as a PING, but clients must send it. Streams and DATA pay for it: a stream
for six frames (grpcio sends two when a call begins and two for its response), each further DATA frame for three (gRPC's
C++ library sends 2.3 in a stream of small messages), and each KiB of DATA for one more. So clients may return every
frame and every KiB at once. WINDOW_UPDATE that nothing has paid for counts as a useless frame.
"""

from __future__ import annotations

from time import monotonic

from edge_server.frontends.http2 import limits
from edge_server.frontends.http2.limits import Http2Limits
from edge_server.http2.frames import ConnectionFault, Http2ErrorCode

_UPDATES_PER_STREAM = 6
_UPDATES_PER_FRAME = 3
"""WINDOW_UPDATE frames that an opened stream and a further DATA frame pay for."""


class ConnectionAccount:
    """Numbers of the streams, bytes for which the window is not raised yet, and credits against abuse.

    No I/O and no lock. Used on the reading thread; `remember_reset` also on others, under the writer's lock.
    """

    __slots__ = (
        "_control_credit", "_credit_s", "_last_ping_s", "_limits", "_ping_strikes", "_reset_credit", "_updates_paid",
        "free_updates", "is_ending", "last_stream_id", "reset_ids", "streams_opened", "ungranted",
    )  # fmt: skip

    def __init__(self, settings: Http2Limits, now_s: float) -> None:
        self._limits = settings
        self.last_stream_id = 0
        self.is_ending = False
        """Whether the last GOAWAY is sent: streams above `last_stream_id` are ignored with all their frames, section
        6.8."""
        self.reset_ids: dict[int, None] = {}
        """Streams closed while the client could still send. Frames already under way are no error, section 5.1."""
        self.ungranted = 0
        """Bytes received since the connection's window was last raised."""
        self.streams_opened = self._updates_paid = 0
        self.free_updates = 0
        """WINDOW_UPDATE frames that are paid for and have not arrived yet."""
        self._control_credit = self._reset_credit = settings.control_rate
        self._credit_s = now_s
        self._last_ping_s = 0.0
        self._ping_strikes = 0

    def is_idle(self, stream_id: int) -> bool:
        """Return whether the stream was never opened, so that a frame on it is an error. Section 5.1."""
        return not stream_id % 2 or (stream_id > self.last_stream_id and not self.is_ending)

    def remember_reset(self, stream_id: int) -> None:
        """Requires the writer's lock."""
        reset_ids = self.reset_ids
        reset_ids[stream_id] = None
        if len(reset_ids) > limits.MAX_RESET_IDS:
            del reset_ids[next(iter(reset_ids))]

    def charge(self, count: int = 1) -> None:
        """Charge useless frames. Raises ConnectionFault for too many of them."""
        self._control_credit -= count
        if self._control_credit < 0:
            self._refill()
            if self._control_credit < 0:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def charge_reset(self) -> None:
        """Charge a stream that the client cancels. Raises ConnectionFault for too many of them.

        Endless opening and cancelling of streams costs the server more than the client (CVE-2023-44487).
        """
        self._refill()
        self._reset_credit -= 1
        if self._reset_credit < 0:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many streams are cancelled")

    def _refill(self) -> None:
        now_s = monotonic()
        rate = self._limits.control_rate
        gained = (now_s - self._credit_s) * rate
        self._credit_s = now_s
        self._control_credit = min(rate, self._control_credit + gained)
        self._reset_credit = min(rate, self._reset_credit + gained)

    def charge_update(self, frames_sent: int, bytes_sent: int) -> None:
        """Charge a WINDOW_UPDATE, unless a stream or the DATA sent so far has paid for it: see the module's first
        lines. Raises ConnectionFault."""
        if self.free_updates:
            self.free_updates -= 1
            return
        paid = _UPDATES_PER_STREAM * self.streams_opened + _UPDATES_PER_FRAME * frames_sent + (bytes_sent >> 10)
        left = paid - self._updates_paid
        if left <= 0:
            self.charge()
            return
        # Half of what may be paid in advance: as much may be paid until these are used.
        self.free_updates = min(left, limits.MAX_FREE_UPDATES // 2) - 1
        self._updates_paid = paid

    def charge_ping(self, now_s: float, *, has_streams: bool, has_sent: bool) -> None:
        """Charge a PING. Raises ConnectionFault for those that come too often: gRPC's rule for servers (gRFC A8).

        `has_sent`: HEADERS or DATA were sent since the last one.
        """
        self.charge()
        settings = self._limits
        has_leave = has_streams or settings.permits_keepalive_without_streams
        interval_s = settings.min_ping_interval_s if has_leave else max(settings.min_ping_interval_s, 7200.0)
        if has_sent:
            # As in gRPC's core: output sent since the last PING permits the next one.
            self._ping_strikes = 0
        elif self._last_ping_s and now_s - self._last_ping_s < interval_s:
            self._ping_strikes += 1
            if settings.max_ping_strikes and self._ping_strikes > settings.max_ping_strikes:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._last_ping_s = now_s
