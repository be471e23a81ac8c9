"""Decoder of detection outputs: chooses the network's output format, drops overlapping boxes, and converts coordinates
and class names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.model_spec import ModelSpec, OutputSpec
from edge_server.errors import BackendError, BadModelConfig
from edge_server.plugins.vision.outputs.box_candidates import (
    BoxEncoding,
    Candidates,
    DetectionHead,
    NetworkSize,
    apply_nms,
)
from edge_server.plugins.vision.outputs.detr_ppyoloe_nanodet import ClassScoreRows, Detr, DistributionGrid
from edge_server.plugins.vision.outputs.faces import BlazeFace, YuNet, yunet_names
from edge_server.plugins.vision.outputs.instance_masks import ObjectMaskDecoder
from edge_server.plugins.vision.outputs.output_parameters import (
    USUAL_COLUMNS,
    Column,
    DetectionDeclaration,
    HeadKind,
)
from edge_server.plugins.vision.outputs.output_tensors import FloatArray, OutputTensor, drop_batch_dim, require_numbers
from edge_server.plugins.vision.outputs.reordered import ReorderedColumns, Transposed
from edge_server.plugins.vision.outputs.rotated_boxes import (
    AngleColumns,
    AngleRows,
    apply_rotated_nms,
    enclosing_boxes,
    rotated_to_original,
)
from edge_server.plugins.vision.outputs.ssd import DetectionRows, FinalTensors, SelectedBoxes, Ssd
from edge_server.plugins.vision.outputs.text_lines import TextMap
from edge_server.plugins.vision.outputs.yolo import ClassColumns, ClassRows, FinalRows, ObjectnessRows, YoloxGrid
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import Detection, Keypoint, ObjectMask, RotatedBox
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

_OUTPUT_COUNTS: Mapping[HeadKind, tuple[int, ...]] = {
    HeadKind.SSD: (2, 3),
    HeadKind.NMS_INSIDE: (2, 3, 4),
    HeadKind.ONNX_NMS: (3,),
    HeadKind.BLAZEFACE: (2,),
    HeadKind.DETR: (2,),
    HeadKind.PPYOLOE: (2,),
}
"""Number of outputs that a head reads, if not one. Those of YuNet and NanoDet depend on their strides."""

_ONE_LIST = (HeadKind.ONNX_NMS, HeadKind.DETECTION_OUTPUT)
"""Heads whose output is one list for a whole batch, which cannot be split into items."""

_DISTRIBUTIONS = (HeadKind.NANODET, HeadKind.NANODET_PLUS)

_LAST_DIMS: Mapping[HeadKind, tuple[int | None, ...]] = {
    HeadKind.SSD: (4, None),
    HeadKind.ONNX_NMS: (4, None, 3),
    HeadKind.BLAZEFACE: (16, 1),
    HeadKind.DETR: (4, None),
    HeadKind.PPYOLOE: (4, None),
}
"""Last dim that identifies each output; None: the remaining output."""

_NMS_OUTPUT_NAMES = (
    ("detection_boxes", "det_boxes", "boxes", "bboxes", "nmsed_boxes", "pred_boxes"),
    ("detection_scores", "det_scores", "scores", "nmsed_scores", "pred_scores"),
    ("detection_classes", "det_classes", "classes", "labels", "class_ids", "nmsed_classes", "pred_classes"),
    ("num_detections", "num_dets", "count", "num_predictions"),
)
"""Names of boxes, scores, classes and their count in TensorFlow, TensorRT, ONNX and YOLO-NAS exporters."""

MAX_POSITION = 1e6
"""Positions are clipped to this many pixels on either side of the frame's corner, so that areas stay exact enough."""

MAX_CLASS_INDEX = 2**32 - 1

_MAX_ACCEPTED_SHAPES = 16
"""Number of shapes of a model's outputs that are checked only once. Most models have one."""


