"""Detections of a frame: filters a head's candidates, suppresses overlaps, and converts coordinates and class names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BackendError, BadModelConfig
from edge_server.plugins.vision.heads.box_candidates import Candidates, DetectionHead, NetworkSize
from edge_server.plugins.vision.heads.head_selection import choose_parts, make_head
from edge_server.plugins.vision.heads.nms import suppress
from edge_server.plugins.vision.heads.output_parameters import TRAITS, DetectionDeclaration
from edge_server.plugins.vision.heads.output_tensors import HeadOutput, Reals, check_number, frame_dims
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import Detection, Keypoint

if TYPE_CHECKING:
    import numpy.typing as npt

FARTHEST = 1e6
"""Positions are clipped to this many pixels on either side of the frame's corner, so that areas stay exact enough."""

LARGEST_CLASS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class DetectionPlan:
    """Conversion of a model's outputs to detections. Immutable and thread-safe."""

    head: DetectionHead
    slots: tuple[HeadOutput, ...]
    declaration: DetectionDeclaration
    labels: tuple[str, ...]

    def read(
        self, outputs: Mapping[str, npt.NDArray[Any]], row: int | None, fit: FittedPicture, *, model: str
    ) -> tuple[Detection, ...]:
        """Return the detections, best first, with boxes clipped to the frame. Boxes outside the frame are omitted.

        Raises BackendError for outputs of shapes that the head cannot read.
        """
        parts = self.parts(outputs, row, model=model)
        found = in_frame(self.head.candidates(parts, self.declaration.score_threshold), fit)
        if TRAITS[self.declaration.head].needs_nms and self.declaration.iou_threshold < 1:
            classes = None if self.declaration.is_class_agnostic else found.classes
            found = _taken(found, suppress(found.boxes, classes, self.declaration.iou_threshold))
        return self._named(_taken(found, np.arange(min(len(found.scores), self.declaration.most))), fit)

    def parts(self, outputs: Mapping[str, npt.NDArray[Any]], row: int | None, *, model: str) -> list[Reals]:
        """Return the values of one frame that the head reads. Raises BackendError for other shapes."""
        parts = [slot.values(outputs, row, model=model) for slot in self.slots]
        problem = self.head.problem([part.shape for part in parts])
        if problem is not None:
            raise BackendError(_mismatch(model, self.declaration, self.slots, problem, [part.shape for part in parts]))
        return parts

    def _named(self, found: Candidates, fit: FittedPicture) -> tuple[Detection, ...]:
        limits = (fit.width, fit.height, fit.width, fit.height)
        boxes = np.clip(found.boxes, 0, limits).tolist()
        points: list[list[list[float]]] = [[]] * len(boxes) if found.keypoints is None else found.keypoints.tolist()
        return tuple(
            Detection(box[0], box[1], box[2], box[3], score, index, self._label(index), _keypoints(around))
            for box, score, index, around in zip(
                boxes, found.scores.tolist(), found.classes.tolist(), points, strict=True
            )
        )

    def _label(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else ""


def _keypoints(points: list[list[float]]) -> tuple[Keypoint, ...]:
    return tuple(Keypoint(x, y, score) for x, y, score in points)


def in_frame(found: Candidates, fit: FittedPicture) -> Candidates:
    """Return the candidates with valid numbers and some area in the frame, in frame coordinates, boxes not clipped."""
    is_sound = np.isfinite(found.boxes).all(axis=1) & np.isfinite(found.scores)
    is_sound &= (found.classes >= 0) & (found.classes <= LARGEST_CLASS)
    if found.keypoints is not None:
        is_sound &= np.isfinite(found.keypoints).all(axis=(1, 2))
    found = _taken(found, np.flatnonzero(is_sound))
    boxes = np.empty_like(found.boxes)
    boxes[:, 0::2], boxes[:, 1::2] = _to_frame(found.boxes[:, 0::2], found.boxes[:, 1::2], fit)
    keypoints = found.keypoints
    if keypoints is not None:
        x, y = _to_frame(keypoints[..., 0], keypoints[..., 1], fit)
        keypoints = np.stack((x, y, keypoints[..., 2]), axis=-1)
    x_min, y_min, x_max, y_max = np.clip(boxes, 0, (fit.width, fit.height, fit.width, fit.height)).T
    moved = Candidates(boxes, found.scores, found.classes, keypoints)
    return _taken(moved, np.flatnonzero((x_max > x_min) & (y_max > y_min)))


def _to_frame(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], fit: FittedPicture
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    x, y = fit.to_original(x, y)
    return np.clip(x, -FARTHEST, FARTHEST), np.clip(y, -FARTHEST, FARTHEST)


def _taken(found: Candidates, rows: npt.NDArray[np.intp]) -> Candidates:
    keypoints = None if found.keypoints is None else found.keypoints[rows]
    return Candidates(found.boxes[rows], found.scores[rows], found.classes[rows], keypoints)


def detection_plan(spec: ModelSpec, declaration: DetectionDeclaration, size: NetworkSize) -> DetectionPlan:
    """Return the plan that converts a model's outputs to detections. `size` is the size of its input.

    Raises BadModelConfig for outputs that the declared head cannot read.
    """
    outputs = choose_parts(spec, declaration)
    for output in outputs:
        check_number(spec, output)
    head = make_head(declaration, size, len(outputs))
    slots = tuple(HeadOutput(output.name, output.dtype, rank) for output, rank in zip(outputs, head.ranks, strict=True))
    shapes = [frame_dims(spec, output, rank) for output, rank in zip(outputs, head.ranks, strict=True)]
    problem = head.problem(shapes)
    if problem is not None:
        raise BadModelConfig(_mismatch(spec.name, declaration, slots, problem, shapes))
    return DetectionPlan(head, slots, declaration, outputs[head.class_part].labels)


def _mismatch(
    model: str,
    declaration: DetectionDeclaration,
    slots: tuple[HeadOutput, ...],
    expected: str,
    shapes: list[tuple[int, ...]],
) -> str:
    given = ", ".join(f"'{slot.name}' {list(shape)}" for slot, shape in zip(slots, shapes, strict=True))
    return f"model '{model}', detection_head {declaration.head.value}: expected {expected}, given {given}"
