"""Parser of infer_cfg.yml, which PaddleDetection writes beside a model: Preprocess, label_list, arch."""

from __future__ import annotations

from collections.abc import Mapping

from edge_server.plugins.vision.exporters.exported_metadata import (
    ExportedMetadata,
    UnfitMetadataError,
    count_noun,
    labels_by_index,
    parse_numbers,
    quote,
)
from edge_server.plugins.vision.exporters.simple_yaml import Node, parse_yaml
from edge_server.plugins.vision.image_parameters import MAX_SIDE
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize

_INTERPOLATIONS = {"0": "nearest", "1": "linear", "2": "cubic", "3": "area"}
"""OpenCV's numbers. PaddleDetection's Resize has 1 if none is stated."""


def read_metadata(metadata: Mapping[str, str]) -> ExportedMetadata | None:
    """Return the layout and labels of infer_cfg.yml, or None if there is none. Raises UnfitMetadataError."""
    text = metadata.get("infer_cfg.yml")
    if text is None:
        return None
    config = parse_yaml(text)
    names = config.get("label_list")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnfitMetadataError("expected label_list with names")
    labels = labels_by_index((index, str(name)) for index, name in enumerate(names))
    size, parameters = _image(config.get("Preprocess", ""))
    title = f"PaddleDetection {quote(str(config.get('arch', '')))[1:-1]} detect, {count_noun(len(labels), 'class')}"
    layouts = ("paddle-rows", "paddle-rows-count", "ppyoloe", "picodet")
    return ExportedMetadata(title, layouts, {"C": len(labels)}, labels, size, parameters=parameters)


def _image(steps: Node) -> tuple[NetworkSize, dict[str, str]]:
    if not isinstance(steps, list):
        raise UnfitMetadataError("expected Preprocess with a list of steps")
    size = None
    parameters = {"image_color": "rgb", "image_fit": "stretch", "image_scale": "1"}
    for step in steps:
        kind = step.get("type") if isinstance(step, dict) else None
        if not isinstance(step, dict) or kind not in ("Resize", "NormalizeImage", "Permute"):
            raise UnfitMetadataError(f"expected steps Resize, NormalizeImage and Permute, given {quote(repr(kind))}")
        if kind == "Resize":
            if _is_true(step.get("keep_ratio", "true")):
                raise UnfitMetadataError("Resize: expected keep_ratio false, given true")
            height, width = (int(value) for value in parse_numbers(_list(step, "target_size"), "target_size", 2))
            if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
                raise UnfitMetadataError(f"Resize: expected target_size of 1 to {MAX_SIDE}, given {height}, {width}")
            size = NetworkSize(width, height)
            parameters["image_interpolation"] = _INTERPOLATIONS.get(str(step.get("interp", 1)), "auto")
        elif kind == "NormalizeImage":
            if _is_true(step.get("is_scale", "true")):
                parameters["image_scale"] = "1/255"
            if step.get("norm_type", "mean_std") == "mean_std":
                parameters["image_mean"] = ",".join(map(repr, parse_numbers(_list(step, "mean"), "mean", 3)))
                parameters["image_stddev"] = ",".join(map(repr, parse_numbers(_list(step, "std"), "std", 3)))
    if size is None:
        raise UnfitMetadataError("expected a step Resize in Preprocess")
    return size, parameters


def _is_true(value: Node) -> bool:
    return value in ("true", "True", "1")


def _list(step: dict[str, Node], key: str) -> list[Node]:
    value = step.get(key)
    return value if isinstance(value, list) else []
