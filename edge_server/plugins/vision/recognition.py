"""Recognition of a model that states no head: image and output parameters, and labels, from its metadata and shapes.

Nothing is guessed: only a layout that is certain is applied, see `layouts`. Where metadata and shapes contradict each
other, nothing is recognised and the note says why.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge_server.core.model_spec import ModelSpec, Recognised
from edge_server.plugins.vision.exporters.exported_metadata import UnfitMetadataError
from edge_server.plugins.vision.layouts import find_stated_layout, find_unmistakable_layout

_HEAD_KEYS = ("detection_head", "class_output", "mask_output", "depth_output", "anomaly_output")


def recognise(spec: ModelSpec, metadata: Mapping[str, str]) -> Recognised | None:
    """Return the image and output parameters and the labels that a model's metadata and shapes give.

    None for a model of no known exporter, and for a configuration that states a head. What the configuration states
    otherwise wins. If the metadata do not fit the model, nothing is recognised and the note says why.
    """
    task = metadata.get("task")
    if any(key in spec.parameters for key in _HEAD_KEYS) or ("image_top_k" in spec.parameters and task != "classify"):
        return None
    try:
        found = find_stated_layout(spec, metadata)
    except UnfitMetadataError as error:
        return Recognised({}, {}, str(error))
    if found is not None:
        return Recognised(found.parameters, found.labels, f"recognised by its metadata: {found.title}")
    found = find_unmistakable_layout(spec)
    if found is None:
        return None
    return Recognised(found.parameters, {}, f"recognised by its outputs: {found.title}")
