"""Declaration of the parameters in a model's configuration that describe its outputs: `track`, `deepstack`, and keys
with detection_, class_, mask_, depth_ or anomaly_.

docs/reference/model-parameters.md describes them. A classifier is also declared by `image_top_k` alone, if the output
is unambiguous, and by a single output with labels and one dimension.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from edge_server.config.model_parameters import (
    BOOLEAN,
    NOT_STATED,
    ParameterReader,
    choice,
    kind_of,
    number,
    parse_decimal,
    parse_whole,
    settings_of,
    text_kind,
    whole,
)
from edge_server.config.setting import setting
from edge_server.record import record

MAX_DETECTIONS = 1000
"""Maximum number of detections per frame."""

MAX_COEFFICIENTS = 1024
"""Maximum number of prototypes of masks. YOLACT and its successors have 32."""

MAX_LIST = 64
"""Maximum number of entries of a list, far more than any head has outputs or grids."""

TRACK_THRESHOLD = 0.5
"""Least score that starts a track, unless `detection_track_threshold` states it."""

_PREFIXES = ("detection_", "class_", "mask_", "depth_", "anomaly_")
_HEAD_DEFAULT = "the head's"
_ONLY_NAME = text_kind("name", "the only one")
_LABELLED_NAME = text_kind("name", "the one with labels, or the only one")


class BoxFormat(enum.Enum):
    XYXY = "xyxy"
    YXYX = "yxyx"
    CXCYWH = "cxcywh"
    XYWH = "xywh"


class BoxUnit(enum.Enum):
    PIXELS = "pixels"
    NORMALIZED = "normalized"


class Activation(enum.Enum):
    """Function that converts a network's scores to probabilities."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class Column(enum.Enum):
    """Part of a row after NMS. A box has four columns."""

    BOX = "box"
    SCORE = "score"
    CLASS = "class"
    IMAGE = "image"


USUAL_COLUMNS = (Column.BOX, Column.SCORE, Column.CLASS)


class TrackMethod(enum.Enum):
    BYTETRACK = "bytetrack"


class DepthKind(enum.Enum):
    METRIC = "metric"
    RELATIVE = "relative"
    INVERSE = "inverse"


class MaskLayout(enum.Enum):
    CHW = "planar"
    HWC = "packed"
    INDEX = "index"


_NMS = ("detection_iou_threshold", "detection_class_agnostic")
_BOX = ("detection_box_format", "detection_box_unit")
_MASKS = "detection_mask_coefficients"
_YOLO = (*_NMS, *_BOX, "detection_activation")
_POINTS = ("detection_keypoints", "detection_keypoint_values")
_COLUMN_KEYS = (*_YOLO, *_POINTS, _MASKS, "detection_transposed")
_PROTOTYPES = "M mask coefficients{}; with these, a second output [M, height, width]: prototypes"
_COLUMNS = f"[4 + C, A]: box, classes, then 3 rows per keypoint, or {_PROTOTYPES.format('')}"
_DISTRIBUTIONS = (*_NMS, "detection_activation", "detection_strides", "detection_bins")


