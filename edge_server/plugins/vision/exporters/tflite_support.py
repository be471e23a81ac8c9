"""Parser of the metadata of TFLite Support and MediaPipe in a TFLite file, as `backends.tflite_metadata` reads them.

As their Task Library, it stretches a picture to the input, and passes bytes unchanged to an input of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_server.plugins.vision.exporters.exported_metadata import (
    ExportedMetadata,
    UnfitMetadataError,
    count_noun,
    labels_by_index,
    number_text,
    numbers_text,
    parse_object,
    quote,
)


def read_metadata(metadata: Mapping[str, str]) -> ExportedMetadata | None:
    """Return the layout and labels of a classifier, a segmentation or MediaPipe's short range face detector, else None.

    Raises UnfitMetadataError.
    """
    if "tflite_metadata" not in metadata:
        return None
    described = parse_object("TFLITE_METADATA", metadata["tflite_metadata"])
    inputs, outputs = (_tensors(described, role) for role in ("inputs", "outputs"))
    if len(inputs) != 1 or inputs[0].get("content") != "image":
        return None
    if [output.get("name") for output in outputs] == ["regressors", "classificators"]:
        parameters = _image(inputs[0]) | {"image_fit": "letterbox"}
        return ExportedMetadata("MediaPipe faces", ("blazeface",), {}, ("face",), parameters=parameters)
    if len(outputs) != 1 or "axis_labels" not in outputs[0]:
        return None
    (output,) = outputs
    labels = _labels(metadata, str(output["axis_labels"]))
    parameters = _image(inputs[0])
    task, layout = ("segment", "class-maps") if output.get("content") == "image" else ("classify", "classes")
    if output.get("type") == "UINT8" and task == "classify":
        parameters["class_scale"] = _scale(output)
    title = f"TFLite {task}, {count_noun(len(labels), 'class')}"
    return ExportedMetadata(title, (layout,), {"C": len(labels)}, labels, parameters=parameters)


def _tensors(described: Mapping[str, Any], role: str) -> list[dict[str, Any]]:
    # An ONNX file may have a text of the same key.
    found = described.get(role)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise UnfitMetadataError(f"expected a list of {role} in TFLITE_METADATA, given {quote(repr(found))}")
    return found


def _labels(metadata: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the labels of a packed file, one a line."""
    text = metadata.get(f"packed/{name}")
    if text is None:
        raise UnfitMetadataError(f"expected labels in the packed file {quote(name)}, given no such text")
    return labels_by_index(enumerate(line.rstrip("\r") for line in text.removesuffix("\n").split("\n")))


def _image(item: Mapping[str, Any]) -> dict[str, str]:
    color = item.get("color")
    if color != "rgb":
        raise UnfitMetadataError(f"expected an input of RGB, given {quote(repr(color))}")
    parameters = {"image_color": "rgb", "image_scale": "1", "image_fit": "stretch"}
    if item.get("type") == "UINT8":
        return parameters
    for key, parameter in (("mean", "image_mean"), ("std", "image_stddev")):
        parameters[parameter] = numbers_text(item.get(key), f"{key} of the input")
    return parameters


def _scale(output: Mapping[str, Any]) -> str:
    if output.get("zero_point") != 0:
        raise UnfitMetadataError(f"expected scores with zero point 0, given {quote(repr(output.get('zero_point')))}")
    return number_text(output.get("scale"), "scale of the scores")
