"""JSON text of hostile clients, read within bounds, and JSON answers written.

Deliberately unlike Triton, whose answer to malformed JSON is 500: what is wrong with a request is INVALID_ARG here, so
400. Its clients look only at "not 200".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.frontends.v2.json_number_arrays import MAX_NESTING, ArrayText, cut_out, put_back

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_VALUES = 2 * 1024 * 1024
"""Most commas, colons and opening brackets outside of strings that the parser is given. Each may stand for 70 bytes
of Python objects, however few of text: 64 MiB of "{}," would be 1.5 GB."""

_CHUNK_BYTES = 1 << 20
_NOT_STRUCTURE = bytes(octet for octet in range(256) if octet not in b'[]{}",:')
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_IMAGES = (
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"\x89PNG\r\n"), "image/png"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)
_IMAGE_BEGINS = b"\xff\x89R"


def _refuse_image(begin: bytes) -> None:
    """Raise InvalidRequest for the beginning of an image file: curl sends one without saying that it is one."""
    for pattern, media_type in _IMAGES:
        if pattern.match(begin):
            raise InvalidRequest(
                f"the request body is an image, not JSON: send it with the header 'Content-Type: {media_type}'"
            )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        # Readers disagree on which of two members counts; a proxy may have judged the other one.
        raise InvalidRequest("failed to parse the request JSON buffer: an object has two members of the same name")
    return members


def _decoder(arrays: dict[str, ArrayText]) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=lambda pairs: _unique(put_back(pairs, arrays)))


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
# What is written are trees made here: to look for circles in them would take as long as to write them.
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def parse_json(text: bytes | bytearray | memoryview, *, cuts: bool = False) -> object:
    """Return the value of a JSON text in UTF-8; bare NaN, Infinity and -Infinity are numbers.

    `cuts`: large arrays of members called "data" are left as ArrayText. Raises InvalidRequest for anything that is not
    JSON, is nested deeper than MAX_NESTING, has more than MAX_VALUES values, repeats a member, or holds half of a
    surrogate pair.
    """
    raw, arrays = cut_out(text) if cuts else (bytes(text), {})
    _check_structure(raw)
    try:
        decoded = raw.decode("utf-8")
        value: object = (_decoder(arrays) if arrays else _DECODER).decode(decoded)
        if _SURROGATE.search(decoded):
            # Only \u escapes can bring half a pair in, and such a string can be written nowhere later.
            json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except (ValueError, RecursionError) as error:
        # ValueError covers JSON's and Unicode's own errors and integers with more digits than Python converts.
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    return value


def parse_object(text: bytes | bytearray | memoryview, *, cuts: bool = False) -> dict[str, object]:
    """Return the members of a JSON object; an empty text counts as an empty object. See `parse_json`."""
    if not len(text):
        return {}
    if text[0] in _IMAGE_BEGINS:
        _refuse_image(bytes(text[:12]))
    value = parse_json(text, cuts=cuts)
    if not isinstance(value, dict):
        raise InvalidRequest(f"request JSON must be an object, got {json_type(value)}")
    return value


def to_json(value: object) -> bytes:
    """Return the value as compact JSON in ASCII; NaN and infinities are written bare, as Triton does."""
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


def _check_structure(raw: bytes) -> None:
    """Refuse deep nesting before the recursive parser meets it, and so many values that memory would suffer."""
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
    """Yield the octets that structure the text, some at a time: whatever the text is, they take little memory."""
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