class HeadKind(enum.Enum):
    """Output format of a detector, by the word of `detection_head`: its outputs, keys and defaults.

    `outputs` describes the shapes without the batch: A boxes, C classes. `keys` are those besides the common ones.
    """

    def __new__(cls, word: str, *_: object) -> HeadKind:
        made = object.__new__(cls)
        made._value_ = word
        return made

    def __init__(
        self, word: str, outputs: str, keys: tuple[str, ...], format: BoxFormat = BoxFormat.XYXY,
        unit: BoxUnit = BoxUnit.PIXELS, activation: Activation = Activation.NONE,
        strides: tuple[int, ...] = (8, 16, 32),
    ) -> None:  # fmt: skip
        self.outputs, self.keys, self.format, self.unit = outputs, keys, format, unit
        self.activation, self.strides = activation, strides

    @property
    def needs_nms(self) -> bool:
        return "detection_iou_threshold" in self.keys

    YOLOV5 = ("yolov5", f"[A, 5 + C]: box, objectness, classes, then {_PROTOTYPES.format('')}", (*_YOLO, _MASKS),
        BoxFormat.CXCYWH)  # fmt: skip
    YOLOV8 = "yolov8", _COLUMNS, _COLUMN_KEYS, BoxFormat.CXCYWH
    YOLO11 = "yolo11", _COLUMNS, _COLUMN_KEYS, BoxFormat.CXCYWH
    YOLOV10 = ("yolov10",
        f"[A, 6]: box, score, class, then 3 columns per keypoint, or {_PROTOTYPES.format('; after NMS')}",
        (*_BOX, *_POINTS, _MASKS, "detection_columns"))  # fmt: skip
    YOLOV8_OBB = ("yolov8_obb", "[4 + C + 1, A]: oriented boxes: centre and size, classes, angle",
        (*_NMS, "detection_box_unit", "detection_activation"), BoxFormat.CXCYWH)  # fmt: skip
    YOLO26_OBB = ("yolo26_obb", "[A, 7]: oriented boxes: centre and size, score, class, angle; after NMS",
        ("detection_box_unit",), BoxFormat.CXCYWH)  # fmt: skip
    RTDETR = ("rtdetr", "[A, 4 + C]: box, classes; needs no NMS", (*_BOX, "detection_activation"), BoxFormat.CXCYWH,
        BoxUnit.NORMALIZED)  # fmt: skip
    YOLOX = ("yolox", "[A, 5 + C]: offsets and sizes in cells of grids 8, 16, 32",
        (*_NMS, "detection_activation", "detection_strides"))  # fmt: skip
    YOLOX_DECODED = "yolox_decoded", "[A, 5 + C]: box, objectness, classes; decoded", _YOLO, BoxFormat.CXCYWH
    SSD = ("ssd", "[A, 4], [A, C], optional priors: [A, 4] cxcywh, or [2, 4 A] corners and variances",
        (*_YOLO, "detection_background", "detection_variances"), BoxFormat.XYXY, BoxUnit.NORMALIZED)  # fmt: skip
    NMS_INSIDE = ("nms_inside",
        "[A, 4], [A], [A], optional [1]: boxes, scores, classes, count; or [A, 5], [A]: boxes with scores, classes",
        (*_BOX, "detection_background"))  # fmt: skip
    ONNX_NMS = ("onnx_nms", "[A, 4], [C, A], [K, 3]: boxes, scores, selected (image, class, box)",
        (*_BOX, "detection_background"), BoxFormat.YXYX, BoxUnit.NORMALIZED)  # fmt: skip
    DETECTION_OUTPUT = ("detection_output", "[1, K, 7]: (image, class, score, box)", (*_BOX, "detection_background"),
        BoxFormat.XYXY, BoxUnit.NORMALIZED)  # fmt: skip
    YUNET = ("yunet", "four for each of grids 8, 16, 32, named cls_8, obj_8, bbox_8, kps_8 and so on",
        (*_NMS, "detection_strides"))  # fmt: skip
    BLAZEFACE = ("blazeface", "[A, 16], [A, 1]: box and 6 keypoints relative to anchors of grids 8, 16, 16, 16; score",
        (*_NMS, "detection_activation", "detection_strides"), BoxFormat.XYXY, BoxUnit.PIXELS, Activation.SIGMOID,
        (8, 16, 16, 16))  # fmt: skip
    DETR = ("detr", "[A, 4], [A, C]: boxes, scores; needs no NMS",
        (*_BOX, "detection_activation", "detection_background"), BoxFormat.CXCYWH, BoxUnit.NORMALIZED,
        Activation.SIGMOID)  # fmt: skip
    PPYOLOE = "ppyoloe", "[A, 4], [C, A]: boxes, scores", _YOLO
    NANODET = ("nanodet",
        "[A, C + 4 * bins]: classes, distances of the sides; or [A, C] and [A, 4 * bins] for each grid",
        _DISTRIBUTIONS)  # fmt: skip
    NANODET_PLUS = ("nanodet_plus", "as nanodet, distances from the corner of a cell", _DISTRIBUTIONS, BoxFormat.XYXY,
        BoxUnit.PIXELS, Activation.NONE, (8, 16, 32, 64))  # fmt: skip
    DBNET = ("dbnet", "[1, H, W]: probability that a pixel is in a line of text; gives oriented boxes",
        ("detection_unclip_ratio", "detection_text_model"))  # fmt: skip


HEAD_KEYS = frozenset(key for kind in HeadKind for key in kind.keys)
"""Keys of some heads. The other keys of detections belong to all."""


def _parse_names(given: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in given.split(","))
    if not all(names) or len(names) > MAX_LIST or len(set(names)) != len(names):
        raise ValueError("expected different names of outputs separated by commas")
    return names


def _parse_strides(given: str) -> tuple[int, ...]:
    found = tuple(parse_whole(part.strip()) for part in given.split(","))
    if len(found) > MAX_LIST or not all(1 <= value <= 1024 for value in found):
        raise ValueError("expected whole numbers from 1 to 1024 separated by commas")
    return found


def _parse_columns(given: str) -> tuple[Column, ...]:
    names = [part.strip().lower() for part in given.split(",")] if len(given) < 100 else []
    found = tuple(column for name in names for column in Column if column.value == name)
    if len(found) != len(names) or len(set(found)) != len(found) or len(set(found) - {Column.IMAGE}) != 3:
        raise ValueError("expected box, score, class, and image if it has one, each once, in their order")
    return found


