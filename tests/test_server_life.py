"""The life of the process, at moments when something else hangs or fails."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.config import RepositoryConfig
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
