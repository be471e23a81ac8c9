"""Parser of the parameters in a model's configuration that describe its outputs: `track`, `deepstack`, and keys with
detection_, class_ or mask_.

PARAMETERS lists the keys, TRAITS the heads. All values are strings; lists are comma-separated. The class names are
those of the output with the classes (`label_filename`, as in Triton).

`image_top_k` is the number of best classes, 5 by default. A classifier is also declared by that key alone, if the
output is unambiguous, and by a single output with labels and one dimension.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NoReturn, TypeVar

from edge_server.errors import BadModelConfig
from edge_server.plugins.vision.declared_parameter import DeclaredParameter, describe_unknown, join_values
from edge_server.record import record

Choice = TypeVar("Choice", bound=enum.Enum)

MAX_DETECTIONS = 1000
"""Maximum number of detections per frame."""

MAX_COEFFICIENTS = 1024
"""Maximum number of prototypes of masks. YOLACT and its successors have 32."""

MAX_LIST = 64
"""Maximum number of entries of a list, far more than any head has outputs or grids."""

_MAX_LISTED = 8
"""Maximum number of values that an error lists."""
_PREFIXES = ("detection_", "class_", "mask_", "depth_", "anomaly_")


class HeadKind(enum.Enum):
    """Output formats of detectors, see TRAITS."""

    YOLOV5 = "yolov5"
    YOLOV8 = "yolov8"
    YOLO11 = "yolo11"
    YOLOV10 = "yolov10"
    YOLOV8_OBB = "yolov8_obb"
    YOLO26_OBB = "yolo26_obb"
    RTDETR = "rtdetr"
    YOLOX = "yolox"
    YOLOX_DECODED = "yolox_decoded"
    SSD = "ssd"
    NMS_INSIDE = "nms_inside"
    ONNX_NMS = "onnx_nms"
    DETECTION_OUTPUT = "detection_output"
    YUNET = "yunet"
    BLAZEFACE = "blazeface"
    DETR = "detr"
    PPYOLOE = "ppyoloe"
    NANODET = "nanodet"
    NANODET_PLUS = "nanodet_plus"
    DBNET = "dbnet"


TRACK_THRESHOLD = 0.5
"""Least score that starts a track, unless `detection_track_threshold` states it."""


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


@record(frozen=True, slots=True)
class HeadTraits:
    """Outputs, keys and defaults of a head.

    `outputs` describes their shapes without the batch: A boxes, C classes. `keys` are its keys besides the common ones.
    """

    outputs: str
    keys: tuple[str, ...]
    format: BoxFormat = BoxFormat.XYXY
    unit: BoxUnit = BoxUnit.PIXELS
    activation: Activation = Activation.NONE
    strides: tuple[int, ...] = (8, 16, 32)

    @property
    def needs_nms(self) -> bool:
        return "detection_iou_threshold" in self.keys


_NMS = ("detection_iou_threshold", "detection_class_agnostic")
_BOX = ("detection_box_format", "detection_box_unit")
_MASKS = "detection_mask_coefficients"
_YOLO = (*_NMS, *_BOX, "detection_activation")
_POINTS = ("detection_keypoints", "detection_keypoint_values")
_COLUMNS = HeadTraits(
    "[4 + C, A]: box, classes, then 3 rows per keypoint, or M mask coefficients; with these, a second output "
    "[M, height, width]: prototypes",
    (*_YOLO, *_POINTS, _MASKS, "detection_transposed"),
    BoxFormat.CXCYWH,
)
_DISTRIBUTIONS = ("detection_activation", "detection_strides", "detection_bins")
TRAITS: Mapping[HeadKind, HeadTraits] = {
    HeadKind.YOLOV5: HeadTraits(
        "[A, 5 + C]: box, objectness, classes, then M mask coefficients; with these, a second output "
        "[M, height, width]: prototypes",
        (*_YOLO, _MASKS),
        BoxFormat.CXCYWH,
    ),
    HeadKind.YOLOV8: _COLUMNS,
    HeadKind.YOLO11: _COLUMNS,
    HeadKind.YOLOV10: HeadTraits(
        "[A, 6]: box, score, class, then 3 columns per keypoint, or M mask coefficients; after NMS; with these, a "
        "second output [M, height, width]: prototypes",
        (*_BOX, *_POINTS, _MASKS, "detection_columns"),
    ),
    HeadKind.YOLOV8_OBB: HeadTraits(
        "[4 + C + 1, A]: oriented boxes: centre and size, classes, angle",
        (*_NMS, "detection_box_unit", "detection_activation"),
        BoxFormat.CXCYWH,
    ),
    HeadKind.YOLO26_OBB: HeadTraits(
        "[A, 7]: oriented boxes: centre and size, score, class, angle; after NMS",
        ("detection_box_unit",),
        BoxFormat.CXCYWH,
    ),
    HeadKind.RTDETR: HeadTraits(
        "[A, 4 + C]: box, classes; needs no NMS",
        (*_BOX, "detection_activation"),
        BoxFormat.CXCYWH,
        BoxUnit.NORMALIZED,
    ),
    HeadKind.YOLOX: HeadTraits(
        "[A, 5 + C]: offsets and sizes in cells of grids 8, 16, 32",
        (*_NMS, "detection_activation", "detection_strides"),
    ),
    HeadKind.YOLOX_DECODED: HeadTraits("[A, 5 + C]: box, objectness, classes; decoded", _YOLO, BoxFormat.CXCYWH),
    HeadKind.SSD: HeadTraits(
        "[A, 4], [A, C], optional priors: [A, 4] cxcywh, or [2, 4 A] corners and variances",
        (*_NMS, *_BOX, "detection_activation", "detection_background", "detection_variances"),
        unit=BoxUnit.NORMALIZED,
    ),
    HeadKind.NMS_INSIDE: HeadTraits(
        "[A, 4], [A], [A], optional [1]: boxes, scores, classes, count; or [A, 5], [A]: boxes with scores, classes",
        (*_BOX, "detection_background"),
    ),
    HeadKind.ONNX_NMS: HeadTraits(
        "[A, 4], [C, A], [K, 3]: boxes, scores, selected (image, class, box)",
        (*_BOX, "detection_background"),
        BoxFormat.YXYX,
        BoxUnit.NORMALIZED,
    ),
    HeadKind.DETECTION_OUTPUT: HeadTraits(
        "[1, K, 7]: (image, class, score, box)", (*_BOX, "detection_background"), unit=BoxUnit.NORMALIZED
    ),
    HeadKind.YUNET: HeadTraits(
        "four for each of grids 8, 16, 32, named cls_8, obj_8, bbox_8, kps_8 and so on", (*_NMS, "detection_strides")
    ),
    HeadKind.BLAZEFACE: HeadTraits(
        "[A, 16], [A, 1]: box and 6 keypoints relative to anchors of grids 8, 16, 16, 16; score",
        (*_NMS, "detection_activation", "detection_strides"),
        activation=Activation.SIGMOID,
        strides=(8, 16, 16, 16),
    ),
    HeadKind.DETR: HeadTraits(
        "[A, 4], [A, C]: boxes, scores; needs no NMS",
        (*_BOX, "detection_activation", "detection_background"),
        BoxFormat.CXCYWH,
        BoxUnit.NORMALIZED,
        Activation.SIGMOID,
    ),
    HeadKind.PPYOLOE: HeadTraits("[A, 4], [C, A]: boxes, scores", _YOLO),
    HeadKind.NANODET: HeadTraits(
        "[A, C + 4 * bins]: classes, distances of the sides; or [A, C] and [A, 4 * bins] for each grid",
        (*_NMS, *_DISTRIBUTIONS),
    ),
    HeadKind.NANODET_PLUS: HeadTraits(
        "as nanodet, distances from the corner of a cell", (*_NMS, *_DISTRIBUTIONS), strides=(8, 16, 32, 64)
    ),
    HeadKind.DBNET: HeadTraits(
        "[1, H, W]: probability that a pixel is in a line of text; gives oriented boxes",
        ("detection_unclip_ratio", "detection_text_model"),
    ),
}

COMMON_PARAMETERS = (
    DeclaredParameter("detection_head", "see the heads", "no detections", "format of the outputs"),
    DeclaredParameter(
        "detection_outputs",
        "names",
        "by name or last dim, or the only one",
        "outputs, in the order of the heads",
    ),
    DeclaredParameter("detection_score_threshold", "0 to 1", "0.25", "weaker detections are dropped"),
    DeclaredParameter("detection_max", f"1 to {MAX_DETECTIONS}", "100", "most detections per frame, the best first"),
    DeclaredParameter(
        "track", join_values(TrackMethod), "no ids", "give the objects of each frame stream ids that stay the same"
    ),
    DeclaredParameter(
        "detection_track_threshold", "0 to 1", "0.5", "with track: weaker detections continue a track but start none"
    ),
    DeclaredParameter("deepstack", "true or false", "false", "answer DeepStack clients that name no model"),
)
"""Keys of every head."""
HEAD_PARAMETERS = (
    DeclaredParameter(
        "detection_iou_threshold",
        "0 to 1",
        "0.45",
        "of boxes that overlap more, the weaker is dropped; 1 drops none",
    ),
    DeclaredParameter(
        "detection_class_agnostic", "true or false", "false", "boxes of different classes may drop each other"
    ),
    DeclaredParameter(
        "detection_box_format",
        join_values(BoxFormat),
        "the head's",
        "order of the numbers; xywh: upper left corner",
    ),
    DeclaredParameter(
        "detection_box_unit", join_values(BoxUnit), "the head's", "pixels of the input, or 0 to 1 of its sides"
    ),
    DeclaredParameter(
        "detection_activation", join_values(Activation), "the head's", "function that makes scores probabilities"
    ),
    DeclaredParameter("detection_background", "0 to 65535", "no such class", "index of the background class"),
    DeclaredParameter(
        "detection_strides", "1 to 1024, one per grid", "the head's", "pixels of the input per cell of each grid"
    ),
    DeclaredParameter(
        "detection_variances", "two numbers above 0", "0.1,0.2", "scale of offsets for centre and size, with priors"
    ),
    DeclaredParameter(
        "detection_keypoints", "0 to 1000", "0", "number of points (x, y, score) after the classes or the class"
    ),
    DeclaredParameter(
        _MASKS,
        f"0 to {MAX_COEFFICIENTS}",
        "0",
        "numbers after the classes or the class that weigh prototypes, which gives the mask of each object",
    ),
    DeclaredParameter("detection_keypoint_values", "2 or 3", "3", "numbers of a point: x, y, or x, y, score"),
    DeclaredParameter("detection_transposed", "true or false", "false", "the output's dimensions are swapped"),
    DeclaredParameter(
        "detection_columns",
        f"{join_values(Column)}, in their order",
        "box,score,class",
        "order of the columns; image: rows of all frames of a batch in one list",
    ),
    DeclaredParameter("detection_bins", "2 to 64", "8", "values of a distribution of a distance, reg_max + 1"),
    DeclaredParameter(
        "detection_unclip_ratio", "0 to 10", "1.6", "a text box grows by this, times its area over its circumference"
    ),
    DeclaredParameter(
        "detection_text_model", "name of a model", "no text is read", "recogniser that reads the text in each box"
    ),
)
"""Keys of some heads, see TRAITS."""
CLASS_PARAMETERS = (
    DeclaredParameter(
        "class_output", "name", "the one with labels, or the only one", "output with a score for each class"
    ),
    DeclaredParameter("class_activation", join_values(Activation), "none", "function that makes scores probabilities"),
    DeclaredParameter(
        "class_scale", "above 0", "1", "multiplies the scores before the activation, as those of a quantized network"
    ),
)
MASK_PARAMETERS = (
    DeclaredParameter("mask_output", "name", "the one with labels, or the only one", "output with the mask"),
    DeclaredParameter(
        "mask_layout",
        join_values(MaskLayout),
        "by dims",
        "planar: (classes, height, width), packed: (height, width, classes), index: (height, width)",
    ),
    DeclaredParameter("mask_activation", "none or sigmoid", "none", "with one class: makes its values probabilities"),
    DeclaredParameter("mask_threshold", "0 to 1", "0.5", "with one class: pixels of at least this value belong to it"),
    DeclaredParameter("mask_unseen", "0 to 65535", "0", "class of pixels of the frame that image_fit crop removed"),
)
DEPTH_PARAMETERS = (
    DeclaredParameter("depth_output", "name", "the only one", "output with the depth of each pixel"),
    DeclaredParameter(
        "depth_kind",
        join_values(DepthKind),
        "inverse",
        "metric: a length; relative: no unit, greater is farther; inverse: no unit, greater is nearer",
    ),
    DeclaredParameter("depth_scale", "above 0", "1", "with metric: metres of depth 1 of the output"),
)
ANOMALY_PARAMETERS = (
    DeclaredParameter("anomaly_output", "name", "the only one", "output with the anomaly of each pixel"),
    DeclaredParameter(
        "anomaly_score_output", "name", "the maximum of the map", "output with the anomaly of the picture"
    ),
    DeclaredParameter("anomaly_threshold", "0 or more", "0.5", "regions of at least this value are detections"),
)
MAP_PARAMETERS = (*DEPTH_PARAMETERS, *ANOMALY_PARAMETERS)
PARAMETERS = (*COMMON_PARAMETERS, *HEAD_PARAMETERS, *CLASS_PARAMETERS, *MASK_PARAMETERS, *MAP_PARAMETERS)
"""All keys."""

_COMMON = tuple(parameter.key for parameter in COMMON_PARAMETERS)
_DETECTION_KEYS = tuple(parameter.key for parameter in (*COMMON_PARAMETERS, *HEAD_PARAMETERS))
_CLASS_KEYS = tuple(parameter.key for parameter in CLASS_PARAMETERS)
_MASK_KEYS = tuple(parameter.key for parameter in MASK_PARAMETERS)
_DEPTH_KEYS = tuple(parameter.key for parameter in DEPTH_PARAMETERS)
_ANOMALY_KEYS = tuple(parameter.key for parameter in ANOMALY_PARAMETERS)
_KEYS = tuple(parameter.key for parameter in PARAMETERS)


@record(frozen=True, slots=True)
class DetectionDeclaration:
    """Detection declaration, valid in itself but not yet checked against the outputs.

    Empty `outputs` means that they are found by name or last dim, or the only one.
    """

    head: HeadKind
    outputs: tuple[str, ...]
    score_threshold: float
    iou_threshold: float
    is_class_agnostic: bool
    max_count: int
    format: BoxFormat
    unit: BoxUnit
    activation: Activation
    background: int | None
    strides: tuple[int, ...]
    variances: tuple[float, float]
    keypoint_count: int
    keypoint_values: int
    mask_coefficient_count: int
    is_transposed: bool
    columns: tuple[Column, ...]
    bins: int
    unclip_ratio: float
    text_model: str
    """Name of the recogniser of text, or ""."""
    track_threshold: float | None
    """Least score that starts a track; None: no tracking."""
    is_deepstack: bool
    """Whether the model answers DeepStack clients that name no model."""


@record(frozen=True, slots=True)
class ClassDeclaration:
    """Class declaration. `is_certain` is False for image_top_k alone: it also applies to image requests, so several
    outputs are no error."""

    is_certain: bool
    output: str | None
    activation: Activation
    scale: float


@record(frozen=True, slots=True)
class MaskDeclaration:
    output: str | None
    layout: MaskLayout | None
    activation: Activation
    threshold: float
    unseen: int


@record(frozen=True, slots=True)
class DepthDeclaration:
    output: str | None
    kind: DepthKind
    scale: float


@record(frozen=True, slots=True)
class AnomalyDeclaration:
    output: str | None
    score_output: str | None
    threshold: float


@record(frozen=True, slots=True)
class OutputDeclaration:
    """Declarations about a model's outputs; None: not declared."""

    detections: DetectionDeclaration | None = None
    classes: ClassDeclaration | None = None
    mask: MaskDeclaration | None = None
    depth: DepthDeclaration | None = None
    anomaly: AnomalyDeclaration | None = None


