"""The requests of Gunicorn's tests (in the source of PyPI's package gunicorn), sent to the HTTP/1.1 server as bytes:
`valid` ones reach a handler as Gunicorn reads them, `invalid` ones are refused."""

from __future__ import annotations

import asyncio
import re
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from edge_server.frontends.http.body_reader import BodyReader
from edge_server.frontends.http.connection import Connections, HttpConnection, NoDrainDelay
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse
from edge_server.frontends.memory_budget import MemoryBudget

pytestmark = pytest.mark.full

_STATUS = re.compile(rb"HTTP/1\.1 (\d+) ")

_IDENTITY = "the coding `identity` is none of HTTP/1.1 any more (RFC 9112, 7)"
_GZIP = "no coding but chunked is offered"
_LONG = "a line of more than 8,190 bytes, which an option of Gunicorn's permits"
_METHOD = "a method in small letters, which an option of Gunicorn's permits"
_FOLDED = "folded lines are refused (RFC 9112, 5.2), which an option of Gunicorn's permits"
_PROXY = "the PROXY protocol, which an option of Gunicorn's turns on"
_UNDERSCORE = "Gunicorn drops or refuses fields with an underscore, as WSGI makes it a hyphen; here nothing does"
_LIMIT = "a limit that Gunicorn's case sets lower than this server's"
VALID_EXCEPTIONS = {
    "009.http": _IDENTITY,
    "024.http": _LONG,
    "025.http": _GZIP,
    "025_line.http": _GZIP,
    "026.http": _LONG,
    "028.http": "a blank before the colon, which an option of Gunicorn's permits",
    "029.http": _IDENTITY,
    "030.http": _IDENTITY,
    "031compat.http": _METHOD,
    "031compat2.http": _METHOD,
    "040.http": _UNDERSCORE,
    "099.http": "its body is shorter than its length says",
    "compat_obs_fold.http": _FOLDED,
    "compat_obs_fold_huge.http": _FOLDED,
    "pp_01.http": _PROXY,
    "pp_02.http": _PROXY,
}
INVALID_EXCEPTIONS = {
    "006.http": _LIMIT,
    "008.http": _LIMIT,
    "009.http": _LIMIT,
    "010.http": _LIMIT,
    "011.http": _LIMIT,
    "012.http": _LIMIT,
    "016.http": "a target of an unknown scheme names no handler: 404",
    "017.http": _LIMIT,
    "019.http": "fields of proxies about the scheme, which decide nothing here",
    "040.http": _UNDERSCORE,
    "chunked_07.http": _UNDERSCORE,
}


class _Target:
    """Keeps a request, and responds to it at once."""

    aligned_at = 0
    is_cacheable = True

    def __init__(self, head: RequestHead, requests: list[Any]) -> None:
        self._head, self._requests = head, requests

    def begin(self, connection: HttpConnection, body: bytes | memoryview, reader: BodyReader | None) -> Any:
        head = self._head
        fields = [(name.upper(), value) for name, value in head.headers.items()]
        self._requests.append((head.method, head.target, fields, bytes(body)))
        del body
        if reader is not None:
            reader.release()
        connection.send_response(HttpResponse(b"read"))
        return types.SimpleNamespace(cancel=lambda: None)


async def exchange_bytes(data: bytes) -> tuple[list[Any], list[int]]:
    """Return the requests that are read from a connection's bytes, and the statuses of all responses."""
    requests: list[Any] = []
    budget = MemoryBudget(1 << 24, 1 << 24, lambda: 1.0)
    connections = Connections(lambda head: _Target(head, requests), budget, NoDrainDelay())
    server = await asyncio.get_running_loop().create_server(connections.expect, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(data)
        writer.write_eof()
        answered = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    return requests, [int(status) for status in _STATUS.findall(answered)]


def exchange(data: bytes) -> tuple[list[Any], list[int]]:
    return asyncio.run(exchange_bytes(data))


def read_case(file: Path) -> tuple[bytes, Any]:
    """Return the bytes of a case, and what its file expects."""
    data = file.read_bytes().replace(b"\n", b"")
    for written, meant in ((rb"\r\n", b"\r\n"), (rb"\0", b"\0"), (rb"\n", b"\n"), (rb"\t", b"\t")):
        data = data.replace(written, meant)
    code = "\n".join(line for line in file.with_suffix(".py").read_text().splitlines() if "import" not in line)
    # The names of errors and of options have no meaning here.
    names: Any = defaultdict(lambda: types.SimpleNamespace(set=lambda *_: None))
    names.update(uri=str, Config=lambda: types.SimpleNamespace(set=lambda *_: None))
    exec(code, {"__builtins__": {}}, names)
    return data, names["request"]


def expected_requests(expected: Any) -> list[Any]:
    found = expected if isinstance(expected, list) else [expected]
    return [
        # Gunicorn's cases have bytes of a target as Latin-1.
        (item["method"], item["uri"].encode("latin-1").decode("utf-8", "surrogateescape"), item["headers"],
         item["body"] or b"")
        for item in found
    ]  # fmt: skip


def test_valid_requests_reach_a_handler_as_gunicorn_reads_them(suites: Path) -> None:
    files = sorted((suites / "gunicorn/tests/requests/valid").glob("*.http"))
    assert len(files) == 42
    different = set()
    for file in files:
        data, expected = read_case(file)
        requests, statuses = exchange(data)
        if requests != expected_requests(expected):
            different.add(file.name)
            assert "040" in file.name or (not requests and statuses in ([], [400]))
    assert different == set(VALID_EXCEPTIONS)


def test_invalid_requests_are_refused(suites: Path) -> None:
    files = sorted((suites / "gunicorn/tests/requests/invalid").glob("*.http"))
    assert len(files) == 56
    taken = set()
    for file in files:
        requests, statuses = exchange(read_case(file)[0])
        if requests and statuses[-1] < 400:
            taken.add(file.name)
    assert taken == set(INVALID_EXCEPTIONS)
