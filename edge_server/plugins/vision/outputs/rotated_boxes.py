"""Rotated (oriented) boxes: decoders of YOLO's two output formats, conversion to the frame, and NMS.

Boxes are rows of an array (K, 5): centre x, centre y, width, height, angle. The angle is in radians, from the x axis
towards the y axis, so clockwise in the picture, to the sides of length `width`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.outputs.box_candidates import (
    MAX_CANDIDATES,
    BoxEncoding,
    Candidates,
    DetectionHead,
    select_classified,
)
from edge_server.plugins.vision.outputs.output_parameters import Activation
from edge_server.plugins.vision.outputs.output_tensors import (
    FloatArray,
    max_probability,
    select_top_k,
    shape_matches,
)
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_EPSILON = 1e-7
_ROWS_AT_ONCE = 32


@record(frozen=True, slots=True)
class AngleColumns(DetectionHead):
    """YOLOv8 and later for oriented boxes, [4 + C + 1, A]: centre and size, classes, angle."""

    encoding: BoxEncoding
    activation: Activation

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        shape = shapes[0]
        matches = len(shape) == 2 and (shape[0] == -1 or shape[0] >= 6)
        return None if matches else "[4 + classes + angle, boxes]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        columns = arrays[0]
        scores = max_probability(columns[4:-1], self.activation, axis=0)
        indices = select_top_k(scores, threshold, MAX_CANDIDATES)
        kept = columns[:, indices].T
        rotated = np.concatenate((kept[:, :4], kept[:, -1:]), axis=1).astype(np.float64)
        rotated[:, :4] *= self.encoding.pixels_per_unit * 2
        return Candidates(enclosing_boxes(rotated), scores[indices], kept[:, 4:-1].argmax(axis=1), rotated=rotated)


@record(frozen=True, slots=True)
class AngleRows(DetectionHead):
    """Exports for oriented boxes that need no NMS (end2end, or with nms), [A, 7]: centre and size, score, class,
    angle."""

    encoding: BoxEncoding

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        return None if shape_matches(shapes[0], (-1, 7)) else "[boxes, 7]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        rows = arrays[0]
        indices = select_classified(rows[:, 4], rows[:, 5], None, threshold)
        kept = rows[indices].astype(np.float64)
        rotated = kept[:, [0, 1, 2, 3, 6]]
        rotated[:, :4] *= self.encoding.pixels_per_unit * 2
        return Candidates(enclosing_boxes(rotated), rows[indices, 4], kept[:, 5].astype(np.int64), rotated=rotated)


def enclosing_boxes(rotated: Floats) -> Floats:
    """Return the upright bounding boxes (K, 4): x_min, y_min, x_max, y_max."""
    centre, size, angle = rotated[:, :2], rotated[:, 2:4], rotated[:, 4]
    cosine, sine = np.abs(np.cos(angle)), np.abs(np.sin(angle))
    half = np.stack((size[:, 0] * cosine + size[:, 1] * sine, size[:, 0] * sine + size[:, 1] * cosine), axis=1) / 2
    return np.concatenate((centre - half, centre + half), axis=1)


def rotated_to_original(rotated: Floats, fit: FittedPicture) -> Floats:
    """Return boxes of the network's input as boxes of the original picture, with angles from 0 to less than pi/2.

    If the picture was distorted, a box becomes a parallelogram. The result is the rectangle with its longer sides: they
    have the direction of the object, which is what a receiver of the angle wants to know.
    """
    x, y = fit.to_original(rotated[:, 0], rotated[:, 1])
    is_tall = rotated[:, 3] > rotated[:, 2]
    longer, shorter = rotated[:, 2:4].max(axis=1), rotated[:, 2:4].min(axis=1)
    angle = rotated[:, 4] + np.where(is_tall, math.pi / 2, 0.0)
    right, down = np.cos(angle) / fit.scale_x, np.sin(angle) / fit.scale_y
    stretch = np.hypot(right, down)
    # The area changes by both scales.
    width, height = longer * stretch, shorter / (fit.scale_x * fit.scale_y * stretch)
    return regularize(np.stack((x, y, width, height, np.arctan2(down, right)), axis=1))


def regularize(rotated: Floats) -> Floats:
    """Return the same rectangles with angles from 0 to less than pi/2, with width and height exchanged if needed."""
    x, y, width, height, angle = rotated.T
    half_turn = np.mod(angle, math.pi)
    # Tiny negative angles are rounded up to a half turn.
    half_turn[half_turn >= math.pi] = 0.0
    is_swapped = half_turn >= math.pi / 2
    angle = np.where(is_swapped, half_turn - math.pi / 2, half_turn)
    return np.stack((x, y, np.where(is_swapped, height, width), np.where(is_swapped, width, height), angle), axis=1)


def apply_rotated_nms(
    rotated: Floats, classes: npt.NDArray[np.int64] | None, iou_threshold: float
) -> npt.NDArray[np.intp]:
    """Return the indices of the kept boxes, in order. `rotated` (K, 5) are finite, have an area, and are best first.

    As in Ultralytics' predictor: a box is dropped if its ProbIoU with a better box is above `iou_threshold`, even if
    that box is dropped itself. Boxes of different `classes` do not drop each other, unless `classes` is None.
    """
    # A greater Bhattacharyya distance than this is below the threshold. Its part for the centres is at least three
    # times their distance, squared, over the sum of squares of the longer sides: that excludes most pairs at once.
    limit = -math.log(1 - (1 - iou_threshold) ** 2) if iou_threshold > 0 else math.inf
    reach = np.square(rotated[:, 2:4].max(axis=1)) * (limit / 3)
    x, y = rotated[:, 0], rotated[:, 1]
    is_dropped = np.zeros(len(rotated), bool)
    for start in range(0, len(rotated), _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(rotated)))
        columns = start + np.flatnonzero(~is_dropped[start:])
        distance = np.square(x[rows, None] - x[columns]) + np.square(y[rows, None] - y[columns])
        is_pair = (distance <= reach[rows, None] + reach[columns]) & (rows[:, None] < columns)
        if classes is not None:
            is_pair &= classes[rows, None] == classes[columns]
        pair_rows, pair_columns = np.nonzero(is_pair)
        others = columns[pair_columns]
        overlap = probabilistic_iou(rotated[rows[pair_rows]], rotated[others])
        is_dropped[others[overlap > iou_threshold]] = True
    return np.flatnonzero(~is_dropped)


def probabilistic_iou(first: Floats, second: Floats) -> Floats:
    """Return the ProbIoU of each two boxes of the same index, 0 to 1: one minus the Hellinger distance of the Gaussians
    with the boxes' means and covariances (Llerena et al., https://arxiv.org/abs/2106.06072)."""
    (xx1, yy1, xy1), (xx2, yy2, xy2) = _covariances(first), _covariances(second)
    xx, yy, xy = xx1 + xx2, yy1 + yy2, xy1 + xy2
    dx, dy = second[:, 0] - first[:, 0], second[:, 1] - first[:, 1]
    determinant = xx * yy - xy * xy
    centres = (xx * dy * dy + yy * dx * dx - 2 * xy * dx * dy) / (4 * (determinant + _EPSILON))
    own = np.maximum(xx1 * yy1 - xy1 * xy1, 0) * np.maximum(xx2 * yy2 - xy2 * xy2, 0)
    shapes = np.log(determinant / (4 * np.sqrt(own) + _EPSILON) + _EPSILON) / 2
    bhattacharyya = np.clip(centres + shapes, _EPSILON, 100.0)
    overlap: Floats = 1 - np.sqrt(1 - np.exp(-bhattacharyya) + _EPSILON)
    return overlap


def _covariances(rotated: Floats) -> tuple[Floats, Floats, Floats]:
    """Return variances of x and y, and the covariance, of points that are spread evenly over each box."""
    along, across = np.square(rotated[:, 2]) / 12, np.square(rotated[:, 3]) / 12
    cosine, sine = np.cos(rotated[:, 4]), np.sin(rotated[:, 4])
    return (
        along * cosine * cosine + across * sine * sine,
        along * sine * sine + across * cosine * cosine,
        (along - across) * cosine * sine,
    )
