"""Types of detected boxes before they are filtered, decoding of their coordinates, and NMS, which drops overlapping
ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.plugins.vision.decode import opencv
from edge_server.plugins.vision.outputs.output_parameters import BoxFormat, BoxUnit
from edge_server.plugins.vision.outputs.output_tensors import FloatArray, select_top_k, shape_matches
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_CANDIDATES = 2048
"""Maximum number of candidates per frame. It limits the cost of a network that detects something everywhere."""


@record(frozen=True, slots=True)
class Candidates:
    """K candidates, best first. `boxes` (K, 4): x_min, y_min, x_max, y_max; `keypoints` (K, points, 3): x, y, score;
    `rotated` (K, 5): rotated boxes, see rotated_boxes.py, which `boxes` enclose; `mask_coefficients` (K, prototypes).

    Positions are pixels of the network's input. Numbers may have any size and may be not finite.
    """

    boxes: npt.NDArray[np.float64]
    scores: FloatArray
    classes: npt.NDArray[np.int64]
    keypoints: npt.NDArray[np.float64] | None = None
    rotated: npt.NDArray[np.float64] | None = None
    mask_coefficients: FloatArray | None = None

    def take(self, indices: npt.NDArray[np.intp]) -> Candidates:
        keypoints = None if self.keypoints is None else self.keypoints[indices]
        rotated = None if self.rotated is None else self.rotated[indices]
        coefficients = None if self.mask_coefficients is None else self.mask_coefficients[indices]
        return Candidates(
            self.boxes[indices], self.scores[indices], self.classes[indices], keypoints, rotated, coefficients
        )


@record(frozen=True, slots=True)
class NetworkSize:
    """Width and height of the network's input, in pixels."""

    width: int
    height: int


