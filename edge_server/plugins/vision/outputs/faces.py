"""Decoders of the outputs of face detectors: YuNet with five landmarks, BlazeFace (MediaPipe) with six."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.outputs.box_candidates import (
    MAX_CANDIDATES,
    Candidates,
    DetectionHead,
    NetworkSize,
    add_full_scores,
    count_cells,
    grid_cells,
    place_grids,
)
from edge_server.plugins.vision.outputs.output_parameters import Activation
from edge_server.plugins.vision.outputs.output_tensors import FloatArray, activate, select_top_k, shape_matches
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

_OUTPUT_KINDS = (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10))
"""Kinds of output in order, and how many numbers each has per cell."""


def yunet_names(strides: tuple[int, ...]) -> tuple[str, ...]:
    """Return the original names of YuNet's outputs: the classes of all grids, then the next kind."""
    return tuple(f"{kind}_{stride}" for kind, _ in _OUTPUT_KINDS for stride in strides)


@record(frozen=True, slots=True)
class YuNet(DetectionHead):
    """For each grid: class [A, 1], objectness [A, 1], box [A, 4], landmarks [A, 10].

    A score is the geometric mean of class and objectness, each clipped to 0..1. A box is its centre's offset and the
    logarithm of its size, a landmark an offset, all in cells. Landmarks: eyes, nose, corners of the mouth; the person's
    right first.
    """

    size: NetworkSize
    strides: tuple[int, ...]
    _corners: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    """(A, 2): upper left corner of each cell, in cells of its grid."""
    _strides: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    """(A, 1)"""

    def __post_init__(self) -> None:
        corners, strides = place_grids(self.size, self.strides, 0)
        object.__setattr__(self, "_corners", corners)
        object.__setattr__(self, "_strides", strides)

    @property
    def ranks(self) -> tuple[int, ...]:
        return (2,) * (len(_OUTPUT_KINDS) * len(self.strides))

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        counts = [count_cells(self.size, stride) for stride in self.strides]
        patterns = [(count, width) for _, width in _OUTPUT_KINDS for count in counts]
        matches = all(shape_matches(shape, pattern) for shape, pattern in zip(shapes, patterns, strict=True))
        return None if matches else ", ".join(str(list(pattern)) for pattern in patterns)

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        # All grids at once: on so few cells, a call of numpy costs more than what it computes.
        count = len(self.strides)
        classes, objectness = np.concatenate(arrays[: 2 * count]).reshape(2, -1).clip(0, 1)
        scores = np.sqrt(classes * objectness)
        order = select_top_k(scores, threshold, MAX_CANDIDATES)
        if not len(order):  # most frames: spares them the copies of all boxes and landmarks
            return Candidates(np.empty((0, 4)), scores[order], order)
        corner, stride = self._corners[order], self._strides[order]
        box = np.concatenate(arrays[2 * count : 3 * count])[order].astype(np.float64)
        landmarks = np.concatenate(arrays[3 * count :])[order].astype(np.float64)
        centre = (corner + box[:, :2]) * stride
        half = np.exp(box[:, 2:]) * stride / 2
        points = (landmarks.reshape(-1, 5, 2) + corner[:, None]) * stride[:, None]
        corners = np.concatenate((centre - half, centre + half), axis=1)
        return Candidates(corners, scores[order], np.zeros(len(order), np.int64), add_full_scores(points))


ANCHORS_PER_CELL = 2
"""Number of anchors that each entry of the strides adds to a cell; equal consecutive strides share their cells."""


@record(frozen=True, slots=True)
class BlazeFace(DetectionHead):
    """[A, 16] and [A, 1]: centre, size and 6 points in pixels of the input, relative to the anchor's centre; score.

    Keypoints: right eye, left eye, nose, mouth, right ear, left ear, from the person's view.
    """

    size: NetworkSize
    strides: tuple[int, ...]
    activation: Activation
    ranks: tuple[int, ...] = (2, 2)
    labels_index: int = 1
    _anchors: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    """(A, 2): centres in pixels, cell by cell, all anchors of a cell together."""

    def __post_init__(self) -> None:
        grids = []
        for stride, same in groupby(self.strides):
            centres = (grid_cells(self.size, stride) + 0.5) * stride
            grids.append(np.repeat(centres, ANCHORS_PER_CELL * len(list(same)), axis=0))
        object.__setattr__(self, "_anchors", np.concatenate(grids))

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        count = ANCHORS_PER_CELL * sum(count_cells(self.size, stride) for stride in self.strides)
        matches = shape_matches(shapes[0], (count, 16)) and shape_matches(shapes[1], (count, 1))
        return None if matches else f"[{count}, 16], [{count}, 1]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        values, scores = arrays[0], activate(arrays[1][:, 0], self.activation, axis=0)
        indices = select_top_k(scores, threshold, MAX_CANDIDATES)
        kept, centre = values[indices].astype(np.float64), self._anchors[indices]
        middle, half = centre + kept[:, :2], kept[:, 2:4] / 2
        points = kept[:, 4:].reshape(-1, 6, 2) + centre[:, None]
        boxes = np.concatenate((middle - half, middle + half), axis=1)
        return Candidates(boxes, scores[indices], np.zeros(len(indices), np.int64), add_full_scores(points))
