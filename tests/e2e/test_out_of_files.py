"""A server that has no file left for one more connection: it waits without spinning, and serves those it has."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
from typing import Any

import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http


def cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as text:
        fields = text.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def is_live(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/v2/health/live")
    with connection.getresponse() as reply:
        reply.read()
        return reply.status == 200


def test_a_server_without_a_free_file_serves_on_and_takes_new_clients_as_soon_as_it_can(
    serve: Any, repository: Any, eventually: Any
) -> None:
    repository.add_sub()
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(serve(repository.path, "--http-max-connections=100000"))
        pid = server.process.pid
        grpc = opened.enter_context(triton_grpc.InferenceServerClient(server.grpc))
        assert grpc.is_server_live()
        early = server.connection()
        opened.callback(early.close)
        assert is_live(early)

        host, _, port = server.http.rpartition(":")
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        files = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (files + 3, hard))
        with contextlib.ExitStack() as crowd:
            for _ in range(40):
                crowd.enter_context(socket.create_connection((host, int(port)), timeout=20))
            told = "no HTTP connection can be accepted: Too many open files; new connections wait"
            assert eventually(lambda: told in server.log())
            before = cpu_ticks(pid)
            for _ in range(20):
                assert is_live(early)
                assert grpc.is_server_live()
            # 40 small requests: a loop that spins would take as much as there is, and write a log of it.
            assert cpu_ticks(pid) - before < 100
            assert server.log().count("Too many open files") == 1
            assert "Traceback" not in server.log()
        client = opened.enter_context(triton_http.InferenceServerClient(server.http))
        assert client.is_model_ready("add_sub")
        assert server.process.poll() is None
