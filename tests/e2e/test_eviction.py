"""More models than fit into memory, on the installed server: each is listed, and loaded for its first request."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tritonclient.grpc

from tests.kit.infer_input import infer_input
from tests.kit.server import serve

NAMES = ("add_a", "add_b", "add_c", "add_d")


def inputs_of(server: Any, name: str) -> list[dict[str, Any]]:
    metadata: list[dict[str, Any]] = server.ask(f"/v2/models/{name}")[1]["inputs"]
    return metadata


def states(server: Any) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in server.ask("/v2/repository/index", {})[1]}


def request_for(server: Any, name: str, value: float) -> dict[str, Any]:
    described = inputs_of(server, name)
    shapes = [[1 if size == -1 else size for size in item["shape"]] for item in described]
    return {
        "inputs": [
            {
                "name": item["name"], "datatype": item["datatype"], "shape": shape,
                "data": [value] * int(np.prod(shape)),
            }
            for item, shape in zip(described, shapes, strict=True)
        ]
    }  # fmt: skip


def test_four_models_are_served_with_memory_for_two(repository: Any) -> None:
    for name in NAMES:
        repository.add_sub(name, 'backend: "onnxruntime"')
    with serve(repository.path, "--max-resident-models=2") as server:
        assert server.get("/v2/health/ready")[0] == 200
        assert sorted(states(server).values()) == ["READY", "READY", "UNAVAILABLE", "UNAVAILABLE"]
        assert "NOT served" not in "\n".join(server.banner)
        for name in NAMES:
            assert server.get(f"/v2/models/{name}/ready")[0] == 200
            assert json.loads(server.get(f"/v2/models/{name}/config")[1])["name"] == name
        requests = {name: request_for(server, name, 3) for name in NAMES}

        def ask_http(number: int) -> int:
            status: int = server.infer(NAMES[number % 4], requests[NAMES[number % 4]])[0]
            return status

        def ask_grpc(number: int) -> str:
            name = NAMES[number % 4]
            given = []
            for item in requests[name]["inputs"]:
                given.append(
                    infer_input(
                        tritonclient.grpc, item["name"], np.full(item["shape"], 3, np.float32), item["datatype"]
                    )
                )
            with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
                return str(client.infer(name, given, client_timeout=60).get_response().model_version)

        with ThreadPoolExecutor(4) as pool:
            by_http = pool.map(ask_http, range(12))
            by_grpc = pool.map(ask_grpc, range(12))
            assert set(by_http) == {200}
            assert set(by_grpc) == {"1"}
        assert sorted(states(server).values()) == ["READY", "READY", "UNAVAILABLE", "UNAVAILABLE"]
        assert server.get("/v2/health/ready")[0] == 200
