"""Recognition of a YOLO export by the metadata that Ultralytics writes: image and output parameters, and labels.

Nothing is guessed. A model is recognised if its metadata name the task and its inputs and outputs have exactly the
shapes of that task. YOLOv5's own exporter names no task: then the number of boxes must be that of its grids, too.

| task | outputs (without batch; A boxes, C names, K keypoints) | detection_head |
|---|---|---|
| detect | [4 + C, A] | yolov8 |
| detect, end2end or with nms | [A, 6] | yolov10 |
| detect by RT-DETR | [A, 4 + C] | rtdetr |
| detect by RT-DETR, with head RTDETRDecoder | [A, 6]: centre, size, score, class | yolov10 |
| pose | [4 + C + 3 K, A] | yolov8 |
| pose, end2end or with nms | [A, 6 + 3 K] | yolov10 |
| none, by YOLOv5 | [A, 5 + C] | yolov5 |
| classify | [C] | - |

Metadata are as hostile as the file: texts are matched by patterns in linear time, and only strings are evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec, Recognised
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize, count_cells
from edge_server.plugins.vision.perception import make_perception_decoder

MAX_LABELS = 65536
MAX_LABEL_LENGTH = 256

_RTDETR = "RTDETRDecoder"
_HEAD_KEYS = ("detection_head", "class_output", "mask_output")
_FIT_KEYS = ("image_fit", "image_resize", "keep_aspect_ratio", "enable_padding", "crop_mode")
_SCALE_KEYS = ("image_scale", "image_mean", "image_stddev")

_NAME = re.compile(r"""\s*(?:(\d{1,5})\s*:\s*)?('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")\s*(,|$)""")
_PAIR = re.compile(r"[\[(]\s*(\d{1,5})\s*,\s*(\d{1,5})\s*[\])]")
_NUMBER = re.compile(r"\d{1,5}")


class _NotCertainError(Exception):
    """Completes the sentence "its metadata are those of a YOLO export, but nothing is recognised: "."""


def recognise(spec: ModelSpec, metadata: Mapping[str, str]) -> Recognised | None:
    """Return the image and output parameters and the labels that the metadata of a model's file give.

    None for other metadata than a YOLO export's, and for a configuration that states a head. What the configuration
    states otherwise wins. If the metadata do not fit the model, nothing is recognised and the note says why.
    """
    task = metadata.get("task")
    if "stride" not in metadata or (task is None and "names" not in metadata):
        return None
    if any(key in spec.parameters for key in _HEAD_KEYS) or ("image_top_k" in spec.parameters and task != "classify"):
        return None
    try:
        found = _Export(spec, metadata).recognise()
        with_it = replace(spec, recognised=found)
        make_image_plan(with_it)
        make_perception_decoder(with_it)
    except _NotCertainError as error:
        reason = str(error)
    except BadModelConfig as error:
        reason = error.message
    else:
        return found
    return Recognised({}, {}, f"its metadata are those of a YOLO export, but nothing is recognised: {reason}")


@dataclass(frozen=True, slots=True)
class _Export:
    """A YOLO export. The methods raise _NotCertainError."""

    spec: ModelSpec
    metadata: Mapping[str, str]

    def recognise(self) -> Recognised:
        task = self.metadata.get("task", "detect")
        if task not in ("detect", "pose", "classify"):
            raise _NotCertainError(f"task {_quote(task)} is not decoded, only detect, pose and classify")
        labels = read_names(self.metadata.get("names", ""))
        image = self._image()
        size = self._size(_without_batch(self.spec, image, 3))
        output = self._output()
        shape = _without_batch(self.spec, output, 1 if task == "classify" else 2)
        what = f"yolo {task}, {_count(len(labels), 'class')}"
        if task == "classify":
            if shape != (len(labels),):
                raise _NotCertainError(_mismatch(output, shape, f"[{len(labels)}] for {len(labels)} names"))
            found = {"class_output": output.name}
        elif "task" not in self.metadata:
            found = self._with_objectness(output, shape, size, len(labels))
        elif task == "pose":
            found = self._keypoints(output, shape, size, len(labels))
            what += f", {_count(int(found['detection_keypoints']), 'keypoint')}"
        else:
            found = self._boxes(output, shape, size, len(labels))
        parameters = self._image_parameters(image, size, found) | found
        return Recognised(parameters, {output.name: labels}, f"recognised by its metadata: {what}")

    def _image_parameters(self, image: InputSpec, size: NetworkSize, head: Mapping[str, str]) -> dict[str, str]:
        stated = self.spec.parameters
        found: dict[str, str] = {}
        if not any(key in stated for key in _FIT_KEYS):
            found = {"image_fit": "letterbox", "image_pad_value": "114"}
            if "class_output" in head:
                found = {"image_fit": "crop"}
            elif head["detection_head"] == "rtdetr" or "detection_box_unit" in head:
                found = {"image_fit": "stretch"}
        if not any(key in stated for key in _SCALE_KEYS):
            found["image_scale"] = "1/255"
        found["image_color"] = "rgb"
        if -1 in _without_batch(self.spec, image, 3):
            found |= {"network_image_width": str(size.width), "network_image_height": str(size.height)}
        return found

    def _image(self) -> InputSpec:
        inputs = self.spec.inputs
        if len(inputs) != 1:
            raise _NotCertainError(f"expected one input, given {len(inputs)}")
        shape = _without_batch(self.spec, inputs[0], 3)
        if len(shape) != 3 or shape[0] != 3 or inputs[0].dtype not in (DType.FP32, DType.FP16):
            given = f"'{inputs[0].name}' {inputs[0].dtype.value} {list(shape)}"
            raise _NotCertainError(f"expected an input FP32 or FP16 [3, height, width], given {given}")
        return inputs[0]

    def _size(self, shape: tuple[int, ...]) -> NetworkSize:
        text = self.metadata.get("imgsz", "")
        height, width = shape[1:]
        stated = read_pair(text) if text else None
        if stated is None and (text or -1 in shape):
            raise _NotCertainError(f"expected imgsz [height, width], given {_quote(text)}")
        if stated is not None:
            if height not in (-1, stated[0]) or width not in (-1, stated[1]):
                raise _NotCertainError(f"imgsz is {_quote(text)}, the input [3, {height}, {width}]")
            height, width = stated
        if not (height and width):
            raise _NotCertainError(f"the input is {width} pixels wide and {height} high")
        return NetworkSize(width, height)

    def _output(self) -> OutputSpec:
        if len(self.spec.outputs) != 1:
            raise _NotCertainError(f"expected one output, given {len(self.spec.outputs)}")
        return self.spec.outputs[0]

    def _box_counts(self, size: NetworkSize) -> tuple[int, ...]:
        """Return the numbers of cells of the grids that networks of this greatest stride have."""
        text = self.metadata["stride"]
        greatest = int(text) if _NUMBER.fullmatch(text) else 0
        if greatest not in (16, 32, 64):
            raise _NotCertainError(f"expected stride 16, 32 or 64, given {_quote(text)}")
        grids = [stride for stride in (4, 8, 16, 32, 64) if stride <= greatest]
        cells = [count_cells(size, stride) for stride in grids]
        return tuple(sum(cells[first:]) for first in range(3))

    def _boxes(self, output: OutputSpec, shape: tuple[int, ...], size: NetworkSize, count: int) -> dict[str, str]:
        has_rows = len(shape) == 2 and shape[1] == 6
        if has_rows and self.metadata.get("head") == _RTDETR:
            return {
                "detection_head": "yolov10", "detection_box_format": "cxcywh", "detection_box_unit": "normalized",
            }  # fmt: skip
        # Until 8.3, exporters did not state end2end for YOLOv10. RT-DETR had [boxes, 4 + names] then.
        is_final = self._is_final
        if has_rows and (is_final or (re.match(r"8\.[0-3]\.", self.metadata.get("version", "")) and count != 2)):
            return {"detection_head": "yolov10"}
        if len(shape) == 2 and shape[0] == 4 + count and not is_final:
            self._check_box_count(output, shape[1], size)
            return {"detection_head": "yolov8"}
        if len(shape) == 2 and shape[1] == 4 + count and self.metadata.get("head", _RTDETR) == _RTDETR and not is_final:
            return {"detection_head": "rtdetr"}
        expected = "[boxes, 6] after NMS" if is_final else f"[{4 + count}, boxes] for {count} names"
        raise _NotCertainError(_mismatch(output, shape, expected))

    @property
    def _is_final(self) -> bool:
        """Whether boxes come out after NMS, or need none."""
        has_nms = re.search(r"'nms': True\b", self.metadata.get("args", "")) is not None
        return has_nms or self.metadata.get("end2end") == "True"

    def _keypoints(self, output: OutputSpec, shape: tuple[int, ...], size: NetworkSize, count: int) -> dict[str, str]:
        text = self.metadata.get("kpt_shape", "")
        points = read_pair(text)
        if points is None or points[0] == 0 or points[1] != 3:
            raise _NotCertainError(f"expected kpt_shape [keypoints, 3], given {_quote(text)}")
        rows, columns = 4 + count + 3 * points[0], 6 + 3 * points[0]
        if self._is_final and len(shape) == 2 and shape[1] == columns:
            return {"detection_head": "yolov10", "detection_keypoints": str(points[0])}
        if self._is_final or len(shape) != 2 or shape[0] != rows:
            expected = f"[boxes, {columns}] after NMS" if self._is_final else f"[{rows}, boxes] for {count} names"
            raise _NotCertainError(_mismatch(output, shape, f"{expected} and {points[0]} keypoints"))
        self._check_box_count(output, shape[1], size)
        return {"detection_head": "yolov8", "detection_keypoints": str(points[0])}

    def _check_box_count(self, output: OutputSpec, given: int, size: NetworkSize) -> None:
        counts = self._box_counts(size)
        if given not in (-1, *counts):
            expected = ", ".join(map(str, counts))
            raise _NotCertainError(f"output '{output.name}' has {given} boxes, expected one of {expected}")

    def _with_objectness(
        self, output: OutputSpec, shape: tuple[int, ...], size: NetworkSize, count: int
    ) -> dict[str, str]:
        # Three anchors for each cell.
        box_counts = [3 * cells for cells in self._box_counts(size)]
        if len(shape) != 2 or shape[0] not in (-1, *box_counts) or shape[1] != 5 + count:
            expected = f"[{' or '.join(map(str, box_counts))}, {5 + count}] of YOLOv5, because no task is stated"
            raise _NotCertainError(_mismatch(output, shape, expected))
        return {"detection_head": "yolov5"}


def read_names(text: str) -> tuple[str, ...]:
    """Return the class names of a Python literal, {0: 'a', 1: 'b'} or ['a', 'b']. Raises _NotCertainError."""
    text = text.strip()
    if len(text) < 2 or text[0] + text[-1] not in ("{}", "[]"):
        raise _NotCertainError(f"expected names as {{0: 'person'}}, given {_quote(text)}")
    has_keys, end = text[0] == "{", len(text) - 1
    names: dict[int, str] = {}
    at = 1
    while at < end:
        found = _NAME.match(text, at, end)
        key = None if found is None else found[1]
        if found is None or (key is not None) != has_keys:
            raise _NotCertainError(f"expected names as {{0: 'person'}}, given {_quote(text[at:])} in them")
        index = len(names) if key is None else int(key)
        if index in names or index >= MAX_LABELS:
            raise _NotCertainError(f"expected each of at most {MAX_LABELS} names once, given {index} in them")
        names[index] = _read_string(found[2])
        at = found.end()
    if not names or max(names) != len(names) - 1:
        raise _NotCertainError(f"expected names for 0, 1, 2 ..., given {len(names)} of them")
    return tuple(names[index] for index in range(len(names)))


def _read_string(literal: str) -> str:
    """Return the printable characters of a string literal. Raises _NotCertainError."""
    value = literal[1:-1]
    if "\\" in literal:
        try:
            value = ast.literal_eval(literal)
        except (SyntaxError, ValueError):
            raise _NotCertainError(f"expected a string literal, given {_quote(literal)}") from None
    return "".join(char if char.isprintable() else " " for char in value[:MAX_LABEL_LENGTH])


def read_pair(text: str) -> tuple[int, int] | None:
    """Return the two numbers of "[640, 480]", or the one number of "640" twice; None for any other text."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return int(text), int(text)
    found = _PAIR.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2]))


def _without_batch(spec: ModelSpec, tensor: InputSpec | OutputSpec, rank: int) -> tuple[int, ...]:
    has_batch_inside = spec.max_batch_size == 0 and len(tensor.dims) > rank and tensor.dims[0] in (1, -1)
    return tensor.dims[1:] if has_batch_inside else tensor.dims


def _mismatch(output: OutputSpec, shape: tuple[int, ...], expected: str) -> str:
    return f"output '{output.name}' is {list(shape)}, expected {expected}"


def _count(number: int, noun: str) -> str:
    plural = {"class": "classes"}.get(noun, noun + "s")
    return f"{number} {noun if number == 1 else plural}"


def _quote(text: str) -> str:
    shown = "".join(char if char.isprintable() else " " for char in text[:60])
    return f"'{shown}{'...' if len(text) > 60 else ''}'" if text else "nothing"