def read_declaration(model: str, parameters: Mapping[str, str]) -> OutputDeclaration:
    """Return the declaration from a model's `parameters`. Raises BadModelConfig: model, key, expected, given."""
    if not any(key.startswith(_PREFIXES) or key in ("image_top_k", "track", "deepstack") for key in parameters):
        return OutputDeclaration()
    reader = _Reader(model, parameters)
    reader.check_keys()
    return OutputDeclaration(reader.detections(), reader.classes(), reader.mask(), reader.depth(), reader.anomaly())


class _Reader:
    """Reads and checks one model's parameters. Raises BadModelConfig for a wrong value."""

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        self._model = model
        self._parameters = parameters

    def refuse(self, key: str, expected: str) -> NoReturn:
        given = self._parameters[key]
        raise BadModelConfig(f"model '{self._model}', parameter '{key}': expected {expected}, given '{given}'")

    def check_keys(self) -> None:
        for key in self._parameters:
            if key.startswith(_PREFIXES) and key not in _KEYS:
                raise BadModelConfig(f"model '{self._model}', parameter '{key}': {describe_unknown(key, _KEYS)}")

    def detections(self) -> DetectionDeclaration | None:
        head = self._choice("detection_head", HeadKind)
        stated = [key for key in self._parameters if key in _DETECTION_KEYS]
        if head is None:
            self._choice("track", TrackMethod)
            if stated:
                self.refuse(stated[0], "detection_head beside it")
            return None
        traits = TRAITS[head]
        for key in stated:
            if key not in _COMMON and key not in traits.keys:
                self.refuse(key, f"it to be left out, because detection_head {head.value} has no use for it")
        coefficient_count = self._integer(_MASKS, 0, 0, MAX_COEFFICIENTS)
        if coefficient_count and "detection_keypoints" in self._parameters:
            self.refuse(_MASKS, "it to be left out beside detection_keypoints")
        return DetectionDeclaration(
            head=head,
            outputs=self._names("detection_outputs"),
            score_threshold=self._number("detection_score_threshold", 0.25, 1.0),
            iou_threshold=self._number("detection_iou_threshold", 0.45, 1.0),
            is_class_agnostic=self._boolean("detection_class_agnostic"),
            max_count=self._integer("detection_max", 100, 1, MAX_DETECTIONS),
            format=self._choice("detection_box_format", BoxFormat) or traits.format,
            unit=self._choice("detection_box_unit", BoxUnit) or traits.unit,
            activation=self._choice("detection_activation", Activation) or traits.activation,
            background=self._background(),
            strides=self._strides(traits.strides),
            variances=self._variances(),
            keypoint_count=self._integer("detection_keypoints", 0, 0, 1000),
            mask_coefficient_count=coefficient_count,
            keypoint_values=self._integer("detection_keypoint_values", 3, 2, 3),
            is_transposed=self._boolean("detection_transposed"),
            columns=self._columns(),
            bins=self._integer("detection_bins", 8, 2, 64),
            unclip_ratio=self._number("detection_unclip_ratio", 1.6, 10.0),
            text_model=self._parameters.get("detection_text_model", ""),
            track_threshold=self._track_threshold(),
            is_deepstack=self._boolean("deepstack"),
        )

    def classes(self) -> ClassDeclaration | None:
        is_certain = any(key in _CLASS_KEYS for key in self._parameters)
        if not is_certain and "image_top_k" not in self._parameters:
            return None
        activation = self._choice("class_activation", Activation) or Activation.NONE
        scale = self._number("class_scale", 1.0, 1e6)
        if not scale:
            self.refuse("class_scale", "a number above 0")
        return ClassDeclaration(is_certain, self._parameters.get("class_output"), activation, scale)

    def mask(self) -> MaskDeclaration | None:
        if not any(key in _MASK_KEYS for key in self._parameters):
            return None
        activation = self._choice("mask_activation", Activation) or Activation.NONE
        if activation is Activation.SOFTMAX:
            self.refuse("mask_activation", "none or sigmoid; the best of several classes needs no activation")
        return MaskDeclaration(
            output=self._parameters.get("mask_output"),
            layout=self._choice("mask_layout", MaskLayout),
            activation=activation,
            threshold=self._number("mask_threshold", 0.5, 1.0),
            unseen=self._integer("mask_unseen", 0, 0, 65535),
        )

    def depth(self) -> DepthDeclaration | None:
        if not any(key in _DEPTH_KEYS for key in self._parameters):
            return None
        kind = self._choice("depth_kind", DepthKind) or DepthKind.INVERSE
        if "depth_scale" in self._parameters and kind is not DepthKind.METRIC:
            self.refuse("depth_scale", "depth_kind metric beside it")
        scale = self._number("depth_scale", 1.0, 1e6)
        if not scale:
            self.refuse("depth_scale", "a number above 0")
        return DepthDeclaration(self._parameters.get("depth_output"), kind, scale)

    def anomaly(self) -> AnomalyDeclaration | None:
        if not any(key in _ANOMALY_KEYS for key in self._parameters):
            return None
        for other in ("detection_head", "depth_output"):
            if other in self._parameters:
                self.refuse(other, "it to be left out beside anomaly_output, which gives detections and a map itself")
        return AnomalyDeclaration(
            self._parameters.get("anomaly_output"),
            self._parameters.get("anomaly_score_output"),
            self._number("anomaly_threshold", 0.5, 1e6),
        )

    def _track_threshold(self) -> float | None:
        threshold = self._number("detection_track_threshold", TRACK_THRESHOLD, 1.0)
        if self._choice("track", TrackMethod) is not None:
            return threshold
        if "detection_track_threshold" in self._parameters:
            self.refuse("detection_track_threshold", "track beside it: bytetrack")
        return None

    def _background(self) -> int | None:
        return (
            self._integer("detection_background", 0, 0, 65535) if "detection_background" in self._parameters else None
        )

    def _choice(self, key: str, kind: type[Choice]) -> Choice | None:
        text = self._parameters.get(key)
        if text is None:
            return None
        found = {member.value: member for member in kind}.get(text.strip().lower())
        if found is None:
            names = [str(member.value) for member in kind]
            if len(names) > _MAX_LISTED:
                expected = describe_unknown(text, names)
                raise BadModelConfig(f"model '{self._model}', parameter '{key}': {expected}, given '{text}'")
            self.refuse(key, f"{'one of ' if len(names) > 1 else ''}{', '.join(names)}")
        return found

    def _boolean(self, key: str) -> bool:
        text = self._parameters.get(key, "false").strip().lower()
        if text not in ("true", "false", "1", "0"):
            self.refuse(key, "true or false")
        return text in ("true", "1")

    def _integer(self, key: str, default: int, minimum: int, maximum: int) -> int:
        text = self._parameters.get(key)
        value = default if text is None else _whole(text)
        if value is None or not minimum <= value <= maximum:
            self.refuse(key, f"a whole number from {minimum} to {maximum}")
        return value

    def _number(self, key: str, default: float, maximum: float) -> float:
        text = self._parameters.get(key)
        value = default if text is None else _decimal(text)
        if value is None or not 0.0 <= value <= maximum:
            self.refuse(key, f"a number from 0 to {maximum:g}")
        return value

    def _names(self, key: str) -> tuple[str, ...]:
        text = self._parameters.get(key)
        if text is None:
            return ()
        names = tuple(part.strip() for part in text.split(","))
        if not all(names) or len(names) > MAX_LIST or len(set(names)) != len(names):
            self.refuse(key, "different names of outputs separated by commas")
        return names

    def _strides(self, default: tuple[int, ...]) -> tuple[int, ...]:
        text = self._parameters.get("detection_strides")
        if text is None:
            return default
        values = [_whole(array.strip()) for array in text.split(",")]
        found = tuple(value for value in values if value is not None and 1 <= value <= 1024)
        if len(found) != len(values) or len(found) > MAX_LIST:
            self.refuse("detection_strides", "whole numbers from 1 to 1024 separated by commas")
        return found

    def _columns(self) -> tuple[Column, ...]:
        text = self._parameters.get("detection_columns", "box,score,class")
        by_name = {column.value: column for column in Column}
        names = [part.strip().lower() for part in text.split(",")] if len(text) < 100 else []
        found = tuple(by_name[name] for name in names if name in by_name)
        if len(found) != len(names) or len(set(found)) != len(found) or len(set(found) - {Column.IMAGE}) != 3:
            self.refuse("detection_columns", "box, score, class, and image if it has one, each once, in their order")
        return found

    def _variances(self) -> tuple[float, float]:
        text = self._parameters.get("detection_variances", "0.1,0.2")
        values = [_decimal(part) for part in text.split(",")]
        found = [value for value in values if value is not None and 0.0 < value <= 100.0]
        if len(found) != 2 or len(values) != 2:
            self.refuse("detection_variances", "two numbers above 0, for centre and size")
        return found[0], found[1]


def _whole(text: str) -> int | None:
    # isdecimal excludes signs, blanks and underscores; the length check excludes numbers that are slow to parse.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _decimal(text: str) -> float | None:
    """Return the number in the text, else None. NaN fails every later comparison."""
    if len(text) > 40:
        return None
    try:
        return float(text)
    except ValueError:
        return None
