"""Decoders of the outputs of SSD detectors: boxes and scores from several tensors, with or without NMS in the
network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.outputs.box_candidates import (
    MAX_CANDIDATES,
    BoxEncoding,
    Candidates,
    DetectionHead,
    check_boxes_and_scores,
    decode_classified,
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


@record(frozen=True, slots=True)
class Ssd(DetectionHead):
    """Decodes boxes and scores from two outputs, [A, 4] and [A, C], before NMS. Each box has only its best class.

    With a third output, the priors, boxes are offsets from them: cx, cy, w, h, scaled by the variances. Priors are
    [A, 4] as cx, cy, w, h, or [2, 4 * A] as in Caffe's PriorBox: corners, then their variances.
    """

    encoding: BoxEncoding
    activation: Activation
    background: int | None
    variances: tuple[float, float]
    has_priors: bool
    labels_index: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return (2, 2, 2) if self.has_priors else (2, 2)

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        boxes, scores, *priors = shapes
        matches = check_boxes_and_scores(boxes, scores, self.background)
        if self.has_priors:
            count = max(boxes[0], scores[0]) if boxes and scores else -1
            corners = -1 if count == -1 else 4 * count
            matches = matches and (shape_matches(priors[0], (count, 4)) or shape_matches(priors[0], (2, corners)))
        classes = (
            "classes" if self.background is None else f"classes, {self.background} among them and not the only one"
        )
        ending = ", [boxes, 4] or [2, 4 * boxes]" if self.has_priors else ""
        return None if matches else f"[boxes, 4], [boxes, {classes}]{ending}"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        boxes, scores = arrays[:2]
        if self.background is not None:
            scores = activate(scores, self.activation, axis=1).copy()
            scores[:, self.background] = -np.inf
            highest: FloatArray = scores.max(axis=1)
        else:
            highest = max_probability(scores, self.activation, axis=1)
        indices = select_top_k(highest, threshold, MAX_CANDIDATES)
        corners = (
            self._decode_offsets(boxes[indices], arrays[2], indices, len(boxes))
            if self.has_priors
            else self.encoding.to_corners(boxes[indices])
        )
        return Candidates(corners, highest[indices], scores[indices].argmax(axis=1))

    def _decode_offsets(
        self, offsets: FloatArray, priors: FloatArray, indices: npt.NDArray[np.intp], prior_count: int
    ) -> npt.NDArray[np.float64]:
        """Return the corners of the boxes with these offsets from the priors `indices`."""
        if priors.shape != (prior_count, 4):
            corners, variances = priors.reshape(2, -1, 4)[:, indices].astype(np.float64)
            centre, size = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
        else:
            selected = priors[indices].astype(np.float64)
            centre, size = selected[:, :2], selected[:, 2:]
            variances = np.repeat(self.variances, 2)
        scaled = offsets.astype(np.float64) * variances
        centre = centre + scaled[:, :2] * size
        half = size * np.exp(scaled[:, 2:]) / 2
        return np.concatenate((centre - half, centre + half), axis=1) * (self.encoding.pixels_per_unit * 2)


@record(frozen=True, slots=True)
class FinalTensors(DetectionHead):
    """Networks with NMS inside, [A, 4], [A], [A] and optionally their valid count: EfficientNMS of TensorRT,
    TensorFlow's detection models, torchvision. With two outputs, [A, 5] and [A], boxes and scores are one: MMDeploy."""

    encoding: BoxEncoding
    background: int | None
    output_count: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return {2: (2, 1), 3: (2, 1, 1), 4: (2, 1, 1, 0)}[self.output_count]

    @property
    def labels_index(self) -> int:
        return 1 if self.output_count == 2 else 2

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        count = shapes[0][0] if shapes[0] else -1
        if self.output_count == 2:
            matches = shape_matches(shapes[0], (count, 5)) and shape_matches(shapes[1], (count,))
            return None if matches else "[boxes, 5], [boxes]"
        matches = shape_matches(shapes[0], (count, 4))
        matches = matches and all(shape_matches(shape, (count,)) for shape in shapes[1:3])
        if self.output_count == 4:
            matches = matches and all(dim in (-1, 1) for dim in shapes[3])
        ending = ", [1]" if self.output_count == 4 else ""
        return None if matches else f"[boxes, 4], [boxes], [boxes]{ending}"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        if self.output_count == 2:
            boxes, scores, classes = arrays[0][:, :4], arrays[0][:, 4], arrays[1]
        else:
            boxes, scores, classes = arrays[:3]
        if self.output_count == 4:
            stated = float(arrays[3].ravel()[0])
            count = int(min(max(stated, 0), len(scores))) if np.isfinite(stated) else 0
            boxes, scores, classes = boxes[:count], scores[:count], classes[:count]
        return decode_classified(self.encoding, boxes, scores, classes, self.background, threshold)


@record(frozen=True, slots=True)
class SelectedBoxes(DetectionHead):
    """Networks with ONNX's NonMaxSuppression: its inputs, [A, 4] and [C, A], and its output, [K, 3].

    Each row of the output is image, class, box. The corners of a box may be in any order, as ONNX allows.
    """

    encoding: BoxEncoding
    background: int | None
    ranks: tuple[int, ...] = (2, 2, 2)
    labels_index: int = 1

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        boxes, scores, selected = shapes
        count = boxes[0] if boxes else -1
        matches = shape_matches(boxes, (count, 4)) and shape_matches(scores, (-1, count))
        matches = matches and shape_matches(selected, (-1, 3))
        return None if matches else "[boxes, 4], [classes, boxes], [chosen, 3]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        boxes, scores, selected = arrays
        image, classes, rows = selected.T
        # The image is 0, because the outputs belong to one frame. An index out of range is an error of the model.
        is_valid = (image == 0) & (classes >= 0) & (classes < len(scores)) & (rows >= 0) & (rows < len(boxes))
        classes, indices = classes[is_valid], rows[is_valid].astype(np.int64)
        found = decode_classified(
            self.encoding,
            boxes[indices],
            scores[classes.astype(np.int64), indices],
            classes,
            self.background,
            threshold,
        )
        first, second = found.boxes[:, :2], found.boxes[:, 2:]
        corners = np.concatenate((np.minimum(first, second), np.maximum(first, second)), axis=1)
        return Candidates(corners, found.scores, found.classes)


@record(frozen=True, slots=True)
class DetectionRows(DetectionHead):
    """Networks with DetectionOutput of Caffe or OpenVINO, [1, K, 7]: image, class, score, box.

    A negative image ends the list.
    """

    encoding: BoxEncoding
    background: int | None
    ranks: tuple[int, ...] = (3,)

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        return None if shape_matches(shapes[0], (1, -1, 7)) else "[1, finds, 7]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        rows = arrays[0][0]
        ends = np.flatnonzero(rows[:, 0] < 0)
        rows = rows[: ends[0]] if ends.size else rows
        rows = rows[rows[:, 0] == 0]
        return decode_classified(self.encoding, rows[:, 3:7], rows[:, 2], rows[:, 1], self.background, threshold)
