"""Counts of a camera's frames and results, by intervals of some seconds."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field, fields

from edge_server.client import Counters
from edge_server.protocol.frame_messages import FrameResult

_RECENT_INTERVALS = 5
_MAX_SENT_TIMES = 1024


@dataclass(slots=True)
class BridgeCounts:
    """Counts over `seconds`. `drops` counts frames without a result, by reason; `latencies_s` are times from a message
    to its result."""

    seconds: float = 0.0
    received: int = 0
    answered: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0
    last_error: str = ""
    latencies_s: list[float] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)

    def latency_ms(self, fraction: float) -> float:
        """Return a quantile of the latencies in ms. There must be at least one."""
        ordered = sorted(self.latencies_s)
        return ordered[min(int(len(ordered) * fraction), len(ordered) - 1)] * 1000


_SUMMED = [item.name for item in fields(BridgeCounts) if item.name != "last_error"]


class FrameCounter:
    """Counts the frames and results of one camera by intervals. For any thread."""

    def __init__(self) -> None:
        self.largest_frame = 0
        self._lock = threading.Lock()
        self._counts = BridgeCounts()
        self._ended: deque[BridgeCounts] = deque(maxlen=_RECENT_INTERVALS)
        self._sent_times: OrderedDict[int, float] = OrderedDict()

    def add_frame(self, seq: int, size: int) -> None:
        """Count a frame of `size` bytes that is sent now."""
        with self._lock:
            self._counts.received += 1
            self.largest_frame = max(self.largest_frame, size)
            self._sent_times[seq] = time.monotonic()
            while len(self._sent_times) > _MAX_SENT_TIMES:
                self._sent_times.popitem(last=False)

    def add_refused(self, error: str) -> None:
        """Count a message that is not an image."""
        with self._lock:
            self._counts.refused += 1
            self._counts.last_error = error

    def add_result(self, result: FrameResult) -> None:
        """Count a result: an error, a late one, or an answer."""
        now = time.monotonic()
        with self._lock:
            if result.error_code:
                self._counts.failed += 1
                self._counts.last_error = f"{result.error_code}: {result.error}"
            elif result.is_late:
                self._counts.late += 1
            else:
                self._counts.answered += 1
                sent_at = self._sent_times.pop(result.header.seq, None)
                if sent_at is not None:
                    self._counts.latencies_s.append(now - sent_at)

    def add_drops(self, drops: Counter[str]) -> None:
        """Count frames without a result, by reason."""
        with self._lock:
            self._counts.drops += drops

    def end_interval(self, seconds: float, drops: Counter[str]) -> None:
        """End an interval of `seconds`, in which the stream counted `drops`."""
        with self._lock:
            counts, self._counts = self._counts, BridgeCounts()
        counts.seconds = seconds
        counts.drops += drops
        self._ended.append(counts)

    def recent(self) -> BridgeCounts:
        """Return the counts of the last intervals together, with the newest error."""
        total = BridgeCounts()
        for part in self._ended:
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(part, name))
            total.last_error = part.last_error or total.last_error
        return total


def drops_between(before: Counters, now: Counters) -> Counter[str]:
    """Return the numbers of frames without a result between two counts of a stream, by reason."""
    drops = Counter(
        {
            reason.name.lower().replace("_", " "): count - before.dropped.get(reason, 0)
            for reason, count in now.dropped.items()
        }
    )
    drops["overtaken before sending"] = now.dropped_here - before.dropped_here
    drops["lost with a connection"] = now.lost - before.lost
    return +drops
