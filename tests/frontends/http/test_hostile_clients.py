"""Hostile HTTP clients: very slow or very many ones lose their connections, slow but honest ones do not.

The time-outs of a minute are made fractions of a second here; the ratios between them stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from edge_server.frontends.http import accept_loop, client_timeouts
from edge_server.frontends.http import connection as connection_module
from edge_server.frontends.http.connection import TICKS, Connections, _Phase
from edge_server.frontends.memory_budget import MemoryBudget
from tests.kit.eventually import eventually
from tests.kit.together import together

PATH = "/v2/models/float/infer"
PATIENCE_S = 60.0
ENCODED = ("Content-Encoding: identity",)
"""Such a request goes through aiohttp."""
CHUNKED = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def request(body: bytes, *lines: str, path: str = PATH, length: int | None = None) -> bytes:
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        *lines,
        f"Content-Length: {len(body) if length is None else length}",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def infer(values: list[float], *lines: str, path: str = PATH) -> bytes:
    tensor = {"name": "IN", "shape": [len(values)], "datatype": "FP32", "data": values}
    return request(json.dumps({"inputs": [tensor]}).encode(), *lines, path=path)


def frame(count: int, *lines: str) -> tuple[bytes, bytes]:
    """Return a request with `count` raw numbers, and their bytes."""
    raw = np.arange(count, dtype="<f4").tobytes()
    tensor = {"name": "IN", "shape": [count], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return request(text + raw, f"Inference-Header-Content-Length: {len(text)}", *lines), raw


NEVER = request(
    json.dumps(
        {
            "inputs": [
                {"name": name, "shape": [1, 4], "datatype": "INT32", "data": [1, 2, 3, 4]}
                for name in ("INPUT0", "INPUT1")
            ]
        }
    ).encode(),
    path="/v2/models/never/infer",
)


@pytest.fixture
def open_impatient(monkeypatch: pytest.MonkeyPatch, open_site: Any) -> Callable[..., Any]:
    def start(stall_s: float, **config: Any) -> Any:
        monkeypatch.setattr(connection_module, "STALL_S", stall_s)
        return open_site(**config)

    return start


@pytest.fixture
def connect() -> Iterator[Callable[..., socket.socket]]:
    with contextlib.ExitStack() as opened:

        def start(site: Any, buffer_bytes: int = 0) -> socket.socket:
            client = opened.enter_context(socket.socket())
            client.settimeout(PATIENCE_S)
            if buffer_bytes:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            client.connect(("127.0.0.1", site.port))
            return client

        yield start


def everything(client: socket.socket) -> bytes:
    """Return all that comes until the server closes or cuts the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            parts.append(data)
    return b"".join(parts)


def answer(client: socket.socket) -> bytes:
    """Return one answer that ends with JSON, or with the head if it has no body."""
    text = b""
    while not text.endswith((b"}", b"\r\n\r\n")):
        data = client.recv(1 << 16)
        assert data, text
        text += data
    return text


def trickle(client: socket.socket, data: bytes, pause_s: float = 0.01) -> bytes:
    """Send byte by byte until the server has had enough; return what it said."""
    ended = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            for octet in data:
                client.send(bytes([octet]))
                if ended.wait(pause_s):
                    return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return client.recv(1 << 16)
    finally:
        ended.set()
        sender.join()


def open_count(site: Any) -> int:
    return len(site.frontend._server._setups[0].connections._open)


@pytest.mark.parametrize("lines", [(), ENCODED], ids=["plain", "encoded"])
def test_a_body_that_trickles_is_refused_with_408_however_steadily_it_moves(open_impatient, connect, lines):
    site = open_impatient(0.3)
    client = connect(site)
    client.sendall(request(b"", *lines, length=1_000_000))
    said = trickle(client, bytes(5000))
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"is too slow after " in said
    assert b" of 1000000 bytes: less than 500 bytes/s came for 0.3 s" in said
    assert site.service.requests == []


def test_a_chunked_body_that_trickles_is_refused_too(open_impatient, connect):
    site = open_impatient(0.3)
    client = connect(site)
    client.sendall(CHUNKED)
    said = trickle(client, b"1\r\nx\r\n" * 1000)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"less than 500 bytes/s" in said


def test_a_head_that_trickles_is_refused_with_408(open_impatient, connect):
    site = open_impatient(0.2)
    said = trickle(connect(site), b"GET /v2/health/live HTTP/1.1\r\nX: " + b"y" * 5000)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"the request's head is not complete after 0.2 s" in said


