"""Check of a detection model when it is loaded: runs it on a sample picture, and looks for outputs that the declared
format cannot have. A classifier is only compared with the number of its labels.

An answer is impossible if no model of the declared layout gives it, trained or not, quantized or not. Anything else
that looks wrong is doubtful. Most networks find nothing in most pictures, so finding nothing is neither.

| impossible | why no right model does it |
|---|---|
| another shape than the head reads | the head answers each frame with an error |
| a score above 1.1 after the declared activation | it is a probability |
| every detection is centred more than 8 inputs away | the frame ends after one |
| in pixels: at least 8 boxes, 9 of 10 within one pixel at the corner | decoded boxes are spread over the input |
| most class indices have a fraction | they count classes |

An output that is quantized as a whole has one step for boxes, scores and classes. A step below 2 rounds scores to at
most 2, and gives indices fractions, but its detections are in the right places: then both are only doubtful.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.tensor import DType
from edge_server.core.version_lifecycle import OutputCheck, SampleRun
from edge_server.errors import BadModelConfig, EdgeServerError
from edge_server.plugins.vision.image_parameters import read_declaration as read_image_declaration
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.plugins.vision.layouts import LAYOUTS, match_shapes
from edge_server.plugins.vision.outputs.box_candidates import Candidates, NetworkSize, count_cells
from edge_server.plugins.vision.outputs.classification import ClassDecoder
from edge_server.plugins.vision.outputs.detections import DetectionDecoder, make_head
from edge_server.plugins.vision.outputs.output_parameters import (
    Activation,
    BoxFormat,
    BoxUnit,
    DetectionDeclaration,
    HeadKind,
    read_declaration,
)
from edge_server.plugins.vision.outputs.output_tensors import FloatArray, OutputTensor, drop_batch_dim
from edge_server.plugins.vision.outputs.reordered import ReorderedColumns, Transposed
from edge_server.plugins.vision.parameter_tables import as_text, settings_of
from edge_server.plugins.vision.perception import make_perception_decoder
from edge_server.plugins.vision.resize import Color
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

_LAYOUT_KEYS = (
    "detection_keypoints", "detection_mask_coefficients", "detection_keypoint_values", "detection_transposed",
    "detection_columns", "detection_activation", "detection_box_format", "detection_box_unit",
)  # fmt: skip
"""Keys of a layout, as a warning lists them."""

MAX_SCORE = 1.1
MAX_ROUNDED_SCORE = 2.0
MAX_DISTANCE = 8
"""Greatest distance of a detection's centre from the upper left corner, in widths and heights of the input."""
MIN_BOXES = 8
"""With fewer boxes, chance explains what they have in common."""
MIN_SIDE = 16
"""Least side of an input on which boxes below one pixel are no detections."""
MAX_LOGIT = 100.0
_ANGLES = (-0.8, 2.4)
"""Angles of rotated boxes are -pi/4 to 3 pi/4."""
_COLUMNS = (HeadKind.YOLOV8, HeadKind.YOLO11, HeadKind.YOLOV8_OBB)
_SCALED_TO_ONE = (*_COLUMNS, HeadKind.YOLOV5, HeadKind.YOLOV10, HeadKind.YOLO26_OBB)
_WITH_CLASS_INDEX = (HeadKind.YOLOV10, HeadKind.YOLO26_OBB)
_WITH_OBJECTNESS = (HeadKind.YOLOV5, HeadKind.YOLOX, HeadKind.YOLOX_DECODED)


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


@record(frozen=True, slots=True)
class LayoutFindings:
    """Result of `check_layout`: what is impossible, what is doubtful, and the number of detections before NMS."""

    impossible: tuple[str, ...]
    doubtful: tuple[str, ...]
    count: int


