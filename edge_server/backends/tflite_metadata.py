"""Reader of the metadata in TensorFlow Lite files: normalization and label files of TFLite Support, and the texts in a
zip archive at the end.

Encoding: FlatBuffers, https://flatbuffers.dev/internals/. Fields: schema.fbs of TensorFlow Lite, and
https://github.com/tensorflow/tflite-support/blob/master/tensorflow_lite_support/metadata/metadata_schema.fbs.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from edge_server.backends.base import MAX_METADATA_TEXT

_MODEL, _METADATA = b"TFL3", b"M001"
"""Bytes 4 to 8 of a model, and of its metadata."""
_METADATA_NAME = "TFLITE_METADATA"
_MAX_ELEMENTS = 64
"""Maximum number of inputs, outputs, and elements of the short lists among the metadata."""
_MAX_TABLES = 1 << 20
_MAX_TEXT_BYTES = 1024
_MAX_METADATA_BYTES = 1 << 20

_TYPES = {0: "FP32", 3: "UINT8"}
"""TensorType -> data type."""
_IMAGE, _NORMALIZATION, _AXIS_LABELS = 2, 1, 2
"""Members of ContentProperties, ProcessUnitOptions and AssociatedFileType. The file of the last has a label for each
index of the last dimension."""
_COLORS = {1: "rgb", 2: "gray"}


MAX_PACKED_FILES = 16
_MAX_DIRECTORY_BYTES = 1 << 16
_END_OF_ZIP = b"PK\x05\x06"


def read_tflite_metadata(path: Path) -> Mapping[str, str]:
    """Return the packed texts under "packed/NAME", and inputs and outputs as JSON under "tflite_metadata".

    What is damaged, larger than MAX_METADATA_TEXT bytes or not UTF-8 is omitted.
    """
    found = {f"packed/{name}": text for name, text in _read_packed(path).items()}
    if (described := describe_tensors(path)) is not None:
        found["tflite_metadata"] = described
    return found


def _read_packed(path: Path) -> Mapping[str, str]:
    """Return the files of the zip archive at the end of a file, or nothing if there is none of a small directory."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 65557))
        end = file.read()
    at = end.rfind(_END_OF_ZIP)
    if at < 0 or int.from_bytes(end[at + 12 : at + 16], "little") > _MAX_DIRECTORY_BYTES:
        return {}
    import zipfile
    import zlib

    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist()[:MAX_PACKED_FILES]:
                if info.file_size <= MAX_METADATA_TEXT:
                    with archive.open(info) as packed:
                        content = packed.read(MAX_METADATA_TEXT + 1)
                    with contextlib.suppress(UnicodeDecodeError):
                        found[info.filename] = content.decode()
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError, RuntimeError, EOFError):
        return {}
    return found


def describe_tensors(path: Path) -> str | None:
    """Return inputs and outputs as JSON, None for a file without such metadata and for a damaged one.

    {"inputs": [{"name": "image", "type": "FP32", "content": "image", "color": "rgb", "mean": [127.5], "std": [127.5]}],
    "outputs": [{"name": "scores", "type": "UINT8", "scale": 0.004, "zero_point": 0, "axis_labels": "labels.txt"}]}.
    Only what the file states is there; "type" is empty for others than FP32 and UINT8.
    """
    try:
        with path.open("rb", buffering=0) as file:
            described = _describe_model(_root(partial(_read_file, file.fileno()), _MODEL))
    except (OSError, ValueError):
        return None
    return None if described is None else json.dumps(described)


def _describe_model(model: _Table) -> dict[str, Any] | None:
    index = next((item.integer(1, "I") for item in model.tables(6) if item.text(0) == _METADATA_NAME), None)
    graph = next(model.tables(2), None)
    if index is None or graph is None:
        return None
    content = model.table_at(4, index).bytes(0, _MAX_METADATA_BYTES)
    described = next(_root(lambda position, size: content[position : position + size], _METADATA).tables(3), None)
    if described is None:
        return None
    return {
        role: [
            _describe_tensor(graph.table_at(0, number), metadata)
            for number, metadata in zip(graph.numbers(of_graph, "i"), described.tables(of_metadata), strict=False)
        ]
        for role, of_graph, of_metadata in (("inputs", 1, 2), ("outputs", 2, 3))
    }


