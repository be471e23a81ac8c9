"""The client of small HTTP requests: redirects, and responses that are no success. Slow servers and secrets: see
`plugins/`."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from edge_server.bounded_http import HttpClient


class _Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        target = self.path.removeprefix("/to/")
        self.send_response(200 if self.path == "/file" else 404 if self.path == "/none" else 302)
        if target != self.path:
            self.send_header("Location", target)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/to//file", 200, b"/file"),
        ("/none", 404, b"/none"),
        ("/to/file:///etc/passwd", 302, b"/to/file:///etc/passwd"),
        ("/to/ftp://127.0.0.1/a", 302, b"/to/ftp://127.0.0.1/a"),
        ("/nowhere", 302, b"/nowhere"),
    ],
)
def test_each_status_is_a_response_and_only_redirects_of_http_are_followed(
    site: str, path: str, status: int, body: bytes
) -> None:
    with HttpClient(lambda url, next_url: True).open(site + path, timeout_s=20) as response:
        assert (response.status, response.read()) == (status, body)


def test_redirects_without_an_end_are_an_error(site: str) -> None:
    client = HttpClient(lambda url, next_url: True)
    path = "/to/" * 20 + "/file"
    with pytest.raises(OSError, match="its redirects cannot be followed"):
        client.open(site + path, timeout_s=20)


def test_a_client_asks_for_each_redirect(site: str) -> None:
    asked: list[tuple[str, str]] = []
    with HttpClient(lambda *urls: bool(asked.append(urls))).open(f"{site}/to//file", timeout_s=20) as response:
        assert response.status == 302
    assert asked == [(f"{site}/to//file", f"{site}/file")]
