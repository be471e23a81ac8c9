"""Parser of the parameters in a model's configuration that describe its outputs: `track`, `deepstack`, and keys with
detection_, class_ or mask_.

All values are strings; lists are comma-separated. The class names are those of the output with the classes
(`label_filename`, as in Triton).

| key | value | default |
|---|---|---|
| detection_head | format of the outputs, see below | no detections |
| detection_outputs | names of the outputs, in the order of the table below | by name or last dim, or the only one |
| detection_score_threshold | 0 to 1: weaker detections are dropped | 0.25 |
| detection_iou_threshold | 0 to 1: of two boxes that overlap more, the weaker one is dropped; 1 drops none | 0.45 |
| detection_class_agnostic | true or false: boxes of different classes may drop each other | false |
| detection_max | 1 to 1000: maximum number of detections per frame, the best first | 100 |
| detection_box_format | xyxy, yxyx, cxcywh or xywh (x, y: upper left corner) | the head's |
| detection_box_unit | pixels of the network's input, or normalized: 0 to 1 of its width and height | the head's |
| detection_activation | none, sigmoid or softmax: converts scores to probabilities | the head's |
| detection_background | index of the background class | none |
| detection_strides | pixels of the input per cell, one number for each grid | the head's |
| detection_variances | scale of offsets for centre and size, with priors | 0.1,0.2 |
| detection_keypoints | number of points (x, y, score) after the classes or the class | 0 |
| deepstack | true: answer DeepStack clients that name no model, see docs/cameras.md | false |
| track | bytetrack: give the objects of each frame stream ids, see `plugins.vision.tracking` | no ids |
| detection_track_threshold | 0 to 1: weaker detections continue a track, but do not start one | 0.5 |
| class_output | name of the output with a score for each class | the one with labels, or the only one |
| class_activation | none, sigmoid or softmax | none |
| mask_output | name of the output with the mask | the one with labels, or the only one |
| mask_layout | planar: (classes, height, width), packed: (height, width, classes), index: (height, width) | by dims |
| mask_activation | with one class: none or sigmoid | none |
| mask_threshold | with one class: a pixel of at least this score is class 1 | 0.5 |
| mask_unseen | 0 to 65535: class of the frame's pixels that a crop removed from the input | 0 |

`image_top_k` is the number of best classes, 5 by default. A classifier is also declared by that key alone, if the
output is unambiguous, and by a single output with labels and one dimension.

| detection_head | outputs (without batch; A boxes, C classes) | boxes, activation | other keys |
|---|---|---|---|
| yolov5 | [A, 5 + C]: box, objectness, classes; decoded | cxcywh pixels, none | format unit activation nms |
| yolov8, yolo11 | [4 + C, A]: box, classes, then 3 rows per keypoint | cxcywh pixels, none | the same, keypoints |
| yolov10 | [A, 6]: box, score, class, then 3 columns per keypoint; already suppressed | xyxy pixels | format unit \
keypoints |
| rtdetr | [A, 4 + C]: box, classes; needs no suppression | cxcywh normalized, none | format unit activation |
| yolox | [A, 5 + C]: offsets and sizes in cells of grids 8, 16, 32 | -, none | activation strides nms |
| yolox_decoded | as yolov5 | cxcywh pixels, none | format unit activation nms |
| ssd | [A, 4], [A, C], optional priors: [A, 4] cxcywh, or [2, 4 A] corners and variances | xyxy \
normalized, none | format unit activation background variances nms |
| nms_inside | [A, 4], [A], [A], optional [1]: boxes, scores, classes, count | xyxy pixels | format unit background |
| onnx_nms | [A, 4], [C, A], [K, 3]: boxes, scores, selected (image, class, box) | yxyx normalized | format unit \
background |
| detection_output | [1, K, 7]: (image, class, score, box) | xyxy normalized | format unit background |
| yunet | four for each of grids 8, 16, 32, named cls_8, obj_8, bbox_8, kps_8 and so on | - | strides nms |
| blazeface | [A, 16], [A, 1]: box and 6 keypoints relative to anchors of grids 8, 16, 16, 16; score | -, sigmoid | \
activation strides nms |

nms means detection_iou_threshold and detection_class_agnostic.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from edge_server.errors import BadModelConfig

Choice = TypeVar("Choice", bound=enum.Enum)

MAX_DETECTIONS = 1000
"""Maximum number of detections per frame."""

MAX_LIST = 64
"""Maximum number of entries of a list, far more than any head has outputs or grids."""

_PREFIXES = ("detection_", "class_", "mask_")


class HeadKind(enum.Enum):
    """Output formats of detectors; see the table above."""

    YOLOV5 = "yolov5"
    YOLOV8 = "yolov8"
    YOLO11 = "yolo11"
    YOLOV10 = "yolov10"
    RTDETR = "rtdetr"
    YOLOX = "yolox"
    YOLOX_DECODED = "yolox_decoded"
    SSD = "ssd"
    NMS_INSIDE = "nms_inside"
    ONNX_NMS = "onnx_nms"
    DETECTION_OUTPUT = "detection_output"
    YUNET = "yunet"
    BLAZEFACE = "blazeface"


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


class TrackMethod(enum.Enum):
    BYTETRACK = "bytetrack"


class MaskLayout(enum.Enum):
    CHW = "planar"
    HWC = "packed"
    INDEX = "index"


@dataclass(frozen=True, slots=True)
class HeadTraits:
    """Keys and defaults of a head. `keys` are its keys besides the common ones."""

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
_YOLO = HeadTraits((*_NMS, *_BOX, "detection_activation"), BoxFormat.CXCYWH)
_YOLOV8 = HeadTraits((*_YOLO.keys, "detection_keypoints"), BoxFormat.CXCYWH)
TRAITS: Mapping[HeadKind, HeadTraits] = {
    HeadKind.YOLOV5: _YOLO,
    HeadKind.YOLOV8: _YOLOV8,
    HeadKind.YOLO11: _YOLOV8,
    HeadKind.YOLOV10: HeadTraits((*_BOX, "detection_keypoints")),
    HeadKind.RTDETR: HeadTraits((*_BOX, "detection_activation"), BoxFormat.CXCYWH, BoxUnit.NORMALIZED),
    HeadKind.YOLOX: HeadTraits((*_NMS, "detection_activation", "detection_strides")),
    HeadKind.YOLOX_DECODED: _YOLO,
    HeadKind.SSD: HeadTraits(
        (*_NMS, *_BOX, "detection_activation", "detection_background", "detection_variances"),
        unit=BoxUnit.NORMALIZED,
    ),
    HeadKind.NMS_INSIDE: HeadTraits((*_BOX, "detection_background")),
    HeadKind.ONNX_NMS: HeadTraits((*_BOX, "detection_background"), BoxFormat.YXYX, BoxUnit.NORMALIZED),
    HeadKind.DETECTION_OUTPUT: HeadTraits((*_BOX, "detection_background"), unit=BoxUnit.NORMALIZED),
    HeadKind.YUNET: HeadTraits((*_NMS, "detection_strides")),
    HeadKind.BLAZEFACE: HeadTraits(
        (*_NMS, "detection_activation", "detection_strides"),
        activation=Activation.SIGMOID,
        strides=(8, 16, 16, 16),
    ),
}

_COMMON = (
    "detection_head", "detection_outputs", "detection_score_threshold", "detection_max", "track",
    "detection_track_threshold", "deepstack",
)  # fmt: skip
_DETECTION_KEYS = (*_COMMON, *sorted({key for traits in TRAITS.values() for key in traits.keys}))
_CLASS_KEYS = ("class_output", "class_activation")
_MASK_KEYS = ("mask_output", "mask_layout", "mask_activation", "mask_threshold", "mask_unseen")
_KEYS = (*_DETECTION_KEYS, *_CLASS_KEYS, *_MASK_KEYS)


@dataclass(frozen=True, slots=True)
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
    track_threshold: float | None
    """Least score that starts a track; None: no tracking."""
    is_deepstack: bool
    """Whether the model answers DeepStack clients that name no model."""


@dataclass(frozen=True, slots=True)
class ClassDeclaration:
    """Class declaration. `is_certain` is False for image_top_k alone: it also applies to image requests, so several
    outputs are no error."""

    is_certain: bool
    output: str | None
    activation: Activation


@dataclass(frozen=True, slots=True)
class MaskDeclaration:
    output: str | None
    layout: MaskLayout | None
    activation: Activation
    threshold: float
    unseen: int


@dataclass(frozen=True, slots=True)
class OutputDeclaration:
    """Declarations about a model's outputs; None: not declared."""

    detections: DetectionDeclaration | None
    classes: ClassDeclaration | None
    mask: MaskDeclaration | None