@record(frozen=True, slots=True)
class DetectionDecoder:
    """Decodes a model's outputs to detections. Immutable and thread-safe. `masks` is None if objects have none."""

    head: DetectionHead
    tensors: tuple[OutputTensor, ...]
    masks: ObjectMaskDecoder | None
    declaration: DetectionDeclaration
    labels: tuple[str, ...]
    _accepted_shapes: set[tuple[tuple[int, ...], ...]] = field(
        default_factory=set, init=False, repr=False, compare=False
    )

    def decode(
        self,
        outputs: Mapping[str, npt.NDArray[Any]],
        item: int | None,
        fit: FittedPicture,
        *,
        model: str,
        has_masks: bool = False,
    ) -> tuple[Detection, ...]:
        """Return the detections, best first, with boxes clipped to the frame. Boxes outside the frame are omitted.

        `has_masks` requests the masks of the objects, if the model gives some. Raises BackendError for outputs of
        shapes that the head cannot read.
        """
        arrays = self.select(outputs, item, model=model)
        candidates = self.head.decode(arrays, self.declaration.score_threshold)
        if not len(candidates.scores):
            return ()
        found = _convert_to_frame(candidates, fit)
        if self.declaration.head.needs_nms and self.declaration.iou_threshold < 1:
            classes = None if self.declaration.is_class_agnostic else found.classes
            if found.rotated is None:
                kept = apply_nms(found.boxes, classes, self.declaration.iou_threshold)
            else:
                kept = apply_rotated_nms(found.rotated, classes, self.declaration.iou_threshold)
            found = found.take(kept)
        if len(found.scores) > self.declaration.max_count:
            found = found.take(np.arange(self.declaration.max_count))
        boxes = np.clip(found.boxes, 0, (fit.width, fit.height, fit.width, fit.height))
        keypoints: list[list[list[float]]] = [[]] * len(boxes) if found.keypoints is None else found.keypoints.tolist()
        rotated: list[RotatedBox | None] = [None] * len(boxes)
        if found.rotated is not None:
            rotated = [RotatedBox(*numbers) for numbers in found.rotated.tolist()]
        masks: list[ObjectMask | None] = [None] * len(boxes)
        if has_masks and self.masks is not None and found.mask_coefficients is not None and len(boxes):
            masks = self.masks.decode(outputs, item, fit, boxes, found.mask_coefficients, model=model)
        return tuple(
            Detection(
                box[0],
                box[1],
                box[2],
                box[3],
                score,
                index,
                self.labels[index] if index < len(self.labels) else "",
                tuple(Keypoint(x, y, point_score) for x, y, point_score in points),
                rotated=rotated_box,
                mask=mask,
            )
            for box, score, index, points, rotated_box, mask in zip(
                boxes.tolist(), found.scores.tolist(), found.classes.tolist(), keypoints, rotated, masks, strict=True
            )
        )

    def select(self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, *, model: str) -> list[FloatArray]:
        """Return the values of one frame that the head reads. Raises BackendError for other shapes."""
        arrays = [tensor.select_floats(outputs, item, model=model) for tensor in self.tensors]
        mismatch = self.find_mismatch(arrays, model=model)
        if mismatch:
            raise BackendError(mismatch)
        return arrays

    def find_mismatch(self, arrays: Sequence[FloatArray], *, model: str) -> str:
        """Return why the head cannot read values of these shapes, or ""."""
        shapes = tuple(array.shape for array in arrays)
        if shapes in self._accepted_shapes:
            return ""
        expected = self.head.check_shapes(shapes)
        if expected is not None:
            return _mismatch(model, self.declaration, self.tensors, expected, shapes)
        if len(self._accepted_shapes) < _MAX_ACCEPTED_SHAPES:
            self._accepted_shapes.add(shapes)
        return ""


def _convert_to_frame(found: Candidates, fit: FittedPicture) -> Candidates:
    """Return the candidates with valid numbers and some area in the frame, in frame coordinates, boxes not clipped."""
    is_valid = np.isfinite(found.boxes).all(axis=1) & np.isfinite(found.scores)
    is_valid &= (found.classes >= 0) & (found.classes <= MAX_CLASS_INDEX)
    if found.keypoints is not None:
        is_valid &= np.isfinite(found.keypoints).all(axis=(1, 2))
    if found.rotated is not None:
        is_valid &= np.isfinite(found.rotated).all(axis=1) & (found.rotated[:, 2:4] > 0).all(axis=1)
    if not is_valid.all():
        found = found.take(np.flatnonzero(is_valid))
    boxes, keypoints, rotated = found.boxes.copy(), found.keypoints, found.rotated
    boxes[:, 0::2], boxes[:, 1::2] = fit.to_original(boxes[:, 0::2], boxes[:, 1::2])
    if rotated is not None:
        rotated = rotated_to_original(rotated, fit)
        rotated[:, :4] = np.clip(rotated[:, :4], -MAX_POSITION, MAX_POSITION)
        boxes = enclosing_boxes(rotated)
    boxes = np.clip(boxes, -MAX_POSITION, MAX_POSITION)
    if keypoints is not None:
        keypoints = keypoints.copy()
        keypoints[..., 0], keypoints[..., 1] = fit.to_original(keypoints[..., 0], keypoints[..., 1])
        keypoints[..., :2] = np.clip(keypoints[..., :2], -MAX_POSITION, MAX_POSITION)
    x_min, y_min, x_max, y_max = np.clip(boxes, 0, (fit.width, fit.height, fit.width, fit.height)).T
    in_frame = replace(found, boxes=boxes, keypoints=keypoints, rotated=rotated)
    has_area = (x_max > x_min) & (y_max > y_min)
    return in_frame if has_area.all() else in_frame.take(np.flatnonzero(has_area))


