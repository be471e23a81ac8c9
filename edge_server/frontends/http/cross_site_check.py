"""Rejection of cross-site requests: HTTP requests that a web page of another site sends through a user's browser.

A browser sends requests of any page to any address. It adds Origin and Sec-Fetch-Site, which a page cannot change. It
first sends a CORS preflight, except for the content types of forms. Other clients send neither header.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from edge_server.errors import Forbidden
from edge_server.frontends.http.cors import CorsPolicy
from edge_server.frontends.http.host_check import HostNames
from edge_server.frontends.http.request_head import RequestHead

_PAGE_TYPES = ("application/json", "application/octet-stream")
_FORM_TYPES = ("text/plain", "multipart/form-data")
"""Content types of forms that no client of this API uses. `curl -d` uses the third, x-www-form-urlencoded."""

_DEFAULT_PORT = {"http": 80, "https": 443}

Origin = tuple[str, str, int]
"""Scheme, host and port."""


class CrossSiteCheck:
    """Refuses cross-site requests. `scheme` is "http" or "https"; `cors` has the origins that may run inference;
    None: no option admits any."""

    def __init__(self, scheme: str, names: HostNames, cors: CorsPolicy | None) -> None:
        self._scheme = scheme
        self._names = names
        self._cors = cors

    def check(self, head: RequestHead, category: str, *, changes_server: bool) -> None:
        """Raise Forbidden for a request of a category that a page of another site may have caused.

        A GET passes: the browser hides its response from such a page. An upgrade to a WebSocket does not.
        """
        headers = head.headers
        if head.method == "GET" and "Upgrade" not in headers:
            return
        is_of_page = "Origin" in headers or "Sec-Fetch-Site" in headers
        if is_of_page and (changes_server or not self._is_admitted(head, category)):
            self._check_origin(head)
        if changes_server:
            _check_content_type(head, is_of_page=is_of_page)

    def check_reader(self, head: RequestHead) -> None:
        """Raise Forbidden for a GET whose response a page of another site could read.

        Browsers send no Origin with a GET of the page's own site. A page of another site has none either if its name
        points to this machine, but then Host has that name.
        """
        if "Origin" in head.headers:
            self._check_origin(head)
        else:
            self._own_origins(head)

    def _is_admitted(self, head: RequestHead, category: str) -> bool:
        """Return whether a request that changes nothing needs no comparison of its origin."""
        headers = head.headers
        if "Origin" not in headers and headers.get("Sec-Fetch-Site") == "none":
            return True  # a program with a browser inside, such as Electron: no page caused it
        if self._cors is None:
            return False
        return self._cors.names_origin(head) or (self._cors.allows_any and category == "inference")

    def _check_origin(self, head: RequestHead) -> None:
        origins = head.headers.getall("Origin")
        own_origins = self._own_origins(head)
        if len(origins) != 1 or _parse(origins[0]) not in own_origins:
            remedy = "" if self._cors is None else "; --http-allowed-origin lets pages of another origin run inference"
            raise Forbidden(
                "requests are accepted only from this server's own web pages "
                f"({self._scheme}://{head.headers.get('Host')}), got Origin '{_shown(origins)}'{remedy}"
            )

    def _own_origins(self, head: RequestHead) -> list[Origin]:
        """Return the origins of this server's pages at Host. Raises Forbidden if Host is not this server."""
        hosts = head.headers.getall("Host")
        own_origin = _parse(f"{self._scheme}://{hosts[0]}") if len(hosts) == 1 else None
        if own_origin is None or not self._names.has(own_origin[1]):
            raise Forbidden(
                "requests of web pages must use an IP address or a name of this machine, "
                f"got Host '{_shown(hosts)}'; {self._names.flag}=<name> allows another"
            )
        behind_tls_proxy = _parse(f"https://{hosts[0]}") if own_origin[1] in self._names.allowed else None
        return [own_origin, *([behind_tls_proxy] if behind_tls_proxy else [])]


def _check_content_type(head: RequestHead, *, is_of_page: bool) -> None:
    """Raise Forbidden for a content type that a form of another site could send without a preflight."""
    content_type = (head.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    if not is_of_page:
        if content_type in _FORM_TYPES:
            raise Forbidden(f"Content-Type '{content_type}' is not accepted, expected application/json")
    elif content_type not in _PAGE_TYPES and (content_type or head.body_size != 0):
        raise Forbidden(
            f"requests of web pages need Content-Type {' or '.join(_PAGE_TYPES)}, got '{content_type[:80]}'"
        )


def _parse(origin: str) -> Origin | None:
    """Return an origin, None if it is not valid."""
    try:
        parts = urlsplit(origin)
        host, port = parts.hostname or "", parts.port or _DEFAULT_PORT.get(parts.scheme, 0)
    except ValueError:
        return None
    is_origin = host and parts.scheme and not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
    return (parts.scheme, host, port) if is_origin else None


def _shown(values: list[str]) -> str:
    return ", ".join(values)[:200]
