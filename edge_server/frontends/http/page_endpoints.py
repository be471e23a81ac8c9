"""Page endpoints: the files of frontends/dashboard, what the page may show to its caller, and the OpenAPI document.

Nothing is kept in memory: each file is read when a browser asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from edge_server.errors import NotFound
from edge_server.frontends.http.generate_endpoints import GenerationRequest
from edge_server.frontends.http.response import HttpResponse, json_response

Route: TypeAlias = tuple[str, str, str, str]
"""Method, path, access category ("" if open) and summary of an endpoint."""

_FOLDER = Path(__file__).parent.parent / "dashboard"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS = {
    # Pictures that the page itself reads have blob: addresses.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class PageEndpoints:
    """The handlers. Live on one event loop.

    `access` returns what the page may do for a request, as JSON values. `routes` returns all endpoints.
    """

    def __init__(
        self, access: Callable[[GenerationRequest], Mapping[str, object]], routes: Callable[[], Iterable[Route]]
    ) -> None:
        self._access = access
        self._routes = routes

    async def index(self, request: GenerationRequest) -> HttpResponse:
        return await _page_file(request, "index.html")

    async def file(self, request: GenerationRequest) -> HttpResponse:
        return await _page_file(request, request.target.names["file"])

    async def reference(self, request: GenerationRequest) -> HttpResponse:
        return await _page_file(request, "reference.html")

    async def access(self, request: GenerationRequest) -> HttpResponse:
        return json_response(self._access(request))

    async def openapi(self, request: GenerationRequest) -> HttpResponse:
        # Imported for the first reader: the schemas are large.
        from edge_server.frontends.http.openapi import openapi_document

        return json_response(openapi_document(self._routes()))


async def _page_file(request: GenerationRequest, name: str) -> HttpResponse:
    """Return a file of the page. Raises NotFound for any other name."""
    path = _FOLDER / name
    kind = _TYPES.get(path.suffix)
    if kind is None or Path(name).name != name or not path.is_file():
        raise NotFound(f"the page has no file '{name[:80]}'")
    loop = asyncio.get_running_loop()
    data = await loop.run_in_executor(request.target.workers, path.read_bytes)
    return HttpResponse(data, headers={"Content-Type": kind, **_HEADERS})
