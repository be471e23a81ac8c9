"""Rollback to an earlier version of a model over the end of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.models import identity_body, identity_config
from tests.kit.server import serve


def add_versions(repository: Any, *versions: int, name: str = "m") -> None:
    for version in versions:
        repository.add(name, identity_config(), version)


def serving(server: Any, name: str = "m") -> int | None:
    """Return the version that answers a request without one."""
    status, answer = server.infer(name, identity_body())
    return int(answer["model_version"]) if status == 200 else None


def rollback(server: Any, name: str = "m", **members: Any) -> tuple[int, Any]:
    return server.ask(f"/edge/v1/models/{name}/rollback", members)


def test_a_pin_survives_a_kill_and_with_a_state_directory_a_stop(repository: Any, tmp_path: Path) -> None:
    add_versions(repository, 1, 2)
    state = tmp_path / "deep" / "state"
    with serve(repository.path, f"--state-dir={state}") as server:
        assert serving(server) == 2
        assert rollback(server)[1]["survives_restart"] is True
        server.process.kill()
        server.process.wait()
    with serve(repository.path, f"--state-dir={state}") as server:
        assert serving(server) == 1
    assert json.loads((state / "pins.json").read_text()) == {"pins": {"m": 1}}
    with serve(repository.path) as server:
        assert serving(server) == 2
