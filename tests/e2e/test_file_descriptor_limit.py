"""A server with few files left for connections: silent connections end for new clients, and no other client is
affected."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

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


def answered_after_s(ask: Callable[[], bool]) -> tuple[float, int]:
    """Return the time until a new client is answered, and how often it had to connect again.

    A client that sends nothing for a moment after it has connected looks like those of the crowd.
    """
    began_s = time.monotonic()
    for again_count in itertools.count():
        try:
            assert ask()
        except (OSError, http.client.HTTPException, InferenceServerException):
            assert time.monotonic() - began_s < PATIENCE_S
        else:
            return time.monotonic() - began_s, again_count
    raise AssertionError


@pytest.mark.long
@pytest.mark.parametrize("attacked", ["http", "grpc"])
def test_a_client_keeps_its_rate_beside_many_silent_connections(repository: Any, attacked: str) -> None:
    """Prints the time until new clients are answered, and the percentiles of a client beside the attack."""
    repository.add_sub()
    tensor = {"shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}
    body = json.dumps({"inputs": [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]})
    with serve(repository.path, OWN_HTTP2, ulimit="-n 80") as server:
        address = server.http if attacked == "http" else server.grpc
        beside = server.connection()
        took_ms: list[float] = []
        answered: dict[str, list[tuple[float, int]]] = {"http": [], "grpc": []}
        is_over = threading.Event()

        async def stay(until_s: float) -> None:
            """Connect, send nothing, and connect again when the server has closed the connection."""
            while time.monotonic() < until_s:
                with contextlib.suppress(OSError, TimeoutError):
                    reader, writer = await asyncio.open_connection(*endpoint(address))
                    with contextlib.closing(writer):
                        await asyncio.wait_for(reader.read(), max(0.01, until_s - time.monotonic()))
                await asyncio.sleep(0.2)

        async def attack() -> None:
            until_s = time.monotonic() + 15
            await asyncio.gather(*(stay(until_s) for _ in range(CROWD)))
            is_over.set()

        attackers = threading.Thread(target=lambda: asyncio.run(attack()))
        with contextlib.closing(beside):
            assert is_live(beside)
            attackers.start()
            next_ones_s = time.monotonic() + 1
            while not is_over.is_set():
                began_s = time.monotonic()
                beside.request("POST", "/v2/models/add_sub/infer", body)
                with beside.getresponse() as reply:
                    assert reply.status == 200
                    reply.read()
                took_ms.append(1000 * (time.monotonic() - began_s))
                if time.monotonic() >= next_ones_s:
                    next_ones_s += 1
                    for wire, ask in (("http", lambda: new_http_client(server.http)),
                                      ("grpc", lambda: new_grpc_client(server.grpc))):  # fmt: skip
                        answered[wire].append(answered_after_s(ask))
                time.sleep(0.005)
            attackers.join()
        cuts = statistics.quantiles(took_ms, n=100)
        worst = {wire: f"{max(found)[0]:.3f} s" for wire, found in answered.items()}
        again_count = sum(count for found in answered.values() for _, count in found)
        print(
            f"\n{CROWD} silent connections to {attacked} that come back, 80 files: new clients were answered after at "
            f"most {worst}, with {again_count} more attempts; {len(took_ms)} requests beside: "
            f"p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms"
        )
        assert "Traceback" not in server.log()
