"""Decoders of the outputs of YOLO detectors: one tensor, with a row or column for each box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.outputs.box_candidates import (
    MAX_CANDIDATES,
    BoxEncoding,
    Candidates,
    DetectionHead,
    NetworkSize,
    add_full_scores,
    count_cells,
    decode_classified,
    place_grids,
)
from edge_server.plugins.vision.outputs.output_parameters import Activation
from edge_server.plugins.vision.outputs.output_tensors import (
    FloatArray,
    activate,
    max_probability,
    select_top_k,
    shape_matches,
)
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt


def select_by_objectness(
    objectness: FloatArray, scores: FloatArray, activation: Activation, threshold: float
) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Return (indices, scores) of the best anchors; a score is the objectness (A) times the best class score (A, C).

    Anchors with an objectness below `threshold` are skipped: no class score raises it.
    """
    # Sigmoid even with softmax, because softmax over a single number is always 1.
    objectness = activate(objectness, Activation.NONE if activation is Activation.NONE else Activation.SIGMOID, axis=0)
    passing = np.flatnonzero(objectness >= threshold)
    products = objectness[passing] * max_probability(scores[passing], activation, axis=1)
    indices = select_top_k(products, threshold, MAX_CANDIDATES)
    return passing[indices], products[indices]


def _extra(keypoint_count: int, coefficient_count: int, keypoint_values: int = 3) -> str:
    """Return the part of an expected shape for numbers after the classes."""
    points = f" + {keypoint_values} * {keypoint_count} keypoints" if keypoint_count else ""
    return points + (f" + {coefficient_count} mask coefficients" if coefficient_count else "")


@record(frozen=True, slots=True)
class ObjectnessRows(DetectionHead):
    """YOLOv5 and decoded YOLOX, [A, 5 + C + M]: box, objectness, classes, then M coefficients of the mask."""

    encoding: BoxEncoding
    activation: Activation
    coefficient_count: int = 0

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        shape = shapes[0]
        matches = len(shape) == 2 and (shape[1] == -1 or shape[1] >= 6 + self.coefficient_count)
        return None if matches else f"[boxes, 5 + classes{_extra(0, self.coefficient_count)}]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        rows = arrays[0]
        end = rows.shape[1] - self.coefficient_count
        indices, scores = select_by_objectness(rows[:, 4], rows[:, 5:end], self.activation, threshold)
        kept = rows[indices]
        coefficients = kept[:, end:] if self.coefficient_count else None
        corners = self.encoding.to_corners(kept[:, :4])
        return Candidates(corners, scores, kept[:, 5:end].argmax(axis=1), mask_coefficients=coefficients)


@record(frozen=True, slots=True)
class ClassColumns(DetectionHead):
    """YOLOv8 and 11, [4 + C + 3 * keypoints + M, A]: box, classes, then x, y and score of each keypoint, or M
    coefficients of the mask; no objectness."""

    encoding: BoxEncoding
    activation: Activation
    keypoint_count: int
    coefficient_count: int = 0
    keypoint_values: int = 3

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        shape = shapes[0]
        matches = len(shape) == 2 and (shape[0] == -1 or shape[0] >= 5 + self._extra_count)
        return (
            None
            if matches
            else f"[4 + classes{_extra(self.keypoint_count, self.coefficient_count, self.keypoint_values)}, boxes]"
        )

    @property
    def _extra_count(self) -> int:
        return self.keypoint_values * self.keypoint_count + self.coefficient_count

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        columns = arrays[0]
        end = len(columns) - self._extra_count
        scores = max_probability(columns[4:end], self.activation, axis=0)
        indices = select_top_k(scores, threshold, MAX_CANDIDATES)
        kept = columns[:, indices].T
        keypoints = None
        if self.keypoint_count:
            keypoints = read_keypoints(kept[:, end:], self.keypoint_values).astype(np.float64)
            keypoints[..., :2] *= self.encoding.pixels_per_unit
            if self.keypoint_values == 3:
                keypoints[..., 2] = activate(keypoints[..., 2], self.activation, axis=0)
        corners = self.encoding.to_corners(kept[:, :4])
        coefficients = kept[:, end:] if self.coefficient_count else None
        return Candidates(
            corners, scores[indices], kept[:, 4:end].argmax(axis=1), keypoints, mask_coefficients=coefficients
        )


