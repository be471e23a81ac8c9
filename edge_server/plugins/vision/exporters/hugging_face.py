"""Parser of config.json and preprocessor_config.json, which Hugging Face's transformers write beside a model.

Scores: `transformers` applies softmax, with "no object" as last class, for DETR and YOLOS, and sigmoid for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from edge_server.plugins.vision.image_parameters import MAX_SIDE
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize

SOFTMAX_MODELS = ("detr", "yolos", "table-transformer")
SIGMOID_MODELS = (
    "rt_detr", "rt_detr_v2", "d_fine", "deimv2", "deformable_detr", "conditional_detr", "dab_detr", "lw_detr",
    "rf_detr", "deta",
)  # fmt: skip
_INTERPOLATIONS = {0: "nearest", 2: "linear_antialias", 3: "cubic_antialias"}
"""Pillow's numbers, without box, Hamming and Lanczos, which no class of processor has as its default."""
_SHAPE_KEEPERS = (
    "Bit", "CLIP", "ConditionalDetr", "ConvNext", "DeformableDetr", "Deta", "Detr", "Levit", "MobileNet", "MobileViT",
    "PoolFormer", "TextNet", "Yolos",
)  # fmt: skip
"""Beginnings of the names of processors that take a size of one number for the shorter side, not for a square."""
_LEVIT_SCALE = 256 / 224
_CROP_PARTS = {"ConvNext": 224 / 256, "PoolFormer": 0.9}
"""Beginning of a processor's name -> its crop_pct where none is stated."""
_MIN_CONVNEXT_STRETCH = 384
"""From this side on, ConvNextImageProcessor cuts nothing off."""


def read_metadata(metadata: Mapping[str, str]) -> ExportedMetadata | None:
    """Return the layout and labels of config.json, or None for no image model. Raises UnfitMetadataError."""
    text = metadata.get("config.json")
    # Language models have such a file, too.
    if text is None or ("ForObjectDetection" not in text and "ForImageClassification" not in text):
        return None
    config = parse_object("config.json", text)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnfitMetadataError(f"config.json: expected one of architectures, given {quote(repr(names))}")
    labels = labels_by_index(_labels(config.get("id2label")))
    kind = config.get("model_type")
    if names[0].endswith("ForImageClassification"):
        layouts, task = ("logits",), "classify"
    elif kind in SOFTMAX_MODELS:
        layouts, task = ("detr-softmax",), "detect"
    elif kind in SIGMOID_MODELS:
        layouts, task = ("detr-sigmoid",), "detect"
    else:
        known = ", ".join((*SOFTMAX_MODELS, *SIGMOID_MODELS))
        raise UnfitMetadataError(f"config.json: expected model_type out of {known}, given {quote(repr(kind))}")
    if "preprocessor_config.json" not in metadata:
        raise UnfitMetadataError("expected preprocessor_config.json beside config.json, given none")
    size, parameters = _image(parse_object("preprocessor_config.json", metadata["preprocessor_config.json"]))
    title = f"{quote(str(kind))[1:-1]} {task}, {count_noun(len(labels), 'class')}"
    return ExportedMetadata(
        title, layouts, {"C": len(labels)}, labels, size, parameters=parameters, is_exact_size=False
    )


def _labels(value: object) -> Iterator[tuple[int, str]]:
    if not isinstance(value, dict):
        raise UnfitMetadataError(f"config.json: expected id2label with an object, given {quote(repr(value))}")
    for key, name in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 6 and isinstance(name, str)):
            raise UnfitMetadataError(f"config.json: expected id2label as {{'0': 'name'}}, given {quote(repr(key))}")
        yield int(key), name


