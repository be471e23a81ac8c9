"""Parser of a JSON object among metadata, with typed access to its values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edge_server.plugins.vision.exporters.exported_metadata import MAX_NUMBER, UnfitMetadataError, quote


def parse_object(name: str, text: str) -> Mapping[str, Any]:
    """Return the object of a file. Raises UnfitMetadataError."""
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
