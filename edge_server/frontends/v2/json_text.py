"""JSON text of hostile clients, read within bounds, and JSON answers written.

Deliberately unlike Triton, whose answer to malformed JSON is 500: what is wrong with a request is INVALID_ARG here, so
400. Its clients look only at "not 200".
"""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring_ascii

import numpy as np

from edge_server.errors import InvalidRequest

MAX_NESTING = 100

_CHUNK_BYTES = 1 << 20
_NOT_STRUCTURE = bytes(octet for octet in range(256) if octet not in b'[]{}"')
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"?')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        # Readers disagree on which of two members counts; a proxy may have judged the other one.
        raise InvalidRequest("failed to parse the request JSON buffer: an object has two members of the same name")
    return members


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
# What is written are trees made here: to look for circles in them would take as long as to write them.
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def parse_json(text: bytes | bytearray | memoryview) -> object:
    """Return the value of a JSON text in UTF-8; bare NaN, Infinity and -Infinity are numbers.

    Raises InvalidRequest for anything that is not JSON, is nested deeper than MAX_NESTING, repeats a member, or holds
    half of a surrogate pair.
    """
    raw = bytes(text)
    _check_nesting(raw)
    try:
        decoded = raw.decode("utf-8")
        value: object = _DECODER.decode(decoded)
        if _SURROGATE.search(decoded):
            # Only \u escapes can bring half a pair in, and such a string can be written nowhere later.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        # ValueError covers JSON's and Unicode's own errors and integers with more digits than Python converts.
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    return value


def parse_object(text: bytes | bytearray | memoryview) -> dict[str, object]:
    """Return the members of a JSON object; an empty text counts as an empty object. Raises InvalidRequest."""
    if not len(text):
        return {}
    value = parse_json(text)
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
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def _check_nesting(raw: bytes) -> None:
    """Refuse deep nesting before the recursive parser meets it."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return
    if b"\\" in raw:
        raw = _ESCAPE.sub(b"", raw)
    brackets = _STRING.sub(b"", raw.translate(None, _NOT_STRUCTURE))
    depth = 0
    for start in range(0, len(brackets), _CHUNK_BYTES):
        depth = _depth_after(brackets[start : start + _CHUNK_BYTES], depth)


def _depth_after(brackets: bytes, depth: int) -> int:
    octets = np.frombuffer(brackets, np.uint8)
    depths = depth + np.where((octets == ord("[")) | (octets == ord("{")), 1, -1).cumsum()
    if depths.max() > MAX_NESTING:
        raise InvalidRequest(f"failed to parse the request JSON buffer: nested deeper than {MAX_NESTING} levels")
    return int(depths[-1])
