"""Parser of inference.yml, which PaddleOCR writes beside a model, and of the characters or class names that RapidOCR
and RapidLayout write into the model's metadata.

Only the sections PreProcess and PostProcess are read: others have anchors. A text detector (DBPostProcess) states how a
picture becomes its input, a recogniser of text (CTCLabelDecode) lists its characters. PaddleOCR adds a space to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edge_server.plugins.vision.exporters.exported_metadata import (
    MAX_LABELS,
    ExportedMetadata,
    UnfitMetadataError,
    parse_numbers,
    printable,
    quote,
)
from edge_server.plugins.vision.exporters.simple_yaml import Node, parse_yaml
from edge_server.plugins.vision.image_parameters import MAX_SIDE
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize

_FILE = "inference.yml"
_USUAL_SIDE = 960
"""Longest side of a picture for a detector whose file does not state it, as in PaddleOCR."""
_SCALES = {"1./255.": "1/255", "1.0/255.0": "1/255", "1/255": "1/255", "None": "1", "null": "1"}


def read_metadata(metadata: Mapping[str, str]) -> ExportedMetadata | None:
    """Return the layout of a text detector, or None if inference.yml is of no such model. Raises UnfitMetadataError."""
    lines = _section(metadata.get(_FILE, ""), "PostProcess")
    if not any(line.strip() == "name: DBPostProcess" for line in lines):
        return None
    decoding, preparing = (_mapping(metadata[_FILE], name) for name in ("PostProcess", "PreProcess"))
    parameters = {
        "image_fit": "letterbox",
        # DetResizeForTest calls cv2.resize without a method.
        "image_interpolation": "linear",
        "detection_score_threshold": repr(_number(decoding, "box_thresh", "0.6")),
        "detection_unclip_ratio": repr(_number(decoding, "unclip_ratio", "1.5")),
    }
    size = NetworkSize(_USUAL_SIDE, _USUAL_SIDE)
    steps = preparing.get("transform_ops")
    for step in steps if isinstance(steps, list) else []:
        kind, values = next(iter(step.items())) if isinstance(step, dict) else ("", "")
        if not isinstance(values, dict):
            continue
        if kind == "DecodeImage":
            parameters["image_color"] = str(values.get("img_mode", "BGR")).lower()
        elif kind == "DetResizeForTest" and "resize_long" in values:
            side = int(_number(values, "resize_long", ""))
            if not 32 <= side <= MAX_SIDE:
                raise UnfitMetadataError(f"inference.yml: expected resize_long of 32 to {MAX_SIDE}, given {side}")
            side += -side % 32
            size = NetworkSize(side, side)
        elif kind == "NormalizeImage":
            scale = str(values.get("scale", "1./255."))
            if scale not in _SCALES:
                raise UnfitMetadataError(f"inference.yml: expected scale 1./255. or null, given {quote(scale)}")
            parameters["image_scale"] = _SCALES[scale]
            for key, name in (("image_mean", "mean"), ("image_stddev", "std")):
                numbers = values.get(name)
                texts = numbers if isinstance(numbers, list) else []
                parameters[key] = ",".join(map(repr, parse_numbers(texts, name, 3)))
    title = "PaddleOCR text detector"
    return ExportedMetadata(title, ("dbnet", "dbnet-sigmoid"), size=size, parameters=parameters)


def read_characters(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the characters of a recogniser of text, in the order of its scores and with the space after the last;
    empty if the metadata have none. Raises UnfitMetadataError."""
    if "character" in metadata:
        found = read_packed_names(metadata)
    else:
        found = tuple(map(printable, _listed_characters(_section(metadata.get(_FILE, ""), "PostProcess"))))
    return (*found, " ") if found else ()


def read_packed_names(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the lines of `character`: characters of a recogniser, or RapidLayout's class names of a detector."""
    text = metadata.get("character", "")
    return tuple(map(printable, text.split("\n"))) if text and text.count("\n") < MAX_LABELS else ()


def _mapping(text: str, name: str) -> dict[str, Node]:
    """Return the section `name`, empty if it is no mapping. Raises UnfitMetadataError."""
    found = parse_yaml("\n".join((f"{name}:", *_section(text, name))))[name]
    return found if isinstance(found, dict) else {}


def _section(text: str, name: str) -> list[str]:
    """Return the lines below the key `name`, which begins a line."""
    found: list[str] | None = None
    for line in text.split("\n"):
        if found is not None and line.strip(" \r") and line[0] not in " -":
            break
        if found is not None:
            found.append(line)
        elif line.rstrip(" \r") == f"{name}:":
            found = []
    return found or []


def _listed_characters(lines: list[str]) -> Iterator[str]:
    """Yield the items of character_dict.

    Not with `parse_yaml`: spaces of other scripts are characters here.
    """
    is_inside = False
    for line in lines:
        item = line.strip(" \r")
        if item == "character_dict:":
            is_inside = True
        elif is_inside and (item == "-" or item.startswith("- ")):
            yield _unquote(item[2:])
        elif item:
            is_inside = False


_ESCAPES = {"\\t": "\t", "\\\\": "\\", '\\"': '"', "\\_": "\xa0", "\\N": "\x85", "\\L": "\u2028", "\\P": "\u2029"}


def _unquote(item: str) -> str:
    """Return the text of a YAML scalar. Raises UnfitMetadataError."""
    if len(item) > 1 and item[0] == item[-1] == "'":
        return item[1:-1].replace("''", "'")
    if len(item) < 3 or not item[0] == item[-1] == '"':
        return item
    text = item[1:-1]
    if text in _ESCAPES:
        return _ESCAPES[text]
    if text[:2] in ("\\x", "\\u", "\\U"):
        try:
            return chr(int(text[2:], 16))
        except (ValueError, OverflowError):
            raise UnfitMetadataError(f"inference.yml: expected a character, given {quote(item)}") from None
    return text


def _number(values: Mapping[str, Node], key: str, default: str) -> float:
    return parse_numbers([values.get(key, default)], f"inference.yml: {key}", 1)[0]
