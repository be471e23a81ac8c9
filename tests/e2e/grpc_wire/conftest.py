"""A server for each gRPC transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.grpc_wire.wire import Target
from tests.kit.model_folder import model_folder, parameters
from tests.kit.models import REPEAT, identity_config
from tests.kit.server import serve


@pytest.fixture(scope="session", params=["http2", pytest.param("grpcio", marks=pytest.mark.full)])
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport that this server has; all but the default belong to the full part."""
    return str(request.param)


@pytest.fixture(scope="session")
def wire_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that these tests ask for."""
    models = tmp_path_factory.mktemp("wire")
    model_folder(models / "same", identity_config("UINT8"))
    model_folder(models / "slow", identity_config("UINT8", batch=1, more=parameters(execute_delay_ms=250)))
    batched = parameters(execute_delay_ms=20) + "dynamic_batching { }"
    model_folder(models / "batched", identity_config("UINT8", batch=64, more=batched))
    model_folder(models / "repeat", REPEAT)
    return models


@pytest.fixture(scope="session")
def wire_server(wire_models: Path, transport: str) -> Iterator[Target]:
    """One server for each transport, which no test changes."""
    with serve(wire_models, f"--grpc-transport={transport}") as server:
        yield Target(server, transport)
        server.stop_cleanly()


@pytest.fixture
def target(wire_server: Target) -> Iterator[Target]:
    """The server of the transport. After the test it must still give right answers."""
    try:
        yield wire_server
        wire_server.assert_serves()
    finally:
        wire_server.close()