def _describe_tensor(tensor: _Table, metadata: _Table) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tensor.text(3), "type": _TYPES.get(tensor.integer(1, "b"), "")}
    if (quantization := tensor.table(4)) is not None:
        scales, zero_points = quantization.numbers(2, "f"), quantization.numbers(3, "q")
        if len(scales) == len(zero_points) == 1:
            found |= {"scale": scales[0], "zero_point": zero_points[0]}
    if (content := metadata.table(3)) is not None and content.integer(0, "B") == _IMAGE:
        found["content"] = "image"
        if (properties := content.table(1)) is not None:
            found["color"] = _COLORS.get(properties.integer(0, "b"), "")
    for unit in metadata.tables(4):
        if unit.integer(0, "B") == _NORMALIZATION and (options := unit.table(1)) is not None:
            found |= {"mean": options.numbers(0, "f"), "std": options.numbers(1, "f")}
    # The file of one language comes after the one of all.
    for file in sorted(metadata.tables(6), key=lambda file: file.text(3)):
        if file.integer(2, "b") == _AXIS_LABELS:
            found.setdefault("axis_labels", file.text(0))
    return found


Reader = Callable[[int, int], bytes]
"""Returns the bytes of a position and length; fewer at the end of the data."""


def _read_file(descriptor: int, position: int, size: int) -> bytes:
    # Mapped, a file that is overwritten in place would kill the process.
    return os.pread(descriptor, size, position)


def _root(read: Reader, identifier: bytes) -> _Table:
    if read(4, 4) != identifier:
        raise ValueError("another format")
    return _Table(read, _unpack("I", read, 0))


def _unpack(format: str, read: Reader, position: int) -> Any:
    """Return the number at a position. Raises ValueError outside the data."""
    if position < 0:
        raise ValueError("an offset that leads before the beginning")
    try:
        return struct.unpack(f"<{format}", read(position, struct.calcsize(f"<{format}")))[0]
    except struct.error as error:
        raise ValueError("an offset that leads past the end") from error


class _Table(NamedTuple):
    """A table of a FlatBuffer. Fields have the numbers of the schema's order; a union has two, its type and its value.

    All methods raise ValueError for offsets that lead out of the data, and for more than their limits.
    """

    read: Reader
    position: int

    def _find(self, field: int) -> int | None:
        """Return the position of a field, None if it is absent."""
        vtable = self.position - _unpack("i", self.read, self.position)
        entry = 4 + 2 * field
        if entry + 2 > _unpack("H", self.read, vtable):
            return None
        offset = _unpack("H", self.read, vtable + entry)
        return self.position + offset if offset else None

    def _follow(self, position: int) -> int:
        return position + int(_unpack("I", self.read, position))

    def _vector(self, field: int, limit: int) -> tuple[int, int]:
        """Return position and number of elements of a vector; 0 elements if it is absent."""
        found = self._find(field)
        if found is None:
            return 0, 0
        position = self._follow(found)
        count = int(_unpack("I", self.read, position))
        if count > limit:
            raise ValueError(f"{count} elements")
        return position + 4, count

    def integer(self, field: int, format: str) -> int:
        found = self._find(field)
        return 0 if found is None else int(_unpack(format, self.read, found))

    def numbers(self, field: int, format: str) -> list[Any]:
        position, count = self._vector(field, _MAX_ELEMENTS)
        size = struct.calcsize(f"<{format}")
        return [_unpack(format, self.read, position + size * index) for index in range(count)]

    def bytes(self, field: int, limit: int) -> bytes:
        return self.read(*self._vector(field, limit))

    def text(self, field: int) -> str:
        return self.bytes(field, _MAX_TEXT_BYTES).decode("utf-8", "replace")

    def table(self, field: int) -> _Table | None:
        found = self._find(field)
        return None if found is None else _Table(self.read, self._follow(found))

    def table_at(self, field: int, index: int) -> _Table:
        position, count = self._vector(field, _MAX_TABLES)
        if not 0 <= index < count:
            raise ValueError(f"element {index} of {count}")
        return _Table(self.read, self._follow(position + 4 * index))

    def tables(self, field: int) -> Iterator[_Table]:
        """Yield the tables of a vector, which has at most _MAX_ELEMENTS."""
        position, count = self._vector(field, _MAX_ELEMENTS)
        for index in range(count):
            yield _Table(self.read, self._follow(position + 4 * index))
