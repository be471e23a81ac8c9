"""The server process while one of its parts hangs or fails."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edge_server
from edge_server.config import GrpcConfig, RepositoryConfig, ServerConfig
from edge_server.process import server as process_module
from edge_server.process.server import ServerProcess
from tests.kit.eventually import eventually
from tests.kit.server import is_refused


def server(**parts: Any) -> Any:
    """Return a server of which only these parts are there."""
    made: Any = ServerProcess.__new__(ServerProcess)
    for name, part in parts.items():
        setattr(made, f"_{name}", part)
    return made


@pytest.mark.parametrize("mode", ["explicit", "none"])
def test_a_disk_that_hangs_at_the_first_scan_does_not_keep_the_loop_from_turning(mode: str) -> None:
    has_turned = threading.Event()
    stated: list[object] = []

    def desired_models() -> tuple[dict[str, object], tuple[str, ...]]:
        assert has_turned.wait(60), "the loop waited for the disk"
        return {}, ()

    async def live() -> None:
        asyncio.get_running_loop().call_soon(has_turned.set)
        await server(
            config=SimpleNamespace(repository=RepositoryConfig(control_mode=mode)),
            core=SimpleNamespace(
                source=SimpleNamespace(desired_models=desired_models),
                service=SimpleNamespace(set_desired_state=stated.append),
            ),
        )._set_first_desired_state()

    asyncio.run(live())
    assert stated == [{}]


def test_what_fails_to_close_does_not_keep_the_rest_open(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    async def close() -> None:
        closed.append("front end")

    async def fail() -> None:
        raise OSError(5, "Input/output error")

    async def end() -> None:
        closed.append("supervision")

    async def live() -> None:
        stop = asyncio.Event()
        stop.set()
        traces = SimpleNamespace(close=lambda patience_s: closed.append("traces"))
        await server(
            stop=stop,
            closers=[close, fail],
            core=SimpleNamespace(service=SimpleNamespace(traces=traces)),
            supervision=SimpleNamespace(end=end),
        )._close()

    asyncio.run(live())
    assert closed == ["front end", "traces", "supervision"]
    assert "Input/output error" in caplog.text


@pytest.mark.parametrize(
    ("listen", "mode", "load_models", "accepts"),
    [
        ("when-loaded", "poll", (), False),
        ("when-loaded", "none", (), False),
        ("when-loaded", "explicit", ("*",), False),
        ("when-loaded", "explicit", (), True),  # nothing is loaded before an order comes
        ("at-start", "poll", (), True),
    ],
)
def test_grpc_accepts_clients_at_the_start_if_asked_to_or_if_nothing_is_loaded_then(
    monkeypatch: pytest.MonkeyPatch, listen: str, mode: str, load_models: tuple[str, ...], accepts: bool
) -> None:
    calls: list[object] = []

    class StubFrontend:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def start(self, *, accepts: bool) -> int:
            calls.append(accepts)
            return 8001

        def accept_connections(self) -> None:
            calls.append("accept")

    monkeypatch.setattr("edge_server.frontends.grpc.server.GrpcFrontend", StubFrontend)
    config = ServerConfig(
        repository=RepositoryConfig(control_mode=mode, load_models=load_models), grpc=GrpcConfig(listen=listen)
    )
    made = server(
        config=config, core=SimpleNamespace(service=None, plugins=SimpleNamespace(rpcs=list)), closers=[], addresses=[],
        budget=None, tokens=None, connection_limit=None, grpc_waits=False,
    )  # fmt: skip
    made.ports = {}
    asyncio.run(made._open_grpc())
    made._accept_grpc()
    made._accept_grpc()
    assert calls == ([True] if accepts else [False, "accept"])


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


def test_grpc_accepts_clients_while_only_engine_builds_are_left(
    repository: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_ENGINE_WAIT_S", 0.0)
    builds = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }'
    gates = {}
    for model, more in (("plain", ""), ("engine", builds)):
        gates[model] = tmp_path / model
        os.mkfifo(gates[model])
        repository.add(
            model,
            f'backend: "python" {TENSORS} {more}',
            files={"1/model.py": SLOW.replace("GATE", repr(str(gates[model])))},
        )
    repository.add(
        "ensemble",
        f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ step {{ model_name: "engine" model_version: -1 '
        'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }',
    )
    server = edge_server.Server(repository.path, grpc_port=0, model_load_thread_count=2)
    starting = threading.Thread(target=server.start)
    starting.start()
    try:
        assert eventually(lambda: server.grpc_port is not None)
        port = server.grpc_port
        assert port is not None
        assert is_refused(port)
        # Opens only when the model's code has opened the other end.
        os.close(os.open(gates["plain"], os.O_WRONLY))
        assert eventually(lambda: not is_refused(port))
        states = {entry.name: entry.state for entry in server.models()}
        assert (states["plain"], states["engine"]) == ("READY", "LOADING")
        assert states["ensemble"] != "READY"
    finally:
        # For reading too, so that it opens at once; kept open for a model that comes later.
        ends = [os.open(gate, os.O_RDWR) for gate in gates.values()]
        starting.join(60)
        server.stop()
        for end in ends:
            os.close(end)
