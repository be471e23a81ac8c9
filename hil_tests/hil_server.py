"""The installed server in its own process, called with Python's standard library."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

START_LIMIT_S = 900.0
"""Engines may have to be built first."""


@dataclass
class ServerProcess:
    """`http` and `grpc` are "host:port", `metrics` is the page's address."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    metrics: str
    log_path: Path

    def ask(self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(f"http://{self.http}{path}", data=body, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def ask_json(self, path: str, body: object = None) -> tuple[int, Any]:
        """Send `body` as JSON, or nothing. Return the status and the parsed answer, None for an empty one."""
        status, text = self.ask(path, None if body is None else json.dumps(body).encode())
        return status, json.loads(text) if text else None

    def get(self, path: str) -> Any:
        status, text = self.ask(path)
        assert status == 200, f"{path}: {status} {text[:300]!r}"
        return json.loads(text)

    def metric(self, name: str) -> list[float]:
        """Return the values of a metric, whatever its labels."""
        with urllib.request.urlopen(self.metrics, timeout=60) as reply:
            lines = reply.read().decode().splitlines()
        return [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[ {{]", line)]

    def infer(self, model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Send FP32 tensors in binary, and return the FP32 outputs."""
        entries = [
            {"name": name, "datatype": "FP32", "shape": list(array.shape),
             "parameters": {"binary_data_size": array.nbytes}}
            for name, array in inputs.items()
        ]  # fmt: skip
        head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
        payload = head + b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in inputs.values())
        request = urllib.request.Request(
            f"http://{self.http}/v2/models/{model}/infer", payload,
            {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as reply:
            length = int(reply.headers["Inference-Header-Content-Length"])
            data = reply.read()
        outputs, offset = {}, length
        for item in json.loads(data[:length])["outputs"]:
            size = item["parameters"]["binary_data_size"]
            outputs[item["name"]] = np.frombuffer(data, "<f4", size // 4, offset).reshape(item["shape"])
            offset += size
        return outputs

    def resident_mb(self) -> float:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def log(self) -> str:
        return self.log_path.read_text()


@contextlib.contextmanager
def running(repository: Path, *flags: str) -> Iterator[ServerProcess]:
    """Start a server on free ports, wait until it is ready; end it afterwards."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "log"
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "edge_server", "serve", f"--model-repository={repository}", "--http-port=0",
                 "--grpc-port=0", "--metrics-port=0", *flags],
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            )  # fmt: skip
        limit = threading.Timer(START_LIMIT_S, process.kill)
        limit.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            limit.cancel()
            found = re.search(r"HTTP http://([^;\s]+); gRPC ([^;\s]+); metrics (\S+)", line)
            assert found, f"the server did not start: {line}{log_path.read_text()[-2000:]}"
            reader = threading.Thread(target=process.stdout.read)
            reader.start()
            yield ServerProcess(process, found[1], found[2], found[3], log_path)
        finally:
            limit.cancel()
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if "reader" in locals():
                reader.join()
            process.stdout.close()
