"""Log lines of a bridge: its connection to the server, and the counts of its frames."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from edge_server.client import StreamError
from edge_server.plugins.ros.bridge_counts import BridgeCounts
from edge_server.protocol.frame_messages import StreamOpened

_REPEAT_S = 60.0

log = logging.getLogger(__name__)


class ConnectionLog:
    """Logs opened and broken connections; the same error at most once a minute."""

    def __init__(self, topic: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._topic = topic
        self._clock = clock
        self._logged: tuple[str, float] | None = None

    def log_broken(self, error: StreamError) -> None:
        """Log a broken connection."""
        now = self._clock()
        if self._logged is None or self._logged[0] != error.message or now - self._logged[1] >= _REPEAT_S:
            self._logged = error.message, now
            log.warning("%s: %s; trying again", self._topic, error)

    def log_opened(self, opened: StreamOpened) -> None:
        """Log an opened connection."""
        self._logged = None
        log.info("%s goes to %s", self._topic, describe_server(opened))


def describe_server(opened: StreamOpened) -> str:
    """Return a text such as "yunet version 2 on openvino 2024.4"."""
    return f"{opened.model} version {opened.version} on {opened.runtime}"


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