def _parse_variances(given: str) -> tuple[float, ...]:
    found = tuple(map(parse_decimal, given.split(",")))
    if len(found) != 2 or not all(0 < value <= 100 for value in found):
        raise ValueError("expected two numbers above 0, for centre and size")
    return found


@record(frozen=True, slots=True)
class DetectionDeclaration:
    """Detection declaration, valid in itself but not yet checked against the outputs.

    Empty `outputs` means that they are found by name or last dim, or the only one.
    """

    head: HeadKind = setting(
        NOT_STATED, "detection_head", choice(HeadKind, "no detections", "see the heads"), "format of the outputs"
    )
    outputs: tuple[str, ...] = setting(
        (), "detection_outputs", kind_of("names", _parse_names, "by name or last dim, or the only one"),
        "outputs, in the order of the heads")  # fmt: skip
    score_threshold: float = setting(0.25, "detection_score_threshold", number(1), "weaker detections are dropped")
    max_count: int = setting(
        100, "detection_max", whole(1, MAX_DETECTIONS), "most detections per frame, the best first"
    )
    track: TrackMethod | None = setting(
        None, "track", choice(TrackMethod, "no ids"), "give the objects of each frame stream ids that stay the same"
    )
    track_threshold: float = setting(
        TRACK_THRESHOLD, "detection_track_threshold", number(1),
        "with track: weaker detections continue a track but start none")  # fmt: skip
    is_deepstack: bool = setting(False, "deepstack", BOOLEAN, "answer DeepStack clients that name no model")
    iou_threshold: float = setting(
        0.45, "detection_iou_threshold", number(1), "of boxes that overlap more, the weaker is dropped; 1 drops none"
    )
    is_class_agnostic: bool = setting(
        False, "detection_class_agnostic", BOOLEAN, "boxes of different classes may drop each other"
    )
    format: BoxFormat = setting(
        NOT_STATED, "detection_box_format", choice(BoxFormat, _HEAD_DEFAULT),
        "order of the numbers; xywh: upper left corner")  # fmt: skip
    unit: BoxUnit = setting(
        NOT_STATED, "detection_box_unit", choice(BoxUnit, _HEAD_DEFAULT),
        "pixels of the input, or 0 to 1 of its sides")  # fmt: skip
    activation: Activation = setting(
        NOT_STATED, "detection_activation", choice(Activation, _HEAD_DEFAULT),
        "function that makes scores probabilities")  # fmt: skip
    background: int | None = setting(
        None, "detection_background", whole(0, 65535, default="no such class"), "index of the background class"
    )
    strides: tuple[int, ...] = setting(
        NOT_STATED, "detection_strides", kind_of("1 to 1024, one per grid", _parse_strides, _HEAD_DEFAULT),
        "pixels of the input per cell of each grid")  # fmt: skip
    variances: tuple[float, float] = setting(
        (0.1, 0.2), "detection_variances", kind_of("two numbers above 0", _parse_variances),
        "scale of offsets for centre and size, with priors")  # fmt: skip
    keypoint_count: int = setting(
        0, "detection_keypoints", whole(0, 1000), "number of points (x, y, score) after the classes or the class"
    )
    mask_coefficient_count: int = setting(
        0, _MASKS, whole(0, MAX_COEFFICIENTS),
        "numbers after the classes or the class that weigh the prototypes to the mask of each object")  # fmt: skip
    keypoint_values: int = setting(
        3, "detection_keypoint_values", whole(2, 3, "2 or 3"), "numbers of a point: x, y, or x, y, score"
    )
    is_transposed: bool = setting(False, "detection_transposed", BOOLEAN, "the output's dimensions are swapped")
    columns: tuple[Column, ...] = setting(
        USUAL_COLUMNS, "detection_columns", kind_of("box, score, class or image, in their order", _parse_columns),
        "order of the columns; image: rows of all frames of a batch in one list")  # fmt: skip
    bins: int = setting(8, "detection_bins", whole(2, 64), "values of a distribution of a distance, reg_max + 1")
    unclip_ratio: float = setting(
        1.6, "detection_unclip_ratio", number(10), "a text box grows by this, times its area over its circumference"
    )
    text_model: str = setting(
        "", "detection_text_model", text_kind("name of a model", "no text is read"),
        "recogniser that reads the text in each box")  # fmt: skip


@record(frozen=True, slots=True)
class ClassDeclaration:
    """Class declaration. `is_certain` is False for image_top_k alone: it also applies to image requests, so several
    outputs are no error."""

    is_certain: bool
    output: str | None = setting(None, "class_output", _LABELLED_NAME, "output with a score for each class")
    activation: Activation = setting(
        Activation.NONE, "class_activation", choice(Activation), "function that makes scores probabilities"
    )
    scale: float = setting(
        1.0, "class_scale", number(1e6, has_zero=False),
        "multiplies the scores before the activation, as those of a quantized network")  # fmt: skip


