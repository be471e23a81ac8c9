"""Servers of the tests of `edge-server perf` and `analyze`, and the commands as users call them."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli.main import main
from edge_server.plugins.tuning.clients.client_interface import TextTimes
from edge_server.plugins.tuning.clients.connection import ConnectionLoop, LoadWorker, ServerAddress
from tests.kit import models as servers
from tests.kit.server import serve as serve_repository

BRIEF = ("--measurement-interval=150", "--measurement-request-count=5", "--max-trials=3")


def stub(*, delay_ms: int = 0, batch: int = 8, more: str = "") -> str:
    return (
        f'backend: "stub"\nmax_batch_size: {batch}\n'
        "input { name: 'INPUT0' data_type: TYPE_FP32 dims: [4] }\n"
        "output { name: 'OUTPUT0' data_type: TYPE_FP32 dims: [4] }\n"
        f"parameters {{ key: 'stub_delay_ms' value {{ string_value: '{delay_ms}' }} }}\n{more}"
    )


@pytest.fixture(scope="session")
def stub_config() -> Callable[..., str]:
    """`stub_config(delay_ms=20, batch=8, more="")` is the config.pbtxt of a model that doubles FP32 [4]."""
    return stub


@dataclass
class Done:
    """A command that has ended."""

    code: int
    output: str
    errors: str
    report: dict[str, Any]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    """`command("perf", *arguments)` runs a command in this process, which saves the start of another one."""

    def run(*arguments: str) -> Done:
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        capsys.readouterr()
        try:
            code = main([*arguments, f"--json={path}"])
        except SystemExit as error:  # argparse's way out
            code = int(error.code or 0)
        output, errors = capsys.readouterr()
        return Done(code, output, errors, json.loads(path.read_text()) if path.exists() else {})

    return run


class Requests:
    """`send(request, ...)` sends requests at once, each by another worker of one connection, and returns reason and
    message of each outcome in the order in which they came."""

    def __init__(self, loop: ConnectionLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._outcomes: list[tuple[str, str]] = []
        self.connection: Any = None
        self.count = 0
        """Of all outcomes."""
        self.starts: list[float] = []
        self.texts: list[TextTimes] = []

    def __call__(self, *requests: bytes) -> list[tuple[str, str]]:
        self._outcomes.clear()
        workers = [LoadWorker(self.connection, iter(())) for _ in requests]
        for worker, request in zip(workers, requests, strict=True):
            self.connection.start(worker, request)
        self.connection.flush()
        end_s = time.monotonic() + self._timeout_s
        while len(self._outcomes) < len(requests):
            self._loop.wait(max(0.0, end_s - time.monotonic()))
            if time.monotonic() > end_s and len(requests) == 1 and not self._outcomes:
                self.connection.cancel(workers[0], "too late")
        return list(self._outcomes)

    def take(self, worker: LoadWorker, end_s: float, reason: str, message: str, text: TextTimes | None) -> None:
        self.count += 1
        self._outcomes.append((reason, message))
        if text is not None:
            self.starts.append(worker.start_s)
            self.texts.append(text)


@pytest.fixture
def ask() -> Callable[..., Any]:
    """`with ask((host, port), make, timeout_s) as send:` gives Requests of the connection that `make(server, loop,
    on_answer)` makes."""

    @contextlib.contextmanager
    def run(address: tuple[str, int], make: Callable[..., Any], timeout_s: float = 30.0) -> Iterator[Requests]:
        with contextlib.closing(ConnectionLoop()) as loop:
            send = Requests(loop, timeout_s)
            send.connection = make(ServerAddress(socket.AF_INET, address, "localhost", None), loop, send.take)
            yield send

    return run


@pytest.fixture
def measure(server: Any, command: Callable[..., Done]) -> Callable[..., Done]:
    """`measure("model", *flags)` runs `edge-server perf` on the server and returns its results."""

    def run(model: str, *flags: str) -> Done:
        return command(
            "perf", "-m", model, f"--address={server.grpc}", f"--url=http://{server.http}", *BRIEF, *flags
        )  # fmt: skip

    return run


@pytest.fixture
def run_server() -> Callable[..., Any]:
    """`with run_server(folder, *flags) as server:` runs a server of the models in a folder."""
    return serve_repository


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of models that answer after a known time, or never."""
    repository = servers.Repository(tmp_path_factory.mktemp("models"))
    repository.add("slow", stub(delay_ms=30))
    repository.add("failing", stub(more=servers.FAILING))
    repository.add(
        "sometimes", stub(delay_ms=1, more="parameters { key: 'stub_fail_after' value { string_value: '40' } }")
    )
    repository.add("open_shape", servers.identity_config("FP32", "-1, 3"))
    stated = {"network_image_height": "2", "network_image_width": "5", "image_color": "rgb"}
    sizes = "".join(f"parameters {{ key: '{key}' value {{ string_value: '{text}' }} }}" for key, text in stated.items())
    repository.add("picture", servers.identity_config("FP32", "3, -1, -1", more=sizes))
    for datatype in ("BYTES", "BF16", "BOOL", "INT64"):
        repository.add(f"same_{datatype}", servers.identity_config(datatype, "5"))
    repository.add("repeat", servers.REPEAT)
    repository.add("talker", 'backend: "scripted_llm"')
    script = {"answers": {"hello": "abcde" * 4}, "step_s": 0.005}
    (repository.path / "talker/1/script.json").write_text(json.dumps(script))
    with serve_repository(repository.path, "--allow-client-shm") as server:
        yield server
        assert "Traceback" not in server.log(), server.log()
