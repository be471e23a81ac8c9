"""Derivation of a vision model's image parameters, output parameters and labels from the metadata and the tensor shapes
of its file, if its configuration names no layout.

Nothing is guessed: only a layout that is certain is applied, see `layouts`. Where metadata and shapes contradict each
other, nothing is recognised and the note says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edge_server.core.model_spec import ModelSpec, Recognised
from edge_server.errors import BadModelConfig
from edge_server.plugins.vision.exporters.exported_metadata import UnfitMetadataError
from edge_server.plugins.vision.exporters.paddle_ocr import read_characters
from edge_server.plugins.vision.layout_search import find_stated_layout, find_unmistakable_layout, joins_rows_of_batch

_HEAD_KEYS = ("detection_head", "class_output", "mask_output", "depth_output", "anomaly_output")
_KIND_OF_HEAD = {
    "yolov5": "objectness", "yolox": "objectness", "yolox_decoded": "objectness", "yolov8": "columns",
    "yolo11": "columns", "yolov10": "after NMS", "yolov8_obb": "oriented", "yolo26_obb": "oriented, after NMS",
}  # fmt: skip
"""Heads of YOLO -> name of what they read. A head reads nothing true in the outputs of another kind."""
_SEVERAL_OUTPUTS = ("ssd", "nms_inside", "yunet", "blazeface", "detr", "ppyoloe")
"""Heads that read more than one output, which a YOLO without masks does not have."""

UNDECIDED = "undecided"
"""Value of the parameter `preprocessing` in a config.pbtxt whose candidates are comments."""


def recognise(spec: ModelSpec, metadata: Mapping[str, str]) -> Recognised | None:
    """Return the image and output parameters and the labels that a model's metadata and shapes give.

    None for a model of no known exporter, and for a configuration that states a head. What the configuration states
    otherwise wins. If the metadata do not fit the model, nothing is recognised and the note says why. Raises
    BadModelConfig for a wrong parameter of the configuration, also for a head that metadata and shapes disprove.
    """
    if joins_rows_of_batch(spec, metadata):
        raise BadModelConfig(
            f"model '{spec.name}': expected max_batch_size 0 and an input with dims [-1, ...] in config.pbtxt, because "
            f"the rows of all pictures of a batch are in one list, given max_batch_size {spec.max_batch_size}. "
            "`edge-server add` writes such a configuration"
        )
    if any(key in spec.parameters for key in _HEAD_KEYS):
        _check_stated_head(spec, metadata)
        return None
    if spec.parameters.get("preprocessing") == UNDECIDED:
        note = (
            "its preprocessing is not decided: config.pbtxt has the candidates as comments, or delete its folder and "
        )
        return Recognised({}, {}, f"{note}use `edge-server add --choose=N`")
    try:
        reader = recognise_text_reader(spec, metadata)
        if reader is not None:
            return reader
        found = find_stated_layout(spec, metadata)
    except UnfitMetadataError as error:
        return Recognised({}, {}, str(error))
    if "image_top_k" in spec.parameters and (found is None or found.task != "classify"):
        return None  # the configuration states a classifier
    if found is not None:
        return Recognised(found.parameters, found.labels, f"recognised by its metadata: {found.title}")
    found = find_unmistakable_layout(spec)
    if found is None:
        return None
    return Recognised(found.parameters, {}, f"recognised by its outputs: {found.title}")


def _check_stated_head(spec: ModelSpec, metadata: Mapping[str, str]) -> None:
    """Raise BadModelConfig if metadata and shapes of outputs together prove another head than `detection_head`."""
    stated = spec.parameters.get("detection_head", "").strip().lower()
    needs_more = stated in _SEVERAL_OUTPUTS and len(spec.outputs) == 1
    has_open_sizes = any(-1 in output.dims[-2:] for output in spec.outputs)
    if not needs_more and (stated not in _KIND_OF_HEAD or has_open_sizes):
        return
    parameters = {key: value for key, value in spec.parameters.items() if not key.startswith("detection_")}
    try:
        found = find_stated_layout(replace(spec, parameters=parameters), metadata)
    except (UnfitMetadataError, BadModelConfig):
        return
    if found is None:
        return
    recognised = found.parameters.get("detection_head", "")
    if recognised in _KIND_OF_HEAD and _KIND_OF_HEAD[recognised] != _KIND_OF_HEAD.get(stated):
        raise BadModelConfig(
            f"model '{spec.name}', parameter 'detection_head': expected {recognised}, as metadata and shapes of the "
            f"file say ({found.title}), given '{stated}'; without the parameter it is recognised"
        )


def recognise_text_reader(spec: ModelSpec, metadata: Mapping[str, str]) -> Recognised | None:
    """Return the labels of a recogniser of text, which are its characters.

    None if the metadata list none, or if the model has other outputs than one with a score for each of them and for the
    blank. Raises UnfitMetadataError.
    """
    labels = read_characters(metadata)
    if not labels or len(spec.outputs) != 1:
        return None
    (output,) = spec.outputs
    if not output.dims or output.dims[-1] != len(labels) + 1:
        return None
    return Recognised({}, {output.name: labels}, f"recognised by its metadata: text of {len(labels)} characters")
