"""Batch that a session runs now, as seen by the code of its model: whether all its requests are cancelled, and their
deadline."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from dataclasses import dataclass

from edge_server.backends.base import Execution


@dataclass(eq=False)
class RunningBatch:
    """The batch that `execute` computes now.

    `holds_instance`: the instance is busy until the batch ends, so a wait for the same instance would never end.
    """

    executions: Sequence[Execution]
    holds_instance: bool = True

    def is_cancelled(self) -> bool:
        """Return whether all requests of the batch are cancelled."""
        return bool(self.executions) and all(execution.is_cancelled() for execution in self.executions)

    @property
    def deadline_ns(self) -> int:
        """The latest of the requests' deadlines; 0 when one of them has none."""
        deadlines = [execution.request.deadline_ns for execution in self.executions]
        return max(deadlines) if deadlines and all(deadlines) else 0


current_batch: contextvars.ContextVar[RunningBatch | None] = contextvars.ContextVar("edge_running_batch", default=None)
