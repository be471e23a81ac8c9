"""Reader of TensorRT's plan files: the engine, and the metadata that Ultralytics' exports put before it.

Format of the head: length in 4 bytes, little-endian, then so many bytes of a JSON object
(https://github.com/ultralytics/ultralytics, `engine_header`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from edge_server.backends.base import MAX_METADATA_TEXT

_LENGTH_BYTES = 4


def read_plan(path: Path) -> tuple[bytes, str]:
    """Return the engine, and the JSON text before it, or "" if there is none. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        # The first bytes of an engine are a larger number.
        text = _json_object(file.read(length)) if 0 < length <= min(MAX_METADATA_TEXT, size - _LENGTH_BYTES) else ""
        if not text:
            file.seek(0)
        return file.read(), text


def _json_object(content: bytes) -> str:
    """Return the text, or "" if it is no JSON object."""
    try:
        text = content.decode()
        return text if isinstance(json.loads(text), dict) else ""
    except (ValueError, RecursionError):
        return ""
