"""Selection of the head for a model's outputs and of the role of each output."""

from __future__ import annotations

from collections.abc import Mapping

from edge_server.core.model_spec import ModelSpec, OutputSpec
from edge_server.errors import BadModelConfig
from edge_server.plugins.vision.heads.blazeface import BlazeFace
from edge_server.plugins.vision.heads.box_candidates import BoxCode, DetectionHead, NetworkSize
from edge_server.plugins.vision.heads.output_parameters import DetectionDeclaration, HeadKind
from edge_server.plugins.vision.heads.ssd import Ssd
from edge_server.plugins.vision.heads.suppressed_boxes import DetectionRows, FinalRows, FinalTensors, SelectedBoxes
from edge_server.plugins.vision.heads.yolo import ClassColumns, ObjectnessRows
from edge_server.plugins.vision.heads.yolox import YoloxGrid
from edge_server.plugins.vision.heads.yunet import YuNet, yunet_names

_COUNTS: Mapping[HeadKind, tuple[int, ...]] = {
    HeadKind.SSD: (2, 3),
    HeadKind.NMS_INSIDE: (3, 4),
    HeadKind.ONNX_NMS: (3,),
    HeadKind.BLAZEFACE: (2,),
}
"""Number of outputs that a head reads, if not one. YuNet's depends on its strides."""

_ONE_LIST = (HeadKind.ONNX_NMS, HeadKind.DETECTION_OUTPUT)
"""Heads whose output is one list for a whole batch, which cannot be split into rows."""

_LAST_DIMS: Mapping[HeadKind, tuple[int | None, ...]] = {
    HeadKind.SSD: (4, None),
    HeadKind.ONNX_NMS: (4, None, 3),
    HeadKind.BLAZEFACE: (16, 1),
}
"""Last dim that identifies each output; None: the remaining output."""

_FINAL_NAMES = (
    ("detection_boxes", "det_boxes", "boxes", "bboxes", "nmsed_boxes"),
    ("detection_scores", "det_scores", "scores", "nmsed_scores"),
    ("detection_classes", "det_classes", "classes", "labels", "class_ids", "nmsed_classes"),
    ("num_detections", "num_dets", "count"),
)
"""Names of boxes, scores, classes and their count in TensorFlow, TensorRT and ONNX exporters."""


def choose_parts(spec: ModelSpec, declaration: DetectionDeclaration) -> tuple[OutputSpec, ...]:
    """Return the outputs that the declared head reads, in its order.

    Raises BadModelConfig if they cannot be determined or the head does not support the model's batches.
    """
    if declaration.head in _ONE_LIST and spec.max_batch_size > 1:
        raise BadModelConfig(
            f"model '{spec.name}', detection_head {declaration.head.value}: expected max_batch_size of at most 1, "
            f"because it lists the finds of all frames together, given {spec.max_batch_size}"
        )
    if declaration.head is HeadKind.YUNET:
        counts: tuple[int, ...] = (4 * len(declaration.strides),)
    else:
        counts = _COUNTS.get(declaration.head, (1,))
    names = declaration.outputs or _names(spec, declaration)
    parts = [output for name in names if (output := spec.output(name)) is not None]
    if len(parts) != len(names) or len(parts) not in counts:
        known = ", ".join(f"'{output.name}' {list(output.dims)}" for output in spec.outputs)
        stated = ", ".join(f"'{name}'" for name in names) or "no parameter 'detection_outputs'"
        raise BadModelConfig(
            f"model '{spec.name}', detection_head {declaration.head.value}: expected "
            f"{' or '.join(str(count) for count in counts)} of its outputs, {known}, named in parameter "
            f"'detection_outputs', given {stated}"
        )
    return tuple(parts)


def _names(spec: ModelSpec, declaration: DetectionDeclaration) -> tuple[str, ...]:
    """Return the names of outputs that can be determined without 'detection_outputs', or nothing."""
    if declaration.head is HeadKind.YUNET:
        return yunet_names(declaration.strides)
    if declaration.head is HeadKind.NMS_INSIDE:
        return _names_by_name(spec)
    ends = _LAST_DIMS.get(declaration.head)
    if ends is not None:
        return _names_by_dims(spec, ends)
    return (spec.outputs[0].name,) if len(spec.outputs) == 1 else ()


def _names_by_name(spec: ModelSpec) -> tuple[str, ...]:
    by_name = {output.name.lower(): output.name for output in spec.outputs}
    found = [next((by_name[name] for name in names if name in by_name), None) for names in _FINAL_NAMES]
    if found[3] is None:
        found.pop()
    return tuple(name for name in found if name is not None) if None not in found else ()


def _names_by_dims(spec: ModelSpec, ends: tuple[int | None, ...]) -> tuple[str, ...]:
    if len(spec.outputs) != len(ends):
        return ()
    stated = [end for end in ends if end is not None]
    by_end: dict[int | None, list[str]] = {}
    for output in spec.outputs:
        last = output.dims[-1] if output.dims else 0
        by_end.setdefault(last if last in stated else None, []).append(output.name)
    names = [by_end.get(end, []) for end in ends]
    return tuple(found[0] for found in names) if all(len(found) == 1 for found in names) else ()


def make_head(declaration: DetectionDeclaration, size: NetworkSize, part_count: int) -> DetectionHead:
    """Return the declared head for an input of that size and that many outputs."""
    code = BoxCode(declaration.format, declaration.unit, size)
    kind, activation = declaration.head, declaration.activation
    if kind in (HeadKind.YOLOV5, HeadKind.YOLOX_DECODED):
        return ObjectnessRows(code, activation)
    if kind in (HeadKind.YOLOV8, HeadKind.YOLO11):
        return ClassColumns(code, activation, declaration.keypoint_count)
    if kind is HeadKind.YOLOV10:
        return FinalRows(code)
    if kind is HeadKind.YOLOX:
        return YoloxGrid(size, declaration.strides, activation)
    if kind is HeadKind.SSD:
        return Ssd(code, activation, declaration.background, declaration.variances, has_priors=part_count == 3)
    if kind is HeadKind.NMS_INSIDE:
        return FinalTensors(code, declaration.background, has_count=part_count == 4)
    if kind is HeadKind.ONNX_NMS:
        return SelectedBoxes(code, declaration.background)
    if kind is HeadKind.DETECTION_OUTPUT:
        return DetectionRows(code, declaration.background)
    if kind is HeadKind.YUNET:
        return YuNet(size, declaration.strides)
    return BlazeFace(size, declaration.strides, activation)
