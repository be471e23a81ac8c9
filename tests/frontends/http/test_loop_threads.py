"""Several event loops of one HTTP front end: each connection on one of them, one limit and one stop for all."""

from __future__ import annotations

import hashlib
import http.client
import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edge_server.frontends.auth_tokens import Tokens
from edge_server.telemetry.event_bus import MODEL_READY

WAIT_S = 60.0
VALUES = struct.pack("<4f", 1, 2, 3, 4)
HEAD = json.dumps(
    {
        "inputs": [
            {"name": "IN", "datatype": "FP32", "shape": [1, 2, 2], "parameters": {"binary_data_size": len(VALUES)}}
        ],
        "parameters": {"binary_data_output": True},
    }
).encode()

Connect = Callable[[Any], http.client.HTTPConnection]


@pytest.fixture
def connect() -> Iterator[Connect]:
    opened: list[http.client.HTTPConnection] = []

    def start(site: Any) -> http.client.HTTPConnection:
        opened.append(http.client.HTTPConnection("127.0.0.1", site.port, timeout=WAIT_S))
        opened[-1].connect()
        return opened[-1]

    yield start
    for connection in opened:
        connection.close()


def ask(connection: http.client.HTTPConnection, path: str = "/v2/health/live", **headers: str) -> int:
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    response.read()
    return response.status


def infer(connection: http.client.HTTPConnection) -> bytes:
    connection.request(
        "POST", "/v2/models/raw/infer", HEAD + VALUES, {"Inference-Header-Content-Length": str(len(HEAD))}
    )
    response = connection.getresponse()
    body = response.read()
    assert response.status == 200, body
    return body[int(response.headers["Inference-Header-Content-Length"]) :]


def counts(site: Any) -> list[int]:
    return [setup.count() for setup in site.frontend._server._setups]


def test_connections_are_divided_among_the_loops_and_stay(open_site: Any, connect: Connect) -> None:
    site = open_site(thread_count=3)
    connections = [connect(site) for _ in range(6)]
    for _ in range(3):
        assert [infer(connection) for connection in connections] == [VALUES] * 6
        assert [ask(connection) for connection in connections] == [200] * 6
        # aiohttp's server serves this path.
        assert [ask(connection, "/edge/v1/events?follow=false") for connection in connections] == [200] * 6
    assert counts(site) == [2, 2, 2]


def test_requests_on_several_loops_at_once_get_their_own_answers(open_site: Any, connect: Connect) -> None:
    site = open_site(thread_count=3)

    def work(connection: http.client.HTTPConnection) -> bool:
        return all(infer(connection) == VALUES and ask(connection) == 200 for _ in range(30))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, [connect(site) for _ in range(6)]))


def test_the_limit_of_connections_is_that_of_all_loops(open_site: Any, connect: Connect) -> None:
    site = open_site(thread_count=2, max_connections=2)
    connections = [connect(site) for _ in range(2)]
    for connection in connections:
        assert ask(connection) == 200
    for _ in range(2):
        assert ask(connect(site)) == 200
    # The oldest make room, each on its own loop, which nobody waits for.
    assert [connection.sock.recv(1) for connection in connections] == [b"", b""]
    assert sum(counts(site)) <= 2


def test_an_event_reaches_the_streams_of_each_loop(open_site: Any, connect: Connect) -> None:
    site = open_site(thread_count=2)
    streams = []
    for _ in range(4):
        connection = connect(site)
        connection.request("GET", "/edge/v1/events")
        streams.append(connection.getresponse())
    assert counts(site) == [2, 2]
    site.service.events.publish(MODEL_READY, model="m", version=1)
    for stream in streams:
        while not (line := stream.readline()).startswith(b"event:"):
            assert line
        assert line.split() == [b"event:", MODEL_READY.encode()]


def test_new_tokens_count_for_the_cached_headers_of_each_loop(open_site: Any, connect: Connect, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    tokens = Tokens()
    site = open_site(thread_count=2, tokens=tokens)
    connections = [connect(site) for _ in range(2)]
    assert [infer(connection) for connection in connections * 2] == [VALUES] * 4
    file.write_text(f"a {hashlib.sha256(b'secret').hexdigest()} inference\n")
    tokens.load(str(file))
    for connection in connections:
        # After the loop's call that drops the headers.
        assert ask(connection) == 200
        with pytest.raises(AssertionError, match="token"):
            infer(connection)


def test_a_stop_waits_for_the_requests_of_each_loop(open_site: Any, connect: Connect) -> None:
    site = open_site(thread_count=2)
    released, entered = threading.Event(), threading.Semaphore(0)
    compute = site.service.models["raw"][1]

    def wait(request: Any) -> Any:
        entered.release()
        assert released.wait(WAIT_S)
        return compute(request)

    site.service.models["raw"] = (site.service.models["raw"][0], wait)
    threads = site.frontend._threads[0]._thread
    connections = [connect(site) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(infer, connection) for connection in connections]
        for _ in connections:
            assert entered.acquire(timeout=WAIT_S)
        stopping = pool.submit(site.run, site.stop(WAIT_S))
        released.set()
        assert [answer.result(WAIT_S) for answer in answers] == [VALUES] * 2
        stopping.result(WAIT_S)
    assert not threads.is_alive()
    with pytest.raises(OSError):
        connect(site)
