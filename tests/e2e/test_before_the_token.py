"""What each listener does for a client before its token is known: it reads a head of at most 64 KiB, and nothing more.

SECURITY.md has the table. GR00T's token is inside its messages: tests/plugins/policies/test_groot_port.py.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest

from tests.kit.model_folder import model_folder
from tests.kit.server import serve

MODEL = """
backend: "stub"
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
"""
UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.fixture(scope="module", params=["http2", "grpcio"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("guarded")
    model_folder(folder / "models/one", MODEL)
    digest = hashlib.sha256(secrets.token_bytes()).hexdigest()
    (folder / "tokens").write_text(f"robot {digest} metadata,inference,model-repository,metrics\n")
    flags = (f"--auth-tokens-file={folder / 'tokens'}", f"--grpc-transport={request.param}")
    with serve(folder / "models", *flags, "--policy-openpi=127.0.0.1:0") as server:
        yield server


def addresses(server: Any) -> dict[str, str]:
    openpi = re.search(r"openpi ws://([\d.:]+)", "\n".join(server.banner))
    assert openpi
    return {"http": server.http, "metrics": server.metrics, "openpi": openpi[1]}


def exchange(address: str, data: bytes) -> bytes:
    """Send bytes as far as they are taken, and return what comes until the server closes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as client:
        answer = b""
        try:
            client.sendall(data)
            while piece := client.recv(65536):
                answer += piece
                if b"HTTP/1.1 401" in answer:
                    break
        except ConnectionError:
            pass  # it closed while it was sent to
        return answer


@pytest.mark.parametrize("listener", ["http", "metrics", "openpi"])
def test_a_request_without_a_token_is_answered_by_its_head_alone(guarded: Any, listener: str) -> None:
    head = {
        "http": "POST /v2/models/one/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000000\r\n\r\n",
        "metrics": "GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000000\r\n\r\n",
        "openpi": f"GET /one HTTP/1.1\r\nHost: localhost\r\n{UPGRADE}\r\n",
    }[listener]
    assert exchange(addresses(guarded)[listener], head.encode()).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("listener", ["http", "metrics", "openpi"])
def test_a_head_without_end_is_read_for_64_kib(guarded: Any, listener: str) -> None:
    data = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000
    answer = exchange(addresses(guarded)[listener], data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 "), answer[:200]


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ServerMetadata", "RepositoryModelLoad"])
def test_a_call_without_a_token_is_answered_before_its_message(guarded: Any, method: str) -> None:
    host, _, port = guarded.grpc.rpartition(":")
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    with socket.create_connection((host, int(port)), 30) as client:
        connection.initiate_connection()
        path = f"/inference.GRPCInferenceService/{method}"
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
                ("te", "trailers"), ("content-type", "application/grpc")]  # fmt: skip
        connection.send_headers(1, head)
        client.sendall(connection.data_to_send())
        found: dict[str, str] = {}
        while "grpc-status" not in found:
            for event in connection.receive_data(client.recv(65536)):
                if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                    found |= dict(event.headers)
        assert found["grpc-status"] == "16", found
