"""Head for networks that contain non-maximum suppression (NMS) themselves: final boxes with scores and classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.heads.box_candidates import MOST_CANDIDATES, BoxCode, Candidates
from edge_server.plugins.vision.heads.output_tensors import Reals, fits
from edge_server.plugins.vision.heads.top_k import best

if TYPE_CHECKING:
    import numpy.typing as npt


def _sorted_out(
    code: BoxCode, boxes: Reals, scores: Reals, classes: Reals, background: int | None, threshold: float
) -> Candidates:
    """Return the candidates whose class is a valid index and not the background, best first."""
    # A class is at most 2**32 - 1 on the wire; NaN fails the comparison.
    is_class = (classes >= 0) & (classes < 2**32)
    if background is not None:
        is_class &= classes != background
    rows = np.flatnonzero(is_class)
    rows = rows[best(scores[rows], threshold, MOST_CANDIDATES)]
    return Candidates(code.corners(boxes[rows]), scores[rows], classes[rows].astype(np.int64))


@dataclass(frozen=True, slots=True)
class FinalRows:
    """[A, 6]: box, score, class."""

    code: BoxCode
    ranks: tuple[int, ...] = (2,)
    class_part: int = 0

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        return None if fits(shapes[0], (-1, 6)) else "[boxes, 6]"

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        rows = parts[0]
        return _sorted_out(self.code, rows[:, :4], rows[:, 4], rows[:, 5], None, threshold)


@dataclass(frozen=True, slots=True)
class FinalTensors:
    """[A, 4], [A], [A] and optionally their valid count: EfficientNMS of TensorRT, TensorFlow's detection models."""

    code: BoxCode
    background: int | None
    has_count: bool
    class_part: int = 2

    @property
    def ranks(self) -> tuple[int, ...]:
        return (2, 1, 1, 0) if self.has_count else (2, 1, 1)

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        boxes, scores, classes = shapes[:3]
        count = boxes[0] if boxes else -1
        is_sound = fits(boxes, (count, 4)) and fits(scores, (count,)) and fits(classes, (count,))
        if self.has_count:
            is_sound = is_sound and all(dim in (-1, 1) for dim in shapes[3])
        ending = ", [1]" if self.has_count else ""
        return None if is_sound else f"[boxes, 4], [boxes], [boxes]{ending}"

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        boxes, scores, classes = parts[:3]
        if self.has_count:
            stated = float(parts[3].ravel()[0])
            count = int(min(max(stated, 0), len(scores))) if np.isfinite(stated) else 0
            boxes, scores, classes = boxes[:count], scores[:count], classes[:count]
        return _sorted_out(self.code, boxes, scores, classes, self.background, threshold)


@dataclass(frozen=True, slots=True)
class SelectedBoxes:
    """[A, 4], [C, A] and [K, 3]: inputs and output of ONNX's NonMaxSuppression.

    Each row of the third is image, class, box. The corners of a box may be in any order, as ONNX allows.
    """

    code: BoxCode
    background: int | None
    ranks: tuple[int, ...] = (2, 2, 2)
    class_part: int = 1

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        boxes, scores, selected = shapes
        count = boxes[0] if boxes else -1
        is_sound = fits(boxes, (count, 4)) and fits(scores, (-1, count)) and fits(selected, (-1, 3))
        return None if is_sound else "[boxes, 4], [classes, boxes], [chosen, 3]"

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        boxes, scores, selected = parts
        image, number, box = selected.T
        # The image is 0, because the outputs belong to one frame. An index out of range is an error of the model.
        is_sound = (image == 0) & (number >= 0) & (number < len(scores)) & (box >= 0) & (box < len(boxes))
        numbers, rows = number[is_sound].astype(np.int64), box[is_sound].astype(np.int64)
        found = _sorted_out(self.code, boxes[rows], scores[numbers, rows], number[is_sound], self.background, threshold)
        return Candidates(_in_order(found.boxes), found.scores, found.classes)


def _in_order(boxes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    first, second = boxes[:, :2], boxes[:, 2:]
    return np.concatenate((np.minimum(first, second), np.maximum(first, second)), axis=1)


@dataclass(frozen=True, slots=True)
class DetectionRows:
    """[1, K, 7]: image, class, score, box: DetectionOutput of Caffe and OpenVINO. A negative image ends the list."""

    code: BoxCode
    background: int | None
    ranks: tuple[int, ...] = (3,)
    class_part: int = 0

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        return None if fits(shapes[0], (1, -1, 7)) else "[1, finds, 7]"

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        rows = parts[0][0]
        ends = np.flatnonzero(rows[:, 0] < 0)
        rows = rows[: ends[0]] if ends.size else rows
        rows = rows[rows[:, 0] == 0]
        return _sorted_out(self.code, rows[:, 3:7], rows[:, 2], rows[:, 1], self.background, threshold)