def check_layout(declaration: DetectionDeclaration, size: NetworkSize, arrays: Sequence[FloatArray]) -> LayoutFindings:
    """Compare the outputs for one frame with the declared head. Their shapes must be those that the head reads."""
    head = make_head(declaration, size, len(arrays))
    if isinstance(head, ReorderedColumns):
        arrays, head = [head.reorder(arrays[0]), *arrays[1:]], head.head
    elif isinstance(head, Transposed):
        arrays, head = [arrays[0].T, *arrays[1:]], head.head
    # A wrong layout may overflow.
    with np.errstate(all="ignore"):
        found = head.decode(arrays, declaration.score_threshold)
        every = head.decode(arrays, -np.inf)
        doubtful = [*_shape_doubts(declaration, size, arrays), *_score_doubts(declaration, arrays)]
        doubtful += [*_box_format_doubts(found), *_keypoint_doubts(found), *_count_doubts(declaration, found, every)]
        wrong_values = [*_impossible_scores(found), *_fractional_classes(declaration, arrays)]
        impossible = list(_far_boxes(found, size))
        is_rounded = found.scores.max(initial=0.0) <= MAX_ROUNDED_SCORE and any(map(_is_quantized, arrays))
        (doubtful if is_rounded else impossible).extend(wrong_values)
        box_count = _count_boxes_in_one_pixel(declaration, size, every)
    if box_count >= MIN_BOXES or (box_count and found.scores.size):
        message = f"{box_count} boxes within a pixel at the input's corner, as if detection_box_unit were normalized"
        (impossible if box_count >= MIN_BOXES else doubtful).append(message)
    return LayoutFindings(tuple(impossible), tuple(doubtful), len(found.scores))


