"""Grid cells of a network's input, in the order of its output rows."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.heads.box_candidates import NetworkSize

if TYPE_CHECKING:
    import numpy.typing as npt


def cell_count(size: NetworkSize, stride: int) -> int:
    """Return the number of cells of `stride` pixels that cover the input. Cells at the right and lower edge may extend
    beyond it."""
    return -(-size.width // stride) * -(-size.height // stride)


@lru_cache(maxsize=64)
def cells(size: NetworkSize, stride: int) -> npt.NDArray[np.float64]:
    """Return column and row of each cell (cells, 2), row by row. The array is read-only and cached."""
    rows, columns = np.mgrid[0 : -(-size.height // stride), 0 : -(-size.width // stride)]
    found = np.stack((columns.ravel(), rows.ravel()), axis=1).astype(np.float64)
    found.flags.writeable = False
    return found
