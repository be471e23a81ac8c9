"""A server with few files left for connections: silent connections end for new clients, and no other client is
affected."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.kit.eventually import eventually
from tests.kit.server import serve


def is_live(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/v2/health/live")
    with connection.getresponse() as reply:
        reply.read()
        return reply.status == 200


@contextlib.contextmanager
def silent_crowd(address: str, count: int) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as crowd:
        for _ in range(count):
            crowd.enter_context(socket.create_connection((host, int(port)), timeout=60))
        yield


def test_silent_connections_are_closed_for_new_clients_of_any_listener(repository: Any) -> None:
    repository.add_sub()
    with (
        serve(repository.path, "--model-control-mode=explicit", ulimit="-n 80") as server,
        contextlib.closing(server.connection()) as early,
        triton_grpc.InferenceServerClient(server.grpc) as early_grpc,
    ):
        assert is_live(early)
        assert early_grpc.is_server_live()
        for address in (server.http, server.grpc, server.metrics):
            with silent_crowd(address, 200):
                # Each is a new client.
                assert server.get("/v2/health/live")[0] == 200
                with triton_grpc.InferenceServerClient(server.grpc) as client:
                    assert client.is_server_live(client_timeout=60)
                assert "nv_" in server.read_metrics()
                # The server keeps descriptors for itself, and clients that have sent a request stay connected.
                early_grpc.load_model("add_sub")
                early_grpc.unload_model("add_sub")
                assert is_live(early)
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 80
        assert "Too many open files" not in server.log()
        assert "all but 20 of 80 file descriptors are in use: the longest idle connections are closed" in server.log()
        server.stop_cleanly()


def test_a_server_without_free_descriptors_serves_and_accepts_again_later(repository: Any) -> None:
    repository.add_sub()
    with (
        serve(repository.path, "--http-max-connections=100000", ulimit="-S -n 128") as server,
        contextlib.closing(server.connection()) as early,
        triton_grpc.InferenceServerClient(server.grpc) as grpc,
    ):
        pid = server.process.pid

        def cpu_ticks() -> int:
            with open(f"/proc/{pid}/stat") as text:
                fields = text.read().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        assert grpc.is_server_live()
        assert is_live(early)
        files = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
        # Fewer than the connections that may use the reserve.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (files + 3, hard))
        message = "no HTTP connection can be accepted: Too many open files; the longest idle connection is closed"
        with silent_crowd(server.http, 40):
            assert eventually(lambda: message in server.log())
            before = cpu_ticks()
            for _ in range(20):
                assert is_live(early)
                assert grpc.is_server_live()
            # 40 small requests: a loop that spins would take as much as there is, and write a log of it.
            assert cpu_ticks() - before < 100
            lines = [line for line in server.log().splitlines() if "Too many open files" in line]
            # An idle server may have begun a measurement by then.
            assert len([line for line in lines if "cannot be measured" not in line]) == 1, lines
            assert "Traceback" not in server.log()
        with triton_http.InferenceServerClient(server.http) as client:
            assert client.is_model_ready("add_sub")
        assert server.process.poll() is None
