"""Decoders of the outputs of DETR and its successors, PP-YOLOE, PicoDet and NanoDet, where a box may have several
classes."""

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
    check_boxes_and_scores,
    count_cells,
    place_grids,
)
from edge_server.plugins.vision.outputs.output_parameters import Activation
from edge_server.plugins.vision.outputs.output_tensors import FloatArray, activate, select_top_k, shape_matches
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt


def select_pairs(
    scores: FloatArray, activation: Activation, threshold: float
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64], FloatArray]:
    """Return boxes, classes and scores of the best pairs of a box and a class. `scores` are (A, C).

    The activation, none or sigmoid, does not change the order of scores.
    """
    values = activate(scores, activation, axis=1).ravel()
    indices = select_top_k(values, threshold, MAX_CANDIDATES)
    boxes, classes = np.divmod(indices, max(1, scores.shape[1]))
    return boxes, classes.astype(np.int64), values[indices]


@record(frozen=True, slots=True)
class Detr(DetectionHead):
    """Networks of the DETR family, which need no NMS, [Q, 4] and [Q, C].

    With softmax, a box has its best class, and one class, the background, is no object. With sigmoid, each class of a
    box is a detection, as in RT-DETR, D-FINE and RF-DETR.
    """

    encoding: BoxEncoding
    activation: Activation
    background: int | None
    ranks: tuple[int, ...] = (2, 2)
    labels_index: int = 1

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        boxes, scores = shapes
        matches = check_boxes_and_scores(boxes, scores, self.background)
        classes = "classes" if self.background is None else f"classes, {self.background} among them"
        return None if matches else f"[boxes, 4], [boxes, {classes}]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        boxes, scores = arrays
        scores = activate(scores, self.activation, axis=1)
        if self.background is not None:
            scores = scores.copy()
            scores[:, self.background] = -np.inf
        if self.activation is Activation.SOFTMAX:
            highest: FloatArray = scores.max(axis=1)
            indices = select_top_k(highest, threshold, MAX_CANDIDATES)
            classes, selected = scores[indices].argmax(axis=1), highest[indices]
        else:
            indices, classes, selected = select_pairs(scores, Activation.NONE, threshold)
        return Candidates(self.encoding.to_corners(boxes[indices]), selected, classes)


@record(frozen=True, slots=True)
class ClassScoreRows(DetectionHead):
    """PP-YOLOE and PicoDet with decoded boxes, before NMS, [A, 4] and [C, A]."""

    encoding: BoxEncoding
    activation: Activation
    ranks: tuple[int, ...] = (2, 2)
    labels_index: int = 1

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        boxes, scores = shapes
        count = boxes[0] if boxes else -1
        matches = shape_matches(boxes, (count, 4)) and shape_matches(scores, (-1, count))
        return None if matches else "[boxes, 4], [classes, boxes]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        boxes, scores = arrays
        indices, classes, selected = select_pairs(scores.T, self.activation, threshold)
        return Candidates(self.encoding.to_corners(boxes[indices]), selected, classes)


@record(frozen=True, slots=True)
class DistributionGrid(DetectionHead):
    """NanoDet and PicoDet, [A, C + 4 * bins]: class scores, then a distribution of the distance to each side.

    With two outputs for each grid, these are [A, C] of all grids, then [A, 4 * bins] of all grids. A distance is the
    mean bin of its softmax, in cells, from the middle of the cell, or from its corner in NanoDet-Plus (`cell_point` 0).
    """

    size: NetworkSize
    strides: tuple[int, ...]
    bins: int
    cell_point: float
    activation: Activation
    is_split: bool
    _points: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _scales: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        points, scales = place_grids(self.size, self.strides, self.cell_point)
        object.__setattr__(self, "_points", points * scales)
        object.__setattr__(self, "_scales", scales)

    @property
    def ranks(self) -> tuple[int, ...]:
        return (2,) * (2 * len(self.strides) if self.is_split else 1)

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        counts, width = [count_cells(self.size, stride) for stride in self.strides], 4 * self.bins
        grids = ", ".join(map(str, self.strides))
        if not self.is_split:
            shape = shapes[0]
            matches = shape_matches(shape, (sum(counts), -1)) and (shape[1] == -1 or shape[1] > width)
            return None if matches else f"[{sum(counts)}, classes + {width}] for grids {grids} over the input"
        scores, distances = shapes[: len(counts)], shapes[len(counts) :]
        matches = all(shape_matches(shape, (count, -1)) for shape, count in zip(scores, counts, strict=True))
        matches = matches and len({shape[1] for shape in scores if shape[1] != -1}) < 2
        matches = matches and all(
            shape_matches(shape, (count, width)) for shape, count in zip(distances, counts, strict=True)
        )
        listed = ", ".join(map(str, counts))
        expected = f"[boxes, classes] and [boxes, {width}] of {listed} boxes for grids {grids} over the input"
        return None if matches else expected

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        if self.is_split:
            scores = np.concatenate(arrays[: len(self.strides)])
            rows = np.concatenate(arrays[len(self.strides) :])
        else:
            scores, rows = np.split(arrays[0], [arrays[0].shape[1] - 4 * self.bins], axis=1)
        indices, classes, selected = select_pairs(scores, self.activation, threshold)
        logits = rows[indices].astype(np.float64).reshape(-1, 4, self.bins)
        weights = activate(logits, Activation.SOFTMAX, axis=2)
        distances = weights @ np.arange(self.bins) * self._scales[indices]
        points = self._points[indices]
        boxes = np.concatenate((points - distances[:, :2], points + distances[:, 2:]), axis=1)
        return Candidates(boxes, selected, classes)
