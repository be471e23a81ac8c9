"""Flow control for camera frames that a client sends: which frames wait, how many more the server accepts now, and
which are dropped.

No threads, no clock, no network: the caller holds its lock around each method and passes the time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_server.protocol.frame_codec import EncodedFrame
from edge_server.protocol.frame_messages import DropReason

_MAX_AGE_US = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of a stream's frames, over all connections.

    offered = sent + dropped_here + waiting, and sent = answered + sum(dropped.values()) + in_flight + lost.
    `dropped_here`: replaced by a newer frame, or the stream was closed, before they could be sent. `dropped`: dropped
    by the server, as reported in its results. `lost`: without a result or report when their connection ended.
    """

    offered: int = 0
    sent: int = 0
    dropped_here: int = 0
    waiting: int = 0
    answered: int = 0
    dropped: Mapping[DropReason, int] = field(default_factory=dict)
    in_flight: int = 0
    lost: int = 0
    connections: int = 0


class FlowControl:
    """Waiting and sent frames of one stream. The server limits the number of sent frames.

    At most `depth` frames wait: a newer frame replaces the oldest one. At most `max_in_flight` are in flight; 0 means
    as many as the server allows.
    """

    def __init__(self, depth: int, max_in_flight: int = 0) -> None:
        self._depth = max(depth, 1)
        self._max_in_flight = max_in_flight
        self._waiting: deque[tuple[float, EncodedFrame]] = deque()
        self._offered = self._sent = self._dropped_here = self._answered = self._lost = self._connections = 0
        self._dropped_here_reported = 0
        self._dropped: Counter[DropReason] = Counter()
        self._reset_connection()

    def _reset_connection(self) -> None:
        """Reset the counts of a connection."""
        self._frames_allowed = self._sent_now = self._in_flight = 0
        self._noticed: Counter[DropReason] = Counter()
        self._notices_due: Counter[DropReason] = Counter()

    @property
    def offered(self) -> int:
        return self._offered

    @property
    def has_room(self) -> bool:
        """Whether a frame can be offered without replacing another one."""
        return len(self._waiting) < self._depth

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def in_flight(self) -> int:
        """Frames of this connection without a result or a report yet."""
        return self._in_flight

    @property
    def may_send(self) -> bool:
        if not self._waiting or self._sent_now >= self._frames_allowed:
            return False
        return not self._max_in_flight or self._in_flight < self._max_in_flight

    def offer(self, frame: EncodedFrame, now_s: float) -> None:
        """Add a frame; the oldest one is dropped when there are more than `depth`."""
        self._offered += 1
        self._waiting.append((now_s, frame))
        if len(self._waiting) > self._depth:
            self._waiting.popleft()
            self._dropped_here += 1

    def connect(self) -> None:
        """Start a new connection, and end the previous one. Nothing may be sent until the server allows it."""
        self.disconnect()
        self._connections += 1

    def allow(self, frames_allowed: int) -> None:
        """Set the total number of frames that the server allows on this connection."""
        self._frames_allowed = max(self._frames_allowed, frames_allowed)

    def take_frame(self, now_s: float) -> EncodedFrame | None:
        """Return the next frame to send, or None without a frame or credit. The waiting time is added to its age."""
        if not self.may_send:
            return None
        since_s, frame = self._waiting.popleft()
        self._sent += 1
        self._sent_now += 1
        self._in_flight += 1
        age_us = frame.age_us + max(0, round((now_s - since_s) * 1e6))
        return EncodedFrame(frame.fields, min(age_us, _MAX_AGE_US), frame.data)

    def count_result(self, dropped: Mapping[DropReason, int]) -> None:
        """Count one result, and the drops since the previous result, which it reports in `dropped`.

        Counts that exceed the sent frames of this connection are an error of the server, and are ignored.
        """
        self._answered += self._end_flight(1)
        for reason, count in dropped.items():
            self._notices_due[reason] += count - self._noticed[reason]
            self._count_dropped(reason, count - self._noticed[reason])
        self._noticed.clear()

    def drops_to_report(self, dropped: Mapping[DropReason, int]) -> dict[DropReason, int]:
        """Return the server's drops of one result plus the frames replaced here since the last call."""
        here, self._dropped_here_reported = self._dropped_here - self._dropped_here_reported, self._dropped_here
        newer = dropped.get(DropReason.NEWER, 0) + here
        return {**dropped, DropReason.NEWER: newer} if here else dict(dropped)

    def count_drop_notice(self, reason: DropReason) -> None:
        """Count a drop that a notice reports. A result reports the same drop, before or after: it is counted once."""
        if self._notices_due[reason] > 0:
            self._notices_due[reason] -= 1
        else:
            self._noticed[reason] += 1
            self._count_dropped(reason, 1)

    def _count_dropped(self, reason: DropReason, count: int) -> None:
        ended = self._end_flight(max(count, 0))
        if ended:
            self._dropped[reason] += ended

    def _end_flight(self, count: int) -> int:
        """Remove up to `count` frames from those in flight, and return their number."""
        ended = min(count, self._in_flight)
        self._in_flight -= ended
        return ended

    def disconnect(self) -> None:
        """End the connection: its frames without a result are lost."""
        self._lost += self._in_flight
        self._reset_connection()

    def clear(self) -> None:
        """Drop the waiting frames."""
        self._dropped_here += len(self._waiting)
        self._waiting.clear()

    def counters(self) -> Counters:
        """Return the counts now."""
        return Counters(
            offered=self._offered,
            sent=self._sent,
            dropped_here=self._dropped_here,
            waiting=len(self._waiting),
            answered=self._answered,
            dropped=dict(self._dropped),
            in_flight=self._in_flight,
            lost=self._lost,
            connections=self._connections,
        )
