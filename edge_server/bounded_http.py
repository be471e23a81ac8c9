"""HTTP client for all outgoing requests of commands and plugins: bounds the time and size of responses, and reads no
body of a redirect.

A timeout alone ends only silence: a server that sends a byte a minute, of its headers too, could hold a client for
years.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import IO, Any, cast

from edge_server.default_tls import make_default_tls_context

MIN_BYTES_PER_S = 500
"""As of request bodies that a server receives (`frontends/http/client_timeouts.py`)."""


class TooSlow(TimeoutError):
    """The other side takes longer than it may. The message says what is late."""


class BoundedResponse(http.client.HTTPResponse):
    """Response whose bytes come in time; else reading them raises TooSlow.

    The status line and the head, with those of all interim responses, have one deadline, the timeout of the connection.
    Of the body, the timeout is how long in all it may be waited for beyond the time that its bytes take at
    MIN_BYTES_PER_S; `set_deadline` replaces that. A single wait ends after the timeout.
    """

    def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        timeout_s = sock.gettimeout()
        self._timeout_s: float = math.inf if timeout_s is None else timeout_s
        self._timed = _TimedReader(sock, self.fp.detach(), self._timeout_s)
        self._timed.set_deadline(self._timeout_s, f"no complete head of a response within {self._timeout_s:g} s")
        self.fp = io.BufferedReader(self._timed)

    def begin(self, *args: Any, **options: Any) -> None:
        super().begin(*args, **options)
        self._timed.set_rate(self._timeout_s)

    owner: object = None
    """Exception of urllib that closes the response when it goes."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def set_deadline(self, seconds: float) -> None:
        """Let reading end this time from now, whatever comes."""
        self._timed.set_deadline(seconds, f"not complete within {seconds:g} s")


class HttpClient:
    """Client of HTTP and HTTPS, whose responses are bounded in time.

    It sends secrets only where they belong: `headers` go to the scheme, host and port of `named_url` alone, the
    proxy's password to the proxy. Of a redirect it reads no body, which may have no end.
    """

    def __init__(
        self,
        follows: Callable[[str, str], bool] = lambda url, next_url: False,
        *,
        tls: ssl.SSLContext | None = None,
        uses_proxy: bool = True,
        named_url: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
        handlers: Iterable[urllib.request.BaseHandler] = (),
    ) -> None:
        """`follows`: whether to follow a redirect from a URL to the next of HTTP; it may raise. `tls` None: the default
        context. `uses_proxy`: whether that of the environment is used. `handlers` of urllib, such as log-ins."""
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            *([urllib.request.ProxyHandler()] if uses_proxy else []),
            urllib.request.UnknownHandler(),
            urllib.request.HTTPErrorProcessor(),
            _Handler(tls, named_url, headers),
            _Redirects(follows),
            *handlers,
        ):
            self._opener.add_handler(handler)

    def open(
        self,
        url: str,
        data: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        method: str | None = None,
        timeout_s: float,
    ) -> BoundedResponse:
        """Return the open response, of any status. `headers` also go to where the URL redirects to; without `method`
        it is GET, with `data` POST. Raises OSError, ValueError and http.client.HTTPException."""
        request = urllib.request.Request(url, data, dict(headers), method=method)
        try:
            response: BoundedResponse = self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:  # redirects that end nowhere, or refused log-ins
            response = cast(BoundedResponse, error.fp)
            if response.isclosed():
                raise OSError(0, "its redirects cannot be followed") from None
            response.owner = error
        except urllib.error.URLError as error:
            raise error.reason if isinstance(error.reason, OSError) else error from None
        return response


def same_site(url: str, other: str) -> bool:
    """Return whether two URLs have the same scheme, host and port."""
    return urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(other)[:2]


class _HttpConnection(http.client.HTTPConnection):
    response_class = BoundedResponse


class _HttpsConnection(http.client.HTTPSConnection):
    response_class = BoundedResponse


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, tls: ssl.SSLContext | None, named_url: str, headers: Mapping[str, str]) -> None:
        urllib.request.AbstractHTTPHandler.__init__(self)
        self._tls = tls
        self._named_url = named_url
        self._headers = headers

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        self._tls = self._tls or make_default_tls_context()
        return self.do_open(_HttpsConnection, req, context=self._tls)

    def do_request_(self, request: urllib.request.Request) -> urllib.request.Request:
        # urllib calls it before each request, also after a redirect.
        if self._named_url and same_site(request.full_url, self._named_url):
            for key, value in self._headers.items():
                request.add_unredirected_header(key, value)
        return super().do_request_(request)

    http_request = https_request = do_request_

    def http_error_default(self, req: Any, fp: IO[bytes], code: int, msg: str, hdrs: Any) -> IO[bytes]:
        return fp


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, follows: Callable[[str, str], bool]) -> None:
        self._follows = follows

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any
    ) -> http.client.HTTPResponse | None:
        next_url = urllib.parse.urljoin(req.full_url, headers.get("Location", ""))
        with contextlib.ExitStack() as stack:
            stack.callback(fp.close)
            is_http = urllib.parse.urlsplit(next_url).scheme in ("http", "https")
            if "Location" in headers and is_http and self._follows(req.full_url, next_url):
                return super().http_error_302(req, fp, code, msg, headers)
            stack.pop_all()
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        fp.close()  # urllib would read the body whole
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        if redirected is not None:
            redirected.remove_header("Proxy-authorization")  # ProxyHandler adds it again, where there is a proxy
        return redirected


class _TimedReader(io.RawIOBase):
    """Reads from `raw`, the file of `sock`, until a deadline or at the minimum rate."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, timeout_s: float) -> None:
        super().__init__()
        self._sock = sock
        self._raw = raw
        self._timeout_s = timeout_s
        self._end_s = math.inf
        self._has_bytes = False
        """Whether any came since the deadline was set: else the server is silent, and not slow."""
        self._max_wait_s: float | None = None
        self._left_s = math.inf
        self._problem = ""

    def set_deadline(self, seconds: float, problem: str) -> None:
        self._end_s, self._max_wait_s, self._problem = time.monotonic() + seconds, None, problem
        self._has_bytes = False

    def set_rate(self, max_wait_s: float) -> None:
        """Each byte gives time, up to `max_wait_s`; waiting takes it."""
        self._left_s = self._max_wait_s = max_wait_s
        self._problem = f"it sends less than {MIN_BYTES_PER_S} bytes/s"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        begin_s = time.monotonic()
        left_s = self._end_s - begin_s if self._max_wait_s is None else math.inf
        wait_s = max(min(left_s, self._timeout_s), 0.001)
        self._sock.settimeout(None if wait_s == math.inf else wait_s)
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError:
            if left_s < self._timeout_s and self._has_bytes:
                raise TooSlow(self._problem) from None
            raise
        self._has_bytes = self._has_bytes or bool(count)
        now_s = time.monotonic()
        if self._max_wait_s is None:
            is_late = now_s > self._end_s
        else:
            # Only waiting counts: a reader that limits its own rate, or writes to a slow disk, may take its time.
            gained_s = (count or 0) / MIN_BYTES_PER_S
            self._left_s = min(self._max_wait_s, self._left_s + gained_s - (now_s - begin_s))
            is_late = self._left_s < 0
        if count and is_late:
            raise TooSlow(self._problem)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
