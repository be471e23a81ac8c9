"""SSD head: boxes and scores as two outputs; the server suppresses overlaps (SSD, DETR and similar)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.heads.activation import activate, best_class
from edge_server.plugins.vision.heads.box_candidates import MOST_CANDIDATES, BoxCode, Candidates
from edge_server.plugins.vision.heads.output_parameters import Activation
from edge_server.plugins.vision.heads.output_tensors import Reals, fits
from edge_server.plugins.vision.heads.top_k import best

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Ssd:
    """[A, 4] and [A, C]. With priors, boxes are offsets from the priors: cx, cy, w, h, scaled by the variances.

    Priors are [A, 4] as cx, cy, w, h, or [2, 4 * A] as in Caffe's PriorBox: corners, then their variances. Each box has
    only its best class.
    """

    code: BoxCode
    activation: Activation
    background: int | None
    variances: tuple[float, float]
    has_priors: bool
    class_part: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return (2, 2, 2) if self.has_priors else (2, 2)

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        boxes, scores, *priors = shapes
        count = max(boxes[0], scores[0]) if boxes and scores else -1
        is_sound = fits(boxes, (count, 4)) and fits(scores, (count, -1)) and self._has_classes(scores[1])
        if self.has_priors:
            corners = -1 if count == -1 else 4 * count
            is_sound = is_sound and (fits(priors[0], (count, 4)) or fits(priors[0], (2, corners)))
        classes = (
            "classes" if self.background is None else f"classes, {self.background} among them and not the only one"
        )
        ending = ", [boxes, 4] or [2, 4 * boxes]" if self.has_priors else ""
        return None if is_sound else f"[boxes, 4], [boxes, {classes}]{ending}"

    def _has_classes(self, count: int) -> bool:
        return count == -1 or count > (0 if self.background is None else max(1, self.background))

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        boxes, scores = parts[:2]
        if self.background is not None:
            scores = activate(scores, self.activation, axis=1).copy()
            scores[:, self.background] = -np.inf
            highest: Reals = scores.max(axis=1)
        else:
            highest = best_class(scores, self.activation, axis=1)
        chosen = best(highest, threshold, MOST_CANDIDATES)
        kept = self._decoded(boxes, parts[2], chosen) if self.has_priors else self.code.corners(boxes[chosen])
        return Candidates(kept, highest[chosen], scores[chosen].argmax(axis=1))

    def _decoded(self, offsets: Reals, priors: Reals, chosen: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        moves = offsets[chosen].astype(np.float64)
        if priors.shape != (len(offsets), 4):
            corners, variances = priors.reshape(2, -1, 4)[:, chosen].astype(np.float64)
            centre, size = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
        else:
            around = priors[chosen].astype(np.float64)
            centre, size = around[:, :2], around[:, 2:]
            variances = np.repeat(self.variances, 2)
        moves = moves * variances
        centre = centre + moves[:, :2] * size
        half = size * np.exp(moves[:, 2:]) / 2
        return np.concatenate((centre - half, centre + half), axis=1) * (self.code.pixels * 2)
