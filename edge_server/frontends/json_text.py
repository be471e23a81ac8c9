"""JSON parser and writer of the HTTP endpoints: refuses texts that are too deep, hold too many values or name a member
twice.

Malformed JSON is INVALID_ARG (400). This differs from Triton, which responds with 500; its clients only check for 200.

orjson parses and writes arrays of numbers: a request with 1,000 numbers takes 0.3 ms of processor time instead of 1.3
ms, one with 150,000 numbers 24 ms instead of 113 ms. The standard library's json parses everything else, because it can
refuse repeated members. orjson would save 0 of 130 us for a cached header of 300 bytes, and 10 of 210 us for a new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.frontends.json_number_arrays import MAX_NESTING, ArrayText, cut_out, put_back

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_VALUES = 2 * 1024 * 1024
"""Maximum number of commas, colons and opening brackets outside of strings. Each can cause 70 bytes of Python objects:
64 MiB of "{}," would become 1.5 GB."""

_CHUNK_BYTES = 1 << 20
_NOT_STRUCTURE = bytes(octet for octet in range(256) if octet not in b'[]{}",:')
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        # Parsers disagree about which of two equal members counts: a proxy may have checked the other one.
        raise InvalidRequest("failed to parse the request JSON buffer: an object has two members of the same name")
    return members


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_NUMBER_DECODER = json.JSONDecoder()
# The server's own values have no circular references, and a check for them takes as long as the encoding.
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def parse_json(text: bytes | bytearray | memoryview, *, cuts: bool = False) -> object:
    """Return the value of a JSON text in UTF-8. NaN, Infinity and -Infinity are accepted as numbers.

    With `cuts`, large arrays in members named "data" become ArrayText. Raises InvalidRequest for text that is not JSON,
    is nested deeper than MAX_NESTING, has more than MAX_VALUES values, repeats a member, or has an unpaired surrogate.
    """
    raw, arrays = cut_out(text) if cuts else (bytes(text), {})
    check_structure(raw)
    try:
        decoded = raw.decode("utf-8")
        decoder = _DECODER
        if arrays:
            decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: _unique(put_back(pairs, arrays)))
        value: object = decoder.decode(decoded)
        if _SURROGATE.search(decoded):
            # Only \u escapes can contain an unpaired surrogate; such a string could not be encoded later.
            json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except (ValueError, RecursionError) as error:
        # ValueError includes errors of JSON and Unicode, and integers with more digits than Python converts.
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    return value


def parse_numbers(text: bytes) -> object:
    """Return the value of a JSON text without strings and objects. Raises ValueError.

    Without the limits of `parse_json`: the caller checks size and nesting. Integers of more than 64 bits may become
    floating point.
    """
    # Imported for the first array: a server without JSON tensors saves the memory.
    import orjson

    try:
        value: object = orjson.loads(text)
    except ValueError:
        # orjson does not accept NaN and infinities.
        return _NUMBER_DECODER.decode(text.decode("ascii"))
    return value


def format_numbers(numbers: list[object]) -> str:
    """Return numbers as a JSON array.

    If one of them is NaN or infinite, the text is not valid, and contains the letter "n".
    """
    import orjson

    return str(orjson.dumps(numbers), "ascii")


def parse_object(text: bytes | bytearray | memoryview, *, cuts: bool = False) -> dict[str, object]:
    """Return the members of a JSON object; an empty text means an empty object. See `parse_json`."""
    if not len(text):
        return {}
    try:
        value = parse_json(text, cuts=cuts)
    except InvalidRequest as error:
        if text[0] in b"{[ \t\r\n":
            raise
        # curl sends a picture without its content type, and phones take pictures that are not read.
        raise InvalidRequest(
            f"{error.message}. If it is a picture: expected a JPEG, PNG, BMP or WebP image with the header "
            f"'Content-Type: image/jpeg', given {len(text)} bytes beginning with 0x{bytes(text[:8]).hex()}"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"request JSON must be an object, got {json_type(value)}")
    return value


def to_json(value: object) -> bytes:
    """Return the value as compact JSON in ASCII; NaN and infinities are written without quotes, as in Triton."""
    return _ENCODER.encode(value).encode("ascii")


def json_string(text: str) -> str:
    """Return the text as a JSON string in ASCII, with its quotes."""
    return encode_basestring_ascii(text)


def json_type(value: object) -> str:
    """Return JSON's name for the type of a parsed value."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    ArrayText: "a large array",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def check_structure(raw: bytes) -> None:
    """Raise InvalidRequest for nesting too deep for the recursive parser, and for more than MAX_VALUES values."""
    may_be_deep = raw.count(b"[") + raw.count(b"{") > MAX_NESTING
    if not may_be_deep and (len(raw) <= MAX_VALUES or raw.count(b",") + raw.count(b":") <= MAX_VALUES - MAX_NESTING):
        return
    depth = count = 0
    for octets in _outside_strings(raw):
        opens = (octets == ord("[")) | (octets == ord("{"))
        closes = (octets == ord("]")) | (octets == ord("}"))
        count += len(octets) - int(closes.sum())
        if count > MAX_VALUES:
            raise InvalidRequest(
                f"failed to parse the request JSON buffer: more than {MAX_VALUES} values. Please use the binary data "
                f"format for tensors of that many elements"
            )
        depths = depth + (opens.astype(np.int8) - closes.astype(np.int8)).cumsum(dtype=np.int64)
        if len(depths):
            if depths.max() > MAX_NESTING:
                raise InvalidRequest(
                    f"failed to parse the request JSON buffer: nested deeper than {MAX_NESTING} levels"
                )
            depth = int(depths[-1])


def _outside_strings(raw: bytes) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the structural characters outside of strings, in chunks that use little memory."""
    has_escapes = b"\\" in raw
    is_inside = is_escaped = False
    for start in range(0, len(raw), _CHUNK_BYTES):
        chunk = raw[start + is_escaped : start + _CHUNK_BYTES]
        if has_escapes:
            chunk = _ESCAPE.sub(b"", chunk)
            is_escaped = chunk.endswith(b"\\")
        octets = np.frombuffer(chunk.translate(None, _NOT_STRUCTURE), np.uint8)
        if not len(octets):
            continue
        quotes = octets == ord('"')
        inside = np.logical_xor.accumulate(quotes) ^ is_inside
        is_inside = bool(inside[-1])
        yield octets[~(inside | quotes)]
