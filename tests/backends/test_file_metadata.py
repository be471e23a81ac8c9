"""Metadata of ONNX and OpenVINO IR files, as the runtimes read them."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from edge_server.backends import load_backend
from edge_server.backends.base import MAX_METADATA_TEXT, ModelFile

RUNTIMES = ("onnxruntime", "openvino")


def network(metadata: dict[str, str]) -> bytes:
    made = helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"])],
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    helper.set_model_props(made, metadata)
    return made.SerializeToString()


def read(runtime: str, path: Path) -> dict[str, str]:
    pytest.importorskip(runtime)
    signature = load_backend(runtime).inspect(ModelFile(path, path.parent, 1), {})
    assert signature is not None
    return dict(signature.metadata)


@pytest.mark.parametrize("runtime", [*RUNTIMES, "tensorrt_rtx"])
def test_texts_of_an_onnx_file(runtime: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(network({"task": "d\u00e9tect", "empty": "", "long": "x" * (MAX_METADATA_TEXT + 1)}))
    assert read(runtime, path) == {"task": "d\u00e9tect", "empty": ""}
    path.write_bytes(network({}))
    assert read(runtime, path) == {}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_texts_of_other_bytes_are_left_out(runtime: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(network({"task": "BYTES"}).replace(b"BYTES", b"\xff\xfe\x80\xc0\x00"))
    assert read(runtime, tmp_path / "model.onnx") == {}


def test_an_ir_file_has_the_texts_of_the_onnx_file_and_its_own(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    (tmp_path / "source.onnx").write_bytes(network({"task": "detect"}))
    graph = openvino.Core().read_model(tmp_path / "source.onnx")
    graph.set_rt_info("YOLO", ["model_info", "model_type"])
    openvino.save_model(graph, tmp_path / "model.xml")
    found = read("openvino", tmp_path / "model.xml")
    assert found["task"] == "detect"
    assert found["model_info/model_type"] == "YOLO"
