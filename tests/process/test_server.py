"""The server process while one of its parts hangs or fails."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.config import GrpcConfig, RepositoryConfig, ServerConfig
from edge_server.process.server import ServerProcess


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
