"""Limit on the memory of all request bodies that HTTP and gRPC receive at one time: if it is full, rejects large, slow
uploads first.

The bytes received count, not the announced length: announcements cost a client nothing, and could block all others.
When the budget is exceeded, the bodies with the highest cost are refused; the cost is bytes held times seconds held. A
large, slow upload is therefore refused before a new one, and small bodies always get through. No body waits for another
one, so there is no deadlock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from edge_server.errors import Refusal
from edge_server.memory.available_memory import read_memory
from edge_server.telemetry.metrics_page import Family

_LOG = logging.getLogger(__name__)

MIN_DEFAULT_BYTES = 256 << 20
_SHARE_OF_MEMORY = 4
_KEPT_FREE = 8
"""Refusals free this part of the budget (an eighth), so that not each received piece causes a scan of all bodies."""

_RETRY_AFTER_S = 5.0
_LOG_EVERY_S = 60.0


def budget_bytes(setting: int, largest_body: int) -> int:
    """Return the total budget for a setting. 0 means a quarter of the available memory, but at least MIN_DEFAULT_BYTES
    and, if the machine has that much, the largest allowed body."""
    if setting:
        return setting
    available = read_memory().available_bytes or 0
    return max(MIN_DEFAULT_BYTES, available // _SHARE_OF_MEMORY, min(largest_body, available))


class Body(Protocol):
    """A body that is being received. Only the budget changes `filled`, under its lock."""

    filled: int
    """Bytes held for it."""

    def refuse(self, refusal: Refusal) -> None:
        """Release the bytes, leave the budget, and refuse the request. Called without the lock, on any thread: a body
        that belongs to a thread passes this to it and returns at once. A settled body ignores it."""


class MemoryBudget:
    """Budget for received bodies. Thread-safe. `total` limits all bodies together, `each` a single one; in bytes.

    A piece is counted once it is received: `held` may exceed `total` until the bodies refused for it are released."""

    def __init__(self, total: int, each: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.each = min(each, total)
        self.held = 0
        """Bytes of all bodies."""
        self.refused = 0
        """Number of bodies refused to free memory."""
        self._lock = threading.Lock()
        self._growing: dict[Body, float] = {}
        self._clock = clock
        self._logged_s = -_LOG_EVERY_S

    def enter(self, body: Body) -> None:
        """Count a body from now on. It may be refused to free memory."""
        with self._lock:
            self._growing[body] = self._clock()

    def grow(self, body: Body, nbytes: int) -> None:
        """Count further bytes of a body. The body may be refused before this returns."""
        with self._lock:
            body.filled += nbytes
            self.held += nbytes
            chosen = self._choose_refused() if self.held > self.total else []
            if not chosen and self.held > self.total and body not in self._growing:
                # The body is complete, and grew when it was decompressed.
                chosen = [body]
            self.refused += len(chosen)
        for item in chosen:
            item.refuse(
                Refusal(
                    f"request body refused after {item.filled} bytes: the bodies on their way to this server hold more "
                    f"than {self.total} bytes together (--http-max-body-bytes-in-flight), and this one is among those "
                    "that hold most, for longest",
                    retry_after_s=_RETRY_AFTER_S,
                )
            )

    def settle(self, body: Body) -> None:
        """Mark the body as complete and in use: it still counts, but is not refused. May be called again."""
        with self._lock:
            self._growing.pop(body, None)

    def leave(self, body: Body) -> None:
        """Remove the body from the budget. May be called again."""
        with self._lock:
            self._growing.pop(body, None)
            self.held -= body.filled
            body.filled = 0

    def families(self) -> list[Family]:
        """Return the metrics. They include gRPC; their names say HTTP because existing dashboards use them."""
        held = Family("edge_http_body_bytes", "gauge", "Bytes received of request bodies that are not decoded yet")
        refused = Family(
            "edge_http_bodies_refused_total", "counter", "Request bodies refused because the memory budget was exceeded"
        )
        held.add({}, self.held)
        refused.add({}, self.refused)
        return [held, refused]

    def _choose_refused(self) -> list[Body]:
        """Choose the bodies to refuse: the largest and oldest, at least one if there is any, until an eighth of the
        budget beside the settled bodies is free. Under the lock."""
        now_s = self._clock()
        # One second is added, so that among new bodies the largest is refused first.
        costs = {body: body.filled * (now_s - since_s + 1.0) for body, since_s in self._growing.items()}
        settled = self.held - sum(body.filled for body in costs)
        room = max(0, self.total - settled)
        held = self.held
        chosen: list[Body] = []
        for body in sorted(costs, key=costs.__getitem__, reverse=True):
            if held <= settled + room - room // _KEPT_FREE:
                break
            held -= body.filled
            del self._growing[body]
            chosen.append(body)
        if chosen and now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            _LOG.warning(
                "request bodies on their way held more than %d bytes: %d of them refused", self.total, len(chosen)
            )
        return chosen
