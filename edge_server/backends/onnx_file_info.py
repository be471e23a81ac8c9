"""Reader of an ONNX file's weight types, operators, inputs, outputs, metadata and external data, without loading the
model.

ONNX files are protobuf messages (onnx.proto: ModelProto, GraphProto, NodeProto, TensorProto and others). The reader
follows tags and lengths in a memory map, and skips the bytes of weights. Used by the backends only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edge_server.errors import LoadError

_QUANTISED_OPERATORS = frozenset(
    (
        b"ConvInteger",
        b"DequantizeLinear",
        b"DynamicQuantizeLinear",
        b"MatMulInteger",
        b"QLinearConv",
        b"QLinearMatMul",
        b"QuantizeLinear",
    )
)

_ROW_MIXING_OPERATORS = frozenset((b"DynamicQuantizeLinear", b"DynamicQuantizeMatMul"))

_FLOATS = {1: "f32", 10: "f16", 11: "f64", 16: "bf16"}
"""TensorProto.DataType numbers of the floating types."""

_MAX_ELEMENTS = 1 << 64

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_NODE_INPUT = 1
_TRAPPING_INTEGERS = (6, 7)
"""TensorProto.DataType numbers of INT32 and INT64: the processor cannot divide their least value by -1."""
_MODEL_GRAPH, _GRAPH_NODE, _GRAPH_INITIALIZER, _NODE_OPERATOR = 7, 1, 5, 4
_MODEL_METADATA, _ENTRY_KEY, _ENTRY_VALUE = 14, 1, 2
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_EXTERNAL = 1, 2, 8, 13
_MESSAGES_IN: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
"""Fields that lead to tensors, with the message that each holds."""

_SINGLE_TENSORS = (("attribute", 5), ("attribute", 22), ("sparse tensor", 1), ("sparse tensor", 2))
"""Those of _MESSAGES_IN that hold one tensor and are not repeated."""

_GRAPH_INPUT, _GRAPH_OUTPUT = 11, 12
_VALUE_NAME, _VALUE_TYPE, _TYPE_TENSOR, _ELEMENT, _SHAPE, _DIM, _DIM_VALUE = 1, 2, 1, 1, 2, 1, 1


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output as declared in the graph.

    `element` is a TensorProto.DataType number, 0 if it is no tensor. `dims` has -1 for a dimension of any size, and is
    None if the graph does not declare the number of dimensions.
    """

    name: str
    element: int
    dims: tuple[int, ...] | None


def declared(path: Path) -> tuple[tuple[GraphTensor, ...], tuple[GraphTensor, ...]]:
    """Return the required inputs, and the outputs. Raises ValueError if the file is not ONNX."""
    inputs: list[GraphTensor] = []
    outputs: list[GraphTensor] = []
    weights: set[str] = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for number, start, end in _fields(view, 0, len(view)):
            if number != _MODEL_GRAPH:
                continue
            for inner, begin, stop in _fields(view, start, end):
                if inner == _GRAPH_INITIALIZER:
                    weights.add(_text(view, begin, stop, _TENSOR_NAME))
                elif inner == _GRAPH_INPUT:
                    inputs.append(_value(view, begin, stop))
                elif inner == _GRAPH_OUTPUT:
                    outputs.append(_value(view, begin, stop))
    if not outputs:
        raise ValueError("not an ONNX file: it declares no output")
    # Files of IR version 3 list their weights among the inputs.
    return tuple(item for item in inputs if item.name not in weights), tuple(outputs)


def metadata(path: Path) -> dict[str, str]:
    """Return the texts that the exporter wrote into the file, by key. Raises ValueError if it is not ONNX."""
    found: dict[str, str] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for number, start, end in _fields(view, 0, len(view)):
            if number == _MODEL_METADATA:
                found[_text(view, start, end, _ENTRY_KEY)] = _text(view, start, end, _ENTRY_VALUE)
    return found


def external_files(path: Path, error_prefix: str) -> list[str]:
    """Return the names of the files, relative to the folder of this one, that hold weights of it.

    Looks at every tensor: of the graph, its subgraphs and functions, in attributes and in sparse tensors. Raises
    LoadError unless each is in a regular file inside the folder, with its offset and length inside that file: a runtime
    may read any file or memory otherwise. OpenVINO 2026.4 reads the memory of this process for the location
    `*/_ORT_MEM_ADDR_/*`, which ONNX Runtime uses for itself. Raises ValueError if it is not ONNX.
    """
    found: dict[str, None] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for start, end in _tensors(view):
            if entries := _external_entries(view, start, end):
                name = _text(view, start, end, _TENSOR_NAME)[:80]
                location = _check_external(path.parent, entries, f"{error_prefix}: external data of {name!r}")
                found[location] = None
    return list(found)


