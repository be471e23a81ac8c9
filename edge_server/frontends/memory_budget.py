"""Bound for the request bodies and messages that are on their way, over all wires together.

A body is counted as its bytes come, not by what its head promises: a promise costs nothing, and a client that made many
would keep all others out. At the bound the bodies that cost most are refused, by bytes held times seconds held. So a
half-sent huge body goes before one that just began, and small ones come through whatever others do. No body ever waits
for another one, so no two wait for each other.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from edge_server.errors import Refusal
from edge_server.memory.available_memory import read_memory
from edge_server.telemetry.metrics_page import Family

_LOG = logging.getLogger(__name__)

MIN_DEFAULT_BYTES = 256 << 20
_SHARE_OF_MEMORY = 4
_KEPT_FREE = 8
"""At the bound, room is made until this part of it is free, so that not every piece costs a look at all bodies."""

_RETRY_AFTER_S = 5.0
_LOG_EVERY_S = 60.0


def budget_bytes(setting: int, largest_body: int) -> int:
    """Return the bound that a setting means: itself, or for 0 a quarter of the memory that is available now; at least
    LEAST_BY_DEFAULT, and room for the largest body that is allowed if the machine has that."""
    if setting:
        return setting
    available = available_bytes()
    return max(MIN_DEFAULT_BYTES, available // _SHARE_OF_MEMORY, min(largest_body, available))


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this process can get: the kernel's MemAvailable or, where less, what its control group
    (v2, or an ancestor) still allows; 0 where neither tells. `root` is the root of the file system."""
    rooms = [room for room in (read_memory(root / "proc").available_bytes, _group_room(root)) if room is not None]
    return min(rooms, default=0)


def _group_room(root: Path) -> int | None:
    try:
        found = re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:
        return None
    if found is None:
        return None
    top = root / "sys/fs/cgroup"
    own = top / found[1]
    rooms = [_room(group) for group in (own, *own.parents) if group.is_relative_to(top)]
    return min((room for room in rooms if room is not None), default=None)


def _room(group: Path) -> int | None:
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text().strip()
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else None


class Body(Protocol):
    """A body that is being received. `filled` is changed by the budget alone, under its lock."""

    filled: int
    """Bytes of it that are held."""

    def refuse(self, refusal: Refusal) -> None:
        """Let go of what is held, leave the budget, and refuse the request. Called without the lock on any thread: a
        body that belongs to a thread hands this over to it and returns at once. A body that was settled meanwhile
        ignores it."""


class MemoryBudget:
    """Thread-safe. `total` bounds all bodies together, `each` a single one; both in bytes."""

    def __init__(self, total: int, each: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.each = min(each, total)
        self.held = 0
        """Bytes of all bodies."""
        self.refused = 0
        """How many bodies were refused to make room."""
        self._lock = threading.Lock()
        self._growing: dict[Body, float] = {}
        self._clock = clock
        self._logged_s = -_LOG_EVERY_S

    def enter(self, body: Body) -> None:
        """Count a body from now on; it may be refused to make room."""
        with self._lock:
            self._growing[body] = self._clock()

    def grow(self, body: Body, nbytes: int) -> None:
        """Count further bytes of a body, which may be refused for them before this returns."""
        with self._lock:
            body.filled += nbytes
            self.held += nbytes
            chosen = self._make_room() if self.held > self.total else []
            if not chosen and self.held > self.total and body not in self._growing:
                # It came whole, and became larger by inflating.
                chosen = [body]
            self.refused += len(chosen)
        for item in chosen:
            self._refuse(item)

    def settle(self, body: Body) -> None:
        """The body is all there, and in use: it counts as before, but is not refused any more. May be called again."""
        with self._lock:
            self._growing.pop(body, None)

    def leave(self, body: Body) -> None:
        """Count the body no more. May be called again."""
        with self._lock:
            self._growing.pop(body, None)
            self.held -= body.filled
            body.filled = 0

    def families(self) -> list[Family]:
        """Return the metrics. The names say HTTP for the sake of those who read them before gRPC was counted too."""
        held = Family("edge_http_body_bytes", "gauge", "Bytes of bodies that have come and are no requests yet")
        refused = Family("edge_http_bodies_refused_total", "counter", "Bodies refused as too many bytes were held")
        held.add({}, self.held)
        refused.add({}, self.refused)
        return [held, refused]

    def _make_room(self) -> list[Body]:
        """Return the bodies to be refused: the largest and oldest, at least one if there is any, until an eighth of
        what the settled ones leave is free. Under the lock."""
        now_s = self._clock()
        # A second more: of those that just began, the largest goes first.
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

    def _refuse(self, body: Body) -> None:
        body.refuse(
            Refusal(
                f"request body refused after {body.filled} bytes: the bodies on their way to this server hold more "
                f"than {self.total} bytes together (--http-max-body-bytes-in-flight), and this one is among those "
                "that hold most, for longest",
                retry_after_s=_RETRY_AFTER_S,
            )
        )