class DetectionHead:
    """Decoder of one output format of detectors. Immutable and thread-safe."""

    __slots__ = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of dimensions of each output, without a batch."""
        return (2,)

    @property
    def labels_index(self) -> int:
        """Index of the output with the labels."""
        return 0

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """Return the expected output shapes if the given ones do not match, else None. -1 is any number."""
        raise NotImplementedError

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        """Return at most MAX_CANDIDATES candidates with a score of at least `threshold`. The shapes are checked."""
        raise NotImplementedError


@record(frozen=True, slots=True)
class BoxEncoding:
    """Box format and unit of a network."""

    format: BoxFormat
    unit: BoxUnit
    size: NetworkSize

    @property
    def pixels_per_unit(self) -> tuple[float, float]:
        """Horizontal and vertical."""
        if self.unit is BoxUnit.PIXELS:
            return 1.0, 1.0
        return float(self.size.width), float(self.size.height)

    def to_corners(self, boxes: FloatArray) -> npt.NDArray[np.float64]:
        """Return boxes (K, 4) as x_min, y_min, x_max, y_max in pixels of the input."""
        first, second, third, fourth = np.asarray(boxes, np.float64).T
        if self.format is BoxFormat.CXCYWH:
            columns = (first - third / 2, second - fourth / 2, first + third / 2, second + fourth / 2)
        elif self.format is BoxFormat.XYWH:
            columns = (first, second, first + third, second + fourth)
        elif self.format is BoxFormat.YXYX:
            columns = (second, first, fourth, third)
        else:
            columns = (first, second, third, fourth)
        return np.stack(columns, axis=1) * (self.pixels_per_unit * 2)


def select_classified(
    scores: FloatArray, classes: FloatArray, background: int | None, threshold: float
) -> npt.NDArray[np.intp]:
    """Return the indices of the best boxes of a network that gives a class index for each. Boxes with other than valid
    indices, and those of the background, are omitted."""
    # A class is at most 2**32 - 1 on the wire; NaN fails the comparison.
    is_class = (classes >= 0) & (classes < 2**32)
    if background is not None:
        is_class &= classes != background
    indices = np.flatnonzero(is_class)
    return indices[select_top_k(scores[indices], threshold, MAX_CANDIDATES)]


def decode_classified(
    encoding: BoxEncoding,
    boxes: FloatArray,
    scores: FloatArray,
    classes: FloatArray,
    background: int | None,
    threshold: float,
    keypoints: FloatArray | None = None,
    mask_coefficients: FloatArray | None = None,
) -> Candidates:
    """Return the candidates that `select_classified` selects. `keypoints` are (A, K, 3): position and score.
    `mask_coefficients` are (A, prototypes)."""
    indices = select_classified(scores, classes, background, threshold)
    points = None
    if keypoints is not None:
        points = keypoints[indices].astype(np.float64)
        points[..., :2] *= encoding.pixels_per_unit
    return Candidates(
        encoding.to_corners(boxes[indices]),
        scores[indices],
        classes[indices].astype(np.int64),
        points,
        mask_coefficients=None if mask_coefficients is None else mask_coefficients[indices],
    )


def apply_nms(
    boxes: npt.NDArray[np.float64], classes: npt.NDArray[np.int64] | None, iou_threshold: float
) -> npt.NDArray[np.intp]:
    """Return the indices of the kept boxes, in order. `boxes` (K, 4) are finite corners, best first.

    Greedy: a box is dropped if its intersection over union with a kept box is above `iou_threshold`. Boxes of different
    `classes` do not drop each other, unless `classes` is None. The time grows with K times the number of kept boxes:
    about 20 ms for 2048.
    """
    if len(boxes) < 2:
        return np.arange(len(boxes))
    rectangles = boxes.copy()
    rectangles[:, 2:] -= rectangles[:, :2]
    if classes is not None:
        # Shifting the boxes of each class separates the classes. OpenCV's own shift mixes them if boxes begin left of
        # the frame.
        shifts = np.unique(classes, return_inverse=True)[1]
        rectangles[:, 0] += shifts * (boxes[:, 2].max() - boxes[:, 0].min() + 1)
    # OpenCV compares scores as FP32: ranks keep the order of scores that differ by less.
    ranks = np.arange(len(boxes), 0, -1).astype(np.float32)
    # 0.4 ms for 200 boxes that are all kept, and other threads run; a loop in numpy, one step per box, took 4 to 8 ms.
    kept = opencv().dnn.NMSBoxes(rectangles, ranks, 0.0, iou_threshold)
    return np.asarray(kept, np.intp).ravel()


def count_cells(size: NetworkSize, stride: int) -> int:
    """Return the number of cells of `stride` pixels that cover the input. Cells at the right and lower edge may extend
    beyond it."""
    return -(-size.width // stride) * -(-size.height // stride)


def check_boxes_and_scores(boxes: tuple[int, ...], scores: tuple[int, ...], background: int | None) -> bool:
    """Return whether the shapes are [A, 4] and [A, C], with the class `background` and at least one other in C."""
    count = max(boxes[0], scores[0]) if boxes and scores else -1
    min_classes = 1 if background is None else 1 + max(1, background)
    matches = shape_matches(boxes, (count, 4)) and shape_matches(scores, (count, -1))
    return matches and (scores[1] == -1 or scores[1] >= min_classes)


@lru_cache(maxsize=64)
def grid_cells(size: NetworkSize, stride: int) -> npt.NDArray[np.float64]:
    """Return column and row of each cell (cells, 2), row by row, as networks list them.

    The array is read-only and cached.
    """
    rows, columns = np.mgrid[0 : -(-size.height // stride), 0 : -(-size.width // stride)]
    cells = np.stack((columns.ravel(), rows.ravel()), axis=1).astype(np.float64)
    cells.flags.writeable = False
    return cells


def place_grids(
    size: NetworkSize, strides: Sequence[int], cell_point: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return a point of each cell (cells, 2) in cells of its grid, and the grids' strides (cells, 1), one grid after
    the other. `cell_point`: 0 the corner of a cell, 0.5 its middle."""
    grids = [grid_cells(size, stride) + cell_point for stride in strides]
    scales = [np.full((len(grid), 1), float(stride)) for grid, stride in zip(grids, strides, strict=True)]
    return np.concatenate(grids), np.concatenate(scales)


def add_full_scores(points: npt.NDArray[np.floating[Any]]) -> npt.NDArray[Any]:
    """Return points (A, K, 2) with the score 1 each: (A, K, 3)."""
    return np.concatenate((points, np.ones((*points.shape[:2], 1), points.dtype)), axis=2)
