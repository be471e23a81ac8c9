"""The installed server in a process of its own, and one in the test's process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND = Path(sys.executable).parent / "edge-server"
PACKAGES = Path(__file__).parent / "packages"
"""Backends of another package, for each server; see tests/README.md."""
READY = re.compile(r"edge-server \S+ is ready: (.*)")
START_LIMIT_S = 120.0


@dataclass
class Addresses:
    """Where a server listens, each "host:port", and what tests ask it."""

    http: str = ""
    grpc: str = ""
    metrics: str = ""

    def url(self, path: str) -> str:
        return f"http://{self.http}{path}"

    def get(self, path: str) -> tuple[int, bytes]:
        return self.request("GET", path)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return status and body, whatever the status is."""
        request = urllib.request.Request(self.url(path), data=body, headers=headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def ask(self, path: str, body: object = None, *, method: str | None = None) -> tuple[int, Any]:
        """Send JSON (POST) or nothing (GET); return the status and the answer read as JSON, None when it is empty."""
        data = None if body is None else json.dumps(body).encode()
        status, text = self.request(method or ("GET" if body is None else "POST"), path, data)
        return status, json.loads(text) if text else None

    def infer(self, model: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self.ask(f"/v2/models/{model}/infer", body)

    def index(self, **members: Any) -> dict[str, dict[str, Any]]:
        """Return the repository's index: by name, the entry of each model's last version."""
        status, answer = self.ask("/v2/repository/index", members)
        assert status == 200, answer
        return {item["name"]: item for item in answer}

    def connection(self) -> http.client.HTTPConnection:
        """Return a separate connection, for requests that urllib would correct. The caller closes it."""
        return http.client.HTTPConnection(self.http, timeout=30)

    def read_counters(self, model: str) -> dict[str, float]:
        """Return the metrics of one model: name (with ` reason` where it has one) -> value."""
        found = {}
        for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", self.read_metrics(), re.MULTILINE):
            if f'model="{model}"' in labels:
                reason = re.search(r'reason="(\w+)"', labels)
                found[f"{name} {reason[1]}" if reason else name] = float(value)
        return found

    def statistics(self, model: str) -> dict[str, Any]:
        status, answer = self.ask(f"/v2/models/{model}/stats")
        assert status == 200, answer
        return answer["model_stats"][0]

    def notes(self, model: str) -> list[str]:
        loaded = self.ask("/edge/v1/models")[1]["models"]
        return next(item["notes"] for item in loaded if item["name"] == model)

    def read_metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as reply:
            return reply.read().decode()


@dataclass(kw_only=True)
class ServerProcess(Addresses):
    """One `edge-server serve`."""

    process: subprocess.Popen[str]
    banner: list[str] = field(default_factory=list)
    stderr_path: Path = Path(os.devnull)
    _reader: threading.Thread = field(default_factory=threading.Thread)

    def read_ahead(self) -> None:
        """Collect the rest of the standard output as it comes, so that the server never waits for a reader."""

        def collect() -> None:
            assert self.process.stdout is not None
            with self.process.stdout as lines:
                self.banner.extend(line.rstrip() for line in lines)

        self._reader = threading.Thread(target=collect)
        self._reader.start()

    def output(self) -> str:
        """Return everything the server printed, once it has ended."""
        self.process.wait(30)
        self._reader.join(30)
        return "\n".join(self.banner)

    def log(self) -> str:
        return self.stderr_path.read_text()

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def stop_cleanly(self) -> None:
        """Stop it, and check its exit code and that no traceback is in its log."""
        assert self.stop() == 0
        assert "Traceback" not in self.log(), self.log()


def is_refused(port: int) -> bool:
    """Return whether nothing listens on a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), 10).close()
    except ConnectionRefusedError:
        return True
    return False


@functools.cache
def machine_without_sensors() -> str:
    """Return a folder with this machine's /proc and /etc. Without its /sys: no test depends on the heat of this one."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    os.chmod(folder.name, 0o755)
    for name in ("proc", "etc"):
        os.symlink(f"/{name}", f"{folder.name}/{name}")
    return folder.name


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without what would configure a server. The server finds no sensors."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}
    kept["EDGE_SERVER_SYSFS_ROOT"] = machine_without_sensors()
    return {**kept, **(more or {})}


def start(
    repository: Path, *flags: str, stderr_path: Path, environment: Mapping[str, str] | None = None, ulimit: str = ""
) -> ServerProcess:
    """Start a server on free ports and wait for its ready line. `ulimit` are arguments of the shell's command."""
    variables = clean_environment(environment)
    packages = (variables.get("PYTHONPATH"), str(PACKAGES))
    limited = ["sh", "-c", f'ulimit {ulimit} && exec "$0" "$@"'] if ulimit else []
    with open(stderr_path, "w") as stderr:
        process = subprocess.Popen(
            [
                *limited, str(COMMAND), "serve", f"--model-repository={repository}",
                "--http-port=0", "--grpc-port=0", "--metrics-port=0", *flags,
            ],
            stdout=subprocess.PIPE, stderr=stderr, text=True,
            env={"PYTHONFAULTHANDLER": "1", **variables, "PYTHONPATH": os.pathsep.join(filter(None, packages))},
        )  # fmt: skip
    server = ServerProcess(process=process, stderr_path=stderr_path)
    # A server that hangs while starting is ended, so that the read below ends too, and says where its threads are.
    limit = threading.Timer(START_LIMIT_S, process.send_signal, (signal.SIGABRT,))
    limit.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            server.banner.append(line.rstrip())
            found = READY.match(line)
            if found:
                addresses = found[1]
                server.read_ahead()
                server.http = re.search(r"HTTP https?://([^;\s]+)", addresses)[1] if "HTTP" in addresses else ""
                server.grpc = re.search(r"gRPC ([^;\s]+)", addresses)[1] if "gRPC" in addresses else ""
                server.metrics = re.search(r"metrics https?://([^/]+)/", addresses)[1] if "metrics" in addresses else ""
                return server
    finally:
        limit.cancel()
    process.stdout.close()
    raise AssertionError(f"the server ended with {process.wait()} before it was ready:\n{stderr_path.read_text()}")


@contextlib.contextmanager
def serve(
    repository: Path, *flags: str, environment: Mapping[str, str] | None = None, ulimit: str = ""
) -> Iterator[ServerProcess]:
    """Run a server until the end of the block. Its log is gone then.

    >>> with serve(repository.path, "--model-control-mode=explicit") as server:
    ...     assert server.infer("same", body)[0] == 200
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr.log"
        server = start(repository, *flags, stderr_path=log, environment=environment, ulimit=ulimit)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.terminate()
                try:
                    server.process.wait(30)
                except subprocess.TimeoutExpired:
                    server.process.kill()
                    server.process.wait()
            server.output()


@dataclass(kw_only=True)
class ServerHere(Addresses):
    """A server in this process."""

    server: Any
    """The edge_server.Server."""


@contextlib.contextmanager
def serve_here(repository: Path, **settings: Any) -> Iterator[ServerHere]:
    """Run a server in this process until the end of the block: for rules of wires that need no process. It finds no
    sensors.

    `settings` are those of edge_server.Server.

    >>> with serve_here(tmp_path, model_control_mode="explicit") as server:
    ...     assert server.get("/v2/health/ready")[0] == 200
    """
    import edge_server

    ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port"), 0)
    with edge_server.Server(repository, **ports, sysfs_root=machine_without_sensors(), **settings) as server:
        numbers = (server.http_port, server.grpc_port, server.metrics_port)
        http, grpc, metrics = (f"127.0.0.1:{number}" for number in numbers)
        yield ServerHere(http=http, grpc=grpc, metrics=metrics, server=server)