def make_detection_decoder(spec: ModelSpec, declaration: DetectionDeclaration, size: NetworkSize) -> DetectionDecoder:
    """Return the decoder of a model's detections. `size` is the size of its input.

    Raises BadModelConfig for outputs that the declared head cannot read.
    """
    outputs = _choose_outputs(spec, declaration)
    for output in outputs:
        require_numbers(spec, output)
    masks = None
    if declaration.mask_coefficient_count:
        outputs, prototypes = outputs[:-1], outputs[-1]
        masks = _make_mask_decoder(spec, prototypes, declaration, size)
    head = make_head(declaration, size, len(outputs))
    ranked = list(zip(outputs, head.ranks, strict=True))
    tensors = tuple(OutputTensor(output.name, output.dtype, rank) for output, rank in ranked)
    shapes = [drop_batch_dim(spec, output, rank) for output, rank in ranked]
    expected = head.check_shapes(shapes)
    if expected is not None:
        message = _mismatch(spec.name, declaration, tensors, expected, shapes)
        if spec.max_batch_size > 0 and any(len(shape) < rank for shape, (_, rank) in zip(shapes, ranked, strict=True)):
            message += (
                "; if the first dimension of the file's output counts boxes and not pictures, expected max_batch_size "
                f"0 and an input with dims [-1, ...], given max_batch_size {spec.max_batch_size}"
            )
        raise BadModelConfig(message)
    labels = spec.labels_of(outputs[head.labels_index])
    if declaration.head is HeadKind.DBNET:
        labels = labels or ("text",)
    return DetectionDecoder(head, tensors, masks, declaration, labels)


def _make_mask_decoder(
    spec: ModelSpec, prototypes: OutputSpec, declaration: DetectionDeclaration, size: NetworkSize
) -> ObjectMaskDecoder:
    tensor = OutputTensor(prototypes.name, prototypes.dtype, 3)
    decoder = ObjectMaskDecoder(tensor, declaration.mask_coefficient_count, size)
    shape = drop_batch_dim(spec, prototypes, 3)
    expected = decoder.check_shape(shape)
    if expected is not None:
        raise BadModelConfig(_mismatch(spec.name, declaration, (tensor,), f"prototypes {expected}", [shape]))
    return decoder


def _mismatch(
    model: str,
    declaration: DetectionDeclaration,
    tensors: tuple[OutputTensor, ...],
    expected: str,
    shapes: Sequence[tuple[int, ...]],
) -> str:
    given = ", ".join(f"'{tensor.name}' {list(shape)}" for tensor, shape in zip(tensors, shapes, strict=True))
    return f"model '{model}', detection_head {declaration.head.value}: expected {expected}, given {given}"


def _choose_outputs(spec: ModelSpec, declaration: DetectionDeclaration) -> tuple[OutputSpec, ...]:
    """Return the outputs that the declared head reads, in its order.

    Raises BadModelConfig if they cannot be determined or the head does not support the model's batches.
    """
    is_one_list = declaration.head in _ONE_LIST or Column.IMAGE in declaration.columns
    if is_one_list and spec.max_batch_size > 1:
        raise BadModelConfig(
            f"model '{spec.name}', detection_head {declaration.head.value}: expected max_batch_size of at most 1, "
            f"because it lists the finds of all frames together, given {spec.max_batch_size}"
        )
    if declaration.head is HeadKind.YUNET:
        counts: tuple[int, ...] = (4 * len(declaration.strides),)
    elif declaration.head in _DISTRIBUTIONS:
        counts = (1, 2 * len(declaration.strides))
    else:
        counts = _OUTPUT_COUNTS.get(declaration.head, (1,))
    if declaration.mask_coefficient_count:
        counts = tuple(count + 1 for count in counts)
    names = declaration.outputs or _find_outputs(spec, declaration)
    outputs = [output for name in names if (output := spec.output(name)) is not None]
    if len(outputs) != len(names) or len(outputs) not in counts:
        known = ", ".join(f"'{output.name}' {list(output.dims)}" for output in spec.outputs)
        stated = ", ".join(f"'{name}'" for name in names) or "no parameter 'detection_outputs'"
        raise BadModelConfig(
            f"model '{spec.name}', detection_head {declaration.head.value}: expected "
            f"{' or '.join(str(count) for count in counts)} of its outputs, {known}, named in parameter "
            f"'detection_outputs', given {stated}"
        )
    return tuple(outputs)


