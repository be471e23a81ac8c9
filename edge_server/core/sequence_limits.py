"""How many sequences may wait for a slot, and how many requests within one sequence: what clients can make the server
keep for work that it has not begun."""

from __future__ import annotations

from dataclasses import dataclass

from edge_server.errors import QueueFull

_PER_SLOT = 16
_LEAST_SEQUENCES = 1024


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """`sequences` 0: sixteen for each slot of the model, but at least 1,024. `requests` are those of one sequence that
    wait behind its running one."""

    sequences: int = 0
    requests: int = 4096

    def sequence_limit(self, slot_count: int) -> int:
        """Return how many sequences may wait for one of `slot_count` slots."""
        return self.sequences or max(_LEAST_SEQUENCES, _PER_SLOT * slot_count)

    def check_sequences(self, waiting: int, slot_count: int, model: str) -> None:
        """Raise QueueFull where one more sequence is one too many."""
        limit = self.sequence_limit(slot_count)
        if waiting >= limit:
            raise QueueFull(
                f"Exceeds maximum queue size: {waiting} sequences are waiting for a slot of model '{model}' already, "
                f"at most {limit} may"
            )

    def check_requests(self, waiting: int, sequence_id: int | str, model: str) -> None:
        """Raise QueueFull where one more request of a sequence is one too many."""
        if waiting >= self.requests:
            raise QueueFull(
                f"Exceeds maximum queue size: {waiting} requests of sequence {sequence_id} are waiting for model "
                f"'{model}' already, at most {self.requests} may"
            )