def read_declaration(model: str, parameters: Mapping[str, str]) -> OutputDeclaration:
    """Return the declaration from a model's `parameters`. Raises BadModelConfig: model, key, expected, given."""
    if not any(key.startswith(_PREFIXES) or key in ("image_top_k", "track", "deepstack") for key in parameters):
        return OutputDeclaration(None, None, None)
    reader = _Reader(model, parameters)
    reader.check_keys()
    return OutputDeclaration(reader.detections(), reader.classes(), reader.mask())


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
                nearest = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.0)[0]
                self.refuse(key, f"one of {', '.join(_KEYS)}; did you mean '{nearest}'")

    def detections(self) -> DetectionDeclaration | None:
        head = self._choice("detection_head", HeadKind)
        stated = [key for key in self._parameters if key in _DETECTION_KEYS]
        if head is None:
            if stated:
                self.refuse(stated[0], f"detection_head beside it: one of {_values(HeadKind)}")
            return None
        traits = TRAITS[head]
        for key in stated:
            if key not in _COMMON and key not in traits.keys:
                self.refuse(key, f"it to be left out, because detection_head {head.value} has no use for it")
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
            track_threshold=self._track_threshold(),
            is_deepstack=self._boolean("deepstack"),
        )

    def classes(self) -> ClassDeclaration | None:
        is_certain = any(key in _CLASS_KEYS for key in self._parameters)
        if not is_certain and "image_top_k" not in self._parameters:
            return None
        activation = self._choice("class_activation", Activation) or Activation.NONE
        return ClassDeclaration(is_certain, self._parameters.get("class_output"), activation)

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

    def _track_threshold(self) -> float | None:
        threshold = self._number("detection_track_threshold", 0.5, 1.0)
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
            self.refuse(key, f"one of {_values(kind)}")
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

    def _variances(self) -> tuple[float, float]:
        text = self._parameters.get("detection_variances", "0.1,0.2")
        values = [_decimal(part) for part in text.split(",")]
        found = [value for value in values if value is not None and 0.0 < value <= 100.0]
        if len(found) != 2 or len(values) != 2:
            self.refuse("detection_variances", "two numbers above 0, for centre and size")
        return found[0], found[1]


def _values(kind: type[enum.Enum]) -> str:
    return ", ".join(str(member.value) for member in kind)


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
