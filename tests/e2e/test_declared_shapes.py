"""ONNX files whose declared outputs are not what they compute. ONNX Runtime runs them, so they are served."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto, helper

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "n"])
S = helper.make_tensor_value_info("s", TensorProto.INT64, [None])
ASKED = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
SIZES = {"name": "s", "shape": [3], "datatype": "INT64", "data": [2, 1, 2]}


def model_of(nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> Any:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_an_output_of_another_shape_than_declared_is_answered_with_a_warning_in_the_status(
    shared_server: Any, repository: Any
) -> None:
    doubled = [
        helper.make_node("Concat", ["x", "x"], ["c"], axis=1),
        helper.make_node("Shape", ["c"], ["s"]),
        helper.make_node("Reshape", ["c", "s"], ["y"]),
    ]
    wrong = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 4])
    absent = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    repository.add("wrong", 'backend: "onnxruntime"', model=model_of(doubled, [X], [wrong]))
    reshaped = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    repository.add("absent", 'backend: "onnxruntime"', model=model_of(reshaped, [X, S], [absent]))
    with shared_server(repository.path) as server:
        for name, inputs, shape in (("wrong", [ASKED], [1, 8]), ("absent", [ASKED, SIZES], [2, 1, 2])):
            for _ in range(2):
                status, answer = server.infer(name, {"inputs": inputs})
                assert (status, answer["outputs"][0]["shape"]) == (200, shape)
        loaded = server.ask("/edge/v1/models")[1]["models"]
    for name, seen, stated in (("wrong", "[1, 8]", "[1, 4]"), ("absent", "[2, 1, 2]", "[-1]")):
        (warning,) = next(item["warnings"] for item in loaded if item["name"] == name)
        assert warning.startswith(f"output 'y' was answered with shape {seen}, where the metadata says {stated}")


def test_a_model_with_a_list_as_output_is_served_without_it(shared_server: Any, repository: Any) -> None:
    parts = helper.make_value_info(
        "parts", helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    )
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("SequenceConstruct", ["x"], ["parts"])]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", "n"])
    config = 'backend: "onnxruntime"\noutput { name: "y" }'
    repository.add("list", config, model=model_of(nodes, [X], [parts, output]))
    with shared_server(repository.path) as server:
        status, answer = server.infer("list", {"inputs": [ASKED]})
    assert status == 200
    assert [(item["name"], item["data"]) for item in answer["outputs"]] == [("y", [-1, -2, -3, -4])]
