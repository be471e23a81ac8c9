"""Generator of model-parameters.md, from the declarations of the plugin `vision`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edge_server.plugins.policies import policy
from edge_server.plugins.vision import image_parameters
from edge_server.plugins.vision.declared_parameter import DeclaredParameter
from edge_server.plugins.vision.outputs import output_parameters
from edge_server.plugins.vision.outputs.output_parameters import TRAITS, Activation

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
A version without `model_warmup` runs one made-up inference before it serves, if the sizes of its inputs are known:
zeros, and if they fail random floats and ones. If these fail too, a warning in the log and in `edge-server status` says
so, and the version serves, unless it replaces one that answered: then the load fails. A declared `model_warmup` must
always work.

| Key | Value | Default | Meaning |
|---|---|---|---|
| `warmup_probe` | true or false | true | run the made-up inference, and the checks of detectors with pictures |
| `warmup_allow_nan` | true or false | false | outputs may hold NaN or infinity though the inputs are finite |"""


def generate() -> str:
    """Return the text of the page below its note."""
    return "\n".join([
        "# Parameters of image models\n",
        _INTRODUCTION,
        "## How an image becomes the input\n", *_keys(image_parameters.PARAMETERS), "", _IMAGES,
        "## What the outputs mean\n", _OUTPUTS,
        "### Detections, with every head\n", *_keys(output_parameters.COMMON_PARAMETERS), "",
        "### Detections, with some heads\n", *_keys(output_parameters.HEAD_PARAMETERS), "",
        "### Classes\n", *_keys(output_parameters.CLASS_PARAMETERS), "",
        "### A mask of the picture\n", *_keys(output_parameters.MASK_PARAMETERS), "",
        "### Depth\n", *_keys(output_parameters.DEPTH_PARAMETERS), "",
        "### Anomaly maps\n", *_keys(output_parameters.ANOMALY_PARAMETERS), "",
        "## Heads\n", _HEADS, *_heads(),
        "", "## Robot policies\n", "See [robots](../robots.md).\n", *_keys(policy.PARAMETERS),
        "", "## Checks at the load of any model\n", _WARMUP,
    ]) + "\n"  # fmt: skip


def _keys(parameters: Sequence[DeclaredParameter]) -> Iterator[str]:
    rows = [(f"`{item.key}`", item.value, item.default, item.meaning) for item in parameters]
    yield from _table(("Key", "Value", "Default", "Meaning"), rows)


def _heads() -> Iterator[str]:
    rows = []
    for kind, traits in TRAITS.items():
        has_boxes = "detection_box_unit" in traits.keys
        boxes = f"{traits.format.value} {traits.unit.value}" if has_boxes else ""
        activation = "" if traits.activation is Activation.NONE else f"detection_activation {traits.activation.value}"
        keys = [key.removeprefix("detection_") for key in traits.keys if key.removeprefix("detection_") not in _NMS]
        rows.append((
            f"`{kind.value}`", traits.outputs, ", ".join(filter(None, (boxes, activation))),
            ", ".join((["NMS"] if traits.needs_nms else []) + keys),
        ))  # fmt: skip
    yield from _table(("`detection_head`", "Outputs", "Defaults", "Keys `detection_...`"), rows)


_NMS = ("iou_threshold", "class_agnostic")


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
