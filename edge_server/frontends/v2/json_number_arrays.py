"""Large arrays of a request's JSON, kept as text until the tensor that they fill is known.

A number is some bytes of text and a few bytes of tensor, but thirty to a hundred bytes of Python objects in between.
So a large `data` array is cut out of the text before the parser sees it, and parsed piece by piece into the tensor.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edge_server.errors import InvalidRequest

MAX_NESTING = 100

MAX_ARRAYS = 1024 * 1024
"""Most arrays within one: each takes the time of many numbers, and a tensor needs few."""

LARGE_BYTES = 64 * 1024
"""Arrays of fewer bytes are parsed with the rest: they cost little."""

_PIECE_BYTES = 256 * 1024
"""How much text is parsed, and held as Python objects, at a time."""

# Brackets, digits, white space, and the letters of true, false, null, NaN and Infinity: what holds neither strings nor
# objects. Which of it is JSON, the parser of the pieces says.
_LARGE = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*(\[[][0-9eE+.,\-truefalsnNIity \t\r\n]{%d,}\])' % LARGE_BYTES)
_SPACE = b" \t\r\n"
_EMPTY = re.compile(rb"\[[ \t\r\n]*\]")

_MARK = f"array {secrets.token_hex(16)} "
"""Stands, with a number, for an array that was cut out. No client can know it."""


@dataclass(frozen=True, slots=True)
class ArrayText:
    """A JSON array of numbers, booleans and arrays of such, not parsed yet."""

    text: memoryview

    def count(self) -> tuple[int, bool]:
        """Return the most elements that it can have, and whether it has as many if it is JSON at all.

        Raises InvalidRequest when it is made of more than MAX_ARRAYS arrays.
        """
        most, arrays = 1, 0
        for piece in _slices(self.text):
            octets = bytes(piece)
            most += octets.count(b",")
            arrays += octets.count(b"[")
        if arrays > MAX_ARRAYS:
            raise _malformed(f"more than {MAX_ARRAYS} arrays")
        return most, _EMPTY.search(self.text) is None

    def pieces(self) -> Iterator[bytes]:
        """Yield JSON arrays, each as deeply nested as the whole, whose elements in a row are its elements.

        They are JSON if, and only if, the whole is. Raises InvalidRequest for what shows between two of them.
        """
        text, start, depth = self.text, 0, 0
        while start < len(text):
            end = _cut(text, start)
            piece = bytes(text[start:end])
            before, depth = depth, depth + piece.count(b"[") - piece.count(b"]")
            if depth < 0 or (depth == 0) != (end == len(text)):
                raise _malformed("its brackets do not match")
            if depth > MAX_NESTING:
                raise _malformed(f"nested deeper than {MAX_NESTING} levels")
            yield b"[" * before + piece + b"]" * depth
            start = end + 1  # behind the comma


def _slices(text: memoryview) -> Iterator[memoryview]:
    return (text[start : start + _PIECE_BYTES] for start in range(0, len(text), _PIECE_BYTES))


def _cut(text: memoryview, start: int) -> int:
    """Return where the piece from `start` on ends: at a comma between two values, or at the end of the text."""
    if len(text) - start <= _PIECE_BYTES:
        return len(text)
    near = bytes(text[start + _PIECE_BYTES // 2 : start + _PIECE_BYTES])
    place = near.rfind(b",")
    if place < 0:
        raise _malformed(f"no comma within {len(near)} bytes")
    # Between two pieces, and so in neither, may not be what is wrong: no value before the comma, or none behind it.
    if near[:place].rstrip(_SPACE)[-1:] in (b"", b"[", b",") or near[place + 1 :].lstrip(_SPACE)[:1] in (b"]", b","):
        raise _malformed("a value is missing at a comma")
    end = start + _PIECE_BYTES // 2 + place
    if not near[place + 1 :].strip(_SPACE) and _lacks_value(text, end + 1):
        raise _malformed("a value is missing at a comma")
    return end


def _lacks_value(text: memoryview, start: int) -> bool:
    following = bytes(text[start : start + _PIECE_BYTES]).lstrip(_SPACE)[:1]
    return following in (b"", b"]", b",")


def _malformed(what: str) -> InvalidRequest:
    return InvalidRequest(f"failed to parse the request JSON buffer: in a large 'data' array, {what}")


def cut_out(text: bytes | bytearray | memoryview) -> tuple[bytes, dict[str, ArrayText]]:
    """Return the text with a string in place of each large `data` array, and the arrays by these strings."""
    if len(text) <= LARGE_BYTES:
        return bytes(text), {}
    view = memoryview(text)
    parts: list[bytes] = []
    arrays: dict[str, ArrayText] = {}
    done = quotes = 0
    for match in _LARGE.finditer(view):
        part = bytes(view[done : match.start(1)])
        quotes += part.count(b'"')
        # Within a string, or perhaps: an escaped quote counts as none, and looks like one.
        if quotes % 2 or b"\\" in part:
            break
        name = f"{_MARK}{len(arrays)}"
        arrays[name] = ArrayText(view[match.start(1) : match.end(1)])
        parts += [part, b'"', name.encode("ascii"), b'"']
        done = match.end(1)
    if not arrays:
        return bytes(text), arrays
    parts.append(bytes(view[done:]))
    return b"".join(parts), arrays


def put_back(pairs: list[tuple[str, Any]], arrays: dict[str, ArrayText]) -> list[tuple[str, Any]]:
    """Return an object's members with the arrays that were cut out of them."""
    return [(key, arrays.get(value, value) if isinstance(value, str) else value) for key, value in pairs]
