"""Frame admission: what the frame streams ask the governor before a frame runs."""

from __future__ import annotations

from typing import Protocol

from edge_server.core.status_reports import GovernorState


class FrameAdmission(Protocol):
    """Says how much the box may do. Both are called by many threads, for each frame, and must return at once."""

    def state(self) -> GovernorState:
        """Return the governor state that every result carries: heat, power and memory."""

    def refuse_frame(self, priority: int) -> str | None:
        """Return in plain words why a frame of that priority (1 goes first) is not to be run now; None: run it."""

    def count_refused(self, priority: int) -> None:
        """Count one more frame that was refused: with others, as one request."""


class NoFrameAdmission:
    """No governor: everything may run."""

    _STATE = GovernorState()

    def state(self) -> GovernorState:
        return self._STATE

    def refuse_frame(self, priority: int) -> str | None:
        return None

    def count_refused(self, priority: int) -> None:
        pass
