"""Frame admission: the governor's interface for frame streams, called before a frame runs."""

from __future__ import annotations

from typing import Protocol

from edge_server.core.status_reports import GovernorState


class FrameAdmission(Protocol):
    """Decides whether a frame may run. Many threads call the methods for each frame, so they must return at once."""

    def state(self) -> GovernorState:
        """Return the governor state that every result carries: heat, power and memory."""

    def refuse_frame(self, priority: int) -> str | None:
        """Return a readable reason to refuse a frame of that priority (1 is the highest), or None if it may run."""

    def count_refused(self, priority: int) -> None:
        """Count one more refused frame of a batch that was refused as one request."""


class NoFrameAdmission:
    """Frame admission without a governor: every frame may run."""

    _STATE = GovernorState()

    def state(self) -> GovernorState:
        return self._STATE

    def refuse_frame(self, priority: int) -> str | None:
        return None

    def count_refused(self, priority: int) -> None:
        pass
