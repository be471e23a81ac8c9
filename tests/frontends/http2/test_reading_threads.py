"""Several reading threads of one HTTP/2 server: each connection on one of them, one limit, drain and stop for all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hyperframe.frame import DataFrame, GoAwayFrame

from edge_server import cgroup_limits
from edge_server.frontends.reading_thread_count import reading_thread_count

Serve = Callable[..., Any]


def _connect_all(server: Any, count: int) -> tuple[list[Any], list[Any]]:
    """Return clients with one open stream each, and what received the streams."""
    clients, streams = [], []
    for _ in range(count):
        client = server.connect()
        client.send(client.headers(1))
        clients.append(client)
        streams.append(server.next_stream())
    return clients, streams


def test_connections_are_divided_among_the_threads(serve: Serve) -> None:
    server = serve(thread_count=3)
    clients, streams = _connect_all(server, 6)
    threads = [item.reader.thread_id for item in streams]
    assert sorted(map(threads.count, threads)) == [2] * 6
    for client in clients:
        client.send(DataFrame(1, b"abc", flags=["END_STREAM"]))
    assert [client.response(1) for client in clients] == [b"abc"] * 6


def test_the_limit_of_connections_is_that_of_all_threads(serve: Serve) -> None:
    server = serve(thread_count=2, max_connections=2)
    (idle, busy), _ = _connect_all(server, 2)
    idle.send(DataFrame(1, b"", flags=["END_STREAM"]))
    assert idle.response(1) == b""
    third = server.connect()
    third.check_alive()
    while idle.receive() is not None:
        pass
    fourth = server.connect()
    fourth.check_alive()
    while third.receive() is not None:
        pass
    busy.send(DataFrame(1, b"still here", flags=["END_STREAM"]))
    assert busy.response(1) == b"still here"


def test_a_stop_asks_the_clients_of_each_thread_and_waits_for_their_streams(serve: Serve) -> None:
    server = serve(thread_count=2)
    clients, _ = _connect_all(server, 4)
    before = threading.active_count()
    refused, stopped = threading.Event(), threading.Event()

    def stop() -> None:
        server.http2.stop_accepting(server.WAIT_S)
        refused.set()
        server.http2.stop(server.WAIT_S)
        stopped.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    for client in clients[:3]:
        client.acknowledge_goaway(client.headers(3))
    assert not refused.is_set(), "a client of one thread has not heard it yet"
    clients[3].acknowledge_goaway(clients[3].headers(3))
    assert refused.wait(server.WAIT_S)
    for client in clients:
        assert client.until(GoAwayFrame).last_stream_id == 3
        client.send(DataFrame(1, b"a", flags=["END_STREAM"]), DataFrame(3, b"b", flags=["END_STREAM"]))
        assert not stopped.is_set()
        assert {client.response(1), client.response(3)} == {b"a", b"b"}
        client.close()
    stopping.join(server.WAIT_S)
    assert threading.active_count() == before - 2


def test_a_drain_asks_the_clients_of_each_thread(serve: Serve) -> None:
    server = serve(thread_count=2)
    clients, _ = _connect_all(server, 2)
    server.http2.begin_drain()
    for client in clients:
        client.acknowledge_goaway()
        client.send(DataFrame(1, b"abc", flags=["END_STREAM"]))
        assert client.response(1) == b"abc"


@pytest.mark.parametrize(("has_lock", "cores", "count"), [(True, 8, 1), (False, 1, 1), (False, 2, 2), (False, 64, 4)])
def test_only_a_python_without_a_lock_has_several_threads(
    monkeypatch: pytest.MonkeyPatch, has_lock: bool, cores: int, count: int
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_lock, raising=False)
    monkeypatch.setattr(cgroup_limits, "usable_cores", lambda: cores)
    assert reading_thread_count() == count


def test_a_python_before_3_13_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    monkeypatch.setattr(cgroup_limits, "usable_cores", lambda: 8)
    assert reading_thread_count() == 1
