"""HTTP handlers of the web page: send its files, and tell the page what its caller may see.

The files are not kept in memory: each is read when a browser asks for it.
"""

from __future__ import annotations

from pathlib import Path

from edge_server.config import CATEGORIES
from edge_server.errors import Forbidden, NotFound
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.plugin import ServingCore
from edge_server.plugins.dashboard.server_gauges import ServerGauges

PAGE_FOLDER = Path(__file__).parent / "page"

_DOCUMENTS = Path(__file__).parent / "documents"
"""A link to the folder docs in a clone, its Markdown files in an installed package. A clone without links has none."""

_TYPES = {
    ".md": "text/plain; charset=utf-8",
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
    """The handlers. They are open to everyone: a browser cannot send a key for the page itself."""

    def __init__(self, core: ServingCore, gauges: ServerGauges) -> None:
        self._core = core
        self._gauges = gauges

    async def index(self, request: HttpRequest) -> HttpResponse:
        return await send_file(request, PAGE_FOLDER, "index.html")

    async def file(self, request: HttpRequest) -> HttpResponse:
        return await send_file(request, PAGE_FOLDER, request.names["file"])

    async def panel(self, request: HttpRequest) -> HttpResponse:
        """Return a plugin's panel as panel.js, and the files `panel_*.js` beside it under their names."""
        name = request.names["file"]
        panel = self._core.panels().get(request.names["plugin"])
        if panel is None or not name.startswith("panel"):
            raise _no_file(name)
        return await send_file(request, panel.parent, panel.name if name == "panel.js" else name)

    async def reference(self, request: HttpRequest) -> HttpResponse:
        return await send_file(request, PAGE_FOLDER, "reference.html")

    async def documents(self, request: HttpRequest) -> HttpResponse:
        return await send_file(request, PAGE_FOLDER, "documents.html")

    async def document(self, request: HttpRequest) -> HttpResponse:
        """Return a document as Markdown. Raises NotFound for any other file."""
        name = request.names["file"]
        if not name.endswith(".md") or not _has_documents():
            raise _no_file(name)
        is_reference = Path(name).name == name and (_DOCUMENTS / "reference" / name).is_file()
        return await send_file(request, _DOCUMENTS / "reference" if is_reference else _DOCUMENTS, name)

    async def history(self, request: HttpRequest) -> HttpResponse:
        return json_response(await request.run_on_worker(self._gauges.history))

    async def access(self, request: HttpRequest) -> HttpResponse:
        """Return the rights of the caller. It may change models only where a key or a token is required and given."""
        access, service = self._core.access, self._core.service
        allowed = {category: access.may_use(request.head.headers, category) for category in CATEGORIES}
        if allowed["view"]:
            try:
                access.check_pictures(request.head, request.peer)
            except Forbidden:
                allowed["view"] = False
        return json_response(
            {
                "version": service.server_metadata().version if allowed["metadata"] else "",
                "is_ready": service.is_ready() if allowed["health"] else None,
                "allowed": allowed,
                "may_change_models": access.is_guarded("model-repository") and allowed["model-repository"],
                "is_key_accepted": any(access.is_guarded(category) and allowed[category] for category in CATEGORIES),
                "loads_on_request": service.is_explicit,
                "repositories": list(self._core.config.repository.paths) if allowed["model-repository"] else [],
                "takes_tokens": access.tokens.is_used,
                "key_headers": access.key_headers,
                "metrics_port": self._core.ports.get("metrics"),
                "grpc_port": self._core.ports.get("grpc"),
                "panels": list(self._core.panels()),
                "has_documents": _has_documents(),
                "machine": self._machine() if allowed["statistics"] else None,
            }
        )

    def _machine(self) -> dict[str, object] | None:
        """Return load and memory of the machine; None on a system without Linux's /proc."""
        reading = self._gauges.host()
        return None if reading is None else reading._asdict()


async def send_file(request: HttpRequest, folder: Path, name: str) -> HttpResponse:
    """Return a file of the page. Raises NotFound for a name that is none of a file in the folder."""
    path = folder / name
    kind = _TYPES.get(path.suffix)
    if kind is None or Path(name).name != name or not path.is_file():
        raise _no_file(name)
    data = await request.run_on_worker(path.read_bytes)
    return HttpResponse(data, headers={"Content-Type": kind, **_HEADERS})


def _has_documents() -> bool:
    return (_DOCUMENTS / "README.md").is_file()


def _no_file(name: str) -> NotFound:
    return NotFound(f"the page has no file '{name[:80]}'")
