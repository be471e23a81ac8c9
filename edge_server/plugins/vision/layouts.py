"""Table of the known layouts of vision models, and the comparison of shapes with one of them.

Dimensions are sums of numbers and symbols, without the batch: A boxes, C classes, K keypoints, Q boxes of a network
without a grid, M prototypes of masks with height H and width W. "4 + C + 3 K" is four numbers of a box, a score for
each class and three numbers for each keypoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

MAX_QUERIES = 1000
"""Greatest number of boxes of networks without a grid. They have 100 to 900."""

MAX_KEYPOINTS = 200
"""Greatest number of keypoints. Whole bodies have 133."""

# One row of scores of a classifier is no list of boxes.
_MIN_SIZES = {"Q": 10}
_MAX_SIZES = {"Q": MAX_QUERIES, "K": MAX_KEYPOINTS}


_LETTERBOX = {"image_color": "rgb", "image_scale": "1/255", "image_fit": "letterbox", "image_pad_value": "114"}
_STRETCH = {"image_color": "rgb", "image_scale": "1/255", "image_fit": "stretch"}


class Layout(NamedTuple):
    """A layout of outputs. `parameters` are the configuration that it implies; "{K}" stands for the number of
    keypoints, "{output}" for the names of the outputs in the order of `outputs`, "{first}" for the first of them.

    `image` are parameters about the picture as models of this layout are usually trained. `inputs` are the other inputs
    that it may have, with their values for a picture; "{W}" and "{H}" stand for the size of the network's input.
    `names` are those of the outputs, in lower case; empty if exporters name them as they like. `anchors_per_cell`: A is
    this many times the number of cells of the input's grids, whose greatest stride is `max_stride`; 0 if it is any
    number. `usual` are sizes that shapes alone assume. `is_unmistakable`: no other known exporter writes these names
    and shapes, so they suffice. `integers` are the indices of outputs of integers, which tell outputs of other names
    apart.
    """

    name: str
    task: str
    outputs: tuple[str, ...]
    parameters: Mapping[str, str]
    image: Mapping[str, str]
    names: tuple[str, ...] = ()
    anchors_per_cell: int = 0
    usual: Mapping[str, int] = MappingProxyType({})
    max_stride: int = 32
    inputs: Mapping[str, str] = MappingProxyType({})
    is_unmistakable: bool = False
    integers: tuple[int, ...] = ()


IMAGENET_VALUES = {"image_mean": "0.485,0.456,0.406", "image_stddev": "0.229,0.224,0.225"}
_IMAGENET = {"image_color": "rgb", "image_scale": "1/255", "image_fit": "stretch", **IMAGENET_VALUES}
_TORCHVISION = {
    **_IMAGENET, "image_fit": "crop", "image_resize": "{R}", "image_interpolation": "linear_antialias",
}  # fmt: skip
# Its predict() calls torchvision's resize with antialias=False.
_RF_DETR = {**_IMAGENET, "image_interpolation": "linear"}
_BYTES_BGR = {"image_color": "bgr", "image_scale": "1", "image_fit": "letterbox"}
_MEDIAPIPE = {
    "image_color": "rgb", "image_scale": "1", "image_fit": "letterbox", "image_mean": "127.5", "image_stddev": "127.5",
}  # fmt: skip
_NANODET_IMAGE = {
    "image_color": "bgr", "image_scale": "1", "image_fit": "stretch", "image_mean": "103.53,116.28,123.675",
    "image_stddev": "57.375,57.12,58.395",
}  # fmt: skip

_POINTS = {"detection_keypoints": "{K}"}
_TWO_VALUES = {"detection_keypoint_values": "2"}
_TRANSPOSED = {"detection_transposed": "true"}
_PERSON = {"C": 1, "K": 17}
_TEXT = {"detection_head": "dbnet", "detection_score_threshold": "0.5"}
_PPOCR = {
    "image_color": "bgr", "image_scale": "1/255", "image_mean": "0.5", "image_stddev": "0.5", "image_fit": "letterbox",
}  # fmt: skip
_MASKS = {"detection_mask_coefficients": "{M}"}
_PROTOTYPES = "M, H, W"
_SOFTMAX = {"detection_activation": "softmax", "detection_background": "{C}"}
_MASK = {"pixel_mask": "1"}
PADDLE_INPUTS = {"im_shape": "{H},{W}", "scale_factor": "1,1"}
_YUNET_GRIDS = ("8", "16", "32")

LAYOUTS: Sequence[Layout] = (
    Layout("yolov8", "detect", ("4 + C, A",), {"detection_head": "yolov8"}, _LETTERBOX, anchors_per_cell=1),
    Layout("yolov5", "detect", ("A, 5 + C",), {"detection_head": "yolov5"}, _LETTERBOX, anchors_per_cell=3),
    Layout(
        "yolov8-pose", "pose", ("4 + C + 3 K, A",), {"detection_head": "yolov8", **_POINTS}, _LETTERBOX,
        anchors_per_cell=1, usual=_PERSON,
    ),
    Layout(
        "yolov8-pose-xy", "pose", ("4 + C + 2 K, A",), {"detection_head": "yolov8", **_POINTS, **_TWO_VALUES},
        _LETTERBOX, anchors_per_cell=1, usual=_PERSON,
    ),
    Layout(
        "yolov8-transposed", "detect", ("A, 4 + C",), {"detection_head": "yolov8", **_TRANSPOSED}, _LETTERBOX,
        anchors_per_cell=1,
    ),
    Layout(
        "yolov8-pose-transposed", "pose", ("A, 4 + C + 3 K",), {"detection_head": "yolov8", **_TRANSPOSED, **_POINTS},
        _LETTERBOX, anchors_per_cell=1, usual=_PERSON,
    ),
    Layout("end2end", "detect", ("A, 6",), {"detection_head": "yolov10"}, _LETTERBOX),
    Layout(
        "end2end-pose", "pose", ("A, 6 + 3 K",), {"detection_head": "yolov10", **_POINTS}, _LETTERBOX, usual=_PERSON
    ),
    Layout(
        "end2end-pose-xy", "pose", ("A, 6 + 2 K",), {"detection_head": "yolov10", **_POINTS, **_TWO_VALUES},
        _LETTERBOX, usual=_PERSON,
    ),
    Layout(
        "yolov8-obb", "obb", ("4 + C + 1, A",), {"detection_head": "yolov8_obb"}, _LETTERBOX, anchors_per_cell=1,
        usual={"C": 15},
    ),
    Layout("end2end-obb", "obb", ("A, 7",), {"detection_head": "yolo26_obb"}, _LETTERBOX),
    Layout(
        "yolov8-seg", "segment", ("4 + C + M, A", _PROTOTYPES), {"detection_head": "yolov8", **_MASKS}, _LETTERBOX,
        anchors_per_cell=1, usual={"M": 32},
    ),
    Layout(
        "yolov5-seg", "segment", ("A, 5 + C + M", _PROTOTYPES), {"detection_head": "yolov5", **_MASKS}, _LETTERBOX,
        anchors_per_cell=3, usual={"M": 32},
    ),
    Layout(
        "end2end-seg", "segment", ("A, 6 + M", _PROTOTYPES), {"detection_head": "yolov10", **_MASKS}, _LETTERBOX,
        usual={"M": 32},
    ),
    Layout("rtdetr", "detect", ("Q, 4 + C",), {"detection_head": "rtdetr"}, _STRETCH),
    Layout(
        "rtdetr-rows", "detect", ("Q, 6",),
        {"detection_head": "yolov10", "detection_box_format": "cxcywh", "detection_box_unit": "normalized"}, _STRETCH,
    ),
    # Rows that other exporters order otherwise.
    Layout(
        "paddle-rows", "detect", ("A, 6",), {"detection_head": "yolov10", "detection_columns": "class,score,box"},
        _IMAGENET, inputs=PADDLE_INPUTS,
    ),
    Layout(
        "paddle-rows-count", "detect", ("A, 6", "N"),
        {"detection_head": "yolov10", "detection_columns": "class,score,box", "detection_outputs": "{first}"},
        _IMAGENET, inputs=PADDLE_INPUTS,
    ),
    Layout(
        "yolov7-rows", "detect", ("A, 7",), {"detection_head": "yolov10", "detection_columns": "image,box,class,score"},
        _LETTERBOX,
    ),
    Layout(
        "box-class-score-rows", "detect", ("A, 6",),
        {"detection_head": "yolov10", "detection_columns": "box,class,score"}, _LETTERBOX,
    ),
    Layout(
        "score-class-box-rows", "detect", ("A, 6",),
        {"detection_head": "yolov10", "detection_columns": "score,class,box"}, _LETTERBOX,
    ),
    Layout("yolox", "detect", ("A, 5 + C",), {"detection_head": "yolox"}, _BYTES_BGR, anchors_per_cell=1),
    Layout("detection-output", "detect", ("1, A, 7",), {"detection_head": "detection_output"}, _STRETCH),
    # RF-DETR's exporter alone names logits "labels".
    Layout(
        "rf-detr", "detect", ("Q, 4", "Q, C"), {"detection_head": "detr"}, _RF_DETR, ("dets", "labels"),
        is_unmistakable=True,
    ),
    Layout(
        "detr-sigmoid", "detect", ("Q, 4", "Q, C"), {"detection_head": "detr"}, _STRETCH, ("pred_boxes", "logits"),
        inputs=_MASK,
    ),
    Layout(
        "detr-softmax", "detect", ("Q, 4", "Q, C + 1"), {"detection_head": "detr", **_SOFTMAX}, _IMAGENET,
        ("pred_boxes", "logits"), inputs=_MASK,
    ),
    # torchvision, whose exports often have numbers as names, and RT-DETR and D-FINE of their authors.
    Layout(
        "boxes-scores-labels", "detect", ("A, 4", "A", "A"), {"detection_head": "nms_inside"}, _STRETCH,
        ("boxes", "scores", "labels"), inputs={"orig_target_sizes": "{W},{H}"}, integers=(2,),
    ),
    Layout(
        "efficient-nms", "detect", ("A, 4", "A", "A", "1"), {"detection_head": "nms_inside"}, _LETTERBOX,
        ("det_boxes", "det_scores", "det_classes", "num_dets"),
    ),
    Layout(
        "yolo-nas", "detect", ("A, 4", "A", "A", "1"), {"detection_head": "nms_inside"}, _LETTERBOX,
        ("pred_boxes", "pred_scores", "pred_classes", "num_predictions"),
    ),
    Layout("mmdeploy", "detect", ("A, 5", "A"), {"detection_head": "nms_inside"}, _IMAGENET, ("dets", "labels")),
    Layout(
        "ppyoloe", "detect", ("A, 4", "C, A"), {"detection_head": "ppyoloe"}, _IMAGENET, anchors_per_cell=1,
        inputs=PADDLE_INPUTS,
    ),
    # SSD and others without NMS, whose exporters name the outputs as they like.
    Layout("boxes-and-scores", "detect", ("A, 4", "A, C"), {"detection_head": "ssd"}, _STRETCH),
    Layout(
        "boxes-and-scores-pixels", "detect", ("A, 4", "A, C"),
        {"detection_head": "ssd", "detection_box_unit": "pixels"}, _STRETCH,
    ),
    Layout(
        "nanodet-plus", "detect", ("A, C + 32",), {"detection_head": "nanodet_plus"}, _NANODET_IMAGE,
        anchors_per_cell=1, max_stride=64,
    ),
    Layout("nanodet", "detect", ("A, C + 32",), {"detection_head": "nanodet"}, _NANODET_IMAGE, anchors_per_cell=1),
    Layout(
        "picodet", "detect", ("D, C", "E, C", "F, C", "G, C", "D, 32", "E, 32", "F, 32", "G, 32"),
        {"detection_head": "nanodet", "detection_strides": "8,16,32,64"}, _IMAGENET,
        inputs=PADDLE_INPUTS,
    ),
    # libfacedetection.train alone writes these twelve, for pixels as OpenCV has them.
    Layout(
        "yunet", "faces", ("D, 1", "E, 1", "F, 1", "D, 1", "E, 1", "F, 1", "D, 4", "E, 4", "F, 4", "D, 10", "E, 10",
        "F, 10"), {"detection_head": "yunet"}, _BYTES_BGR,
        tuple(f"{part}_{grid}" for part in ("cls", "obj", "bbox", "kps") for grid in _YUNET_GRIDS),
        is_unmistakable=True,
    ),
    Layout(
        "blazeface", "faces", ("896, 16", "896, 1"), {"detection_head": "blazeface"}, _MEDIAPIPE,
        ("regressors", "classificators"),
    ),
    # Names that converters of Paddle's models give.
    Layout("dbnet", "text", ("1, H, W",), _TEXT, _PPOCR, ("fetch_name_0",)),
    Layout("dbnet-sigmoid", "text", ("1, H, W",), _TEXT, _PPOCR, ("sigmoid_0.tmp_0",)),
    Layout("depth", "depth", ("1, H, W",), {"depth_output": "{output}"}, _STRETCH),
    Layout(
        "anomalib", "anomaly", ("1", "1", "1, H, W", "1, H, W"),
        {"anomaly_output": "anomaly_map", "anomaly_score_output": "pred_score"}, _STRETCH,
        names=("pred_score", "pred_label", "anomaly_map", "pred_mask"), is_unmistakable=True,
    ),
    Layout(
        "openvino-boxes", "detect", ("A, 5", "A"), {"detection_head": "nms_inside"}, _STRETCH, ("boxes", "labels")
    ),
    Layout(
        "logits", "classify", ("C",), {"class_output": "{output}", "class_activation": "softmax"}, _IMAGENET,
        ("logits",),
    ),
    Layout(
        "class-logits", "classify", ("C",), {"class_output": "{output}", "class_activation": "softmax"}, _TORCHVISION
    ),
    Layout("classes", "classify", ("C",), {"class_output": "{output}"}, _STRETCH),
    Layout(
        "class-maps", "segment", ("H, W, C",), {"mask_output": "{output}", "mask_layout": "packed"}, _STRETCH,
    ),
)  # fmt: skip
"""All known layouts; of two that fit equally well, the first is the likelier one."""


def match_shapes(
    patterns: Sequence[str], shapes: Sequence[tuple[int, ...]], known: Mapping[str, int]
) -> dict[str, int] | None:
    """Return the sizes of the symbols if `shapes` match a layout's outputs, else None.

    `known` are sizes that must hold. A dim of -1 matches any, and a dim with two unknown symbols any of at least 1.
    """
    symbols = dict(known)
    for pattern, shape in zip(patterns, shapes, strict=True):
        dims = pattern.split(",")
        if len(dims) != len(shape):
            return None
        for dim, size in zip(dims, shape, strict=True):
            rest, unknown = size, []
            for term in dim.split("+"):
                factor, symbol = parse_term(term)
                if symbol and symbol not in symbols:
                    unknown.append((factor, symbol))
                else:
                    rest -= factor * (symbols[symbol] if symbol else 1)
            if size == -1 or len(unknown) > 1:
                continue
            if not unknown:
                if rest:
                    return None
                continue
            ((factor, symbol),) = unknown
            found = rest // factor
            is_usual = _MIN_SIZES.get(symbol, 1) <= found <= _MAX_SIZES.get(symbol, found)
            if rest % factor or not is_usual:
                return None
            symbols[symbol] = found
    return symbols


_TERM = re.compile(r"\s*(\d*)\s*([A-Z]?)\s*")


def parse_term(term: str) -> tuple[int, str]:
    """Return factor and symbol of "3 K", "C" or "4", which has the symbol ""."""
    found = _TERM.fullmatch(term)
    assert found is not None, term
    return int(found[1] or 1), found[2]


_WORDS = {"A": "boxes", "C": "classes", "Q": "boxes", "M": "prototypes", "H": "height", "W": "width"}


def substitute(pattern: str, known: Mapping[str, int]) -> str:
    """Return a layout's shape for people: sums of known sizes as numbers, "A" as boxes."""
    dims = []
    for dim in pattern.split(","):
        number, words = 0, []
        for term in dim.split("+"):
            factor, symbol = parse_term(term)
            if not symbol or symbol in known:
                number += factor * known.get(symbol, 1)
            else:
                words.append(_WORDS.get(symbol, term.strip()))
        dims.append(" + ".join(([str(number)] if number else []) + words))
    return ", ".join(dims)
