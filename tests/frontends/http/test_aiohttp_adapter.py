"""Requests served by aiohttp on the server's own connections, as raw bytes, and their effect on the next request."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

QUESTION = b"GET /v2/logging HTTP/1.1\r\nHost: localhost\r\n\r\n"
INDEX = "/v2/repository/index"
INFER = "/v2/models/float/infer"


@pytest.fixture
def connect(site: Any) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def start() -> Client:
        clients.append(Client(site.port))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


class Client:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._file = self.socket.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        status = int(self._file.readline().split()[1])
        fields: dict[str, str] = {}
        while line := self._file.readline().strip().decode():
            name, _, value = line.partition(": ")
            assert name.lower() not in fields
            fields[name.lower()] = value
        return status, fields, self._file.read(int(fields.get("content-length", "0")))

    def is_at_end(self) -> bool:
        return self._file.read(1) == b""


def post(path: str, body: bytes, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", *lines, f"Content-Length: {len(body)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def chunked(path: str, *chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + body


def test_questions_and_inferences_that_are_sent_at_once_are_answered_in_order(connect: Callable[[], Client]) -> None:
    client = connect()
    tensor = {"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.5]}
    infer = post(INFER, json.dumps({"inputs": [tensor]}).encode())
    client.send((QUESTION + infer + post(INDEX, b"{}") + b"GET /no HTTP/1.1\r\n\r\n" + infer) * 3)
    for _ in range(3):
        assert [client.answer()[0] for _ in range(5)] == [200, 200, 200, 404, 200]


def test_a_body_of_megabytes_comes_whole_however_it_is_sent(site: Any, connect: Callable[[], Client]) -> None:
    content = bytes(range(256)) * 16384
    parameters = {"config": "{}", "file:1/model.bin": base64.b64encode(content).decode()}
    body = json.dumps({"parameters": parameters}).encode()
    path = "/v2/repository/models/add/load"
    client = connect()
    ways = (
        post(path, body),
        chunked(path, body[:7], body[7:3_000_000], body[3_000_000:]),
        post(path, gzip.compress(body), "Content-Encoding: gzip"),
    )
    for way in ways:
        client.send(way + QUESTION)
        assert client.answer()[0] == 200
        assert client.answer()[0] == 200
        assert site.service.loads[-1][2] == {"1/model.bin": content}
    assert site.frontend._budget.held == 0


def test_a_body_that_no_handler_reads_does_not_disturb_the_next_request(connect: Callable[[], Client]) -> None:
    client = connect()
    for size in (10, 3_000_000):
        body = QUESTION * (size // len(QUESTION) + 1)
        client.send(post("/v2/systemsharedmemory/unregister", body) + QUESTION)
        assert client.answer()[0] == 200
        assert client.answer()[0] == 200


def test_expect_100_continue_is_answered_once(connect: Callable[[], Client]) -> None:
    client = connect()
    head, _, body = post(INDEX, b'{"ready": true}', "Expect: 100-continue").partition(b"\r\n\r\n")
    client.send(head + b"\r\n\r\n")
    assert client.answer() == (100, {}, b"")
    client.send(body)
    assert client.answer()[0] == 200
    client.send(QUESTION)
    assert client.answer()[0] == 200


@pytest.mark.parametrize(
    ("lines", "version", "header", "stays"),
    [
        ((), "1.1", None, True),
        (("Connection: close",), "1.1", "close", False),
        ((), "1.0", None, False),
        (("Connection: keep-alive",), "1.0", "keep-alive", True),
        (("Connection: Upgrade", "Upgrade: websocket"), "1.1", None, True),
        (("Connection: Upgrade", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"), "1.1", None, True),
    ],
)
def test_the_connection_stays_as_the_client_asks(
    connect: Callable[[], Client], lines: tuple[str, ...], version: str, header: str | None, stays: bool
) -> None:
    client = connect()
    text = "\r\n".join([f"GET /v2/logging HTTP/{version}", "Host: localhost", *lines, "", ""]).encode()
    client.send(text)
    status, fields, _ = client.answer()
    assert status == 200
    assert (fields.get("connection"), fields["server"]) == (header, "edge-server")
    if stays:
        client.send(text)
        assert client.answer()[0] == 200
    else:
        assert client.is_at_end()


def test_what_aiohttp_cannot_read_is_refused_and_ends_the_connection(
    connect: Callable[[], Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()
    client.send(b"GET /v2/logging HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n" + QUESTION)
    status, fields, body = client.answer()
    if status == 400:
        assert (fields["server"], fields["connection"]) == ("edge-server", "close")
        assert json.loads(body) == {"error": "the request's head cannot be read"}
        assert client.is_at_end()
    else:  # a version of aiohttp that reads it
        assert (status, client.answer()[0]) == (200, 200)
    assert not caplog.records


def test_clients_that_leave_are_forgotten(site: Any, connect: Callable[[], Client]) -> None:
    for request in (QUESTION, b"GET /edge/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n", post(INDEX, b"{}")[:-1]):
        client = connect()
        client.send(QUESTION + request)
        assert client.answer()[0] == 200
        client.close()
    (context,) = site.frontend._contexts.values()
    server = context.aiohttp._server

    async def settled() -> None:
        for _ in range(2000):
            if not server.connections and not site.frontend._server._setups[0].connections.tasks:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(server.connections)

    site.run(settled())
    assert not site.events._wakers


def test_aiohttp_is_imported_by_the_first_request_that_needs_it() -> None:
    code = """
import asyncio, sys
from edge_server.lazy_import import defer_import
defer_import("aiohttp", has_free_parts=True)
import edge_server.process.server, edge_server.process.http_routes
from edge_server.frontends.http.aiohttp_adapter import AiohttpServer, AiohttpTarget
from edge_server.frontends.http.host_check import HostNames
from edge_server.frontends.http.request import RequestContext
from edge_server.frontends.http.response import HttpResponse, plain_error
from edge_server.frontends.http.server import HttpServer

async def ask(port, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n".encode())
    text = await reader.read()
    writer.close()
    return text.split()[1].decode()

async def main():
    adapter, context = AiohttpServer(), RequestContext()

    async def answer(request):
        return HttpResponse(b"yes")

    def route(head):
        return AiohttpTarget(adapter, answer, {}, head, context) if head.target == "/yes" else plain_error("none", 404)

    server = HttpServer("test", route, HostNames(()))
    port = await server.open("127.0.0.1", 0, max_connections=10)
    print(await ask(port, "/none"), "aiohttp.web" in sys.modules)
    print(*await asyncio.gather(*(ask(port, "/yes") for _ in range(5))))
    print("aiohttp.web" in sys.modules, "aiohttp.client" in sys.modules)
    await server.close(1)

asyncio.run(main())
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == ["404 False", "200 200 200 200 200", "True False"]
