"""Generator of model-parameters.md, from the declarations of the plugins `vision` and `policies`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from edge_server.config.model_parameters import default_text, settings_of
from edge_server.config.setting import Setting
from edge_server.plugins.policies.policy import Policy
from edge_server.plugins.vision.image_parameters import Declaration
from edge_server.plugins.vision.outputs.output_parameters import (
    HEAD_KEYS,
    Activation,
    AnomalyDeclaration,
    ClassDeclaration,
    DepthDeclaration,
    DetectionDeclaration,
    HeadKind,
    MaskDeclaration,
)

_INTRODUCTION = """\
They say how a picture becomes the input, and what the outputs mean. `edge-server add` writes them, and
[YOLO exports](../models.md#a-yolo-export) need none. They stand in `config.pbtxt` as

```pbtxt
parameters { key: "image_fit" value { string_value: "letterbox" } }
```

Values are texts. Lists are separated by commas. A misspelt key that begins with `image_`,
`network_image_`, `detection_`, `class_`, `mask_`, `depth_` or `anomaly_` fails the load, with the nearest key. Another
one that is near a known key is a warning.
"""
_IMAGES = """\
A channel's value v of 0 to 255 becomes (v * `image_scale` - `image_mean`) / `image_stddev`. With `image_scale: "1"`
mean and stddev are in units of 0 to 255, with `"1/255"` in units of 0 to 1. A configuration with one of them states
`image_scale` too.

With `image_color: "depth"` v is the sensor's measurement: by ROS REP 118 integers are millimetres, floats metres. A
value that is not finite becomes 0, and `image_interpolation: "auto"` means nearest.

`image_decode: "fast"` saves about a quarter of the decoding time of JPEG frames that are at least twice as large as the
input. `keep_aspect_ratio`, `enable_padding` and `crop_mode` of Isaac ROS are accepted in place of `image_fit`.
"""
_OUTPUTS = """\
Class names are those of the output with the classes (`label_filename`, as in Triton). A single output with labels and
one dimension is a classifier without any parameter.
"""
_HEADS = """\
Shapes are without the batch; A boxes, C classes. NMS drops overlapping boxes: `detection_iou_threshold` and
`detection_class_agnostic`. Every head has the keys of the first table of detections. Oriented boxes have their angle in
radians, clockwise in the picture; `detection_iou_threshold` is a ProbIoU, as in Ultralytics' predictor.
"""
_WARMUP = """\
A version without `model_warmup` runs one generated inference before it serves, if the sizes of its inputs are known:
zeros, and if they fail random floats and ones. If these fail too, a warning in the log and in `edge-server status` says
so, and the version serves, unless it replaces one that answered: then the load fails. A declared `model_warmup` must
always work.

| Key | Value | Default | Meaning |
|---|---|---|---|
| `warmup_probe` | true or false | true | run the generated inference, and the checks of detectors with pictures |
| `warmup_allow_nan` | true or false | false | outputs may hold NaN or infinity though the inputs are finite |"""


def generate() -> str:
    """Return the text of the page below its note."""
    detections = settings_of(DetectionDeclaration).values()
    return "\n".join([
        "# Parameters of image models\n",
        _INTRODUCTION,
        "## How an image becomes the input\n", *_keys(Declaration), "", _IMAGES,
        "## What the outputs mean\n", _OUTPUTS,
        "### Detections, with every head\n", *_table_of(item for item in detections if item.flag not in HEAD_KEYS), "",
        "### Detections, with some heads\n", *_table_of(item for item in detections if item.flag in HEAD_KEYS), "",
        "### Classes\n", *_keys(ClassDeclaration), "",
        "### A mask of the picture\n", *_keys(MaskDeclaration), "",
        "### Depth\n", *_keys(DepthDeclaration), "",
        "### Anomaly maps\n", *_keys(AnomalyDeclaration), "",
        "## Heads\n", _HEADS, *_heads(),
        "", "## Robot policies\n", "See [robots](../robots.md).\n", *_keys(Policy),
        "", "## Checks at the load of any model\n", _WARMUP,
    ]) + "\n"  # fmt: skip


def _keys(declaration: type[Any]) -> Iterator[str]:
    return _table_of(settings_of(declaration).values())


def _table_of(settings: Iterable[Setting]) -> Iterator[str]:
    rows = [(f"`{item.flag}`", item.kind.metavar, default_text(item), item.help) for item in settings]
    return _table(("Key", "Value", "Default", "Meaning"), rows)


def _heads() -> Iterator[str]:
    rows = []
    for kind in HeadKind:
        has_boxes = "detection_box_unit" in kind.keys
        boxes = f"{kind.format.value} {kind.unit.value}" if has_boxes else ""
        activation = "" if kind.activation is Activation.NONE else f"detection_activation {kind.activation.value}"
        keys = [key.removeprefix("detection_") for key in kind.keys if key.removeprefix("detection_") not in _NMS]
        rows.append((
            f"`{kind.value}`", kind.outputs, ", ".join(filter(None, (boxes, activation))),
            ", ".join((["NMS"] if kind.needs_nms else []) + keys),
        ))  # fmt: skip
    yield from _table(("`detection_head`", "Outputs", "Defaults", "Keys `detection_...`"), rows)


_NMS = ("iou_threshold", "class_agnostic")


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
