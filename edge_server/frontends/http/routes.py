"""Class `Route` (method, path, handler, access), and the router that finds the route of a request."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from edge_server.errors import EdgeServerError, InvalidRequest, NotFound, ServingFault
from edge_server.frontends.http.request import Handler, HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse

_NAME = re.compile(r"\{(\w+)\}")
_CACHED_ROUTES = 256

_INFERENCE_ELSEWHERE = re.compile(r"(/[^/]+)*[/:](infer|invocations|predict|predictions)")
"""Paths for inference of other servers, and misspelt ones of this server."""

_INFERENCE_HINT = "; inference is POST /v2/models/NAME/infer"


class Route(NamedTuple):
    """The line of a method and a path.

    A segment of `path` is literal or a name in braces: "/v2/models/{model}/infer". A name matches one segment, never an
    empty one, and is percent-decoded. `category` is one of `config.CATEGORIES`, or "" if the route is open to everyone.
    `summary` is its line in the OpenAPI document. Without a handler, the route is inference.
    """

    method: str
    path: str
    category: str
    summary: str
    handler: Handler | None = None
    changes_server: bool = False
    """Whether a request can change the state of the server: `CrossSiteCheck` then accepts only this server's pages."""
    uses_aiohttp: bool = False
    """Whether aiohttp runs the handler, and is imported for it; else it runs in a task of its own."""
    schema: str = ""
    """`module:NAME` of its OperationSchema, see `schemas`. Without one, it needs no body and answers a JSON object."""


class DeferredEndpoints:
    """Handlers of objects that are made, and their modules imported, for the first request to one of them. `arguments`
    are those of their classes. Of each class there is one object."""

    def __init__(self, *arguments: Any) -> None:
        def make(name: str) -> Any:
            from pkgutil import resolve_name  # here, because a server without such a request need not import it

            return resolve_name(name)(*arguments)

        self._make = functools.cache(make)

    def handler(self, name: str) -> Handler:
        """Return the handler `module:Class.method`."""
        class_name, _, method = name.rpartition(".")
        return functools.partial(self._handle, class_name, method)

    async def _handle(self, class_name: str, method: str, request: HttpRequest) -> HttpResponse | None:
        handler: Handler = getattr(self._make(class_name), method)
        return await handler(request)


RefusalBody: TypeAlias = Callable[[RequestHead, EdgeServerError], "bytes | None"]
"""Returns the body of a response that refuses a request before its handler runs; None: the usual JSON object."""


class NoSuchPath(NotFound):
    """No route has this path."""


class NoSuchMethod(Exception):
    """The path exists, but not with this method: 405. `hint` names the path that may be meant."""

    def __init__(self, allowed: Iterable[str], hint: str = "") -> None:
        self.allowed = tuple(sorted(allowed))
        self.hint = hint
        super().__init__(", ".join(self.allowed))


class _PathNode:
    """A place in the tree of paths: the segments that may follow, and the routes of the path that ends here."""

    __slots__ = ("literals", "name", "routes")

    def __init__(self) -> None:
        self.literals: dict[str, _PathNode] = {}
        self.name: _PathNode | None = None
        self.routes: dict[str, tuple[Route, list[str]]] = {}
        """Method -> route, and the names in its path."""

    def add(self, route: Route) -> Route | None:
        """Add a route. If there is one with its method and path, return that one instead. Raises ServingFault."""
        node, names = self, []
        for segment in _segments(route.path):
            name = _NAME.fullmatch(segment)
            if name is None:
                if "{" in segment:
                    raise ServingFault(f"HTTP route {route.method} {route.path}: a name must be a whole segment")
                node = node.literals.setdefault(segment, _PathNode())
            else:
                names.append(name[1])
                node.name = node.name or _PathNode()
                node = node.name
        other = node.routes.setdefault(route.method, (route, names))
        return None if other[1] is names else other[0]

    def match(
        self, segments: Sequence[str], index: int, values: list[str]
    ) -> Mapping[str, tuple[Route, list[str]]] | None:
        """Return the routes of a path from its segment `index` on, by method; None for an unknown path.

        Appends the segments that names stand for to `values`.
        """
        if index == len(segments):
            return self.routes or None
        segment = segments[index]
        literal = self.literals.get(segment)
        if literal is not None and (found := literal.match(segments, index + 1, values)) is not None:
            return found
        if self.name is None or not segment:
            return None
        values.append(segment)
        found = self.name.match(segments, index + 1, values)
        if found is None:
            values.pop()
        return found


class PathRouter:
    """Finds routes by method and path.

    From left to right, a literal segment is preferred to a name: /v2/models/stats is never the model "stats". The order
    of the routes does not matter.
    """

    def __init__(self, routes: Iterable[Route] = ()) -> None:
        """Raises ServingFault if two routes have the same method and path, whatever their names, or a path is wrong."""
        self.routes = tuple(routes)
        self._root = _PathNode()
        for route in self.routes:
            other = self._root.add(route)
            if other is not None:
                raise ServingFault(
                    "two HTTP routes have the same method and path: "
                    f"{other.method} {other.path} ({other.summary}) and {route.method} {route.path} ({route.summary})"
                )
        # Clients repeat the same few requests.
        self._find = functools.lru_cache(maxsize=_CACHED_ROUTES)(self._find_route)

    def find(self, method: str, target: str) -> tuple[Route, Mapping[str, str]]:
        """Return the route, and the values of the names in its path. Raises NoSuchPath, NoSuchMethod, InvalidRequest.

        `target` is that of the request line, still percent-encoded, with or without a query.
        """
        return self._find(method, target.partition("?")[0])

    def _find_route(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        texts: list[str] = []
        routes = self._root.match(_segments(path), 0, texts) if path.startswith("/") else None
        if routes is None:
            hint = _INFERENCE_HINT if _INFERENCE_ELSEWHERE.fullmatch(path) else ""
            raise NoSuchPath(f"Not Found{hint}")
        try:
            values = [unquote(text, errors="strict") for text in texts]
        except UnicodeDecodeError:
            raise InvalidRequest("the path is not UTF-8") from None
        if method == "HEAD" and "GET" in routes:
            method = "GET"  # the connection leaves out the body
        if method not in routes:
            raise NoSuchMethod(routes, _INFERENCE_HINT if path.endswith(":predict") else "")
        route, names = routes[method]
        return route, dict(zip(names, values, strict=True))


def _segments(path: str) -> list[str]:
    """Return the segments of a path that begins with a slash. One slash at its end makes no difference."""
    segments = path[1:].split("/")
    return segments[:-1] if len(segments) > 1 and not segments[-1] else segments


def model_paths(action: str) -> tuple[str, str]:
    """Return the two paths of a model's action, without and with a version."""
    return (f"/v2/models/{{model}}{action}", f"/v2/models/{{model}}/versions/{{version}}{action}")