def count_classes(declaration: DetectionDeclaration, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """Return the number of classes in outputs of these shapes, or None if they do not tell it."""
    kind = declaration.head
    if kind in (HeadKind.YUNET, HeadKind.BLAZEFACE, HeadKind.DBNET):
        return 1
    if declaration.is_transposed:
        shapes = [shapes[0][::-1], *shapes[1:]]
    if kind in _COLUMNS:
        size, others = shapes[0][0], 4 + _rows_after_classes(declaration)
    elif kind in _WITH_OBJECTNESS:
        size, others = shapes[0][1], 5 + declaration.mask_coefficient_count
    elif kind is HeadKind.RTDETR:
        size, others = shapes[0][1], 4
    elif kind in (HeadKind.SSD, HeadKind.DETR):
        is_last = declaration.background is not None and declaration.background == shapes[1][1] - 1
        size, others = shapes[1][1], int(is_last and kind is HeadKind.DETR)
    elif kind in (HeadKind.ONNX_NMS, HeadKind.PPYOLOE):
        size, others = shapes[1][0], 0
    elif kind in (HeadKind.NANODET, HeadKind.NANODET_PLUS):
        size, others = shapes[0][1], 4 * declaration.bins if len(shapes) == 1 else 0
    else:
        return None
    return None if size == -1 else size - others


def _rows_after_classes(declaration: DetectionDeclaration) -> int:
    if declaration.head is HeadKind.YOLOV8_OBB:
        return 1
    return declaration.keypoint_values * declaration.keypoint_count + declaration.mask_coefficient_count


def find_fitting_layouts(
    declaration: DetectionDeclaration, size: NetworkSize, values: FloatArray, label_count: int
) -> tuple[str, ...]:
    """Return descriptions of at most two layouts that `values`, a single output of two dimensions, fits.

    A layout fits if nothing about it is impossible or doubtful. Those that find something go first.
    """
    fitting: dict[tuple[str, str], tuple[bool, str]] = {}
    for text, layout, option in _options(declaration, size, values, label_count):
        key = text, layout
        if key not in fitting and make_head(option, size, 1).check_shapes([values.shape]) is None:
            findings = check_layout(option, size, [values])
            if not findings.impossible and not findings.doubtful:
                fitting[key] = findings.count == 0, text.format(_describe(option))
    ordered = sorted(fitting.values(), key=lambda fit: fit[0])
    return tuple(dict.fromkeys(description for _, description in ordered))[:2]


def _options(
    declaration: DetectionDeclaration, size: NetworkSize, values: FloatArray, label_count: int
) -> Iterator[tuple[str, str, DetectionDeclaration]]:
    """Yield a text about a layout, its name, and its declaration."""
    for unit, activation in itertools.product(
        sorted(BoxUnit, key=lambda unit: unit is not declaration.unit), (Activation.NONE, Activation.SIGMOID)
    ):
        for name, implied in _fitting_rows(values.shape, size, label_count):
            option = replace(
                implied,
                unit=unit,
                activation=activation,
                score_threshold=declaration.score_threshold,
                iou_threshold=declaration.iou_threshold,
            )
            is_angle = option.head is HeadKind.YOLOV8_OBB
            has_activation = "detection_activation" in option.head.keys
            if (has_activation or activation is Activation.NONE) and (not is_angle or _are_angles(values[-1])):
                yield "{}", name, option
            if name == "yolov8" and len(values) > 4 + 32 and (values[-32:].min(axis=1) < 0).mean() > 0.5:
                masked = replace(option, mask_coefficient_count=32)
                yield "{}, with the prototype masks as second output", name, masked


def _fitting_rows(
    shape: tuple[int, ...], size: NetworkSize, label_count: int
) -> Iterator[tuple[str, DetectionDeclaration]]:
    """Yield the names of the layouts with one output of this shape, and what they declare."""
    cells = _count_grid_cells(size)
    for layout in LAYOUTS:
        if len(layout.outputs) > 1 or "detection_head" not in layout.parameters:
            continue
        # Keypoints follow an unknown number of classes.
        known = [{"C": count} for count in sorted({1, label_count or 1})] if "K" in layout.outputs[0] else [{}]
        for symbols in filter(None, (match_shapes(layout.outputs, [shape], one) for one in known)):
            # YOLOv5 and its successors have one or three boxes for each cell.
            counts = {layout.anchors_per_cell * cells, cells}
            if layout.anchors_per_cell and symbols["A"] not in counts:
                continue
            parameters = {key: text.format_map(symbols) for key, text in layout.parameters.items()}
            implied = read_declaration("", parameters).detections
            assert implied is not None
            yield layout.name, implied


def _are_angles(row: FloatArray) -> bool:
    """Return whether the numbers may be angles, and are no scores: most scores are near 0."""
    low, high = float(row.min()), float(row.max())
    is_no_score = low < 1 - MAX_SCORE or high > MAX_SCORE or float(np.median(row)) > 0.1
    return is_no_score and _ANGLES[0] <= low and high <= _ANGLES[1]


def _describe(option: DetectionDeclaration) -> str:
    """Return the head of a layout, and the keys that are not at their defaults."""
    stated = [f"detection_head {option.head.value}"]
    for key in _LAYOUT_KEYS:
        setting = settings_of(DetectionDeclaration)[key]
        value = getattr(option, setting.name)
        if key in option.head.keys and value != getattr(option.head, setting.name, setting.default):
            stated.append(f"{key} {as_text(value)}")
    return ", ".join(stated)


def _impossible_scores(found: Candidates) -> Iterator[str]:
    highest = float(found.scores.max(initial=0.0))
    if highest > MAX_SCORE:
        yield f"scores up to {highest:.4g}, expected at most 1"


def _is_quantized(values: FloatArray) -> bool:
    """Return whether all values are multiples of one step, at most 255 of them."""
    levels = np.unique(np.abs(values[np.isfinite(values)]))
    if not 2 <= levels.size <= 256:
        return False
    multiples = levels / np.diff(levels, prepend=0.0)[1 if levels[0] == 0 else 0 :].min()
    return bool(np.abs(multiples - np.rint(multiples)).max() < 0.01)


def _far_boxes(found: Candidates, size: NetworkSize) -> Iterator[str]:
    centres = np.abs(_centres(found.boxes))
    is_far = (centres > MAX_DISTANCE * np.array((size.width, size.height))).any(axis=1)
    if is_far.size and is_far.all():
        yield f"boxes centred {centres.max():.4g} pixels away, expected them in the input of {size.width}x{size.height}"


def _fractional_classes(declaration: DetectionDeclaration, arrays: Sequence[FloatArray]) -> Iterator[str]:
    if declaration.head not in _WITH_CLASS_INDEX:
        return
    # Unused rows are 0.
    classes = arrays[0][:, 5][np.isfinite(arrays[0][:, 5]) & (arrays[0][:, 5] != 0)]
    has_fraction = np.abs(classes - np.rint(classes)) > 0.02
    if has_fraction.size and has_fraction.mean() > 0.5:
        yield f"class indices such as {classes[has_fraction][0]:.4g}, expected whole numbers"


def _count_boxes_in_one_pixel(declaration: DetectionDeclaration, size: NetworkSize, every: Candidates) -> int:
    """Return the number of different boxes if nearly all are smaller than one pixel and at the corner, else 0."""
    has_unit = "detection_box_unit" in declaration.head.keys
    if not has_unit or declaration.unit is not BoxUnit.PIXELS or min(size.width, size.height) < MIN_SIDE:
        return 0
    # Unused rows of a list are often alike.
    boxes = np.unique(every.boxes[(every.boxes != 0).any(axis=1)], axis=0)
    values = boxes
    if declaration.format is BoxFormat.CXCYWH:
        values = np.concatenate((_centres(boxes), boxes[:, 2:] - boxes[:, :2]), axis=1)
    is_small = ((values >= 0) & (values <= 1)).all(axis=1)
    return len(boxes) if is_small.size and is_small.mean() > 0.9 else 0


def _shape_doubts(
    declaration: DetectionDeclaration, size: NetworkSize, arrays: Sequence[npt.NDArray[Any]]
) -> Iterator[str]:
    """Yield a doubt for fewer boxes than the grids of the input have, or than each box has numbers."""
    shape = arrays[0].shape
    cells = _count_grid_cells(size)
    if declaration.head in _COLUMNS:
        is_odd, expected = shape[1] < shape[0] and shape[1] != cells, "4 + classes, boxes"
    else:
        has_few = shape[0] < max(shape[1], cells / 4) and shape[0] not in (cells, 3 * cells)
        is_odd, expected = declaration.head in _WITH_OBJECTNESS and has_few, "boxes, 5 + classes"
    if is_odd:
        yield f"few boxes for [{expected}], as if it were another layout"


def _count_grid_cells(size: NetworkSize) -> int:
    return sum(count_cells(size, stride) for stride in (8, 16, 32))


def _score_doubts(declaration: DetectionDeclaration, arrays: Sequence[FloatArray]) -> Iterator[str]:
    kind, activation = declaration.head, declaration.activation
    if kind in _COLUMNS:
        scores = arrays[0][4 : len(arrays[0]) - _rows_after_classes(declaration)]
    elif kind in (*_WITH_OBJECTNESS, HeadKind.RTDETR):
        scores = arrays[0][:, 4 : arrays[0].shape[1] - declaration.mask_coefficient_count]
    elif kind in (HeadKind.SSD, HeadKind.ONNX_NMS, HeadKind.BLAZEFACE, HeadKind.DETR, HeadKind.PPYOLOE):
        scores = arrays[1]
    else:
        return
    low, high = float(scores.min(initial=np.inf)), float(scores.max(initial=-np.inf))
    if activation is Activation.NONE:
        if low < 1 - MAX_SCORE:
            yield f"scores down to {low:.4g}, as if they were logits (detection_activation) or angles of rotated boxes"
    elif 0 <= low < high <= 1:
        yield f"scores are 0 to 1 before {activation.value}, as if the model applied detection_activation itself"
    elif max(-low, high) > MAX_LOGIT and kind is not HeadKind.BLAZEFACE:
        yield f"scores up to {max(-low, high):.4g} before {activation.value}, as if they were coordinates"


def _box_format_doubts(found: Candidates) -> Iterator[str]:
    is_inverted = (found.boxes[:, 2:] < found.boxes[:, :2]).any(axis=1)
    if is_inverted.size and is_inverted.mean() > 0.5:
        yield "most boxes end before they begin, as if detection_box_format were another"


def _keypoint_doubts(found: Candidates) -> Iterator[str]:
    if found.keypoints is not None and found.keypoints.size:
        low, high = float(found.keypoints[..., 2].min()), float(found.keypoints[..., 2].max())
        if low < 1 - MAX_SCORE or high > MAX_SCORE:
            yield f"keypoint scores from {low:.4g} to {high:.4g}, as if detection_keypoints were another"


def _count_doubts(declaration: DetectionDeclaration, found: Candidates, every: Candidates) -> Iterator[str]:
    count = len(every.scores)
    if declaration.score_threshold >= 0.2 and count >= 100 and len(found.scores) >= count / 2:
        yield f"{len(found.scores)} of the {count} best boxes are detections, as if their scores were something else"


def _centres(boxes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return (boxes[:, :2] + boxes[:, 2:]) / 2
