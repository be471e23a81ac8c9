"""`isolation: "process"` for models of runtimes that compute batches: their answers are those of the runtime."""

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
