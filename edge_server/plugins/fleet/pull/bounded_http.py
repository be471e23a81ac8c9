"""Handlers of urllib that bound what a hostile server can cost: the time of a slow answer, and the body of a redirect.

A timeout alone ends only silence: a server that sends a byte a minute, of its headers too, could hold a download for
years.
"""

from __future__ import annotations

import http.client
import io
import ssl
import time
import urllib.request
from typing import IO, Any

MIN_BYTES_PER_S = 500
"""As of request bodies that a server receives (`frontends/http/client_timeouts.py`)."""


class TooSlow(TimeoutError):
    """The other side sends less than the minimum rate."""


class HttpHandler(urllib.request.HTTPHandler):
    """Handler of urllib for http://. The timeout of a request is how long in all it may wait for bytes beyond the time
    that they take at MIN_BYTES_PER_S. Then it ends with TooSlow."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, req)


class HttpsHandler(urllib.request.HTTPSHandler):
    """As HttpHandler, for https://."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__(context=tls)
        self._tls = tls

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, req, context=self._tls)


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


class _HttpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock = _TimedSocket(self.sock, self.timeout)


class _HttpsConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock = _TimedSocket(self.sock, self.timeout)


class _TimedSocket:
    """What http.client uses of a socket."""

    def __init__(self, sock: Any, timeout_s: float | None) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self.sendall = sock.sendall
        self.close = sock.close

    def makefile(self, mode: str) -> io.BufferedReader:
        raw = self._sock.makefile(mode, buffering=0)
        return io.BufferedReader(raw if self._timeout_s is None else _TimedReader(raw, self._timeout_s))


class _TimedReader(io.RawIOBase):
    """Reads from `raw`. Each byte gives time, up to `timeout_s`; waiting takes it."""

    def __init__(self, raw: io.RawIOBase, timeout_s: float) -> None:
        super().__init__()
        self._raw = raw
        self._timeout_s = self._left_s = timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        # Only waiting counts: a reader that limits its own rate, or writes to a slow disk, may take its time.
        begin_s = time.monotonic()
        count = self._raw.readinto(buffer)
        gained_s = (count or 0) / MIN_BYTES_PER_S
        self._left_s = min(self._timeout_s, self._left_s + gained_s - (time.monotonic() - begin_s))
        if count and self._left_s < 0:
            raise TooSlow(f"it sends less than {MIN_BYTES_PER_S} bytes/s")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