def _image(config: Mapping[str, Any]) -> tuple[NetworkSize, dict[str, str]]:
    """Return the size of the picture, and how it becomes the input."""
    kind = str(config.get("image_processor_type", config.get("feature_extractor_type", "")))
    parameters = _pixel_values(config, kind)
    if kind.startswith("Perceiver"):
        raise UnfitMetadataError(f"{quote(kind)} cuts a picture before it is resized, which is not offered")
    size, crop, is_cut = config.get("size"), config.get("crop_size"), bool(config.get("do_center_crop"))
    shape = dict(size) if isinstance(size, dict) else _shape(size, kind.startswith(_SHAPE_KEEPERS))
    shorter = shape.get("shortest_edge")
    if shorter is not None:
        shorter = _side(shorter, "shortest_edge")
        if kind.startswith("Levit"):
            shorter = int(_LEVIT_SCALE * shorter)
        elif kind.startswith(tuple(_CROP_PARTS)) or "crop_pct" in config:
            usual = _CROP_PARTS["PoolFormer" if kind.startswith("PoolFormer") else "ConvNext"]
            fraction = float(number_text(config.get("crop_pct", usual), "crop_pct"))
            if not 0.1 <= fraction <= 1:
                raise UnfitMetadataError(f"expected crop_pct from 0.1 to 1, given {fraction}")
            if kind.startswith("PoolFormer"):
                shorter = int(shorter / fraction)
            elif shorter < _MIN_CONVNEXT_STRETCH:
                is_cut, crop, shorter = True, shorter, int(shorter / fraction)
            else:
                shape, shorter = _shape(shorter, False), None
    cut = crop if isinstance(crop, dict) else {"height": crop, "width": crop}
    if (
        is_cut
        and shorter is None
        and (cut.get("height"), cut.get("width")) != (shape.get("height"), shape.get("width"))
    ):
        raise UnfitMetadataError(
            f"expected a crop of a picture that keeps its shape (size with shortest_edge), given {quote(repr(shape))}"
        )
    if is_cut and shorter is not None:
        parameters |= {"image_fit": "crop", "image_resize": str(_side(shorter, "size")), "image_crop_offset": "down"}
        shape = cut
    elif "height" in shape:
        parameters["image_fit"] = "stretch"
    else:
        # The picture keeps its shape. A border of the mean is 0 for the network.
        parameters |= {"image_fit": "letterbox", "image_pad_value": "124,116,104"}
        shape = {"height": shape.get("shortest_edge"), "width": shape.get("shortest_edge")}
    return NetworkSize(_side(shape.get("width"), "width"), _side(shape.get("height"), "height")), parameters


def _pixel_values(config: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Return how pixels become values, and how they are interpolated. `kind` is the class of the processor."""
    parameters = {"image_color": "bgr" if config.get("do_flip_channel_order") else "rgb", "image_scale": "1"}
    resample = config.get("resample", 2)
    if isinstance(resample, bool) or resample not in (0, 2, 3):
        known = ", ".join(map(str, _INTERPOLATIONS))
        raise UnfitMetadataError(f"expected resample out of {known}, given {quote(repr(resample))}")
    parameters["image_interpolation"] = _INTERPOLATIONS[resample]
    if config.get("rescale_offset"):
        raise UnfitMetadataError("expected rescale_offset false, given true")
    if config.get("do_rescale", True):
        factor = number_text(config.get("rescale_factor", 1 / 255), "rescale_factor")
        parameters["image_scale"] = "1/255" if factor == repr(1 / 255) else factor
    # MobileViT's class alone does not normalise unless that is stated.
    if config.get("do_normalize", not kind.startswith("MobileViT")):
        parameters["image_mean"] = numbers_text(config.get("image_mean"), "image_mean")
        parameters["image_stddev"] = numbers_text(config.get("image_std"), "image_std")
        if config.get("include_top"):
            # EfficientNet divides by the deviation twice.
            parts = parameters["image_stddev"].split(",")
            parameters["image_stddev"] = ",".join(repr(float(part) ** 2) for part in parts)
    return parameters


def _shape(side: object, keeps_shape: bool) -> dict[str, object]:
    """Return the size of one number as transformers does (get_size_dict)."""
    return {"shortest_edge": side} if keeps_shape else {"height": side, "width": side}


def _side(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIDE:
        raise UnfitMetadataError(f"expected 1 to {MAX_SIDE} pixels as {what} of size, given {quote(repr(value))}")
    return value
