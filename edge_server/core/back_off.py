"""Exponential back-off: computes the wait before a new attempt from the number of failures. The caller counts the
failures and draws the random fraction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackOff:
    """Wait before a new attempt: `first_s` at first, doubled after each failure, at most `most_s`.

    A random share, at most `jitter` (0 to 1), is subtracted, so that many cameras do not reconnect at the same time.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if not (0 < self.first_s <= self.most_s and 0 <= self.jitter <= 1):
            raise ValueError(f"back-off needs 0 < first_s <= most_s and 0 <= jitter <= 1, got {self}")

    def delay_s(self, failures: int, random_fraction: float) -> float:
        """Return the wait after `failures` consecutive failures, at least 1. `random_fraction` is from 0 to 1."""
        # The limit is reached long before 2**30; the power must not overflow.
        longest = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return longest * (1 - self.jitter * random_fraction)