def _find_outputs(spec: ModelSpec, declaration: DetectionDeclaration) -> tuple[str, ...]:
    """Return the names of the outputs that can be determined without 'detection_outputs', or nothing."""
    if declaration.head is HeadKind.YUNET:
        return yunet_names(declaration.strides)
    if declaration.head is HeadKind.NMS_INSIDE:
        by_name = {output.name.lower(): output.name for output in spec.outputs}
        found = [next((by_name[name] for name in names if name in by_name), None) for names in _NMS_OUTPUT_NAMES]
        if found[0] is None and "dets" in by_name:
            found = [by_name["dets"], found[2]]  # boxes with their scores
        elif found[3] is None:
            found.pop()  # the count is optional
        return tuple(name for name in found if name is not None) if None not in found else ()
    if declaration.mask_coefficient_count:
        # The prototypes have one dimension more than the boxes.
        by_rank = sorted(spec.outputs, key=lambda output: len(output.dims))
        is_clear = len(by_rank) == 2 and len(by_rank[0].dims) < len(by_rank[1].dims)
        return tuple(output.name for output in by_rank) if is_clear else ()
    last_dims = _LAST_DIMS.get(declaration.head)
    if last_dims is None:
        return (spec.outputs[0].name,) if len(spec.outputs) == 1 else ()
    if len(spec.outputs) != len(last_dims):
        return ()
    # An output is found if no other has the same last dim.
    by_last_dim: dict[int | None, list[str]] = {}
    for output in spec.outputs:
        last = output.dims[-1] if output.dims else None
        by_last_dim.setdefault(last if last in last_dims else None, []).append(output.name)
    names = [by_last_dim.get(dim, []) for dim in last_dims]
    return tuple(alike[0] for alike in names) if all(len(alike) == 1 for alike in names) else ()


def make_head(declaration: DetectionDeclaration, size: NetworkSize, output_count: int) -> DetectionHead:
    """Return the declared head for an input of that size and that many outputs."""
    encoding = BoxEncoding(declaration.format, declaration.unit, size)
    head = _make_head(declaration, encoding, output_count)
    if declaration.is_transposed:
        return Transposed(head)
    return head if declaration.columns == USUAL_COLUMNS else ReorderedColumns(head, declaration.columns)


def _make_head(declaration: DetectionDeclaration, encoding: BoxEncoding, output_count: int) -> DetectionHead:
    kind, activation, size = declaration.head, declaration.activation, encoding.size
    coefficient_count = declaration.mask_coefficient_count
    if kind in (HeadKind.YOLOV5, HeadKind.YOLOX_DECODED):
        return ObjectnessRows(encoding, activation, coefficient_count)
    if kind in (HeadKind.YOLOV8, HeadKind.YOLO11):
        return ClassColumns(
            encoding, activation, declaration.keypoint_count, coefficient_count, declaration.keypoint_values
        )
    if kind is HeadKind.YOLOV10:
        return FinalRows(encoding, declaration.keypoint_count, coefficient_count, declaration.keypoint_values)
    if kind is HeadKind.YOLOV8_OBB:
        return AngleColumns(encoding, activation)
    if kind is HeadKind.YOLO26_OBB:
        return AngleRows(encoding)
    if kind is HeadKind.RTDETR:
        return ClassRows(encoding, activation)
    if kind is HeadKind.YOLOX:
        return YoloxGrid(size, declaration.strides, activation)
    if kind is HeadKind.SSD:
        return Ssd(encoding, activation, declaration.background, declaration.variances, has_priors=output_count == 3)
    if kind is HeadKind.NMS_INSIDE:
        return FinalTensors(encoding, declaration.background, output_count)
    if kind is HeadKind.ONNX_NMS:
        return SelectedBoxes(encoding, declaration.background)
    if kind is HeadKind.DETECTION_OUTPUT:
        return DetectionRows(encoding, declaration.background)
    if kind is HeadKind.DBNET:
        return TextMap(size, declaration.unclip_ratio)
    if kind is HeadKind.YUNET:
        return YuNet(size, declaration.strides)
    if kind is HeadKind.DETR:
        return Detr(encoding, activation, declaration.background)
    if kind is HeadKind.PPYOLOE:
        return ClassScoreRows(encoding, activation)
    if kind in _DISTRIBUTIONS:
        cell_point = 0.5 if kind is HeadKind.NANODET else 0.0
        is_split = output_count > 1
        return DistributionGrid(size, declaration.strides, declaration.bins, cell_point, activation, is_split)
    return BlazeFace(size, declaration.strides, activation)