def _tensors(view: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield the start and end of every tensor of a model. Its memory grows with the depth of the messages only."""
    open_messages: list[tuple[str, Iterator[tuple[int, int, int]], set[int]]] = [
        ("model", _fields(view, 0, len(view)), set())
    ]
    while open_messages:
        kind, fields, seen = open_messages[-1]
        number, start, end = next(fields, (0, 0, 0))
        inner = _MESSAGES_IN[kind].get(number)
        if end == 0:
            open_messages.pop()
        elif inner is not None:
            # Protobuf joins two into one tensor, which would not have been checked.
            if number in seen and (kind, number) in _SINGLE_TENSORS:
                raise ValueError(f"not an ONNX file: two tensors at byte {start}, where one is expected")
            seen.add(number)
            if inner == "tensor":
                yield start, end
            else:
                open_messages.append((inner, _fields(view, start, end), set()))


def _external_entries(view: mmap.mmap, start: int, end: int) -> dict[str, str]:
    """Return where the bytes of a tensor are: location, offset, length. Empty for a tensor with its bytes in itself."""
    entries: dict[str, str] = {}
    for number, begin, stop in _fields(view, start, end):
        if number == _TENSOR_EXTERNAL:
            # As protobuf does: of a repeated field the last one counts.
            texts = {kind: view[first:last] for kind, first, last in _fields(view, begin, stop)}
            key, value = (os.fsdecode(texts.get(kind, b"")) for kind in (_ENTRY_KEY, _ENTRY_VALUE))
            entries[key] = value
    return entries


def _check_external(folder: Path, entries: Mapping[str, str], error_prefix: str) -> str:
    """Return the location of external data. Raises LoadError if it is not inside a file of the folder."""
    location = entries.get("location", "")
    relative = PurePosixPath(location)
    is_plain = location.isprintable() and "\\" not in location
    if not is_plain or not relative.parts or relative.is_absolute() or ".." in relative.parts:
        raise LoadError(f"{error_prefix}: expected a file beside the model, given {location[:80]!r}")
    try:
        state = os.stat(folder / relative)
    except OSError:
        raise LoadError(f"{error_prefix}: expected its weights '{location[:80]}' beside it") from None
    if not stat.S_ISREG(state.st_mode):
        raise LoadError(f"{error_prefix}: expected '{location[:80]}' to be a regular file")
    numbers = [entries.get(key) or "0" for key in ("offset", "length")]
    is_inside = all(number.isascii() and number.isdecimal() and len(number) < 20 for number in numbers)
    if not is_inside or sum(map(int, numbers)) > state.st_size:
        raise LoadError(
            f"{error_prefix}: expected an offset and a length inside '{location[:80]}' of {state.st_size} bytes, "
            f"given {' and '.join(number[:80] for number in numbers)}"
        )
    return location


def _value(view: mmap.mmap, start: int, end: int) -> GraphTensor:
    element, dims = 0, None
    for number, begin, stop in _fields(view, start, end):
        if number == _VALUE_TYPE:
            for kind, first, last in _fields(view, begin, stop):
                if kind == _TYPE_TENSOR:
                    element, dims = _element_and_dims(view, first, last)
    return GraphTensor(_text(view, start, end, _VALUE_NAME), element, dims)


def _element_and_dims(view: mmap.mmap, start: int, end: int) -> tuple[int, tuple[int, ...] | None]:
    element, dims = 0, None
    for number, begin, stop in _fields(view, start, end):
        if number == _ELEMENT:
            element = _varint(view, begin, stop)[0]
        elif number == _SHAPE:
            dims = tuple(_dim(view, first, last) for kind, first, last in _fields(view, begin, stop) if kind == _DIM)
    return element, dims


def _dim(view: mmap.mmap, start: int, end: int) -> int:
    for number, begin, stop in _fields(view, start, end):
        if number == _DIM_VALUE:
            size = _varint(view, begin, stop)[0]
            return size if 0 < size < 1 << 63 else -1
    return -1


def _text(view: mmap.mmap, start: int, end: int, wanted: int) -> str:
    for number, begin, stop in _fields(view, start, end):
        if number == wanted:
            return view[begin:stop].decode("utf-8", "replace")
    return ""


def arithmetic(path: Path) -> str | None:
    """Return "int8" for a file with quantised operators, else the floating type of most weights ("f32", "f16" ...).

    None if the file has no floating-point weights outside its operators. Raises ValueError if it is not ONNX.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        elements: Counter[str] = Counter()
        for number, start, end in _fields(view, 0, len(view)):
            if number == _MODEL_GRAPH and _count_weights(view, start, end, elements):
                return "int8"
    return elements.most_common(1)[0][0] if elements else None


def _count_weights(view: mmap.mmap, start: int, end: int, elements: Counter[str]) -> bool:
    """Count a graph's weights by type. Return True, and stop, at the first quantised operator."""
    for number, begin, stop in _fields(view, start, end):
        if number == _GRAPH_INITIALIZER:
            kind, count = _tensor(view, begin, stop)
            if kind in _FLOATS:
                elements[_FLOATS[kind]] += count
        elif number == _GRAPH_NODE and _operator(view, begin, stop) in _QUANTISED_OPERATORS:
            return True
    return False


def has_operator(path: Path, names: frozenset[bytes]) -> bool:
    """Return whether the graph itself has a node with one of these operators. Raises ValueError if it is not ONNX."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return any(
            inner == _GRAPH_NODE and _operator(view, begin, stop) in names
            for number, start, end in _fields(view, 0, len(view))
            if number == _MODEL_GRAPH
            for inner, begin, stop in _fields(view, start, end)
        )


def mixes_rows(path: Path) -> bool:
    """Return whether an answer depends on the other rows of its batch, as the graph itself quantizes a whole tensor by
    the largest value in it. False if the file is not ONNX."""
    with contextlib.suppress(ValueError):
        return has_operator(path, _ROW_MIXING_OPERATORS)
    return False


def integer_divisor(path: Path) -> str | None:
    """Return the name of an INT32 or INT64 input that the graph itself divides by, None if there is none. Raises
    ValueError if the file is not ONNX."""
    names = {item.name for item in declared(path)[0] if item.element in _TRAPPING_INTEGERS}
    if not names:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for number, start, end in _fields(view, 0, len(view)):
            for inner, begin, stop in _fields(view, start, end) if number == _MODEL_GRAPH else ():
                if inner == _GRAPH_NODE and _operator(view, begin, stop) == b"Div":
                    given = [view[at:to] for field, at, to in _fields(view, begin, stop) if field == _NODE_INPUT]
                    if len(given) > 1 and (name := given[1].decode("utf-8", "replace")) in names:
                        return name
    return None


def _operator(view: mmap.mmap, start: int, end: int) -> bytes:
    for number, begin, stop in _fields(view, start, end):
        if number == _NODE_OPERATOR:
            return view[begin : min(stop, begin + 64)]
    return b""


def _tensor(view: mmap.mmap, start: int, end: int) -> tuple[int, int]:
    """Return the element type and the number of elements of a weight."""
    kind, count = 0, 1
    for number, begin, stop in _fields(view, start, end):
        if number == _TENSOR_TYPE:
            kind = _varint(view, begin, stop)[0]
        elif number == _TENSOR_DIMS:
            while begin < stop:
                size, begin = _varint(view, begin, stop)
                # A damaged file may have a million dims. Their product without a limit would take hours.
                count = min(count * size, _MAX_ELEMENTS)
    return kind, count


def _fields(view: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each field of a message its number, and the start and end of its value."""
    at = start
    while at < end:
        tag, at = _varint(view, at, end)
        if tag >> 32:  # Other readers drop the upper bits, and so would see another field.
            raise ValueError(f"not an ONNX file: field number {tag >> 3} at byte {at}")
        wire = tag & 7
        if wire == _VARINT:
            stop = _varint(view, at, end)[1]
        elif wire == _BYTES:
            length, at = _varint(view, at, end)
            stop = at + length
        elif wire in (_FIXED64, _FIXED32):
            stop = at + (8 if wire == _FIXED64 else 4)
        else:
            raise ValueError(f"not an ONNX file: wire type {wire} at byte {at}")
        if stop > end:
            raise ValueError(f"not a whole ONNX file: a field ends at byte {stop}, its message at {end}")
        yield tag >> 3, at, stop
        at = stop


def _varint(view: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """Return the value of a varint, and the position after it."""
    value = shift = 0
    while at < end and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"not an ONNX file: a number does not end by byte {at}")
