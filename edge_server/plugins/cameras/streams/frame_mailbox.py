"""Waiting frames of one stream: keeps the newest ones, drops old ones, and counts every frame.

No threads and no clock: the caller holds its own lock around every method and passes the time, in nanoseconds of any
monotonic clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edge_server.protocol.frame_messages import Delivery, DropReason, StreamCounts

Item = TypeVar("Item")

NORMAL_PRIORITY = 2
"""Priority of a stream that sets none."""

_MS = 1_000_000
_SLACK_NS = _MS


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The limits of a Delivery, in nanoseconds and with defaults filled in. 0 ns means no limit."""

    depth: int = 1
    max_age_ns: int = 0
    deadline_ns: int = 0
    interval_ns: int = 0

    @classmethod
    def of(cls, delivery: Delivery) -> FrameLimits:
        """Return the limits of a validated delivery."""
        return cls(
            depth=delivery.depth or 1,
            max_age_ns=delivery.max_age_ms * _MS,
            deadline_ns=delivery.deadline_ms * _MS,
            interval_ns=round(1e9 / delivery.max_fps) if delivery.max_fps else 0,
        )


@dataclass(slots=True)
class FrameTally:
    """The counters of a stream id. At any time received = answered + sum(dropped) + waiting. `late` of the answered
    ones were late.

    `track_ids` gives the numbers of its tracks: none comes twice, also after a reconnect.
    """

    received: int = 0
    answered: int = 0
    late: int = 0
    dropped: dict[DropReason, int] = field(default_factory=dict)
    track_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def waiting(self) -> int:
        """Frames that are neither answered nor dropped yet."""
        return self.received - self.answered - sum(self.dropped.values())

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """Count dropped frames."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def counts(self) -> StreamCounts:
        """Return a copy of the counters."""
        return StreamCounts(self.received, self.answered, dict(self.dropped), self.late)


class FrameSpacing:
    """Rate limit of a stream: on average at most one frame per `interval_ns`.

    Frames are due on a fixed grid. After a late frame the next one may come earlier, by up to one interval. So a camera
    of 30 fps with a limit of 20 gives 20 fps, not 15. In any time span at most span / interval + 2 frames pass.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._due_ns: int | None = None

    def admits(self, now_ns: int) -> bool:
        """Return whether a frame that arrives now may pass. If so, it counts for the limit."""
        if self._due_ns is None:
            self._due_ns = now_ns
        if now_ns < self._due_ns:
            return False
        self._due_ns = max(self._due_ns, now_ns - self._interval_ns) + self._interval_ns
        return True


class RunEstimate:
    """Estimate of the time from the choice of a frame to its result (`ns`), and of the preparation before the model.

    Both are moving averages, 0 before the first run. Each frame that is dropped because of the estimate lowers it a
    little (`relax`). Without this, one slow run could stop a stream forever: no frame runs, so nothing is measured.
    """

    def __init__(self) -> None:
        self.ns = 0
        self._prepare_ns = 0

    def add(self, run_ns: int, prepare_ns: int) -> None:
        if self.ns:
            run_ns, prepare_ns = (3 * self.ns + run_ns) // 4, (3 * self._prepare_ns + prepare_ns) // 4
        self.ns, self._prepare_ns = run_ns, prepare_ns

    def best_choice_ns(self, chosen_ns: int) -> int:
        """Return the best time to choose the frame that runs after the one chosen at `chosen_ns`.

        Late, so that the frame is fresh, but early enough to prepare it before the current run ends, with some margin.
        """
        return chosen_ns + self.ns - max(self.ns // 4, 2 * self._prepare_ns + _SLACK_NS)

    def relax(self) -> None:
        self.ns -= self.ns // 32


class Mailbox(Generic[Item]):
    """The waiting frames of one stream, at most `limits.depth`. The oldest runs first, and is dropped first."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._spacing = FrameSpacing(limits.interval_ns) if limits.interval_ns else None
        self.waiting: deque[tuple[int, Item]] = deque()
        """The waiting frames with their times of arrival, the oldest first. Only read it."""

    def offer(self, item: Item, now_ns: int, *, reader_is_slow: bool = False) -> tuple[Item, DropReason] | None:
        """Add a frame received now. Return the frame dropped for it, which may be the same one, and the reason.

        `reader_is_slow`: the client does not read its results; this is then the reason.
        """
        if self._spacing is not None and not self._spacing.admits(now_ns):
            return item, DropReason.MAX_FPS
        self.waiting.append((now_ns, item))
        if len(self.waiting) <= self._limits.depth:
            return None
        return self.waiting.popleft()[1], DropReason.SLOW_READER if reader_is_slow else DropReason.NEWER

    def take(self, now_ns: int, estimate: RunEstimate) -> tuple[Item | None, list[tuple[Item, DropReason]]]:
        """Remove and return the frame to run now (or None), and the frames dropped before it.

        Drops frames that are too old, and frames whose estimated result is after their deadline.
        """
        dropped: list[tuple[Item, DropReason]] = []
        while self.waiting:
            received_ns, item = self.waiting.popleft()
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
        """Return whether a result that is ready now is after the deadline of its frame."""
        return 0 < self._limits.deadline_ns < now_ns - received_ns

    def clear(self) -> list[Item]:
        """Remove and return all waiting frames."""
        items = [item for _, item in self.waiting]
        self.waiting.clear()
        return items