def read_keypoints(columns: FloatArray, values: int) -> FloatArray:
    """Return keypoints (A, K, 3) of columns (A, values * K): x, y and score, which is 1 if there are 2 values."""
    points = columns.reshape(len(columns), columns.shape[1] // values, values)
    if values == 3:
        return points
    return add_full_scores(points)


@record(frozen=True, slots=True)
class FinalRows(DetectionHead):
    """YOLOv10 and end2end exports, which need no NMS, [A, 6 + 3 * keypoints + M]: box, score, class, then x, y and
    score of each keypoint, or M coefficients of the mask."""

    encoding: BoxEncoding
    keypoint_count: int
    coefficient_count: int = 0
    keypoint_values: int = 3

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        is_match = shape_matches(
            shapes[0], (-1, 6 + self.keypoint_values * self.keypoint_count + self.coefficient_count)
        )
        return (
            None
            if is_match
            else f"[boxes, 6{_extra(self.keypoint_count, self.coefficient_count, self.keypoint_values)}]"
        )

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        rows = arrays[0]
        points = read_keypoints(rows[:, 6:], self.keypoint_values) if self.keypoint_count else None
        coefficients = rows[:, 6:] if self.coefficient_count else None
        return decode_classified(
            self.encoding, rows[:, :4], rows[:, 4], rows[:, 5], None, threshold, points, coefficients
        )


@record(frozen=True, slots=True)
class ClassRows(DetectionHead):
    """RT-DETR, which needs no NMS, [A, 4 + C]: box, classes."""

    encoding: BoxEncoding
    activation: Activation

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        shape = shapes[0]
        matches = len(shape) == 2 and (shape[1] == -1 or shape[1] >= 5)
        return None if matches else "[boxes, 4 + classes]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        rows = arrays[0]
        scores = max_probability(rows[:, 4:], self.activation, axis=1)
        indices = select_top_k(scores, threshold, MAX_CANDIDATES)
        kept = rows[indices]
        return Candidates(self.encoding.to_corners(kept[:, :4]), scores[indices], kept[:, 4:].argmax(axis=1))


@record(frozen=True, slots=True)
class YoloxGrid(DetectionHead):
    """YOLOX, [A, 5 + C]: box, objectness, classes; one grid after the other, each row by row.

    A box is its centre's offset and the logarithm of its size, in cells.
    """

    size: NetworkSize
    strides: tuple[int, ...]
    activation: Activation
    _cells: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _scales: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        cells, scales = place_grids(self.size, self.strides, 0.0)
        object.__setattr__(self, "_cells", cells)
        object.__setattr__(self, "_scales", scales)

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        shape = shapes[0]
        count = sum(count_cells(self.size, stride) for stride in self.strides)
        matches = len(shape) == 2 and shape[0] in (-1, count) and (shape[1] == -1 or shape[1] >= 6)
        grids = ", ".join(str(stride) for stride in self.strides)
        return None if matches else f"[{count}, 5 + classes] for grids {grids} over the input"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        rows = arrays[0]
        indices, scores = select_by_objectness(rows[:, 4], rows[:, 5:], self.activation, threshold)
        kept, scale = rows[indices].astype(np.float64), self._scales[indices]
        centre = (kept[:, :2] + self._cells[indices]) * scale
        half = np.exp(kept[:, 2:4]) * scale / 2
        boxes = np.concatenate((centre - half, centre + half), axis=1)
        return Candidates(boxes, scores, kept[:, 5:].argmax(axis=1))
