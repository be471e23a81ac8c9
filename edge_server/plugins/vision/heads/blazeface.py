"""BlazeFace head (MediaPipe): faces with six keypoints on fixed anchors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.heads.activation import activate
from edge_server.plugins.vision.heads.box_candidates import MOST_CANDIDATES, Candidates, NetworkSize
from edge_server.plugins.vision.heads.grid_cells import cell_count, cells
from edge_server.plugins.vision.heads.output_parameters import Activation
from edge_server.plugins.vision.heads.output_tensors import Reals, fits
from edge_server.plugins.vision.heads.top_k import best

if TYPE_CHECKING:
    import numpy.typing as npt

ANCHORS_PER_CELL = 2
"""Number of anchors that each entry of the strides adds to a cell; equal consecutive strides share their cells."""


@dataclass(frozen=True, slots=True)
class BlazeFace:
    """[A, 16] and [A, 1]: centre, size and 6 points in pixels of the input, relative to the anchor's centre; score.

    Keypoints: right eye, left eye, nose, mouth, right ear, left ear, from the person's view.
    """

    size: NetworkSize
    strides: tuple[int, ...]
    activation: Activation
    ranks: tuple[int, ...] = (2, 2)
    class_part: int = 1
    _anchors: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_anchors", anchors(self.size, self.strides))

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        count = ANCHORS_PER_CELL * sum(cell_count(self.size, stride) for stride in self.strides)
        is_sound = fits(shapes[0], (count, 16)) and fits(shapes[1], (count, 1))
        return None if is_sound else f"[{count}, 16], [{count}, 1]"

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        values, scores = parts[0], activate(parts[1][:, 0], self.activation, axis=0)
        chosen = best(scores, threshold, MOST_CANDIDATES)
        kept, centre = values[chosen].astype(np.float64), self._anchors[chosen]
        middle, half = centre + kept[:, :2], kept[:, 2:4] / 2
        points = kept[:, 4:].reshape(-1, 6, 2) + centre[:, None]
        # A keypoint has no score.
        keypoints = np.concatenate((points, np.ones((len(chosen), 6, 1))), axis=2)
        boxes = np.concatenate((middle - half, middle + half), axis=1)
        return Candidates(boxes, scores[chosen], np.zeros(len(chosen), np.int64), keypoints)


def anchors(size: NetworkSize, strides: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return the centres of the anchors (A, 2) in pixels: cell by cell, all anchors of a cell together."""
    grids = []
    for stride, same in groupby(strides):
        centres = (cells(size, stride) + 0.5) * stride
        grids.append(np.repeat(centres, ANCHORS_PER_CELL * len(list(same)), axis=0))
    return np.concatenate(grids)
