"""Parser of `model_info` in an OpenVINO IR, as OpenVINO's Model API and Ultralytics write it.

Names: https://github.com/openvinotoolkit/model_api, model configuration.
"""

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

_PREFIX = "model_info/"
_LAYOUTS = {
    "classification": ("classes",),
    "ssd": ("openvino-boxes", "detection-output"),
    "yolo": ("yolov8", "end2end"),
    "yolov5": ("yolov8",),
    "yolov8": ("yolov8",),
    "yolo11": ("yolov8",),
}
"""Model type in lower case -> layouts. Model API reads YOLOv5u, not YOLOv5, under "YOLOv5"."""
_FITS = {"standard": "stretch", "fit_to_window_letterbox": "letterbox", "crop": "crop"}
_INTERPOLATIONS = {"LINEAR": "linear", "CUBIC": "cubic"}
"""Without NEAREST: OpenVINO takes another pixel than `image_interpolation` nearest between two that are as near."""


def read_metadata(metadata: Mapping[str, str]) -> ExportedMetadata | None:
    """Return the layout and labels of model_info, or None if there is none. Raises UnfitMetadataError."""
    info = {key.removeprefix(_PREFIX): text for key, text in metadata.items() if key.startswith(_PREFIX)}
    if "model_type" not in info:
        return None
    kind = info["model_type"]
    layouts = _LAYOUTS.get(kind.lower())
    if layouts is None:
        raise UnfitMetadataError(f"expected model_type out of {', '.join(_LAYOUTS)}, given {quote(kind)}")
    labels = labels_by_index(enumerate(info.get("labels", "").split()))
    fit = info.get("resize_type", "standard")
    if fit not in _FITS:
        raise UnfitMetadataError(f"expected resize_type out of {', '.join(_FITS)}, given {quote(fit)}")
    interpolation = info.get("interpolation_mode", "LINEAR")
    if interpolation not in _INTERPOLATIONS:
        expected = ", ".join(_INTERPOLATIONS)
        raise UnfitMetadataError(f"expected interpolation_mode out of {expected}, given {quote(interpolation)}")
    is_reversed = info.get("reverse_input_channels", "").lower() in ("true", "yes", "1")
    parameters = {
        "image_fit": _FITS[fit], "image_color": "rgb" if is_reversed else "bgr", "image_scale": "1",
        "image_interpolation": _INTERPOLATIONS[interpolation],
    }  # fmt: skip
    if fit == "crop":
        parameters["image_crop_offset"] = "before"
    if fit == "fit_to_window_letterbox":
        (pad_value,) = parse_numbers([info.get("pad_value", "0")], "pad_value", 1)
        parameters["image_pad_value"] = f"{pad_value:.0f}"
    for key, parameter in (("mean_values", "image_mean"), ("scale_values", "image_stddev")):
        if info.get(key, "").strip():
            texts = info[key].replace(",", " ").split()
            parameters[parameter] = ",".join(map(repr, parse_numbers(texts, key, 1 if len(texts) == 1 else 3)))
    title = f"OpenVINO {quote(kind)[1:-1]}, {count_noun(len(labels), 'class')}"
    max_stride = 32 if "yolov8" in layouts else None
    return ExportedMetadata(title, layouts, {"C": len(labels)}, labels, None, max_stride, parameters)
