"""Detection of lost sensors: those that had readings before and have had none for a while. No clock, no I/O."""

from __future__ import annotations

from dataclasses import field

from edge_server.record import record


@record(slots=True)
class _Silence:
    """Start of a sensor's silence, and the number of samples without it."""

    since_s: float
    misses: int = 0


@record(slots=True)
class SensorHealth:
    """Tracks the silence of each sensor. One missing sample is never a loss, even after a long pause: after a suspend,
    a sensor may not answer at once."""

    lost_after_s: float
    _silences: dict[str, _Silence] = field(default_factory=dict)
    _kinds: set[str] = field(default_factory=set)

    def step(self, present: frozenset[str], expected: frozenset[str], silent: frozenset[str], now_s: float) -> set[str]:
        """Return the lost sensors.

        `present` are the kinds of reading in this sample. A kind that was ever present or `expected` must be present
        from then on. `silent` are single sensors that are missing in this sample.
        """
        self._kinds |= present | expected
        missing = (self._kinds - present) | silent
        for name in self._silences.keys() - missing:
            del self._silences[name]
        for name in missing:
            # At the first missing sample the silence begins now: the sensor may have worked until just before.
            self._silences.setdefault(name, _Silence(now_s)).misses += 1
        return {
            name
            for name, silence in self._silences.items()
            if silence.misses > 1 and now_s - silence.since_s > self.lost_after_s
        }
