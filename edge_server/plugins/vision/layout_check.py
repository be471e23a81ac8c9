"""Comparison of a detector's outputs for one frame with the declared layout, and the search for layouts that they fit.

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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.config.model_parameters import as_text, settings_of
from edge_server.plugins.vision.layouts import LAYOUTS, match_shapes
from edge_server.plugins.vision.outputs.box_candidates import Candidates, NetworkSize, count_cells
from edge_server.plugins.vision.outputs.detections import make_head
from edge_server.plugins.vision.outputs.output_parameters import (
    Activation,
    BoxFormat,
    BoxUnit,
    DetectionDeclaration,
    HeadKind,
    read_declaration,
)
from edge_server.plugins.vision.outputs.output_tensors import FloatArray
from edge_server.plugins.vision.outputs.reordered import ReorderedColumns, Transposed
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
_WITH_CLASS_INDEX = (HeadKind.YOLOV10, HeadKind.YOLO26_OBB)
_WITH_OBJECTNESS = (HeadKind.YOLOV5, HeadKind.YOLOX, HeadKind.YOLOX_DECODED)


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
        doubtful += _find_doubts(declaration, found, every)
        wrong_values = list(_fractional_classes(declaration, arrays))
        highest = float(found.scores.max(initial=0.0))
        if highest > MAX_SCORE:
            wrong_values.insert(0, f"scores up to {highest:.4g}, expected at most 1")
        impossible = []
        centres = np.abs(_centres(found.boxes))
        is_far = (centres > MAX_DISTANCE * np.array((size.width, size.height))).any(axis=1)
        if is_far.size and is_far.all():
            inside = f"{size.width}x{size.height}"
            impossible.append(f"boxes centred {centres.max():.4g} pixels away, expected them in the input of {inside}")
        is_rounded = highest <= MAX_ROUNDED_SCORE and any(map(_is_quantized, arrays))
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
            row = values[-1]
            low, high = float(row.min()), float(row.max())
            # Angles are in their range, and are no scores: most scores are near 0.
            is_no_score = low < 1 - MAX_SCORE or high > MAX_SCORE or float(np.median(row)) > 0.1
            has_angles = is_no_score and _ANGLES[0] <= low and high <= _ANGLES[1]
            has_activation = "detection_activation" in option.head.keys
            if (has_activation or activation is Activation.NONE) and (
                option.head is not HeadKind.YOLOV8_OBB or has_angles
            ):
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


def _describe(option: DetectionDeclaration) -> str:
    """Return the head of a layout, and the keys that are not at their defaults."""
    stated = [f"detection_head {option.head.value}"]
    for key in _LAYOUT_KEYS:
        setting = settings_of(DetectionDeclaration)[key]
        value = getattr(option, setting.name)
        if key in option.head.keys and value != getattr(option.head, setting.name, setting.default):
            stated.append(f"{key} {as_text(value)}")
    return ", ".join(stated)


def _is_quantized(values: FloatArray) -> bool:
    """Return whether all values are multiples of one step, at most 255 of them."""
    levels = np.unique(np.abs(values[np.isfinite(values)]))
    if not 2 <= levels.size <= 256:
        return False
    multiples = levels / np.diff(levels, prepend=0.0)[1 if levels[0] == 0 else 0 :].min()
    return bool(np.abs(multiples - np.rint(multiples)).max() < 0.01)


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


def _find_doubts(declaration: DetectionDeclaration, found: Candidates, every: Candidates) -> Iterator[str]:
    """Yield doubts about detections. `every` are those of any score."""
    is_inverted = (found.boxes[:, 2:] < found.boxes[:, :2]).any(axis=1)
    if is_inverted.size and is_inverted.mean() > 0.5:
        yield "most boxes end before they begin, as if detection_box_format were another"
    if found.keypoints is not None and found.keypoints.size:
        low, high = float(found.keypoints[..., 2].min()), float(found.keypoints[..., 2].max())
        if low < 1 - MAX_SCORE or high > MAX_SCORE:
            yield f"keypoint scores from {low:.4g} to {high:.4g}, as if detection_keypoints were another"
    count = len(every.scores)
    if declaration.score_threshold >= 0.2 and count >= 100 and len(found.scores) >= count / 2:
        yield f"{len(found.scores)} of the {count} best boxes are detections, as if their scores were something else"


def _centres(boxes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return (boxes[:, :2] + boxes[:, 2:]) / 2
