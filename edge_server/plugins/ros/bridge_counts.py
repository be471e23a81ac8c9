"""Counts of a bridge's frames, and the log line about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from edge_server.client import Counters


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


def sum_counts(parts: Iterable[BridgeCounts]) -> BridgeCounts:
    """Return the counts of all parts together, with the newest error; `parts` are oldest first."""
    total = BridgeCounts()
    for part in parts:
        total.seconds += part.seconds
        total.received += part.received
        total.answered += part.answered
        total.late += part.late
        total.refused += part.refused
        total.failed += part.failed
        total.last_error = part.last_error or total.last_error
        total.latencies_s += part.latencies_s
        total.drops += part.drops
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


def report_line(topic: str, counts: BridgeCounts) -> str:
    """Return a log line: input and output rates, drops by reason, time from message to result."""
    if not counts.received and not counts.answered:
        return f"{topic}: no images in the last {counts.seconds:.0f} s"
    rates = f"in {counts.received / counts.seconds:.1f}/s, out {counts.answered / counts.seconds:.1f}/s"
    parts = [f"{topic}: {rates}"]
    if counts.drops:
        parts.append("dropped " + ", ".join(f"{count} {reason}" for reason, count in counts.drops.items()))
    if counts.late:
        parts.append(f"{counts.late} too late to publish")
    if counts.latencies_s:
        parts.append(f"latency p50 {counts.latency_ms(0.5):.0f} ms, p99 {counts.latency_ms(0.99):.0f} ms")
    return "; ".join(parts)
