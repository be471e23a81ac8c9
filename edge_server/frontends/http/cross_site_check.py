"""Check against cross-site requests: a web page of another site must not change the server through a user's browser.

A browser sends requests of any page to any address. It adds Origin and Sec-Fetch-Site, which a page cannot change. It
first sends a CORS preflight, except for the content types of forms. Other clients send neither header.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from edge_server.errors import Forbidden
from edge_server.frontends.http.request_head import RequestHead

_PAGE_TYPES = ("application/json", "application/octet-stream")
_FORM_TYPES = ("text/plain", "multipart/form-data")
"""Content types of forms that no client of this API uses. `curl -d` uses the third, x-www-form-urlencoded."""

_DEFAULT_PORT = {"http": 80, "https": 443}


class CrossSiteCheck:
    """Refuses cross-site requests. `scheme` is "http" or "https"; `allowed_hosts` are further names of the machine."""

    def __init__(self, scheme: str, allowed_hosts: Iterable[str]) -> None:
        self._scheme = scheme
        name = socket.gethostname().lower()
        label = name.partition(".")[0]
        self._names = {"localhost", name, label, f"{label}.local", *(host.lower() for host in allowed_hosts)} - {""}

    def check(self, head: RequestHead) -> None:
        """Raise Forbidden for a request that a page of another site may have caused."""
        headers = head.headers
        content_type = (headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if "Origin" not in headers and "Sec-Fetch-Site" not in headers:
            if content_type in _FORM_TYPES:
                raise Forbidden(f"Content-Type '{content_type}' is not accepted, expected application/json")
            return
        self._check_origin(head)
        if content_type not in _PAGE_TYPES and (content_type or head.body_size != 0):
            raise Forbidden(
                f"requests of web pages need Content-Type {' or '.join(_PAGE_TYPES)}, got '{content_type[:80]}'"
            )

    def check_reader(self, head: RequestHead) -> None:
        """Raise Forbidden for a GET whose response a page of another site could read.

        Browsers send no Origin with a GET of the page's own site. A page of another site has none either if its name
        points to this machine, but then Host has that name.
        """
        if "Origin" in head.headers:
            self._check_origin(head)
        else:
            self._own_origin(head)

    def _check_origin(self, head: RequestHead) -> None:
        origins = head.headers.getall("Origin")
        own_origin = self._own_origin(head)
        if len(origins) != 1 or self._parse(origins[0]) != own_origin:
            raise Forbidden(
                "requests are accepted only from this server's own web pages "
                f"({self._scheme}://{head.headers.get('Host')}), got Origin '{_shown(origins)}'"
            )

    def _own_origin(self, head: RequestHead) -> tuple[str, str, int]:
        """Return scheme, host and port that the client asked for. Raises Forbidden if they are not this server's."""
        hosts = head.headers.getall("Host")
        own_origin = self._parse(f"{self._scheme}://{hosts[0]}") if len(hosts) == 1 else None
        if own_origin is None or not self._is_this_server(own_origin[1]):
            raise Forbidden(
                "requests of web pages must use an IP address or a name of this machine, "
                f"got Host '{_shown(hosts)}'; --http-allowed-host=<name> allows another"
            )
        return own_origin

    def _parse(self, origin: str) -> tuple[str, str, int] | None:
        """Return scheme, host and port of an origin, None if it is not valid."""
        try:
            parts = urlsplit(origin)
            host, port = parts.hostname or "", parts.port or _DEFAULT_PORT.get(parts.scheme, 0)
        except ValueError:
            return None
        is_origin = host and parts.scheme and not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
        return (parts.scheme, host, port) if is_origin else None

    def _is_this_server(self, host: str) -> bool:
        """Return whether a host is this server. Any IP address is: its pages can only come from that address."""
        if host in self._names:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True


def _shown(values: list[str]) -> str:
    return ", ".join(values)[:200]
