"""Canaries, replacement and hanging versions, on the installed server."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException


def table_model(values: list[float]) -> onnx.ModelProto:
    """y = values[index]: an index beyond the table fails at run time, in the runtime."""
    table = onnx.numpy_helper.from_array(np.array(values, np.float32), "table")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "index"], ["y"], axis=0)],
        "table",
        [helper.make_tensor_value_info("index", TensorProto.INT64, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
        [table],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


CANARY = """
backend: "onnxruntime"
max_batch_size: 4
version_policy { all {} }
parameters { key: "canary_share" value { string_value: "0.25" } }
parameters { key: "canary_min_requests" value { string_value: "20" } }
parameters { key: "canary_max_p99_ratio" value { string_value: "1000000" } }
"""

REPLACE = """
backend: "onnxruntime"
max_batch_size: 4
parameters { key: "reload_policy" value { string_value: "replace" } }
"""


def index_body(index: int) -> dict[str, Any]:
    return {"inputs": [{"name": "index", "datatype": "INT64", "shape": [1, 1], "data": [index]}]}


def shares(server: Any, model: str) -> dict[int, float]:
    rows = server.ask(f"/edge/v1/versions?model={model}")[1]
    rows = rows["versions"] if isinstance(rows, dict) else rows
    return {int(row["version"]): row["share"] for row in rows if row["state"] == "READY"}


def event_kinds(server: Any) -> list[str]:
    return [event["kind"] for event in server.ask("/edge/v1/events?follow=false")[1]]


def write_whole(folder: Path, version: int, model: onnx.ModelProto) -> None:
    """Move a version into place in one step, as an updater does."""
    staging = folder.parent / ".staging"
    staging.mkdir()
    (staging / "model.onnx").write_bytes(model.SerializeToString())
    os.replace(staging, folder / str(version))


@pytest.fixture(scope="module")
def server(serve: Any, module_repository: Any) -> Iterator[Any]:
    """A server that watches its folder, with a model for each test."""
    module_repository.add("table", CANARY, 1, table_model([1.0] * 100))
    module_repository.add("replaced", REPLACE, 1, table_model([1.0, 1.0]))
    with serve(module_repository.path, "--repository-poll-secs=0.1") as running:
        yield running


def test_a_canary_gets_its_fraction_and_is_rolled_back_if_it_fails_more(
    server: Any, module_repository: Any, eventually: Any
) -> None:
    write_whole(module_repository.path / "table", 2, table_model([2.0] * 2))
    assert eventually(lambda: shares(server, "table") == {1: 0.75, 2: 0.25})

    answers = [server.infer("table", index_body(0)) for _ in range(40)]
    assert {status for status, _ in answers} == {200}
    assert Counter(answer["model_version"] for _, answer in answers) == {"1": 30, "2": 10}
    assert all(answer["outputs"][0]["data"] == [float(answer["model_version"])] for _, answer in answers)

    # Only the canary's table is too short for this one.
    failed = [server.infer("table", index_body(50))[0] for _ in range(80)].count(500)
    assert 0 < failed < 20
    assert shares(server, "table") == {1: 1.0, 2: 0.0}
    assert "model.canary_failed" in event_kinds(server)
    after = [server.infer("table", index_body(50)) for _ in range(20)]
    assert {(status, answer["model_version"]) for status, answer in after} == {(200, "1")}
    assert server.ask("/v2/models/table/versions/2/infer", index_body(0))[1]["outputs"][0]["data"] == [2.0]


def test_replace_unloads_the_old_generation_before_it_loads_the_new_one(
    server: Any, module_repository: Any, eventually: Any
) -> None:
    folder = module_repository.path / "replaced"
    before = len(event_kinds(server))
    shutil.move(folder / "1", module_repository.path / ".old")
    write_whole(folder, 1, table_model([5.0, 5.0]))
    answers: list[tuple[int, Any]] = []

    def has_new_answer() -> bool:
        answers.append(server.infer("replaced", index_body(0)))
        return answers[-1][0] == 200 and answers[-1][1]["outputs"][0]["data"] == [5.0]

    assert eventually(has_new_answer)
    moves = [kind for kind in event_kinds(server)[before:] if kind.startswith("model.")]
    assert moves.index("model.unloaded") < moves.index("model.ready")
    refused = [answer for status, answer in answers if status != 200]
    assert all("replaced" in answer["error"] for answer in refused)


def test_a_call_that_hangs_in_its_runtime_is_answered_and_its_version_removed(
    serve: Any, repository: Any, eventually: Any
) -> None:
    tensors = 'input{name:"x" data_type:TYPE_FP32 dims:[1]} output{name:"y" data_type:TYPE_FP32 dims:[1]}'
    hang = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in (("stub_hang", "true"), ("warmup_probe", "false"))
    )
    for wire in ("http", "grpc"):
        repository.add(f"stuck_{wire}", f'backend: "stub"\n{tensors}\n{hang}')
    repository.add_sub()
    with serve(repository.path, "--hang-timeout-secs=0.5") as server:
        assert server.get("/v2/health/ready")[0] == 200
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
        status, answer = server.infer("stuck_http", body)
        assert status >= 500
        assert "stuck_http" in answer["error"]
        assert eventually(lambda: server.get("/v2/health/ready")[0] == 400)
        value = tritonclient.grpc.InferInput("x", [1], "FP32")
        value.set_data_from_numpy(np.ones(1, np.float32))
        with (
            tritonclient.grpc.InferenceServerClient(server.grpc) as client,
            pytest.raises(InferenceServerException, match="stuck_grpc"),
        ):
            client.infer("stuck_grpc", [value])
        for wire in ("http", "grpc"):
            assert eventually(lambda wire=wire: server.get(f"/v2/models/stuck_{wire}/ready")[0] == 400)
        assert event_kinds(server).count("model.hung") == 2
        ones = [{"name": name, "datatype": "FP32", "shape": [1, 16], "data": [1] * 16} for name in ("INPUT0", "INPUT1")]
        assert server.infer("add_sub", {"inputs": ones})[0] == 200
        server.process.kill()
