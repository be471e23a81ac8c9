"""History of the last half hour of the server's gauges, in rings of a fixed size.

Each gauge has a ring of 32-bit floats, NaN where it had no value; all share one ring of times. With MAX_GAUGES of them
that is 184 KB.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

INTERVAL_S = 5.0
"""Time between two samples."""

MAX_SAMPLES = 360
"""Half an hour."""

MAX_GAUGES = 128
"""Above this, new gauges are not kept until another one has no sample left."""


class GaugeHistory:
    """Samples of gauges by name. Not thread-safe."""

    def __init__(self, max_samples: int = MAX_SAMPLES, max_gauges: int = MAX_GAUGES) -> None:
        self._max_samples = max_samples
        self._max_gauges = max_gauges
        self._times = array("d")
        self._count = 0
        """Number of samples so far. The newest one is at `(_count - 1) % max_samples`."""
        self._rings: dict[str, array[float]] = {}
        self._last_counts: dict[str, int] = {}
        """Value of `_count` after the last sample of each gauge."""

    def add(self, now_s: float, values: Mapping[str, float]) -> None:
        """Add one sample of all gauges, taken at `now_s` of a monotonic clock. The oldest one makes room."""
        index = self._count % self._max_samples
        self._count += 1
        self._times[index : index + 1] = array("d", [now_s])
        for name, last in list(self._last_counts.items()):
            if self._count - last >= self._max_samples and name not in values:
                del self._rings[name], self._last_counts[name]
        for name in values:
            if name not in self._rings and len(self._rings) < self._max_gauges:
                self._rings[name] = array("f", [math.nan]) * self._max_samples
            if name in self._rings:
                self._last_counts[name] = self._count
        for name, ring in self._rings.items():
            ring[index] = values.get(name, math.nan)

    def as_json(self, now_s: float) -> dict[str, object]:
        """Return the age of each sample in seconds, the oldest first, and as many numbers or None for each gauge."""
        first = self._count % self._max_samples if self._count > self._max_samples else 0
        order = [(first + place) % self._max_samples for place in range(min(self._count, self._max_samples))]
        return {
            "ages_s": [round(now_s - self._times[index], 1) for index in order],
            "gauges": {name: [_number(ring[index]) for index in order] for name, ring in self._rings.items()},
        }


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