def test_a_head_that_trickles_behind_a_chunked_request_is_refused_too(open_impatient, connect):
    site = open_impatient(0.2)
    client = connect(site)
    client.sendall(CHUNKED + b"2\r\n{}\r\n0\r\n\r\n")
    assert answer(client).startswith(b"HTTP/1.1 400 ")
    assert trickle(client, b"GET /v2/health/live HTTP/1.1\r\nX: " + b"y" * 5000).startswith(b"HTTP/1.1 408 ")


def test_quick_requests_on_one_connection_are_no_trickle(open_impatient, connect):
    site = open_impatient(0.6)
    clients = {b"": connect(site), CHUNKED + b"2\r\n{}\r\n0\r\n\r\n": connect(site)}

    def check(first: bytes) -> None:
        client = clients[first]
        if first:
            client.sendall(first)
            answer(client)
        end = time.monotonic() + 1.8
        while time.monotonic() < end:
            # Ends within the next one's head each time, so that at every look a head is under way.
            data = infer([1.5])
            client.sendall(data[:20])
            time.sleep(0.01)
            client.sendall(data[20:])
            assert answer(client).startswith(b"HTTP/1.1 200 ")

    together(check, clients)


def test_a_frame_over_a_thin_link_of_20_kb_a_second_is_served(open_impatient, connect):
    site = open_impatient(1.0)
    clients = {(): connect(site), ENCODED: connect(site)}

    def check(lines: tuple[str, ...]) -> None:
        client = clients[lines]
        data, raw = frame(12_000, *lines)
        for start in range(0, len(data), 1000):
            client.sendall(data[start : start + 1000])
            time.sleep(0.05)
        text = b""
        while not text.endswith(raw[-4000:]):
            more = client.recv(1 << 16)
            assert more, text[:300]
            text += more
        assert text.startswith(b"HTTP/1.1 200 ")

    together(check, clients)


# -- taking


@pytest.mark.parametrize("lines", [(), ENCODED], ids=["plain", "encoded"])
def test_a_client_that_never_reads_its_answers_loses_its_connection(open_impatient, connect, lines):
    site = open_impatient(0.3)
    client = connect(site, buffer_bytes=8192)
    data, _ = frame(1_000_000, *lines)
    # More answers than the sockets' buffers take; the server stops reading before it has all of the requests.
    sender = threading.Thread(target=_send, args=(client, data * 8))
    sender.start()
    assert site.service.submitted.wait(PATIENCE_S)
    assert eventually(lambda: open_count(site) == 0)
    sender.join()
    assert site.post(PATH, infer([1.0]).partition(b"\r\n\r\n")[2]).status == 200


