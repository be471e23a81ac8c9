"""Count of the callers that keep a retired version open, such as a robot until the end of its episode."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edge_server.errors import EdgeServerError


class VersionHolds:
    """Delays the end of a version until nobody holds it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._end: Callable[[], None] | None = None

    def take(self, refusal: Callable[[], EdgeServerError]) -> Callable[[], None]:
        """Hold the version, and return the function that ends it; calls after the first do nothing. Raises what
        `refusal` makes if the version is being retired."""
        with self._lock:
            if self._end is not None:
                raise refusal()
            self._count += 1
        is_held = True

        def release() -> None:
            nonlocal is_held
            with self._lock:
                if not is_held:
                    return
                is_held = False
                self._count -= 1
                end = self._end if not self._count else None
            if end is not None:
                end()

        return release

    def end_when_free(self, end: Callable[[], None]) -> None:
        """Call the function once nobody holds the version: at once, or by the last one that releases it."""
        with self._lock:
            self._end = end
            if self._count:
                return
        end()
