"""How the frames of one stream wait: the newest wins, and nothing is lost uncounted.

No threads and no clock: the caller holds its own lock around every method and says what time it is, in nanoseconds of
any monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edge_server.core.frame import Delivery, DropReason, StreamCounts

Item = TypeVar("Item")

NORMAL_PRIORITY = 2
"""What a stream that states no priority has."""

_MS = 1_000_000
_SLACK_NS = _MS


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """A Delivery as the rules need it: nanoseconds, and its zeros replaced. 0 ns leaves a limit out."""

    depth: int = 1
    max_age_ns: int = 0
    deadline_ns: int = 0
    interval_ns: int = 0

    @classmethod
    def of(cls, delivery: Delivery) -> FrameLimits:
        """Return the limits of a delivery whose numbers were checked before."""
        return cls(
            depth=delivery.depth or 1,
            max_age_ns=delivery.max_age_ms * _MS,
            deadline_ns=delivery.deadline_ms * _MS,
            interval_ns=round(1e9 / delivery.max_fps) if delivery.max_fps else 0,
        )


@dataclass(slots=True)
class FrameTally:
    """The counts of a stream id. received = answered + sum(dropped) + waiting, at any moment."""

    received: int = 0
    answered: int = 0
    dropped: dict[DropReason, int] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """How many frames were received and are neither answered nor dropped yet."""
        return self.received - self.answered - sum(self.dropped.values())

    def drop(self, reason: DropReason, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def counts(self) -> StreamCounts:
        """Return a copy that stays as it is."""
        return StreamCounts(self.received, self.answered, dict(self.dropped))


class FrameSpacing:
    """At most one frame each `interval_ns` on average, kept to a grid that the frames' jitter does not shift.

    A frame that comes late makes the next one due by as much earlier, up to one interval: so a camera of 30 fps held
    to 20 gives 20, not 15. In any span of time no more than span / interval + 2 frames pass.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._due_ns: int | None = None

    def admits(self, now_ns: int) -> bool:
        """Take a frame that comes now, or say that it comes too soon."""
        if self._due_ns is None:
            self._due_ns = now_ns
        if now_ns < self._due_ns:
            return False
        self._due_ns = max(self._due_ns, now_ns - self._interval_ns) + self._interval_ns
        return True


class RunEstimate:
    """How long a frame takes from its choice to its result (`ns`), learned from those that went before, and how much
    of it goes by before it is handed to the model.

    0 until the first. Each frame that was not started because of the estimate lowers it a little (`relax`), so that
    one slow run, which is never measured again when nothing is started, does not end a stream for good.
    """

    def __init__(self) -> None:
        self.ns = 0
        self._prepare_ns = 0

    def add(self, run_ns: int, prepare_ns: int) -> None:
        if self.ns:
            run_ns, prepare_ns = (3 * self.ns + run_ns) // 4, (3 * self._prepare_ns + prepare_ns) // 4
        self.ns, self._prepare_ns = run_ns, prepare_ns

    def best_choice_ns(self, chosen_ns: int) -> int:
        """Return when to choose the frame that runs after one chosen at `chosen_ns`: late, so that it is fresh, but
        with room to make it ready before that one ends, and for estimates to be wrong."""
        return chosen_ns + self.ns - max(self.ns // 4, 2 * self._prepare_ns + _SLACK_NS)

    def relax(self) -> None:
        self.ns -= self.ns // 32


class Mailbox(Generic[Item]):
    """The frames of one stream that wait: at most `limits.depth`, of which the oldest gives way and goes first."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._spacing = FrameSpacing(limits.interval_ns) if limits.interval_ns else None
        self._waiting: deque[tuple[int, Item]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, item: Item, now_ns: int, *, reader_is_slow: bool = False) -> tuple[Item, DropReason] | None:
        """Put in a frame received now; return the one that this dropped, which may be the same, and why.

        `reader_is_slow`: the stream waits for its client to take results, which is then the reason.
        """
        if self._spacing is not None and not self._spacing.admits(now_ns):
            return item, DropReason.MAX_FPS
        self._waiting.append((now_ns, item))
        if len(self._waiting) <= self._limits.depth:
            return None
        return self._waiting.popleft()[1], DropReason.SLOW_READER if reader_is_slow else DropReason.NEWER

    def take(self, now_ns: int, estimate: RunEstimate) -> tuple[Item | None, list[tuple[Item, DropReason]]]:
        """Remove and return the frame to run now, None when there is none, and those dropped before it.

        Too old, or not to be finished by its deadline if the run takes as long as estimated, is not run.
        """
        dropped: list[tuple[Item, DropReason]] = []
        while self._waiting:
            received_ns, item = self._waiting.popleft()
            waited_ns = now_ns - received_ns
            if self._limits.max_age_ns and waited_ns > self._limits.max_age_ns:
                dropped.append((item, DropReason.MAX_AGE))
            elif self._limits.deadline_ns and waited_ns + estimate.ns > self._limits.deadline_ns:
                estimate.relax()
                dropped.append((item, DropReason.DEADLINE))
            else:
                return item, dropped
        return None, dropped

    def is_late(self, received_ns: int, now_ns: int) -> bool:
        """Return whether a result ready now is past the deadline of its frame."""
        return 0 < self._limits.deadline_ns < now_ns - received_ns

    def clear(self) -> list[Item]:
        """Remove and return all."""
        items = [item for _, item in self._waiting]
        self._waiting.clear()
        return items
