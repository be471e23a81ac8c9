"""YuNet head: faces with five landmarks, from four outputs per grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_server.plugins.vision.heads.box_candidates import MOST_CANDIDATES, Candidates, NetworkSize
from edge_server.plugins.vision.heads.grid_cells import cell_count, cells
from edge_server.plugins.vision.heads.output_tensors import Reals, fits
from edge_server.plugins.vision.heads.top_k import best

_PARTS = (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10))
"""Kinds of output in order, and how many numbers each has per cell."""


def yunet_names(strides: tuple[int, ...]) -> tuple[str, ...]:
    """Return the original names of YuNet's outputs: the classes of all grids, then the next kind."""
    return tuple(f"{kind}_{stride}" for kind, _ in _PARTS for stride in strides)


@dataclass(frozen=True, slots=True)
class YuNet:
    """For each grid: class [A, 1], objectness [A, 1], box [A, 4], landmarks [A, 10].

    A score is the geometric mean of class and objectness, each clipped to 0..1. A box is its centre's offset and the
    logarithm of its size, a landmark an offset, all in cells. Landmarks: eyes, nose, corners of the mouth; the person's
    right first.
    """

    size: NetworkSize
    strides: tuple[int, ...]
    class_part: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        return (2,) * (len(_PARTS) * len(self.strides))

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        counts = [cell_count(self.size, stride) for stride in self.strides]
        patterns = [(count, width) for _, width in _PARTS for count in counts]
        is_sound = all(fits(shape, pattern) for shape, pattern in zip(shapes, patterns, strict=True))
        return None if is_sound else ", ".join(str(list(pattern)) for pattern in patterns)

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        found = [
            self._of_grid(stride, parts[number :: len(self.strides)], threshold)
            for number, stride in enumerate(self.strides)
        ]
        scores = np.concatenate([grid.scores for grid in found])
        order = best(scores, threshold, MOST_CANDIDATES)
        return Candidates(
            np.concatenate([grid.boxes for grid in found])[order],
            scores[order],
            np.zeros(len(order), np.int64),
            np.concatenate([grid.keypoints for grid in found if grid.keypoints is not None])[order],
        )

    def _of_grid(self, stride: int, parts: Sequence[Reals], threshold: float) -> Candidates:
        classes, objectness, boxes, landmarks = parts
        scores = np.sqrt(np.clip(classes[:, 0], 0, 1) * np.clip(objectness[:, 0], 0, 1))
        chosen = best(scores, threshold, MOST_CANDIDATES)
        corner = cells(self.size, stride)[chosen]
        centre = (corner + boxes[chosen, :2]) * stride
        half = np.exp(boxes[chosen, 2:].astype(np.float64)) * stride / 2
        points = (landmarks[chosen].astype(np.float64).reshape(-1, 5, 2) + corner[:, None]) * stride
        # A landmark has no score.
        keypoints = np.concatenate((points, np.ones((len(chosen), 5, 1))), axis=2)
        corners = np.concatenate((centre - half, centre + half), axis=1)
        return Candidates(corners, scores[chosen], np.zeros(len(chosen), np.int64), keypoints)