def _send(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        client.sendall(data)


def test_a_client_that_never_reads_its_events_loses_its_connection(open_impatient, connect):
    site = open_impatient(0.3)
    client = connect(site, buffer_bytes=8192)
    client.sendall(request(b'{"IN":60000}', path="/v2/models/repeat/generate_stream"))
    assert site.service.submitted.wait(PATIENCE_S)
    assert eventually(lambda: open_count(site) == 0)
    assert site.service.tickets[0].was_cancelled.wait(PATIENCE_S)


def test_an_answer_that_is_never_read_does_not_keep_a_refused_connection_open(open_impatient, connect):
    site = open_impatient(0.3)
    client = connect(site, buffer_bytes=8192)
    data, _ = frame(1_500_000)
    client.sendall(data)
    client.sendall(b"no HTTP\r\n\r\n")
    assert eventually(lambda: open_count(site) == 0)


def test_a_slow_reader_that_lives_gets_all_of_its_answer(open_impatient, connect):
    site = open_impatient(0.5)
    clients = {(): connect(site, buffer_bytes=16384), ENCODED: connect(site, buffer_bytes=16384)}

    def check(lines: tuple[str, ...]) -> None:
        client = clients[lines]
        data, raw = frame(1_500_000, *lines, "Connection: close") if lines else frame(1_500_000)
        threading.Thread(target=_send, args=(client, data)).start()
        text = b""
        slow_until = time.monotonic() + 2.0
        while not text.endswith(raw[-100:]):
            more = client.recv(20_000)
            assert more, len(text)
            text += more
            # Slow for four times what a client may be silent; the rest quickly, for the test's sake.
            if time.monotonic() < slow_until:
                time.sleep(0.02)
        assert text.endswith(raw)

    together(check, clients)


def test_a_quiet_stream_of_events_goes_on(open_impatient, connect):
    site = open_impatient(0.1)
    client = connect(site)
    client.sendall(b"GET /edge/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    text = client.recv(1 << 16)
    assert text.startswith(b"HTTP/1.1 200 ")
    time.sleep(0.6)  # six times what a client may be silent within a request
    site.service.events.publish("model.ready", model="m", version=1, generation=1)
    while b"event: model.ready" not in text:
        more = client.recv(1 << 16)
        assert more, text
        text += more


def test_clients_that_read_are_distinguished_from_clients_that_do_not():
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, socket.create_connection(listening.getsockname()) as client, listening.accept()[0] as served:

        class Transport:
            left = 10

            def get_write_buffer_size(self) -> int:
                return self.left

            def get_extra_info(self, name: str) -> Any:
                return served

        transport, taking = Transport(), client_timeouts.ReadProgress()
        looks = lambda: taking.stalled_ticks(transport)  # type: ignore[arg-type]  # noqa: E731
        served.send(b"a")
        assert client.recv(1) == b"a"
        assert [looks() for _ in range(3)] == [0, 1, 2]
        transport.left = 900  # more to send is nothing taken
        assert looks() == 3
        served.send(b"b")
        assert client.recv(1) == b"b"
        assert eventually(lambda: looks() == 0)
        transport.left = 0
        assert [looks() for _ in range(2)] == [0, 0]


# -- crowds


def test_as_many_as_are_allowed_are_let_in_also_when_they_come_at_once(open_impatient, connect):
    most = 200
    site = open_impatient(60.0, max_connections=most)
    clients = [connect(site) for _ in range(most)]
    for client in clients:
        client.sendall(infer([1.0]))
    assert all(answer(client).startswith(b"HTTP/1.1 200 ") for client in clients)
    one_more = connect(site)
    one_more.sendall(infer([1.0]))
    assert answer(one_more).startswith(b"HTTP/1.1 200 ")
    assert open_count(site) == most


def test_the_longest_idle_connection_makes_room_for_a_new_one(open_impatient, connect):
    site = open_impatient(0.2, max_connections=3)
    clients = [connect(site) for _ in range(3)]
    for client in clients:
        client.sendall(infer([1.0]))
        assert answer(client).startswith(b"HTTP/1.1 200 ")
    for client in clients[1:]:
        client.sendall(infer([2.0]))
        assert answer(client).startswith(b"HTTP/1.1 200 ")
    fresh = connect(site)
    fresh.sendall(infer([3.0]))
    assert answer(fresh).startswith(b"HTTP/1.1 200 ")
    assert everything(clients[0]) == b""
    for client in (*clients[1:], fresh):
        client.sendall(infer([4.0]))
        assert answer(client).startswith(b"HTTP/1.1 200 ")


def test_without_an_idle_connection_a_new_one_gets_503_and_the_others_go_on(open_impatient, connect, caplog):
    site = open_impatient(0.2, max_connections=2)
    clients = [connect(site) for _ in range(2)]
    for client in clients:
        client.sendall(NEVER)
    assert eventually(lambda: len(site.service.requests) == 2)
    for _ in range(20):
        refused = everything(connect(site))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 5\r\n" in refused
        assert b"\r\nConnection: close\r\n" in refused
        assert json.loads(refused.partition(b"\r\n\r\n")[2]) == {"error": "2 HTTP connections are open already"}
    assert [record.getMessage() for record in caplog.records] == [
        "2 HTTP connections are open already, and none is idle: new ones are refused"
    ]
    assert open_count(site) == 2
    clients[0].close()
    assert eventually(lambda: open_count(site) == 1)
    assert site.get("/v2/health/live").status == 200


def test_a_storm_of_connections_leaves_no_more_open_than_allowed(open_impatient, connect):
    site = open_impatient(0.2, max_connections=8)
    for _ in range(200):
        connect(site)
    assert eventually(lambda: open_count(site) <= 8)
    # All of them are silent: after a tick there is room for the next one.
    assert eventually(lambda: _is_served(site))
    # Some of the storm may only be accepted now, and then close others.
    assert eventually(lambda: open_count(site) <= 8)


def _is_served(site: Any) -> bool:
    try:
        return bool(site.get("/v2/health/live").status == 200)
    except ConnectionError:
        return False


def setting_up(check: Callable[[Any, Connections, socket.socket], Any]) -> None:
    """Call the coroutine function `check` with a setup that has just begun with one accepted socket."""

    async def begin() -> None:
        connections = Connections(lambda head: None, MemoryBudget(1, 1), connection_module.NoDrainDelay())
        setup = accept_loop.ConnectionSetup(connections, None)
        client, accepted = socket.socketpair()
        accepted.setblocking(False)
        with client:
            setup.begin(accepted, time.monotonic())
            await check(setup, connections, accepted)
            await setup.close(0.0)

    asyncio.run(begin())


def test_a_connection_is_counted_once_as_silent_while_it_is_set_up():
    async def check(setup: Any, connections: Connections, accepted: socket.socket) -> None:
        for _ in range(10):
            assert len(setup.silent(None)) == 1
            await asyncio.sleep(0)
        assert not setup.arriving

    setting_up(check)


def test_a_setup_that_is_stopped_at_once_leaves_no_connection_and_no_socket():
    async def check(setup: Any, connections: Connections, accepted: socket.socket) -> None:
        (silent,) = setup.silent(None)
        closed: list[int] = []
        assert setup.close_silent(silent.connection[1], silent.since_s, lambda: closed.append(1))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (closed, connections.count(), accepted.fileno()) == ([1], 0, -1)

    setting_up(check)


class Deaf:
    """A transport whose client takes nothing, and never says that it has seen the end."""

    def __init__(self, left: int, connection: socket.socket | None = None) -> None:
        self.left = left
        self.connection = connection
        self.was_closed = self.was_cut = False
        self.is_reading = True

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.connection

    def get_write_buffer_size(self) -> int:
        return self.left

    def close(self) -> None:
        self.was_closed = True

    def abort(self) -> None:
        self.was_cut = True

    def is_closing(self) -> bool:
        return self.was_closed

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def write(self, data: bytes) -> None:
        """Find out that the client has gone, as asyncio does."""
        self.was_closed = True
        self.left += len(data)


def closing(left: int, ticks: int) -> tuple[Deaf, int]:
    """Return a transport whose connection was closed so many ticks ago, and the connections that the server still
    counts."""

    async def close() -> tuple[Deaf, int]:
        server = connection_module.Connections(lambda head: None, MemoryBudget(1, 1), connection_module.NoDrainDelay())
        connection, transport = server.expect(), Deaf(left)
        connection.connection_made(transport)
        connection.begin_closing()
        for _ in range(ticks):
            server._tick()
        if transport.was_cut:
            connection.connection_lost(None)
        return transport, server.count()

    return asyncio.run(close())


def test_a_connection_closed_for_a_new_one_is_cut_at_once_if_its_last_response_is_unread():
    async def drop() -> Deaf:
        server = connection_module.Connections(lambda head: None, MemoryBudget(1, 1), connection_module.NoDrainDelay())
        client, served = socket.socketpair()
        with client, served:
            connection, transport = server.expect(), Deaf(1, served)
            connection.connection_made(transport)
            client.send(b"G")
            assert not connection.close_silent()  # what it sent is not read yet
            served.recv(1)
            assert connection.close_silent()
            assert not connection.close_silent()
        connection.connection_lost(None)
        assert server.count() == 0
        return transport

    assert asyncio.run(drop()).was_cut


def test_a_closed_connection_whose_client_does_not_agree_to_the_end_is_cut_after_a_while():
    transport, known = closing(left=0, ticks=TICKS)
    assert transport.was_closed
    assert not transport.was_cut
    assert known == 1
    transport, known = closing(left=0, ticks=TICKS + 1)
    assert transport.was_cut
    assert known == 0


def test_nothing_more_is_written_to_a_connection_that_broke_within_an_answer():
    async def answer() -> int:
        server = connection_module.Connections(lambda head: None, MemoryBudget(1, 1), connection_module.NoDrainDelay())
        connection, transport = server.expect(), Deaf(0)
        connection.connection_made(transport)
        connection._phase = _Phase.BUSY
        connection.send_pieces([b"head", b"piece", b"piece"])
        assert connection.is_busy
        connection.connection_lost(None)
        assert not connection.is_busy
        return transport.left

    assert asyncio.run(answer()) == len(b"head")


def test_the_bound_follows_the_files_that_the_process_may_open(monkeypatch):
    for files, bound in ((256, 128), (1024, 512), (10**6, 4096), (resource.RLIM_INFINITY, 4096), (1, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert accept_loop.max_connections(0) == bound
        assert accept_loop.max_connections(70_000) == 70_000
