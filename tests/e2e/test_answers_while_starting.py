"""What a client meets that knocks from the moment on at which the server's port is open."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

COMMAND = Path(sys.executable).parent / "edge-server"
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


def test_a_client_is_asked_to_try_again_until_its_model_answers_and_never_told_that_there_is_none(
    repository: Any, tmp_path: Path, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    repository.add("fast", f'backend: "identity" {TENSORS}')
    folder = repository.add("slow", f'backend: "python" {TENSORS}')
    (folder / "1" / "model.py").write_text(SLOW.replace("GATE", repr(str(gate))))
    asked: dict[str, list[tuple[int, str | None]]] = {"fast": [], "slow": []}
    with socket.socket() as held:
        # Bound and never listening: nobody else gets the port, and every connection is the server's.
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
