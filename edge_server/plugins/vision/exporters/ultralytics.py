"""Parser of the metadata that Ultralytics and YOLOv5 write into their exports: task, names, imgsz, stride and others.

Texts are matched by patterns in linear time, and only strings are evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from edge_server.plugins.vision.exporters.exported_metadata import (
    ExportedMetadata,
    UnfitMetadataError,
    count_noun,
    labels_by_index,
    parse_object,
    quote,
)
from edge_server.plugins.vision.exporters.simple_yaml import parse_yaml
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize

TASKS = ("detect", "pose", "obb", "segment", "depth", "classify")

_RTDETR = "RTDETRDecoder"
_NAME = re.compile(r"""\s*(?:(\d{1,5})\s*:\s*)?('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")\s*(,|$)""")
_PAIR = re.compile(r"[\[(]\s*(\d{1,5})\s*,\s*(\d{1,5})\s*[\])]")
_NUMBER = re.compile(r"\d{1,5}")


def read_metadata(metadata: Mapping[str, str]) -> ExportedMetadata | None:
    """Return the layout and labels of the metadata, or None for others than those of a YOLO export. Raises
    UnfitMetadataError.

    They are in the file itself, in metadata.yaml beside it, before a TensorRT engine, or packed into a TFLite file.
    """
    metadata, parameters = _find_metadata(metadata)
    task = metadata.get("task")
    if "stride" not in metadata or (task is None and "names" not in metadata):
        return None
    if task is not None and task not in TASKS:
        raise UnfitMetadataError(f"task {quote(task)} is not decoded, only {', '.join(TASKS[:-1])} and {TASKS[-1]}")
    labels = read_names(metadata.get("names", ""))
    title = f"yolo {task or 'detect'}, {count_noun(len(labels), 'class')}"
    symbols = {"C": len(labels)}
    if task == "pose":
        text = metadata.get("kpt_shape", "")
        points = read_pair(text)
        if points is None or points[0] == 0 or points[1] not in (2, 3):
            raise UnfitMetadataError(f"expected kpt_shape [keypoints, 2 or 3], given {quote(text)}")
        symbols["K"] = points[0]
        title += f", {count_noun(points[0], 'keypoint')}"
        names = ("end2end-pose",) if _is_final(metadata) else ("yolov8-pose", "yolov8-pose-transposed")
        layouts = tuple(name + ("" if points[1] == 3 else "-xy") for name in names)
    elif task == "obb":
        layouts = ("end2end-obb",) if _is_final(metadata) else ("yolov8-obb",)
    elif task == "segment":
        layouts = ("end2end-seg",) if _is_final(metadata) else ("yolov8-seg",)
    elif task == "depth":
        return ExportedMetadata(
            "yolo depth in metres", ("depth",), size=_read_size(metadata), parameters={"depth_kind": "metric"}
        )
    elif task == "classify":
        layouts = ("classes",)
    elif task is None:
        layouts = ("yolov5", "yolov5-seg")
    else:
        layouts = _detect_layouts(metadata, len(labels))
    max_stride = None
    if task != "classify":
        text = metadata["stride"]
        max_stride = int(text) if _NUMBER.fullmatch(text) else 0
        if max_stride not in (16, 32, 64):
            raise UnfitMetadataError(f"expected stride 16, 32 or 64, given {quote(text)}")
    size = _read_size(metadata)
    if task == "classify":
        # As Ultralytics' classify_transforms: only a square input keeps the shape of the picture.
        parameters["image_interpolation"] = "linear_antialias"
        parameters["image_fit"] = "crop" if size is None or size.width == size.height else "stretch"
        if size is not None and parameters["image_fit"] == "crop":
            parameters["image_resize"] = str(size.width)
    else:
        # As LetterBox of Ultralytics, also where it shrinks a picture.
        parameters["image_interpolation"] = "linear"
    return ExportedMetadata(title, layouts, symbols, labels, size, max_stride, parameters)


def _find_metadata(metadata: Mapping[str, str]) -> tuple[Mapping[str, str], dict[str, str]]:
    """Return the texts of an export, wherever they are, and the parameters that follow from the place."""
    # Other programs write files of these names, too.
    if "stride" not in metadata and "stride:" in metadata.get("metadata.yaml", ""):
        return _texts_of(parse_yaml(metadata["metadata.yaml"])), {}
    if "stride" not in metadata and '"stride"' in metadata.get("metadata.json", ""):
        return _texts_of(parse_object("metadata.json", metadata["metadata.json"])), {}
    if "stride" in metadata or '"stride"' not in metadata.get("packed/metadata.json", ""):
        return metadata, {}
    found = _texts_of(parse_object("metadata.json", metadata["packed/metadata.json"]))
    if found.get("task") not in ("detect", "pose", "classify") or _is_final(found):
        raise UnfitMetadataError("a TFLite file is recognised for detect, pose and classify without NMS")
    # Ultralytics divides positions by the size of the input, so that they can be quantized.
    return found, {} if found["task"] == "classify" else {"detection_box_unit": "normalized"}


def _texts_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a file as the texts that stand in an ONNX file."""
    found = {key: value for key, value in values.items() if isinstance(value, str)}
    for key in ("stride", "imgsz", "kpt_shape", "end2end"):
        value = values.get(key, "")
        found[key] = f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
    found["end2end"] = found["end2end"].capitalize()
    names, arguments = values.get("names"), values.get("args")
    if isinstance(names, dict):
        found["names"] = f"{{{', '.join(f'{key}: {str(name)!r}' for key, name in names.items())}}}"
    elif isinstance(names, list):
        found["names"] = repr([str(name) for name in names])
    if isinstance(arguments, dict) and str(arguments.get("nms", "")).lower() == "true":
        found["args"] = "{'nms': True}"
    return found


def _detect_layouts(metadata: Mapping[str, str], class_count: int) -> tuple[str, ...]:
    is_final, head = _is_final(metadata), metadata.get("head")
    if head == _RTDETR:
        return ("rtdetr-rows",) if is_final else ("rtdetr-rows", "rtdetr")
    if is_final:
        return ("end2end",)
    layouts = ["yolov8", "yolov8-transposed"]
    if head is None:
        layouts.append("rtdetr")
    # Until 8.3, exporters did not state end2end for YOLOv10. RT-DETR had [boxes, 4 + names] then.
    if re.match(r"8\.[0-3]\.", metadata.get("version", "")) and class_count != 2:
        layouts.append("end2end")
    return tuple(layouts)


def _is_final(metadata: Mapping[str, str]) -> bool:
    """Return whether boxes come out after NMS, or need none."""
    has_nms = re.search(r"'nms': True\b", metadata.get("args", "")) is not None
    return has_nms or metadata.get("end2end") == "True"


def _read_size(metadata: Mapping[str, str]) -> NetworkSize | None:
    text = metadata.get("imgsz", "")
    stated = read_pair(text) if text else None
    if stated is None:
        if text:
            raise UnfitMetadataError(f"expected imgsz [height, width], given {quote(text)}")
        return None
    return NetworkSize(stated[1], stated[0])


def read_names(text: str) -> tuple[str, ...]:
    """Return the class names of a Python literal, {0: 'a', 1: 'b'} or ['a', 'b']. Raises UnfitMetadataError."""
    text = text.strip()
    if len(text) < 2 or text[0] + text[-1] not in ("{}", "[]"):
        raise UnfitMetadataError(f"expected names as {{0: 'person'}}, given {quote(text)}")
    return labels_by_index(_parse_names(text))


def _parse_names(text: str) -> Iterator[tuple[int, str]]:
    has_keys, end = text[0] == "{", len(text) - 1
    at, count = 1, 0
    while at < end:
        found = _NAME.match(text, at, end)
        key = None if found is None else found[1]
        if found is None or (key is not None) != has_keys:
            raise UnfitMetadataError(f"expected names as {{0: 'person'}}, given {quote(text[at:])} in them")
        yield count if key is None else int(key), _read_string(found[2])
        at, count = found.end(), count + 1


def _read_string(literal: str) -> str:
    """Return the characters of a string literal. Raises UnfitMetadataError."""
    if "\\" not in literal:
        return literal[1:-1]
    try:
        return str(ast.literal_eval(literal))
    except (SyntaxError, ValueError):
        raise UnfitMetadataError(f"expected a string literal, given {quote(literal)}") from None


def read_pair(text: str) -> tuple[int, int] | None:
    """Return the two numbers of "[640, 480]", or the one number of "640" twice; None for any other text."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return int(text), int(text)
    found = _PAIR.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2]))
