"""Top-k selection of scores, in a time that does not depend on the values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.heads.output_tensors import Reals

if TYPE_CHECKING:
    import numpy.typing as npt


def best(scores: Reals, threshold: float, most: int) -> npt.NDArray[np.intp]:
    """Return the indices of at most `most` finite scores of at least `threshold`, best first.

    Among equal scores the lower index is first. `scores` has one dimension.
    """
    passing = np.flatnonzero((scores >= threshold) & np.isfinite(scores))
    if passing.size > most:
        passing = _largest(scores, passing, most)
    order = np.argsort(-scores[passing], kind="stable")
    chosen: npt.NDArray[np.intp] = passing[order]
    return chosen


def _largest(scores: Reals, passing: npt.NDArray[np.intp], most: int) -> npt.NDArray[np.intp]:
    """Return the `most` indices of `passing` with the largest scores, in index order; of equals the lowest indices."""
    values = scores[passing]
    cut = np.partition(values, values.size - most)[values.size - most] if most else np.inf
    is_taken = values > cut
    ties = np.flatnonzero(values == cut)
    is_taken[ties[: most - int(np.count_nonzero(is_taken))]] = True
    return passing[is_taken]
