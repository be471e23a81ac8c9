"""Not rclpy: see the README beside."""

from __future__ import annotations

import time
from typing import Any


class ExternalShutdownException(Exception):
    """The context was shut down outside the executor."""


class SingleThreadedExecutor:
    def __init__(self, *, context: Any = None) -> None:
        self.context, self.nodes, self.is_shut = context, [], False

    def add_node(self, node: Any) -> bool:
        assert node.context is self.context, "a node and its executor have one context"
        self.nodes.append(node)
        return True

    def spin_once(self, timeout_sec: float | None = None) -> None:
        """Run one callback, or come back after the time."""
        end = time.monotonic() + (timeout_sec or 0)
        while True:
            if not self.context.ok():
                raise ExternalShutdownException
            for node in self.nodes:
                for subscription in node.subscriptions:
                    if subscription.waiting:
                        subscription.callback(subscription.waiting.popleft())
                        return
            if time.monotonic() >= end:
                return
            time.sleep(0.001)

    def shutdown(self, timeout_sec: float | None = None) -> bool:
        self.is_shut = True
        return True
