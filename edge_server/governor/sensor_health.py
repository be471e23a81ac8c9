"""Which sensors are lost: those that told something before and have said nothing for a while. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Silence:
    since_s: float
    misses: int = 0


@dataclass(slots=True)
class SensorHealth:
    """Remembers when each sensor was heard. One miss is never a loss, however long after the last look it comes: a
    box that wakes up from a suspend has not lost what fails to answer at once."""

    lost_after_s: float
    _silences: dict[str, _Silence] = field(default_factory=dict)
    _kinds: set[str] = field(default_factory=set)

    def step(self, told: frozenset[str], expected: frozenset[str], silent: frozenset[str], now_s: float) -> set[str]:
        """Return what is lost now.

        `told` are kinds of reading that spoke at this look; one that ever did, or that is `expected`, is missed from
        then on. `silent` are single sensors that are missed as long as they are named.
        """
        self._kinds |= told | expected
        missed = (self._kinds - told) | silent
        for name in self._silences.keys() - missed:
            del self._silences[name]
        for name in missed:
            # Heard at this very look, for all that is known, when it is missed for the first time.
            self._silences.setdefault(name, _Silence(now_s)).misses += 1
        return {
            name
            for name, silence in self._silences.items()
            if silence.misses > 1 and now_s - silence.since_s > self.lost_after_s
        }
