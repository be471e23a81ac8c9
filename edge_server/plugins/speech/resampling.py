"""Resampling of one channel of audio to another rate with a windowed sinc filter, in numpy alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_ZERO_CROSSINGS = 16
"""Of the sinc on each side. More make the filter steeper."""
_MAX_PHASES = 640
"""Filters for positions between two samples, as many as 11,025 samples a second need. A file may state any rate; those
that would need more take the filter before."""
_BLOCK = 1 << 18
"""Samples of the result that are computed together, which bounds the memory."""


def resample(samples: npt.NDArray[np.float32], rate: int, new_rate: int) -> npt.NDArray[np.float32]:
    """Return the samples (float32, one channel) at `new_rate`. What the new rate cannot hold is filtered out."""
    if rate == new_rate or not samples.size:
        return samples
    divisor = math.gcd(rate, new_rate)
    up, down = new_rate // divisor, rate // divisor
    cutoff = min(1.0, up / down)
    reach = math.ceil(_ZERO_CROSSINGS / cutoff)
    # Sample n of the result lies `n * down % up` of `up` parts behind a given sample.
    phases = min(up, _MAX_PHASES)
    offsets = np.arange(-reach + 1, reach + 1)
    distance = (offsets[:, None] - np.arange(phases) / phases) * cutoff
    window = 0.5 + 0.5 * np.cos(np.pi * np.clip(distance / _ZERO_CROSSINGS, -1, 1))
    filters = (np.sinc(distance) * window * cutoff).astype(np.float32)
    padded = np.pad(samples, reach)
    result = np.empty(-(-samples.size * up // down), np.float32)
    for begin in range(0, result.size, _BLOCK):
        position = np.arange(begin, min(begin + _BLOCK, result.size), dtype=np.int64) * down
        index, phase = position // up + reach, position % up * phases // up
        block = np.zeros(position.size, np.float32)
        for offset, weights in zip(offsets, filters, strict=True):
            block += padded[index + offset] * weights[phase]
        result[begin : begin + position.size] = block
    return result
