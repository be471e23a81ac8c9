"""Parser of large number arrays in a JSON request: cuts them out of the text, and parses them in pieces.

A number takes a few bytes as text and in a tensor, but thirty to a hundred bytes as a Python object. To save memory, a
large `data` array is cut out of the text before the parser runs, and parsed piece by piece later.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.record import record

MAX_NESTING = 100

MAX_ARRAYS = 1024 * 1024
"""Maximum number of arrays inside one: an array takes as long to parse as many numbers, and a tensor needs few."""

LARGE_BYTES = 64 * 1024
"""Smaller arrays are parsed with the rest of the text."""

_PIECE_BYTES = 256 * 1024
"""Maximum bytes of text that become Python objects at the same time."""

# Brackets, digits, white space, and the letters of true, false, null, NaN and Infinity: an array without strings and
# objects. The parser of the pieces checks that it is JSON.
_LARGE = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*(\[[][0-9eE+.,\-truefalsnNIity \t\r\n]{%d,}\])' % LARGE_BYTES)
_SPACE = b" \t\r\n"
_EMPTY = re.compile(rb"\[[ \t\r\n]*\]")

_MARK = f"array {secrets.token_hex(16)} "
"""Placeholder, followed by a number, of an array that is cut out. Random, so that no client can send it."""


@record(frozen=True, slots=True)
class ArrayText:
    """Text of a JSON array of numbers, booleans and nested arrays, not parsed yet."""

    text: memoryview

    def count(self) -> tuple[int, bool]:
        """Return the maximum number of elements, and whether a valid text has exactly that number.

        Raises InvalidRequest for more than MAX_ARRAYS arrays.
        """
        most, arrays = 1, 0
        for start in range(0, len(self.text), _PIECE_BYTES):
            octets = bytes(self.text[start : start + _PIECE_BYTES])
            most += octets.count(b",")
            arrays += octets.count(b"[")
        if arrays > MAX_ARRAYS:
            raise _malformed(f"more than {MAX_ARRAYS} arrays")
        return most, _EMPTY.search(self.text) is None

    def pieces(self) -> Iterator[bytes]:
        """Yield the elements in order, as JSON arrays with the nesting of the whole array.

        The pieces are valid JSON if and only if the whole array is. Raises InvalidRequest for an error between two
        pieces.
        """
        text, start, depth = self.text, 0, 0
        while start < len(text):
            end = _piece_end(text, start)
            piece = bytes(text[start:end])
            before, depth = depth, depth + piece.count(b"[") - piece.count(b"]")
            if depth < 0 or (depth == 0) != (end == len(text)):
                raise _malformed("its brackets do not match")
            if depth > MAX_NESTING:
                raise _malformed(f"nested deeper than {MAX_NESTING} levels")
            yield b"[" * before + piece + b"]" * depth
            start = end + 1  # behind the comma


def _piece_end(text: memoryview, start: int) -> int:
    """Return the end of the piece from `start` on: a comma between two values, or the end of the text."""
    if len(text) - start <= _PIECE_BYTES:
        return len(text)
    near = bytes(text[start + _PIECE_BYTES // 2 : start + _PIECE_BYTES])
    comma = near.rfind(b",")
    if comma < 0:
        raise _malformed(f"no comma within {len(near)} bytes")
    # The parser does not see the comma between two pieces: check here that a value is before and behind it.
    if near[:comma].rstrip(_SPACE)[-1:] in (b"", b"[", b",") or near[comma + 1 :].lstrip(_SPACE)[:1] in (b"]", b","):
        raise _malformed("a value is missing at a comma")
    end = start + _PIECE_BYTES // 2 + comma
    if not near[comma + 1 :].strip(_SPACE):
        following = bytes(text[end + 1 : end + 1 + _PIECE_BYTES]).lstrip(_SPACE)[:1]
        if following in (b"", b"]", b","):
            raise _malformed("a value is missing at a comma")
    return end


def _malformed(problem: str) -> InvalidRequest:
    return InvalidRequest(f"failed to parse the request JSON buffer: in a large 'data' array, {problem}")


def cut_out(text: bytes | bytearray | memoryview) -> tuple[bytes, dict[str, ArrayText]]:
    """Return the text with a placeholder string for each large `data` array, and the arrays by placeholder."""
    if len(text) <= LARGE_BYTES:
        return bytes(text), {}
    view = memoryview(text)
    parts: list[bytes] = []
    arrays: dict[str, ArrayText] = {}
    done = quotes = 0
    for match in _LARGE.finditer(view):
        part = bytes(view[done : match.start(1)])
        quotes += part.count(b'"')
        # The match may be inside a string. With a backslash this is unknown: an escaped quote counts as a quote here.
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
    """Return the members of an object with the arrays in place of their placeholders."""
    return [(key, arrays.get(value, value) if isinstance(value, str) else value) for key, value in pairs]
