"""Headers of cross-origin resource sharing (CORS, https://fetch.spec.whatwg.org): which other sites' pages may read
responses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import GOVERNOR_HEADER, HttpResponse

_EXPOSED = f"Inference-Header-Content-Length, {GOVERNOR_HEADER}, Retry-After"
"""Response headers that a page may read, besides those that every page may."""

_MAX_AGE_S = 600
"""How long a browser may remember a preflight."""

_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(?:, ?[A-Za-z0-9-]+)*")


class CorsPolicy:
    """Headers for requests of allowed origins; `*` allows any. Cookies and HTTP logins are never allowed.

    `scheme://*` allows all origins of a scheme: VS Code gives each view an origin of its own.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)
        self.allows_any = "*" in self._origins

    def names_origin(self, head: RequestHead) -> bool:
        """Return whether the origin of a request is in the list. It need not be where `*` allows any."""
        origins = head.headers.getall("Origin")
        if len(origins) != 1:
            return False
        scheme, mark, _ = origins[0].partition("://")
        return origins[0] in self._origins or (bool(mark) and f"{scheme}://*" in self._origins)

    def headers(self, head: RequestHead) -> dict[str, str]:
        """Return the headers that let the page behind a request read its response; none for other requests."""
        if not self._origins:
            return {}
        if self.allows_any:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
        vary = {"Vary": "Origin"}
        if not self.names_origin(head):
            return vary
        origin = head.headers.getall("Origin")[0]
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED, **vary}

    def preflight(self, head: RequestHead, methods: Iterable[str]) -> HttpResponse | None:
        """Return the response to a preflight of an allowed origin, or None. `methods` are those of the path."""
        if head.method != "OPTIONS" or "Access-Control-Request-Method" not in head.headers:
            return None
        if "Access-Control-Allow-Origin" not in self.headers(head):
            return None
        headers = {"Access-Control-Allow-Methods": ", ".join(methods), "Access-Control-Max-Age": str(_MAX_AGE_S)}
        wanted = head.headers.get("Access-Control-Request-Headers") or ""
        if _HEADER_NAMES.fullmatch(wanted):
            # Named one by one: `*` would leave out Authorization.
            headers["Access-Control-Allow-Headers"] = wanted
        return HttpResponse(headers=headers)
