"""Web servers that tests answer with: a site of a download, a webhook, a camera, another server."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Base of a site's answers: a subclass has do_GET or do_POST."""

    def body(self) -> bytes:
        """Return the body of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
        """Send a whole response; `Content_Type="text/html"` is a header."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Site(ThreadingHTTPServer):
    """A web server on a free port of this machine, with a thread for each connection, from now until it is closed.

    `handler` is a class of `Handler`. `url` has no path.

    >>> class Answers(Handler):
    ...     def do_GET(self) -> None:
    ...         self.answer(b"{}")
    >>> with Site(Answers) as site:
    ...     urllib.request.urlopen(site.url)
    """

    def __init__(self, handler: Any, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        if tls is not None:
            # The handshake is the connection's thread's: a client that fails in it stops no other.
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.server_port}"
        # Every closing waits for the end of a poll, by default half a second.
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()
