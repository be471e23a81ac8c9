"""YOLO head: one row per anchor with decoded boxes (YOLOv5, v8, 11 and decoded YOLOX)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.heads.activation import activate, best_class
from edge_server.plugins.vision.heads.box_candidates import MOST_CANDIDATES, BoxCode, Candidates
from edge_server.plugins.vision.heads.output_parameters import Activation
from edge_server.plugins.vision.heads.output_tensors import Reals
from edge_server.plugins.vision.heads.top_k import best

if TYPE_CHECKING:
    import numpy.typing as npt


def with_objectness(
    objectness: Reals, scores: Reals, activation: Activation, threshold: float
) -> tuple[npt.NDArray[np.intp], Reals]:
    """Return (indices, scores) of the best anchors; a score is the objectness (A) times the best class score (A, C).

    Anchors with an objectness below `threshold` are skipped: no class score raises it.
    """
    # Sigmoid even with softmax, because softmax over a single number is always 1.
    objectness = activate(objectness, Activation.NONE if activation is Activation.NONE else Activation.SIGMOID, axis=0)
    rough = np.flatnonzero(objectness >= threshold)
    products = objectness[rough] * best_class(scores[rough], activation, axis=1)
    chosen = best(products, threshold, MOST_CANDIDATES)
    return rough[chosen], products[chosen]


@dataclass(frozen=True, slots=True)
class ObjectnessRows:
    """[A, 5 + C]: box, objectness, classes."""

    code: BoxCode
    activation: Activation
    ranks: tuple[int, ...] = (2,)
    class_part: int = 0

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        shape = shapes[0]
        is_sound = len(shape) == 2 and (shape[1] == -1 or shape[1] >= 6)
        return None if is_sound else "[boxes, 5 + classes]"

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        rows = parts[0]
        chosen, scores = with_objectness(rows[:, 4], rows[:, 5:], self.activation, threshold)
        kept = rows[chosen]
        return Candidates(self.code.corners(kept[:, :4]), scores, kept[:, 5:].argmax(axis=1))


@dataclass(frozen=True, slots=True)
class ClassColumns:
    """[4 + C + 3 * keypoints, A]: box, classes, then x, y and score of each keypoint; no objectness."""

    code: BoxCode
    activation: Activation
    keypoint_count: int
    ranks: tuple[int, ...] = (2,)
    class_part: int = 0

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        shape = shapes[0]
        is_sound = len(shape) == 2 and (shape[0] == -1 or shape[0] >= 5 + 3 * self.keypoint_count)
        points = f" + 3 * {self.keypoint_count} keypoints" if self.keypoint_count else ""
        return None if is_sound else f"[4 + classes{points}, boxes]"

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        columns = parts[0]
        end = len(columns) - 3 * self.keypoint_count
        scores = best_class(columns[4:end], self.activation, axis=0)
        chosen = best(scores, threshold, MOST_CANDIDATES)
        kept = columns[:, chosen].T
        keypoints = None
        if self.keypoint_count:
            keypoints = self._keypoints(kept[:, end:])
        return Candidates(self.code.corners(kept[:, :4]), scores[chosen], kept[:, 4:end].argmax(axis=1), keypoints)

    def _keypoints(self, values: Reals) -> npt.NDArray[np.float64]:
        points = np.array(values, np.float64).reshape(len(values), self.keypoint_count, 3)
        points[..., :2] *= self.code.pixels
        points[..., 2] = activate(points[..., 2], self.activation, axis=0)
        return points
