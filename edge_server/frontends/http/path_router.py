"""Paths to endpoints: a table of patterns, and Triton's answers to paths and verbs that are not in it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Generic, TypeVar
from urllib.parse import unquote

from edge_server.errors import InvalidRequest

Endpoint = TypeVar("Endpoint")

_PLACE = re.compile(r"\\\{(\w+)\\\}")
_CACHED_PATHS = 256


class NoSuchPath(Exception):
    """No endpoint has that path: 404."""


class NoSuchMethod(Exception):
    """The path exists, but not with that verb: 405."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        super().__init__(", ".join(allowed))
        self.allowed = allowed


class PathRouter(Generic[Endpoint]):
    """Finds endpoints by verb and path. Patterns are tried in the order in which they were added.

    A pattern is a path with names in braces: "/v2/models/{model}/infer". A name takes one segment, never an empty one,
    and is handed on percent-decoded. Add everything before the first `find`.
    """

    def __init__(self) -> None:
        self._patterns: list[tuple[re.Pattern[str], dict[str, Endpoint]]] = []
        # Clients send the same few paths over and over.
        self._match = functools.lru_cache(maxsize=_CACHED_PATHS)(self._match_patterns)

    def add(self, pattern: str, endpoints: Mapping[str, Endpoint]) -> None:
        """Add one path; `endpoints` maps verbs to what answers them."""
        expression = _PLACE.sub(r"(?P<\1>[^/]+)", re.escape(pattern))
        self._patterns.append((re.compile(expression + "/?"), dict(endpoints)))

    def find(self, method: str, target: str) -> tuple[Endpoint, Mapping[str, str]]:
        """Return the endpoint and the names found in the path. Raises NoSuchPath, NoSuchMethod, InvalidRequest.

        `target` is the request line's, still percent-encoded, with or without a query.
        """
        endpoints, names = self._match(target.partition("?")[0])
        endpoint = endpoints.get(method)
        if endpoint is None:
            raise NoSuchMethod(tuple(sorted(endpoints)))
        return endpoint, names

    def _match_patterns(self, path: str) -> tuple[dict[str, Endpoint], Mapping[str, str]]:
        for pattern, endpoints in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                return endpoints, {name: _decoded(text) for name, text in match.groupdict().items()}
        raise NoSuchPath(path)


def _decoded(segment: str) -> str:
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError:
        raise InvalidRequest("the path is not UTF-8") from None
