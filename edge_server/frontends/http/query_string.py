"""The query of a request's path: which parameters an endpoint knows, and what they say."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import parse_qsl

from edge_server.errors import InvalidRequest

_MAX_FIELDS = 16
_MAX_DIGITS = 18


def parse_query(target: str, known: Collection[str]) -> dict[str, str]:
    """Return the parameters of a request target. Raises InvalidRequest for one that is not known or comes twice."""
    text = target.partition("?")[2]
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise InvalidRequest(f"the query cannot be read: {error}") from None
    for key, _ in pairs:
        if key not in known:
            raise InvalidRequest(f"unexpected query parameter '{key[:80]}', expected {', '.join(sorted(known))}")
    if len(dict(pairs)) != len(pairs):
        raise InvalidRequest("the query names a parameter twice")
    return dict(pairs)


def whole_number(what: str, text: str) -> int:
    """Return a number of 0 or more. Raises InvalidRequest."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise InvalidRequest(f"'{what}' must be a whole number of 0 or more, got '{text[:80]}'")
    return int(text)


def truth(what: str, text: str) -> bool:
    """Return what "true" or "false" says. Raises InvalidRequest."""
    if text not in ("true", "false"):
        raise InvalidRequest(f"'{what}' must be true or false, got '{text[:80]}'")
    return text == "true"
