"""More models than fit into memory, on the installed server: each is listed, and loaded for its first request."""

from __future__ import annotations

from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http

from tests.kit.infer_input import infer_input
from tests.kit.models import identity_config
from tests.kit.server import serve
from tests.kit.together import together


def test_three_models_are_served_with_memory_for_two(repository: Any) -> None:
    names = ("a", "b", "c")
    for name in names:
        repository.add(name, identity_config())
    with serve(repository.path, "--max-resident-models=2") as server:

        def states() -> list[str]:
            return sorted(entry["state"] for entry in server.ask("/v2/repository/index", {})[1])

        def ask(wire: str) -> None:
            module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[wire]
            given = [infer_input(module, "INPUT0", np.array([[7]], np.int32))]
            with module.InferenceServerClient(getattr(server, wire)) as client:
                for name in names * 3:
                    assert client.infer(name, given).as_numpy("OUTPUT0").tolist() == [[7]]

        assert states() == ["READY", "READY", "UNAVAILABLE"]
        assert "NOT served" not in "\n".join(server.banner)
        assert [server.get(f"/v2/models/{name}/ready")[0] for name in names] == [200] * 3
        together(ask, ("http", "grpc"))
        assert states() == ["READY", "READY", "UNAVAILABLE"]
        assert server.get("/v2/health/ready")[0] == 200
