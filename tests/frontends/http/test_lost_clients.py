"""Clients that end their connections at any step of a request: nothing is printed for it, and the others are served."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kit.certificates import self_signed

PATIENCE_S = 60.0


def post(path: str, body: bytes, *lines: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = [f"POST {path} HTTP/1.1", "Host: localhost", *lines, f"Content-Length: {size}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def tensors(model: str, *names: str, values: list[int], datatype: str = "INT32", shape: list[int]) -> bytes:
    given = [{"name": name, "shape": shape, "datatype": datatype, "data": values} for name in names]
    return post(f"/v2/models/{model}/infer", json.dumps({"inputs": given}).encode())


ADD = tensors("add", "INPUT0", "INPUT1", values=[1, 2, 3, 4], shape=[1, 4])
NEVER = ADD.replace(b"/add/", b"/never/")
LARGE = tensors("float", "IN", values=[1] * 300_000, datatype="FP32", shape=[300_000])
METADATA = b"GET /v2/models/add HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAM = post("/v2/models/repeat/generate_stream", b'{"IN": 2000}')
CHUNKED = b"POST /v2/models/add/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

SENT = {
    "nothing": b"",
    "a part of a head": b"GET /v2/health/li",
    "bytes that are no HTTP": b"\0\0\0\0 hello",
    "a head with a wrong line": b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    "a head that is too long": b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000,
    "a head, and no body": post("/v2/models/add/infer", b"", length=100),
    "a head that waits for 100 Continue": post("/v2/models/add/infer", b"", "Expect: 100-continue", length=100),
    "a part of a body": LARGE[:500_000],
    "a part of a body that is refused early": post("/no/such/path", b"x" * 1000, length=100_000),
    "a part of a chunked body": CHUNKED + b"100\r\nabc",
    "a chunk of a wrong size": CHUNKED + b"wrong\r\n",
    "a request": ADD,
    "a request without an answer yet": NEVER,
    "a request with a large answer": LARGE,
    "many requests at once": ADD * 200,
    "very many requests at once": ADD * 1200,
    "many requests with large answers": LARGE * 3,
    "many requests, and then bytes that are no HTTP": ADD * 20 + b"\0\0\0\0 hello",
    "a request for aiohttp": METADATA,
    "many requests for aiohttp": METADATA * 100,
    "a part of a body for aiohttp": post("/v2/logging", b"{", length=100),
    "a body for aiohttp that is no JSON": post("/v2/logging", b"{" * 10_000),
    "a stream": STREAM,
    "a stream of HTTP/1.0": STREAM.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "a stream of events": b"GET /edge/v1/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n",
    "the last request": ADD.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close"),
}


def vanish(client: socket.socket) -> None:
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def half_close(client: socket.socket) -> None:
    """Send no more, but read; then close. With TLS, without the message that says so."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(client, socket.SHUT_WR)
    client.settimeout(0.02)
    with contextlib.suppress(OSError):
        while client.recv(1 << 20):
            pass
    client.close()


def end_tls(client: socket.socket) -> None:
    """Say the end of TLS, and close without waiting for the answer."""
    if isinstance(client, ssl.SSLSocket):
        client.settimeout(0.02)
        with contextlib.suppress(OSError, ValueError):
            client.unwrap()
    client.close()


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """What is logged while the test runs, by asyncio too."""
    handler = Errors()
    logging.getLogger().addHandler(handler)
    yield handler.messages
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    cert, key = self_signed(tmp_path_factory.mktemp("tls"))
    return str(cert), str(key)


@pytest.fixture(params=["plain", "TLS"])
def connect(
    request: pytest.FixtureRequest, open_site: Any, certificate: tuple[str, str]
) -> tuple[Any, Callable[[], socket.socket]]:
    if request.param == "plain":
        site = open_site()
        return site, lambda: socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S)
    site = open_site(tls_cert=certificate[0], tls_key=certificate[1])
    trusting = ssl.create_default_context(cafile=certificate[0])
    trusting.check_hostname = False

    def start() -> socket.socket:
        return trusting.wrap_socket(socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S))

    return site, start


# Each case is 52 connections.
@pytest.mark.sample
@pytest.mark.parametrize("ending", [vanish, reset, half_close, end_tls])
def test_nothing_is_printed_for_a_client_that_ends_its_connection(
    connect: Any, errors: list[str], ending: Callable[[socket.socket], None]
) -> None:
    site, start = connect
    for what, data in SENT.items():
        for pause_s in (0.0, 0.005):
            client = start()
            client.settimeout(0.2)
            with contextlib.suppress(OSError):  # it reads no answers, so that not all may be taken
                client.sendall(data)
            time.sleep(pause_s)
            ending(client)
            assert errors == [], what
    connections = site.frontend._server._setups[0].connections
    end_s = time.monotonic() + PATIENCE_S
    while connections.count():
        left = [
            (item._phase, item._head, item._is_full, item._is_reading_paused, item.transport)
            for item in list(connections._open)
        ]
        assert time.monotonic() < end_s, left
        time.sleep(0.01)
    with contextlib.closing(start()) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
    assert errors == []


@pytest.mark.parametrize("ending", [vanish, reset])
def test_nothing_is_printed_for_a_client_that_ends_within_a_tls_handshake(
    open_site: Any, certificate: tuple[str, str], errors: list[str], ending: Callable[[socket.socket], None]
) -> None:
    site = open_site(tls_cert=certificate[0], tls_key=certificate[1])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        asking.do_handshake()
    hello = outgoing.read()
    for data in (b"", hello[:50], hello, hello + b"no TLS", b"GET / HTTP/1.1\r\n\r\n"):
        for pause_s in (0.0, 0.01):
            client = socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S)
            client.sendall(data)
            time.sleep(pause_s)
            ending(client)
    while site.frontend._server._setups[0].connections.count():
        time.sleep(0.01)
    assert errors == []


def test_a_client_that_is_gone_when_its_refusal_is_sent_leaves_no_connection(site: Any, errors: list[str]) -> None:
    """The refusal of the second request tells the kernel that the client is gone, before the server ends its side."""
    for _ in range(5):
        client = socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S)
        client.sendall(post("/no/such/path", b"", length=100))
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        client.sendall(b"x" * 100 + b"\0\0\0\0 hello")
        client.close()
    while site.frontend._server._setups[0].connections.count():
        time.sleep(0.01)
    assert errors == []


def test_a_client_that_sends_requests_and_nonsense_without_reading_gets_all_responses_and_the_refusal(
    site: Any,
) -> None:
    client = socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S)
    with contextlib.closing(client):
        client.sendall(LARGE + b"\0\0\0\0 hello")
        received = b""
        while data := client.recv(1 << 20):
            received += data
    assert received.count(b"HTTP/1.1 200 OK") == 1
    assert received.count(b"HTTP/1.1 400 ") == 1
