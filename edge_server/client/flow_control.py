"""What a client counts and when it may send: frames that wait, credit, and how long to wait before another try.

No threads, no clock, no wire: the caller holds its own lock around every method and says what time it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge_server.core.frame import DropReason, Frame

_MOST_AGE_US = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Counters:
    """What became of the frames, over all connections, at one moment.

    offered = sent + dropped_here + waiting, and sent = answered + sum(dropped.values()) + in_flight + lost.
    `dropped_here`: a newer frame came, or the stream was closed, before there was leave to send. `dropped`: by the
    server, as its results told. `lost`: neither answered nor told of when their connection ended.
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
    """The frames of one stream on the client's side. The newest wins; never more are sent than the server allows.

    At most `depth` frames wait, and at most `most_in_flight` are under way; 0: as many as the server allows.
    """

    def __init__(self, depth: int, most_in_flight: int = 0) -> None:
        self._depth = max(depth, 1)
        self._most_in_flight = most_in_flight
        self._waiting: deque[tuple[float, Frame]] = deque()
        self._offered = self._sent = self._dropped_here = self._answered = self._lost = self._connections = 0
        self._dropped_here_told = 0
        self._dropped: Counter[DropReason] = Counter()
        self._begin()

    def _begin(self) -> None:
        """Set what is counted by connection."""
        self._frames_allowed = self._sent_now = self._in_flight = 0
        self._noticed: Counter[DropReason] = Counter()
        self._notices_due: Counter[DropReason] = Counter()

    @property
    def offered(self) -> int:
        return self._offered

    @property
    def has_room(self) -> bool:
        """Whether a frame can be offered that makes no other give way."""
        return len(self._waiting) < self._depth

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def may_send(self) -> bool:
        if not self._waiting or self._sent_now >= self._frames_allowed:
            return False
        return not self._most_in_flight or self._in_flight < self._most_in_flight

    def offer(self, frame: Frame, now_s: float) -> None:
        """Put in a frame; the oldest gives way when there are more than `depth`."""
        self._offered += 1
        self._waiting.append((now_s, frame))
        if len(self._waiting) > self._depth:
            self._waiting.popleft()
            self._dropped_here += 1

    def connect(self) -> None:
        """A new connection begins, and any before it ended; nothing may be sent until the server allows it."""
        self.disconnect()
        self._connections += 1

    def allow(self, frames_allowed: int) -> None:
        """Take what the server's message says about how many frames may be sent on this connection in all."""
        self._frames_allowed = max(self._frames_allowed, frames_allowed)

    def take(self, now_s: float) -> Frame | None:
        """Return the frame to send now, its age grown by the time it waited; None when there is none or no leave."""
        if not self.may_send:
            return None
        since_s, frame = self._waiting.popleft()
        self._sent += 1
        self._sent_now += 1
        self._in_flight += 1
        age_us = frame.age_us + max(0, round((now_s - since_s) * 1e6))
        return replace(frame, age_us=min(age_us, _MOST_AGE_US))

    def settle(self, dropped: Mapping[DropReason, int]) -> None:
        """Count one result, and the drops since the one before that it tells of.

        Counts beyond what was sent on this connection are the server's mistake and are left out.
        """
        self._answered += self._land(1)
        for reason, count in dropped.items():
            self._notices_due[reason] += count - self._noticed[reason]
            self._drop(reason, count - self._noticed[reason])
        self._noticed.clear()

    def drops_to_tell(self, dropped: Mapping[DropReason, int]) -> dict[DropReason, int]:
        """Return the server's drops of one result, and with them the frames that gave way here since the last call."""
        here, self._dropped_here_told = self._dropped_here - self._dropped_here_told, self._dropped_here
        newer = dropped.get(DropReason.NEWER, 0) + here
        return {**dropped, DropReason.NEWER: newer} if here else dict(dropped)

    def notice(self, reason: DropReason) -> None:
        """Count a drop that is told at once; the next result will tell of it too, or the last one did already."""
        if self._notices_due[reason] > 0:
            self._notices_due[reason] -= 1
        else:
            self._noticed[reason] += 1
            self._drop(reason, 1)

    def _drop(self, reason: DropReason, count: int) -> None:
        landed = self._land(max(count, 0))
        if landed:
            self._dropped[reason] += landed

    def _land(self, count: int) -> int:
        landed = min(count, self._in_flight)
        self._in_flight -= landed
        return landed

    def disconnect(self) -> None:
        """The connection ended: what was not answered on it never will be."""
        self._lost += self._in_flight
        self._begin()

    def clear(self) -> None:
        """Drop what waits."""
        self._dropped_here += len(self._waiting)
        self._waiting.clear()

    def counters(self) -> Counters:
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


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long to wait before the next try: twice as long each time, from `first_s` to at most `most_s`.

    Up to the share `jitter` (0 to 1) of it is taken off at random, so that many cameras do not come back at once.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if not (0 < self.first_s <= self.most_s and 0 <= self.jitter <= 1):
            raise ValueError(f"back-off needs 0 < first_s <= most_s and 0 <= jitter <= 1, got {self}")

    def delay_s(self, failures: int, chance: float) -> float:
        """Return the wait after so many failures in a row, 1 or more. `chance` is a random number, 0 to 1."""
        # Beyond 2**30 the bound has long been reached, and the power must not overflow.
        grown = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return grown * (1 - self.jitter * chance)
