"""Check of a detection model when it is loaded: runs it on a sample picture, and compares the answer with the declared
layout. A classifier is only compared with the number of its labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.tensor import DType
from edge_server.core.version_lifecycle import OutputCheck, SampleRun
from edge_server.errors import BadModelConfig, EdgeServerError
from edge_server.plugins.vision.image_parameters import read_declaration as read_image_declaration
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.plugins.vision.layout_check import check_layout, count_classes, find_fitting_layouts
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize
from edge_server.plugins.vision.outputs.classification import ClassDecoder
from edge_server.plugins.vision.outputs.detections import DetectionDecoder
from edge_server.plugins.vision.outputs.output_parameters import (
    DetectionDeclaration,
    HeadKind,
)
from edge_server.plugins.vision.outputs.output_tensors import FloatArray, OutputTensor, drop_batch_dim
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.plugins.vision.resize import Color

if TYPE_CHECKING:
    import numpy.typing as npt


_SCALED_TO_ONE = (
    HeadKind.YOLOV8, HeadKind.YOLO11, HeadKind.YOLOV8_OBB, HeadKind.YOLOV5, HeadKind.YOLOV10, HeadKind.YOLO26_OBB,
)  # fmt: skip
"""Heads of Ultralytics' networks."""


def sample_check(spec: ModelSpec, picture: Path) -> OutputCheck | None:
    """Return the check of a model with a detection head, or with labels of classes; None for any other. `picture` is a
    JPEG of a person.

    Raises BadModelConfig if the declaration is wrong in itself or does not match the outputs. The check returns
    warnings, and raises BadModelConfig for an answer that is impossible for the declared layout.
    """
    images, perception = make_image_plan(spec), make_perception_decoder(spec)
    if images is None or perception is None:
        return None
    if perception.detections is not None:
        return partial(_check, spec, images, perception.detections, picture)
    if perception.classes is not None and perception.classes.labels:
        return partial(_check_class_labels, spec, images, perception.classes, picture)
    return None


def make_noise() -> npt.NDArray[np.uint8]:
    """Return a picture of noise, the same in each call: (480, 640, 3)."""
    return np.random.default_rng(2026).integers(0, 256, (480, 640, 3), np.uint8)


def check_noise(spec: ModelSpec, run: SampleRun) -> tuple[str, ...]:
    """Return a warning if a model with a detection head sees something in noise; none if its load has warned of it."""
    images, perception = make_image_plan(spec), make_perception_decoder(spec)
    if images is None or perception is None or perception.detections is None or images.color is Color.DEPTH:
        return ()
    tensor, fit = images.fit(make_noise(), Color.BGR, model=spec.name)
    item = 0 if spec.max_batch_size > 0 else None
    try:
        found = perception.detections.decode(run(images.inputs(tensor)), item, fit, model=spec.name)
    except EdgeServerError as error:
        return (f"it was not tried with noise: {error.message}",)
    if not found:
        return ()
    cause = (
        f"image_scale were another: networks of detection_head {perception.detections.declaration.head.value} usually "
        f"have 1/255, and this one gets the values 0 to 255"
        if _has_unusual_scale(spec, perception.detections.declaration)
        else "detection_head, image_scale or image_color were another, or detection_score_threshold too low"
    )
    warning = f"it sees {len(found)} objects in noise, the best with a score of {found[0].score:.2f}, as if {cause}"
    return () if warning in spec.warnings else (warning,)


def _has_unusual_scale(spec: ModelSpec, declaration: DetectionDeclaration) -> bool:
    """Return whether an Ultralytics network, all of which are trained with values of 0 to 1, gets 0 to 255.

    One with integers as input scales them itself.
    """
    if declaration.head not in _SCALED_TO_ONE or all(item.dtype is not DType.FP32 for item in spec.inputs):
        return False
    image = read_image_declaration(spec.name, spec.all_parameters)
    return image.scale == 1.0 and not any(image.mean) and all(value == 1.0 for value in image.stddev)


def _check(
    spec: ModelSpec, images: ImagePlan, decoder: DetectionDecoder, picture: Path, run: SampleRun | None
) -> tuple[str, ...]:
    arrays: list[FloatArray] | None = None
    warnings = []
    if run is not None and _can_run_picture(spec, images):
        try:
            arrays = _run_picture(spec, images, decoder.tensors, picture, run)
        except EdgeServerError as error:
            # The model may be meant for other inputs, which work.
            warnings.append(f"its detections were not checked with the sample picture: {error.message}")
    if arrays is not None:
        mismatch = decoder.find_mismatch(arrays, model=spec.name)
        if mismatch:
            return (*warnings, *_check_shapes(spec, images, decoder, arrays, mismatch))
        warnings += _check_values(spec, images, decoder, arrays)
        if run is not None and _has_unusual_scale(spec, decoder.declaration):
            warnings += check_noise(spec, run)
        shapes = [array.shape for array in arrays]
    else:
        outputs_read = [spec.output(tensor.name) for tensor in decoder.tensors]
        shapes = [
            drop_batch_dim(spec, output, tensor.rank)
            for output, tensor in zip(outputs_read, decoder.tensors, strict=True)
            if output is not None
        ]
    class_count = count_classes(decoder.declaration, shapes)
    if decoder.labels and class_count is not None and class_count != len(decoder.labels):
        warnings.append(
            f"detection_head {decoder.declaration.head.value}: the outputs have "
            + _describe_label_count(class_count, len(decoder.labels))
        )
    return tuple(warnings)


