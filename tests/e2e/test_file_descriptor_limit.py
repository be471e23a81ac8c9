"""A server with few files left for connections: silent connections end for new clients, and no other client is
affected."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.kit.eventually import eventually
from tests.kit.server import serve

PATIENCE_S = 60.0
"""Far above the second within which a new client is answered, far below the 15 s and more that it once took."""

CROWD = 200
OWN_HTTP2 = "--grpc-transport=http2"
"""grpcio's transport accepts connections in its own way."""


def cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as text:
        fields = text.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def is_live(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/v2/health/live")
    with connection.getresponse() as reply:
        reply.read()
        return reply.status == 200


def has_page(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/metrics")
    with connection.getresponse() as reply:
        return reply.status == 200 and b"nv_" in reply.read()


def new_http_client(address: str, ask: Callable[[http.client.HTTPConnection], bool] = is_live) -> bool:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection:
        return ask(connection)


def new_grpc_client(address: str) -> bool:
    with triton_grpc.InferenceServerClient(address) as client:
        return bool(client.is_server_live(client_timeout=PATIENCE_S))


def endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def silent_crowd(address: str, count: int = CROWD) -> Iterator[None]:
    with contextlib.ExitStack() as crowd:
        for _ in range(count):
            crowd.enter_context(socket.create_connection(endpoint(address), timeout=PATIENCE_S))
        yield


def file_limit(pid: int) -> tuple[int, int]:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)


def test_silent_connections_are_closed_for_new_clients_of_any_listener(repository: Any) -> None:
    repository.add_sub()
    flags = ("--model-control-mode=explicit", OWN_HTTP2)
    with serve(repository.path, *flags, ulimit="-n 80") as server, contextlib.ExitStack() as opened:
        early = server.connection()
        opened.callback(early.close)
        assert is_live(early)
        early_grpc = opened.enter_context(triton_grpc.InferenceServerClient(server.grpc))
        assert early_grpc.is_server_live()
        for address in (server.http, server.grpc, server.metrics):
            with silent_crowd(address):
                assert new_http_client(server.http)
                assert new_grpc_client(server.grpc)
                assert new_http_client(server.metrics, has_page)
                # The server keeps descriptors for itself, and clients that have sent a request stay connected.
                early.request("POST", "/v2/repository/models/add_sub/load", b"{}")
                with early.getresponse() as reply:
                    assert reply.status == 200, reply.read()
                    reply.read()
                early_grpc.unload_model("add_sub")
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 80
        assert "Traceback" not in server.log()
        assert "Too many open files" not in server.log()
        assert "all but 20 of 80 file descriptors are in use: the longest idle connections are closed" in server.log()


def test_a_server_without_free_descriptors_serves_and_accepts_again_later(repository: Any) -> None:
    repository.add_sub()
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(serve(repository.path, "--http-max-connections=100000", ulimit="-S -n 128"))
        pid = server.process.pid
        soft, hard = file_limit(pid)
        assert soft == hard
        grpc = opened.enter_context(triton_grpc.InferenceServerClient(server.grpc))
        assert grpc.is_server_live()
        early = server.connection()
        opened.callback(early.close)
        assert is_live(early)

        files = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
        # Fewer than the connections that may use the reserve.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (files + 3, hard))
        told = "no HTTP connection can be accepted: Too many open files; the longest idle connection is closed"
        with silent_crowd(server.http, 40):
            assert eventually(lambda: told in server.log())
            before = cpu_ticks(pid)
            for _ in range(20):
                assert is_live(early)
                assert grpc.is_server_live()
            # 40 small requests: a loop that spins would take as much as there is, and write a log of it.
            assert cpu_ticks(pid) - before < 100
            lines = [line for line in server.log().splitlines() if "Too many open files" in line]
            # An idle server may have begun a measurement by then.
            assert len([line for line in lines if "cannot be measured" not in line]) == 1, lines
            assert "Traceback" not in server.log()
        client = opened.enter_context(triton_http.InferenceServerClient(server.http))
        assert client.is_model_ready("add_sub")
        assert server.process.poll() is None
