"""Responses to clients while a server loads its models: over HTTP, and over gRPC with each value of --grpc-listen."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.server import COMMAND, is_refused

INFER = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]})
TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }'
SLOW = """
import os
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        # Ends when the test opens its end of the pipe.
        os.close(os.open(GATE, os.O_RDONLY))

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
"""


def test_during_the_start_clients_are_told_to_retry_and_never_get_not_found(repository: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    repository.add("fast", f'backend: "identity" {TENSORS}')
    repository.add("slow", f'backend: "python" {TENSORS}', files={"1/model.py": SLOW.replace("GATE", repr(str(gate)))})
    asked: dict[str, list[tuple[int, str | None]]] = {"fast": [], "slow": []}
    with socket.socket() as held:
        # Bound but not listening: no other program gets the port, and every connection reaches the server.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]

        def ask(model: str) -> int:
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request("POST", f"/v2/models/{model}/infer", INFER)
                reply = connection.getresponse()
                reply.read()
            except ConnectionRefusedError:
                return 0
            finally:
                connection.close()
            asked[model].append((reply.status, reply.getheader("Retry-After")))
            return reply.status

        process = subprocess.Popen(
            [
                str(COMMAND), "serve", f"--model-repository={repository.path}", f"--http-port={port}",
                "--reuse-http-port", "--allow-grpc=false", "--allow-metrics=false",
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert eventually(lambda: ask("fast") == 200)
            assert ask("slow") == 503
            assert ask("fast") == 200
            opened = os.open(gate, os.O_RDWR)
            try:
                assert eventually(lambda: ask("slow") == 200)
            finally:
                os.close(opened)
        finally:
            process.terminate()
            process.wait(30)
    answers = {*asked["fast"], *asked["slow"]}
    assert answers <= {(200, None), (503, "1")}, answers


# -- gRPC


BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("no weights")

    def execute(self, requests):
        return []
"""
WATCH = "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def infer_over_grpc(client: Any, model: str) -> float:
    given = infer_input(tritonclient.grpc, "x", np.array([3], np.float32))
    return float(client.infer(model, [given]).as_numpy("y")[0])


class StartingServer:
    """A server whose model "slow" is loaded once `open_gate` is called; "fast" is there at once, "broken" fails."""

    def __init__(self, repository: Any, folder: Path, ports: list[int], *flags: str) -> None:
        self._gate = folder / "gate"
        os.mkfifo(self._gate)
        repository.add("fast", f'backend: "identity" {TENSORS}')
        for model, code in (("slow", SLOW.replace("GATE", repr(str(self._gate)))), ("broken", BROKEN)):
            (repository.add(model, f'backend: "python" {TENSORS}') / "1" / "model.py").write_text(code)
        self.http, self.grpc, self.metrics = ports
        self.log = folder / "log"
        self.command = [
            str(COMMAND), "serve", f"--model-repository={repository.path}", f"--http-port={ports[0]}",
            f"--grpc-port={ports[1]}", f"--metrics-port={ports[2]}", *flags,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def open_gate(self) -> None:
        os.close(os.open(self._gate, os.O_WRONLY))

    def state(self, model: str) -> str:
        connection = HTTPConnection("127.0.0.1", self.http, timeout=30)
        try:
            connection.request("POST", "/v2/repository/index", b"")
            index = json.loads(connection.getresponse().read())
            return next(entry.get("state", "") for entry in index if entry["name"] == model)
        except ConnectionRefusedError:
            return ""
        finally:
            connection.close()


@pytest.fixture
def starting(
    repository: Any, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> Iterator[Callable[..., StartingServer]]:
    with contextlib.ExitStack() as cleanup:

        def start(*flags: str) -> StartingServer:
            server = StartingServer(repository, tmp_path, free_ports(3), *flags)
            cleanup.callback(server.process.wait, 30)
            cleanup.callback(server.process.kill)
            return server

        yield start


@pytest.mark.parametrize("transport", ["http2", pytest.param("grpcio", marks=pytest.mark.full)])
def test_grpc_refuses_clients_until_each_model_is_loaded_or_has_failed_and_http_answers_meanwhile(
    starting: Callable[..., StartingServer], transport: str
) -> None:
    server = starting(f"--grpc-transport={transport}")
    assert eventually(lambda: server.state("fast") == "READY" and server.state("broken") == "UNAVAILABLE")
    assert server.state("slow") == "LOADING"
    assert is_refused(server.grpc)
    assert not is_refused(server.metrics)
    # The port is reserved: another server fails at once rather than later.
    other = [*server.command, "--http-port=0", "--metrics-port=0"]
    done = subprocess.run(other, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"gRPC cannot listen on 127.0.0.1:{server.grpc}: Address already in use" in done.stderr
    assert "is ready" not in server.log.read_text()
    server.open_gate()
    assert eventually(lambda: not is_refused(server.grpc))
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        # The first answer, and no other before.
        assert infer_over_grpc(client, "slow") == 3
        assert client.is_server_ready()
    assert f"gRPC 127.0.0.1:{server.grpc}" in server.log.read_text()


def test_at_the_start_grpc_answers_and_watch_reports_not_serving_until_the_loads_end(
    starting: Callable[..., StartingServer],
) -> None:
    server = starting("--grpc-listen=at-start")
    assert eventually(lambda: server.state("fast") == "READY")
    with (
        grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client,
    ):
        watching = channel.unary_stream(WATCH)(b"", timeout=60)
        assert next(watching) == NOT_SERVING
        assert infer_over_grpc(client, "fast") == 3
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            infer_over_grpc(client, "slow")
        server.open_gate()
        assert next(watching) == SERVING
        assert infer_over_grpc(client, "slow") == 3