def _check_class_labels(
    spec: ModelSpec, images: ImagePlan, decoder: ClassDecoder, picture: Path, run: SampleRun | None
) -> tuple[str, ...]:
    """Return a warning if a classifier has another number of classes than of labels."""
    output = spec.output(decoder.tensor.name)
    dims = drop_batch_dim(spec, output, decoder.tensor.rank) if output is not None else (-1,)
    class_count = math.prod(dims)
    if -1 in dims:
        if run is None or not _can_run_picture(spec, images):
            return ()
        try:
            (values,) = _run_picture(spec, images, (decoder.tensor,), picture, run)
        except EdgeServerError as error:
            return (f"its labels were not checked with the sample picture: {error.message}",)
        class_count = values.size
    if class_count == len(decoder.labels):
        return ()
    return (f"output '{decoder.tensor.name}' has " + _describe_label_count(class_count, len(decoder.labels)),)


def _describe_label_count(class_count: int, label_count: int) -> str:
    """Return the end of a warning: the effect of a wrong number of labels, and the remedy."""
    if label_count < class_count:
        effect = f"classes from {label_count} on have no name"
    else:
        effect = f"the labels from line {class_count + 1} on are not used, and the others may name the wrong classes"
    return (
        f"{class_count} classes, label_filename names {label_count}: {effect}; expected {class_count} lines, one for "
        "each class in the order of the scores"
    )


def _can_run_picture(spec: ModelSpec, images: ImagePlan) -> bool:
    """Return whether a picture fills all inputs that the model needs."""
    filled = {images.input_name, *(one.name for one in images.constants)}
    needs_more = any(item.name not in filled and not item.is_optional for item in spec.inputs)
    return images.color is not Color.DEPTH and not needs_more


def _run_picture(
    spec: ModelSpec, images: ImagePlan, tensors: Sequence[OutputTensor], picture: Path, run: SampleRun
) -> list[FloatArray]:
    """Return the values of outputs for the picture. Raises EdgeServerError."""
    outputs = run(images.inputs(images.fit_file(picture.read_bytes(), model=spec.name)[0]))
    item = 0 if spec.max_batch_size > 0 else None
    return [tensor.select_floats(outputs, item, model=spec.name) for tensor in tensors]


def _check_shapes(
    spec: ModelSpec, images: ImagePlan, decoder: DetectionDecoder, arrays: Sequence[FloatArray], mismatch: str
) -> tuple[str, ...]:
    """Return a warning about shapes that the head does not read. Raises BadModelConfig if the configuration states it.

    The file left these shapes open. An output without detections may have lost a dimension, and proves nothing.
    """
    if any(array.size == 0 for array in arrays):
        return (f"its detections were not checked with the sample picture: {mismatch}",)
    message = mismatch + _describe_fitting_layouts(images, decoder, arrays)
    if "detection_head" in spec.parameters:
        raise BadModelConfig(f"{message}. The parameter warmup_probe false loads it without this check")
    return (message,)


def _describe_fitting_layouts(images: ImagePlan, decoder: DetectionDecoder, arrays: Sequence[FloatArray]) -> str:
    """Return the end of a message: the layouts that a single output of two dimensions fits, or ""."""
    if len(arrays) != 1 or arrays[0].ndim != 2:
        return ""
    size = NetworkSize(images.rule.width, images.rule.height)
    layouts = find_fitting_layouts(decoder.declaration, size, arrays[0], len(decoder.labels))
    return f". The answer fits {', or '.join(layouts)}" if layouts else ""


def _check_values(spec: ModelSpec, images: ImagePlan, decoder: DetectionDecoder, arrays: list[FloatArray]) -> list[str]:
    """Return warnings about an answer. Raises BadModelConfig for an impossible one."""
    size = NetworkSize(images.rule.width, images.rule.height)
    findings = check_layout(decoder.declaration, size, arrays)
    if not findings.impossible and not findings.doubtful:
        return []
    advice = _describe_fitting_layouts(images, decoder, arrays)
    shapes = ", ".join(
        f"'{tensor.name}' {list(array.shape)}" for tensor, array in zip(decoder.tensors, arrays, strict=True)
    )
    error_prefix = f"detection_head {decoder.declaration.head.value}, answer {shapes} to the sample picture: "
    if findings.impossible and "detection_head" in spec.parameters:
        raise BadModelConfig(
            f"model '{spec.name}', {error_prefix}{findings.impossible[0]}{advice}. The parameter warmup_probe false "
            "loads it without this check"
        )
    # A model whose configuration states no head was loaded for its tensors.
    stated = () if "detection_head" in spec.parameters else findings.impossible
    return [error_prefix + "; ".join((*stated, *findings.doubtful)) + advice]
