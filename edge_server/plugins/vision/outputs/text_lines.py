"""Decoder of the probability map of a text detector (DBNet, as in PP-OCR) to oriented boxes of text lines.

Liao et al., "Real-time Scene Text Detection with Differentiable Binarization" (AAAI 2020): the map marks the core of
each line. The smallest rectangle around a core is grown by `unclip_ratio` times its area over its circumference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edge_server.plugins.vision.decode import opencv
from edge_server.plugins.vision.outputs.box_candidates import Candidates, DetectionHead, NetworkSize
from edge_server.plugins.vision.outputs.output_tensors import FloatArray, shape_matches
from edge_server.plugins.vision.outputs.rotated_boxes import enclosing_boxes
from edge_server.record import record

MAX_LINES = 1000
"""Maximum number of cores per frame, those with the longest outlines."""

MIN_PROBABILITY = 0.3
"""Least probability of a pixel of a core, as in PP-OCR."""

MIN_SIDE = 3
"""Least side of a core, in pixels of the map, as in PP-OCR. A grown box has two more."""


@record(frozen=True, slots=True)
class TextMap(DetectionHead):
    """DBNet, [1, H, W]: the probability that a pixel is in the core of a text line. All lines have class 0."""

    size: NetworkSize
    unclip_ratio: float
    ranks: tuple[int, ...] = (3,)

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        is_match = shape_matches(shapes[0], (1, -1, -1)) and 0 not in shapes[0]
        return None if is_match else "[1, height, width]"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        cv2 = opencv()
        probabilities = np.ascontiguousarray(arrays[0][0], np.float32)
        height, width = probabilities.shape
        is_core = np.pad((probabilities > MIN_PROBABILITY).view(np.uint8), ((0, 1), (0, 1)))
        # Corners of pixels instead of centres, so that rectangles enclose whole pixels.
        corners = cv2.dilate(is_core, np.ones((2, 2), np.uint8))
        contours, _ = cv2.findContours(corners, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
        rotated, scores = [], []
        for contour in sorted(contours, key=len, reverse=True)[:MAX_LINES]:
            centre, (along, across), degrees = core = cv2.minAreaRect(contour)
            if min(along, across) < MIN_SIDE:
                continue
            score = _mean_inside(probabilities, cv2.boxPoints(core))
            growth = along * across * self.unclip_ratio / (along + across)
            if score < threshold or min(along, across) + growth < MIN_SIDE + 2:
                continue
            rotated.append((*centre, along + growth, across + growth, math.radians(degrees)))
            scores.append(score)
        order = np.argsort(-np.array(scores), kind="stable")
        boxes = np.array(rotated, np.float64).reshape(-1, 5)[order]
        # The map may be smaller than the input.
        boxes[:, :4] *= (self.size.width / width, self.size.height / height) * 2
        return Candidates(
            enclosing_boxes(boxes), np.array(scores, np.float32)[order], np.zeros(len(boxes), np.int64), rotated=boxes
        )


def _mean_inside(probabilities: FloatArray, corners: FloatArray) -> float:
    """Return the mean of the pixels whose upper left corner is in the polygon."""
    cv2 = opencv()
    height, width = probabilities.shape
    low = np.clip(np.floor(corners.min(axis=0)).astype(int), 0, (width - 1, height - 1))
    high = np.clip(np.ceil(corners.max(axis=0)).astype(int), 0, (width - 1, height - 1))
    mask = np.zeros((high[1] - low[1] + 1, high[0] - low[0] + 1), np.uint8)
    cv2.fillPoly(mask, [(corners - low).astype(np.int32)], 1)
    return float(cv2.mean(probabilities[low[1] : high[1] + 1, low[0] : high[0] + 1], mask)[0])
