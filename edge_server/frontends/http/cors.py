"""Cross-origin resource sharing (CORS, https://fetch.spec.whatwg.org): which other sites' pages may read responses."""

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
    """Headers for requests of allowed origins; `*` allows any. Cookies and HTTP logins are never allowed."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, head: RequestHead) -> dict[str, str]:
        """Return the headers that let the page behind a request read its response; none for other requests."""
        if not self._origins:
            return {}
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
        vary = {"Vary": "Origin"}
        origins = head.headers.getall("Origin")
        if len(origins) != 1 or origins[0] not in self._origins:
            return vary
        return {"Access-Control-Allow-Origin": origins[0], "Access-Control-Expose-Headers": _EXPOSED, **vary}

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
