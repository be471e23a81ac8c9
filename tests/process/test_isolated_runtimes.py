"""`isolation: "process"` for models of runtimes that compute batches: their answers are those of the runtime,
and a crash of the runtime ends the model's process only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.kit.server import serve_here

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


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_an_isolated_model_answers_as_one_in_the_server(repository: Any, backend: str) -> None:
    config = 'max_batch_size: 8 input { name: "a" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }\n'
    config += 'output { name: "y" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }\n'
    config += "dynamic_batching { max_queue_delay_microseconds: 100000 }\n"
    network = model([helper.make_node("Neg", ["a"], ["y"])], "a", TensorProto.FLOAT, 4)
    repository.add(f"isolated_{backend}", ISOLATED.format(backend) + config, model=network)
    with serve_here(repository.path) as server:

        def negate(value: int) -> Any:
            data = np.full((1 + value % 3, 2, 2), value, "f4")
            tensor = {"name": "a", "datatype": "FP32", "shape": list(data.shape), "data": data.ravel().tolist()}
            status, answer = server.ask(f"/v2/models/isolated_{backend}/infer", {"inputs": [tensor]})
            assert status == 200, answer
            (output,) = answer["outputs"]
            assert output["shape"] == list(data.shape)
            return output["data"] == (-data).ravel().tolist()

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(negate, range(12)))
        status, answer = ask(server, f"isolated_{backend}", "FP32", a=[[1, 2]])
        assert status == 400, answer


def test_a_division_that_ends_the_runtime_ends_the_models_process_only(
    repository: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The processor cannot divide the least INT32 by -1, and ONNX Runtime does not ask before."""
    caplog.set_level("INFO")
    division = model([helper.make_node("Div", ["a", "b"], ["y"])], "ab", TensorProto.INT32)
    repository.add("div", ISOLATED.format("onnxruntime"), model=division)
    repository.add("in_server", 'backend: "onnxruntime"', model=division)
    repository.add_sub("other")
    with serve_here(repository.path) as server:
        assert ask(server, "div", a=[[4, 9]], b=[[2, 3]])[1]["outputs"][0]["data"] == [2, 3]
        status, answer = ask(server, "div", a=[[-(2**31), 9]], b=[[-1, 3]])
        assert status == 500
        assert "model 'div': its process" in answer["error"]
        assert "SIGFPE" in answer["error"]
        # It is started again at once, and requests wait for it.
        assert ask(server, "div", a=[[4, 9]], b=[[2, 3]])[1]["outputs"][0]["data"] == [2, 3]
        assert server.request("GET", "/v2/models/other/ready")[0] == 200
        noted = [line for line in caplog.text.splitlines() if "can end the server" in line]
        assert len(noted) == 1
        assert "model 'in_server'" in noted[0]
        assert "input 'b'" in noted[0]