@record(frozen=True, slots=True)
class MaskDeclaration:
    output: str | None = setting(None, "mask_output", _LABELLED_NAME, "output with the mask")
    layout: MaskLayout | None = setting(
        None, "mask_layout", choice(MaskLayout, "by dims"),
        "planar: (classes, height, width), packed: (height, width, classes), index: (height, width)")  # fmt: skip
    activation: Activation = setting(
        Activation.NONE, "mask_activation", choice(Activation, values="none or sigmoid"),
        "with one class: makes its values probabilities")  # fmt: skip
    threshold: float = setting(
        0.5, "mask_threshold", number(1), "with one class: pixels of at least this value belong to it"
    )
    unseen: int = setting(0, "mask_unseen", whole(0, 65535), "class of pixels of the frame that image_fit crop removed")


@record(frozen=True, slots=True)
class DepthDeclaration:
    output: str | None = setting(None, "depth_output", _ONLY_NAME, "output with the depth of each pixel")
    kind: DepthKind = setting(
        DepthKind.INVERSE, "depth_kind", choice(DepthKind),
        "metric: a length; relative: no unit, greater is farther; inverse: no unit, greater is nearer")  # fmt: skip
    scale: float = setting(
        1.0, "depth_scale", number(1e6, has_zero=False), "with metric: metres of depth 1 of the output"
    )


@record(frozen=True, slots=True)
class AnomalyDeclaration:
    output: str | None = setting(None, "anomaly_output", _ONLY_NAME, "output with the anomaly of each pixel")
    score_output: str | None = setting(
        None,
        "anomaly_score_output",
        text_kind("name", "the maximum of the map"),
        "output with the anomaly of the picture",
    )
    threshold: float = setting(
        0.5, "anomaly_threshold", number(1e6, "0 or more"), "regions of at least this value are detections"
    )


@record(frozen=True, slots=True)
class OutputDeclaration:
    """Declarations about a model's outputs; None: not declared."""

    detections: DetectionDeclaration | None = None
    classes: ClassDeclaration | None = None
    mask: MaskDeclaration | None = None
    depth: DepthDeclaration | None = None
    anomaly: AnomalyDeclaration | None = None


DECLARATIONS = (DetectionDeclaration, ClassDeclaration, MaskDeclaration, DepthDeclaration, AnomalyDeclaration)
KEYS = tuple(key for declaration in DECLARATIONS for key in settings_of(declaration))
"""All keys about outputs."""


def read_declaration(model: str, parameters: Mapping[str, str]) -> OutputDeclaration:
    """Return the declaration from a model's `parameters`. Raises BadModelConfig: model, key, expected, given."""
    reader = ParameterReader(model, parameters)
    reader.check_keys(_PREFIXES, KEYS)
    detections = _read_detections(reader)
    classes, mask, depth, anomaly = map(reader.read, DECLARATIONS[1:])
    if mask.get("activation") is Activation.SOFTMAX:
        reader.refuse("mask_activation", "none or sigmoid; the best of several classes needs no activation")
    if "scale" in depth and depth.get("kind") is not DepthKind.METRIC:
        reader.refuse("depth_scale", "depth_kind metric beside it")
    for other in ("detection_head", "depth_output"):
        if anomaly and other in parameters:
            reader.refuse(other, "it to be left out beside anomaly_output, which gives detections and a map itself")
    return OutputDeclaration(
        detections,
        ClassDeclaration(bool(classes), **classes) if classes or "image_top_k" in parameters else None,
        MaskDeclaration(**mask) if mask else None,
        DepthDeclaration(**depth) if depth else None,
        AnomalyDeclaration(**anomaly) if anomaly else None,
    )


def _read_detections(reader: ParameterReader) -> DetectionDeclaration | None:
    values = reader.read(DetectionDeclaration)
    stated = [key for key in reader.parameters if key in settings_of(DetectionDeclaration)]
    if not stated:
        return None
    if "head" not in values:
        reader.refuse(stated[0], "detection_head beside it")
    head = values["head"]
    for key in stated:
        if key in HEAD_KEYS and key not in head.keys:
            reader.refuse(key, f"it to be left out, because detection_head {head.value} has no use for it")
    if values.get("mask_coefficient_count") and "keypoint_count" in values:
        reader.refuse(_MASKS, "it to be left out beside detection_keypoints")
    if "track_threshold" in values and "track" not in values:
        reader.refuse("detection_track_threshold", "track beside it: bytetrack")
    defaults = {name: getattr(head, name) for name in ("format", "unit", "activation", "strides")}
    return DetectionDeclaration(**(defaults | values))
