"""Class `ExportedMetadata`, what the metadata of a model say about its layout, and functions that several parsers of
metadata share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from edge_server.plugins.vision.outputs.box_candidates import NetworkSize

MAX_LABELS = 65536
MAX_LABEL_LENGTH = 256
MAX_NUMBER = 1e9


class UnfitMetadataError(Exception):
    """Metadata of a known exporter that are damaged, or that do not fit the model."""


class ExportedMetadata(NamedTuple):
    """What an exporter says. It admits one or more layouts; the shapes decide between them.

    `title` is the kind of model for people, as "yolo detect, 80 classes". `layouts` are names in
    `LAYOUTS`. `symbols` are known sizes: "C" classes, "K" keypoints. `size` is the size of the input, `max_stride` the
    greatest stride of its grids; None if it is not stated. `parameters` win over those of the layout. Where
    `is_exact_size` is False, the model's own size wins over `size`.
    """

    title: str
    layouts: tuple[str, ...]
    symbols: Mapping[str, int] = MappingProxyType({})
    labels: tuple[str, ...] = ()
    size: NetworkSize | None = None
    max_stride: int | None = None
    parameters: Mapping[str, str] = MappingProxyType({})
    is_exact_size: bool = True

    @property
    def takes_bytes(self) -> bool:
        """Whether the values 0 to 255 of a picture become the input unchanged."""
        return self.parameters.get("image_scale") == "1" and not {"image_mean", "image_stddev"} & self.parameters.keys()


def printable(text: str) -> str:
    """Return a class name without control characters, cut at MAX_LABEL_LENGTH."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_LABEL_LENGTH])


def labels_by_index(names: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """Return the names in the order of their indices. Raises UnfitMetadataError for gaps, repetitions, too many."""
    by_index: dict[int, str] = {}
    for index, name in names:
        if index in by_index or not 0 <= index < MAX_LABELS:
            raise UnfitMetadataError(f"expected each of at most {MAX_LABELS} names once, given {index} in them")
        by_index[index] = printable(name)
    if not by_index or max(by_index) != len(by_index) - 1:
        raise UnfitMetadataError(f"expected names for 0, 1, 2 ..., given {len(by_index)} of them")
    return tuple(by_index[index] for index in range(len(by_index)))


def parse_numbers(texts: Sequence[object], what: str, count: int) -> list[float]:
    """Return `count` numbers of at most MAX_NUMBER in size. Raises UnfitMetadataError."""
    try:
        found = [float(text) for text in texts[: count + 1] if isinstance(text, str) and len(text) < 40]
    except ValueError:
        found = []
    if len(found) != count or not all(abs(number) <= MAX_NUMBER for number in found):
        raise UnfitMetadataError(f"expected {count} numbers as {what}, given {quote(repr(texts[: count + 1]))}")
    return found


def count_noun(number: int, noun: str) -> str:
    plural = {"class": "classes"}.get(noun, noun + "s")
    return f"{number} {noun if number == 1 else plural}"


def quote(text: str) -> str:
    """Return the beginning of a text in quotes, for messages."""
    shown = "".join(char if char.isprintable() else " " for char in text[:60])
    return f"'{shown}{'...' if len(text) > 60 else ''}'" if text else "nothing"


def parse_object(name: str, text: str) -> Mapping[str, Any]:
    """Return the JSON object of a file. Raises UnfitMetadataError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnfitMetadataError(f"{name}: expected JSON, given {quote(text)}") from error
    if not isinstance(value, dict):
        raise UnfitMetadataError(f"{name}: expected a JSON object, given {quote(text)}")
    return value


def number_text(value: object, what: str) -> str:
    """Return a finite number as a text. Raises UnfitMetadataError."""
    # NaN fails the comparison.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise UnfitMetadataError(f"expected a number as {what}, given {quote(repr(value))}")
    return repr(value)


def numbers_text(value: object, what: str) -> str:
    """Return one number or a list of three, separated by commas. Raises UnfitMetadataError."""
    if isinstance(value, list):
        if len(value) not in (1, 3):
            raise UnfitMetadataError(f"expected one or three numbers as {what}, given {len(value)}")
        return ",".join(number_text(item, what) for item in value)
    return number_text(value, what)
