"""HTTP connections, and handlers of urllib for them, that bound what a hostile server can cost: the time of a slow
answer, and the body of a redirect.

A timeout alone ends only silence: a server that sends a byte a minute, of its headers too, could hold a client for
years.
"""

from __future__ import annotations

import http.client
import io
import math
import ssl
import time
import urllib.request
from typing import IO, Any

MIN_BYTES_PER_S = 500
"""As of request bodies that a server receives (`frontends/http/client_timeouts.py`)."""


class TooSlow(TimeoutError):
    """The other side takes longer than it may. The message says what is late."""


class BoundedResponse(http.client.HTTPResponse):
    """Response whose bytes come in time; else reading them raises TooSlow.

    The status line and the head, with those of all interim responses, have one deadline, the timeout of the connection.
    Of the body, the timeout is how long in all it may be waited for beyond the time that its bytes take at
    MIN_BYTES_PER_S; `set_deadline` replaces that. A single wait ends after the timeout, also one that begins just
    before a deadline.
    """

    def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        timeout_s = sock.gettimeout()
        self._timeout_s: float = math.inf if timeout_s is None else timeout_s
        self._timed = _TimedReader(self.fp.detach())
        self._timed.set_deadline(self._timeout_s, f"no complete head of a response within {self._timeout_s:g} s")
        self.fp = io.BufferedReader(self._timed)

    def begin(self, *args: Any, **options: Any) -> None:
        super().begin(*args, **options)
        self._timed.set_rate(self._timeout_s)

    def set_deadline(self, seconds: float) -> None:
        """Let reading end this time from now, whatever comes."""
        self._timed.set_deadline(seconds, f"not complete within {seconds:g} s")


class BoundedHttpConnection(http.client.HTTPConnection):
    """Connection for http:// with bounded responses."""

    response_class = BoundedResponse


class BoundedHttpsConnection(http.client.HTTPSConnection):
    """Connection for https:// with bounded responses."""

    response_class = BoundedResponse


class HttpHandler(urllib.request.HTTPHandler):
    """Handler of urllib for http:// with bounded responses."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(BoundedHttpConnection, req)


class HttpsHandler(urllib.request.HTTPSHandler):
    """Handler of urllib for https:// with bounded responses. `tls` None: the default of http.client."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(context=tls)
        self._tls = tls

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(BoundedHttpsConnection, req, context=self._tls)


class RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows redirects without their bodies, which urllib would read whole, and without the proxy's password, which
    urllib would send to hosts that are reached without this proxy."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        fp.close()
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        if redirected is not None:
            redirected.remove_header("Proxy-authorization")  # ProxyHandler adds it again, where there is a proxy
        return redirected


class _TimedReader(io.RawIOBase):
    """Reads from `raw`, until a deadline or at the minimum rate."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__()
        self._raw = raw
        self._end_s = math.inf
        self._max_wait_s: float | None = None
        self._left_s = math.inf
        self._problem = ""

    def set_deadline(self, seconds: float, problem: str) -> None:
        self._end_s, self._max_wait_s, self._problem = time.monotonic() + seconds, None, problem

    def set_rate(self, max_wait_s: float) -> None:
        """Each byte gives time, up to `max_wait_s`; waiting takes it."""
        self._left_s = self._max_wait_s = max_wait_s
        self._problem = f"it sends less than {MIN_BYTES_PER_S} bytes/s"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        begin_s = time.monotonic()
        count = self._raw.readinto(buffer)
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
