"""Check of a detection model when it is loaded: runs it on a sample picture, and looks for outputs that the declared
format cannot have.

An answer is impossible if no model of the declared layout gives it, trained or not, quantized or not. Anything else
that looks wrong is doubtful. Most networks find nothing in most pictures, so finding nothing is neither.

| impossible | why no right model does it |
|---|---|
| a score above 1.1 after the declared activation | it is a probability |
| every detection is centred more than 8 inputs away | the frame ends after one |
| in pixels: at least 8 boxes, 9 of 10 within one pixel at the corner | decoded boxes are spread over the input |
| most class indices have a fraction | they count classes |

An output that is quantized as a whole has one step for boxes, scores and classes. A step below 2 rounds scores to at
most 2, and gives indices fractions, but its detections are in the right places: then both are only doubtful.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.version_lifecycle import OutputCheck, SampleRun
from edge_server.errors import BadModelConfig, EdgeServerError
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.plugins.vision.outputs.box_candidates import Candidates, NetworkSize, count_cells
from edge_server.plugins.vision.outputs.detections import DetectionDecoder, make_head
from edge_server.plugins.vision.outputs.output_parameters import (
    TRAITS,
    Activation,
    BoxFormat,
    BoxUnit,
    DetectionDeclaration,
    HeadKind,
)
from edge_server.plugins.vision.outputs.output_tensors import FloatArray, drop_batch_dim
from edge_server.plugins.vision.perception import make_perception_decoder
from edge_server.plugins.vision.resize import Color

if TYPE_CHECKING:
    import numpy.typing as npt

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
_COLUMN_ORDERS = {
    (2, 3, 4, 5, 1, 0): "class, score, box",
    (2, 3, 4, 5, 0, 1): "score, class, box",
    (0, 1, 2, 3, 5, 4): "box, class, score",
}
"""Columns that hold box, score and class, in rows of other orders."""
_COLUMNS = (HeadKind.YOLOV8, HeadKind.YOLO11, HeadKind.YOLOV8_OBB)
_WITH_CLASS_INDEX = (HeadKind.YOLOV10, HeadKind.YOLO26_OBB)
_WITH_OBJECTNESS = (HeadKind.YOLOV5, HeadKind.YOLOX, HeadKind.YOLOX_DECODED)


def sample_check(spec: ModelSpec, picture: Path) -> OutputCheck | None:
    """Return the check of a model with a detection head, or None for any other. `picture` is a JPEG of a person.

    Raises BadModelConfig if the declaration is wrong in itself or does not match the outputs. The check returns
    warnings, and raises BadModelConfig for an answer that is impossible for the declared layout.
    """
    images, perception = make_image_plan(spec), make_perception_decoder(spec)
    if images is None or perception is None or perception.detections is None:
        return None
    return partial(_check, spec, images, perception.detections, picture)


def _check(
    spec: ModelSpec, images: ImagePlan, decoder: DetectionDecoder, picture: Path, run: SampleRun | None
) -> tuple[str, ...]:
    arrays: list[FloatArray] | None = None
    warnings = []
    if run is not None and images.color is not Color.DEPTH:
        try:
            outputs = run(images.fit_file(picture.read_bytes(), model=spec.name)[0])
            arrays = decoder.select(outputs, 0 if spec.max_batch_size > 0 else None, model=spec.name)
        except EdgeServerError as error:
            # The model may be meant for other inputs, which work.
            warnings.append(f"its detections were not checked with the sample picture: {error.message}")
    if arrays is not None:
        warnings += _check_values(spec, images, decoder, arrays)
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
            f"detection_head {decoder.declaration.head.value}: the outputs have {class_count} classes, label_filename "
            f"names {len(decoder.labels)}"
        )
    return tuple(warnings)


def _check_values(spec: ModelSpec, images: ImagePlan, decoder: DetectionDecoder, arrays: list[FloatArray]) -> list[str]:
    """Return warnings about an answer. Raises BadModelConfig for an impossible one."""
    size = NetworkSize(images.rule.width, images.rule.height)
    findings = check_layout(decoder.declaration, size, arrays)
    if not findings.impossible and not findings.doubtful:
        return []
    layouts = (
        find_fitting_layouts(decoder.declaration, size, arrays[0], len(decoder.labels)) if len(arrays) == 1 else ()
    )
    advice = f". The answer fits {', or '.join(layouts)}" if layouts else ""
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


@dataclass(frozen=True, slots=True)
class LayoutFindings:
    """Result of `check_layout`: what is impossible, what is doubtful, and the number of detections before NMS."""

    impossible: tuple[str, ...]
    doubtful: tuple[str, ...]
    count: int


def check_layout(declaration: DetectionDeclaration, size: NetworkSize, arrays: Sequence[FloatArray]) -> LayoutFindings:
    """Compare the outputs for one frame with the declared head. Their shapes must be those that the head reads."""
    head = make_head(declaration, size, len(arrays))
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
    if kind in (HeadKind.YUNET, HeadKind.BLAZEFACE):
        return 1
    if kind in _COLUMNS:
        size, others = shapes[0][0], 4 + _rows_after_classes(declaration)
    elif kind in _WITH_OBJECTNESS:
        size, others = shapes[0][1], 5 + declaration.mask_coefficient_count
    elif kind is HeadKind.RTDETR:
        size, others = shapes[0][1], 4
    elif kind in (HeadKind.SSD, HeadKind.ONNX_NMS):
        size, others = shapes[1][1 if kind is HeadKind.SSD else 0], 0
    else:
        return None
    return None if size == -1 else size - others


def _rows_after_classes(declaration: DetectionDeclaration) -> int:
    if declaration.head is HeadKind.YOLOV8_OBB:
        return 1
    return 3 * declaration.keypoint_count + declaration.mask_coefficient_count


def find_fitting_layouts(
    declaration: DetectionDeclaration, size: NetworkSize, values: FloatArray, label_count: int
) -> tuple[str, ...]:
    """Return descriptions of at most two layouts that `values`, a single output of two dimensions, fits.

    A layout fits if nothing about it is impossible or doubtful. Those that find something go first.
    """
    fitting: dict[tuple[str, HeadKind], tuple[bool, str]] = {}
    for text, option, seen in _options(declaration, size, values, label_count):
        key = text, option.head
        if key not in fitting and make_head(option, size, 1).check_shapes([seen.shape]) is None:
            findings = check_layout(option, size, [seen])
            if not findings.impossible and not findings.doubtful:
                fitting[key] = findings.count == 0, text.format(_describe(option))
    return tuple(description for _, description in sorted(fitting.values(), key=lambda fit: fit[0])[:2])


def _options(
    declaration: DetectionDeclaration, size: NetworkSize, values: FloatArray, label_count: int
) -> Iterator[tuple[str, DetectionDeclaration, FloatArray]]:
    """Yield the text of a layout, a declaration for it, and the values that this would read; likely ones first."""
    point_rows = {len(values) - 4 - class_count for class_count in (1, label_count or 1)}
    point_counts = sorted(count // 3 for count in point_rows if count > 0 and count % 3 == 0)
    for unit, activation in itertools.product(
        sorted(BoxUnit, key=lambda unit: unit is not declaration.unit), (Activation.NONE, Activation.SIGMOID)
    ):
        rows, columns, objectness, class_rows = (
            replace(
                declaration,
                head=kind,
                unit=unit,
                activation=activation,
                format=box_format,
                keypoint_count=0,
                mask_coefficient_count=0,
            )
            for kind, box_format in (
                (HeadKind.YOLOV10, BoxFormat.XYXY),
                (HeadKind.YOLOV8, BoxFormat.CXCYWH),
                (HeadKind.YOLOV5, BoxFormat.CXCYWH),
                (HeadKind.RTDETR, BoxFormat.CXCYWH),
            )
        )
        if activation is Activation.NONE:
            yield "{}", rows, values
            yield "{}", replace(rows, format=BoxFormat.CXCYWH), values
            yield "{}", replace(rows, head=HeadKind.YOLO26_OBB, format=BoxFormat.CXCYWH), values
        for point_count in (0, *point_counts):
            yield "{}", replace(columns, keypoint_count=point_count), values
        if len(values) in (_count_grid_cells(size), 3 * _count_grid_cells(size)):
            yield "{}", objectness, values
        yield "{}", class_rows, values
        if activation is Activation.NONE and values.shape[1] == 6:
            for order, names in _COLUMN_ORDERS.items():
                yield f"{{}} if the model reorders its columns {names} as box, score, class", rows, values[:, order]
        if len(values) > 4 + 32 and (values[-32:].min(axis=1) < 0).mean() > 0.5:
            yield "{}, with the prototype masks as second output", replace(columns, mask_coefficient_count=32), values
        if _are_angles(values[-1]):
            yield "{}", replace(columns, head=HeadKind.YOLOV8_OBB), values


def _are_angles(row: FloatArray) -> bool:
    """Return whether the numbers may be angles, and are no scores: most scores are near 0."""
    low, high = float(row.min()), float(row.max())
    is_no_score = low < 1 - MAX_SCORE or high > MAX_SCORE or float(np.median(row)) > 0.1
    return is_no_score and _ANGLES[0] <= low and high <= _ANGLES[1]


def _describe(option: DetectionDeclaration) -> str:
    traits = TRAITS[option.head]
    keys = [f"detection_head {option.head.value}"]
    if option.keypoint_count:
        keys.append(f"detection_keypoints {option.keypoint_count}")
    if option.mask_coefficient_count:
        keys.append(f"detection_mask_coefficients {option.mask_coefficient_count}")
    if option.activation is not traits.activation and "detection_activation" in traits.keys:
        keys.append(f"detection_activation {option.activation.value}")
    if option.format is not traits.format:
        keys.append(f"detection_box_format {option.format.value}")
    if option.unit is not traits.unit:
        keys.append(f"detection_box_unit {option.unit.value}")
    return ", ".join(keys)


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
    has_unit = "detection_box_unit" in TRAITS[declaration.head].keys
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
    elif kind in (HeadKind.SSD, HeadKind.ONNX_NMS, HeadKind.BLAZEFACE):
        scores = arrays[1]
    else:
        return
    low, high = float(scores.min(initial=np.inf)), float(scores.max(initial=-np.inf))
    if activation is Activation.NONE:
        if low < 1 - MAX_SCORE:
            yield f"scores down to {low:.4g}, as if they were logits (detection_activation) or angles of rotated boxes"
    elif 0 <= low < high <= 1:
        yield f"scores are 0 to 1 before {activation.value}, as if the model applied detection_activation itself"
    elif max(-low, high) > MAX_LOGIT:
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
