"""`isolation: "process"` for models of runtimes that compute batches: a crash of the runtime ends the model's process
only."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

ISOLATED = 'backend: "{}" parameters {{ key: "isolation" value {{ string_value: "process" }} }}\n'


def model(nodes: list[Any], inputs: str, kind: int, width: int = 2) -> onnx.ModelProto:
    tensors = [helper.make_tensor_value_info(name, kind, ["N", width]) for name in inputs]
    graph = helper.make_graph(nodes, "graph", tensors, [helper.make_tensor_value_info("y", kind, ["N", width])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def ask(server: Any, name: str, datatype: str = "INT32", **inputs: list[list[float]]) -> tuple[int, Any]:
    tensors = [
        {"name": key, "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": rows}
        for key, rows in inputs.items()
    ]
    return server.ask(f"/v2/models/{name}/infer", {"inputs": tensors})  # type: ignore[no-any-return]


def test_a_division_that_ends_the_runtime_ends_the_models_process_only(shared_server: Any, repository: Any) -> None:
    """The processor cannot divide the least INT32 by -1, and ONNX Runtime does not ask before."""
    repository.add(
        "div", ISOLATED.format("onnxruntime"), model=model([helper.make_node("Div", ["a", "b"], ["y"])], "ab", 6)
    )
    repository.add(
        "in_server", 'backend: "onnxruntime"', model=model([helper.make_node("Div", ["a", "b"], ["y"])], "ab", 6)
    )
    repository.add_sub("other")
    with shared_server(repository.path) as server:
        assert ask(server, "div", a=[[4, 9]], b=[[2, 3]])[1]["outputs"][0]["data"] == [2, 3]
        status, answer = ask(server, "div", a=[[-(2**31), 9]], b=[[-1, 3]])
        assert status == 500
        assert "model 'div': its process" in answer["error"]
        assert "SIGFPE" in answer["error"]
        # It is started again at once, and requests wait for it.
        assert ask(server, "div", a=[[4, 9]], b=[[2, 3]])[1]["outputs"][0]["data"] == [2, 3]
        assert server.request("GET", "/v2/models/other/ready")[0] == 200
        noted = [line for line in server.log().splitlines() if "can end the server" in line]
        assert len(noted) == 1
        assert "model 'in_server'" in noted[0]
        assert "input 'b'" in noted[0]
