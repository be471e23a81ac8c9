"""Reader of ONNX files: weight types, inputs and outputs, external data, also of damaged and hostile files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from edge_server.backends import load_backend, onnx_file_info
from edge_server.backends.base import ModelFile
from edge_server.backends.describe_model import MIXED_ROWS_NOTE
from edge_server.errors import LoadError
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve


def encode_varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def field(number: int, content: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


def weight(kind: int, dims: bytes) -> bytes:
    """Return a ModelProto's graph with one initializer."""
    return field(7, field(5, field(1, dims) + encode_varint(2 << 3) + encode_varint(kind)))


def test_the_precision_is_weighted_by_elements(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(
        weight(10, encode_varint(3) + encode_varint(4))
        + weight(1, encode_varint(11))
        + weight(1, encode_varint(5) + encode_varint(0))
    )
    assert onnx_file_info.arithmetic(path) == "f16"


def divide(inputs: list[str], element: int = TensorProto.INT64) -> bytes:
    """Return a model that divides the first of its inputs "x" and "y" by the second."""
    given = [helper.make_tensor_value_info(name, element, [2]) for name in ("x", "y")]
    output = helper.make_tensor_value_info("z", element, [2])
    weight = helper.make_tensor("w", element, [2], [1, 2])
    node = helper.make_node("Div", inputs, ["z"])
    content: bytes = helper.make_model(helper.make_graph([node], "g", given, [output], [weight])).SerializeToString()
    return content


@pytest.mark.parametrize(
    ("content", "divisor"),
    [
        (divide(["x", "y"]), "y"),
        (divide(["y", "x"], TensorProto.INT32), "x"),
        (divide(["x", "w"]), None),
        (divide(["x", "y"], TensorProto.FLOAT), None),
        (divide(["x"]), None),
    ],
)
def test_an_integer_input_that_the_graph_divides_by_is_found(
    content: bytes, divisor: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert onnx_file_info.integer_divisor(path) == divisor
    assert onnx_file_info.has_operator(path, frozenset((b"Mul", b"Div")))
    assert not onnx_file_info.has_operator(path, frozenset((b"Mul",)))


def test_a_file_with_a_hundred_thousand_dims_is_read_quickly(tmp_path: Path) -> None:
    """Their product has 6 million bits: multiplied out, it held the interpreter's lock for a minute."""
    path = tmp_path / "model.onnx"
    path.write_bytes(weight(1, encode_varint(2**63 - 1) * 100_000))
    before_s = time.thread_time()
    assert onnx_file_info.arithmetic(path) == "f32"
    assert time.thread_time() - before_s < 30


def external(**entries: str) -> TensorProto:
    """Return four bytes that are elsewhere."""
    tensor = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def in_node(tensor: TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["w"], value=tensor)


def in_graph(**fields: object) -> onnx.ModelProto:
    """Return a model that joins "x" and "w"."""
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [1])
    y = helper.make_tensor_value_info("y", TensorProto.UINT8, [5])
    nodes = [*fields.pop("nodes", ()), helper.make_node("Concat", ["x", "w"], ["y"], axis=0)]  # type: ignore[misc]
    graph = helper.make_graph(nodes, "g", [x], [y], **fields)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def in_subgraph(tensor: TensorProto) -> onnx.ModelProto:
    branch = helper.make_graph([], "branch", [], [helper.make_tensor_value_info("w", 2, [4])], initializer=[tensor])
    condition = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    return in_graph(nodes=[condition, helper.make_node("If", ["c"], ["w"], then_branch=branch, else_branch=branch)])


def in_sparse(tensor: TensorProto) -> onnx.ModelProto:
    indices = helper.make_tensor("i", TensorProto.INT64, [4], [0, 1, 2, 3])
    return in_graph(sparse_initializer=[onnx.SparseTensorProto(values=tensor, indices=indices, dims=[4])])


def in_function(tensor: TensorProto) -> onnx.ModelProto:
    model = in_graph(nodes=[helper.make_node("F", [], ["w"], domain="own")])
    model.functions.append(helper.make_function("own", "F", [], ["w"], [in_node(tensor)], model.opset_import))
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


def in_training(tensor: TensorProto) -> onnx.ModelProto:
    model = in_graph(nodes=[in_node(helper.make_tensor("w", TensorProto.UINT8, [4], [0] * 4))])
    model.training_info.add().algorithm.initializer.append(tensor)
    return model


PLACES = {
    "initializer": lambda tensor: in_graph(initializer=[tensor]),
    "attribute": lambda tensor: in_graph(nodes=[in_node(tensor)]),
    "list in an attribute": lambda tensor: in_graph(nodes=[helper.make_node("C", [], ["w"], value=[tensor])]),
    "subgraph": in_subgraph,
    "sparse initializer": in_sparse,
    "function": in_function,
    "training": in_training,
}

ESCAPES = {
    "memory": ({"location": "*/_ORT_MEM_ADDR_/*", "offset": "4096", "length": "4"}, "expected its weights"),
    "absolute": ({"location": "/etc/passwd", "length": "4"}, "expected a file beside the model"),
    "above": ({"location": "../outside.bin"}, "expected a file beside the model"),
    "above and back": ({"location": "sub/../weights.bin"}, "expected a file beside the model"),
    "backslash": ({"location": "..\\outside.bin"}, "expected a file beside the model"),
    "end of text": ({"location": "weights.bin\0.txt"}, "expected a file beside the model"),
    "none": ({"offset": "0"}, "expected a file beside the model, given ''"),
    "missing": ({"location": "gone.bin"}, "expected its weights 'gone.bin'"),
    "folder": ({"location": "sub"}, "expected 'sub' to be a regular file"),
    "pipe": ({"location": "pipe"}, "expected 'pipe' to be a regular file"),
    "offset behind": ({"location": "weights.bin", "offset": "17"}, "inside 'weights.bin' of 16 bytes, given 17 and 0"),
    "length behind": ({"location": "weights.bin", "offset": "13", "length": "4"}, "given 13 and 4"),
    "negative": ({"location": "weights.bin", "offset": "-4", "length": "4"}, "given -4 and 4"),
    "overflow": ({"location": "weights.bin", "offset": str(2**64 - 4), "length": "4"}, "given 18446744073709551612"),
    "no number": ({"location": "weights.bin", "offset": "0x1", "length": "4"}, "given 0x1 and 4"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A version's folder with 16 bytes of weights."""
    folder = tmp_path / "model" / "1"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(16))
    (tmp_path / "model" / "outside.bin").write_bytes(bytes(16))
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("place", PLACES)
def test_external_data_inside_a_file_of_the_folder_is_listed(place: str, folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(PLACES[place](external(location="weights.bin", offset="12", length="4")).SerializeToString())
    assert onnx_file_info.external_files(path, "file") == ["weights.bin"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("escape", ESCAPES)
def test_other_external_data_is_refused_wherever_its_tensor_is(place: str, escape: str, folder: Path) -> None:
    path = folder / "model.onnx"
    entries, reason = ESCAPES[escape]
    path.write_bytes(PLACES[place](external(**entries)).SerializeToString())
    with pytest.raises(LoadError, match="file: external data of 'w': expected") as error:
        onnx_file_info.external_files(path, "file")
    assert reason in error.value.message


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime", pytest.param("tensorrt_rtx", marks=pytest.mark.full)])
@pytest.mark.parametrize("escape", ESCAPES)
def test_no_runtime_opens_a_file_with_other_external_data(runtime: str, escape: str, folder: Path) -> None:
    """OpenVINO ended the process, or read its memory, by "memory"."""
    path = folder / "model.onnx"
    entries, reason = ESCAPES[escape]
    path.write_bytes(PLACES["initializer"](external(**entries)).SerializeToString())
    with pytest.raises(LoadError, match="external data of 'w'") as error:
        load_backend(runtime).inspect(ModelFile(path, folder.parent, 1), {})
    assert reason in error.value.message


def test_the_resolution_before_each_load_and_trial_refuses_other_external_data(folder: Path) -> None:
    """`check`, `add` and trials begin with it too."""
    (folder / "model.onnx").write_bytes(in_subgraph(external(location="../outside.bin")).SerializeToString())
    model = Scanner([folder.parents[1]]).find("model")
    assert model is not None
    with pytest.raises(LoadError, match="external data of 'w': expected a file beside the model"):
        resolve(model, 1, ResolveOptions())


def test_openvino_opens_no_onnx_file_under_another_name(folder: Path) -> None:
    path = folder / "model.bin"
    path.write_bytes(in_graph(initializer=[external(location="weights.bin")]).SerializeToString())
    with pytest.raises(LoadError, match=r"expected a file that ends in \.onnx, \.tflite, \.xml, or a SavedModel"):
        load_backend("openvino").inspect(ModelFile(path, folder.parent, 1), {})


def test_what_readers_of_protobuf_see_differently_is_refused(folder: Path) -> None:
    """Two tensors in one attribute are joined, and the upper bits of a field's number are dropped."""
    path = folder / "model.onnx"
    halves = external(location="weights.bin"), external(offset="4096")
    attribute = b"".join(field(5, half.SerializeToString()) for half in halves)
    path.write_bytes(field(7, field(1, field(5, attribute))))
    with pytest.raises(ValueError, match="two tensors"):
        onnx_file_info.external_files(path, "file")
    hidden = external(location="../outside.bin").SerializeToString()
    path.write_bytes(field(7, field(5 + (1 << 29), hidden)))
    with pytest.raises(ValueError, match="field number"):
        onnx_file_info.external_files(path, "file")


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_requests_are_not_batched_by_a_file_whose_scale_is_that_of_the_whole_batch(
    backend: str, tmp_path: Path
) -> None:
    """With other clients' rows in its batch, a request would be answered otherwise."""
    given, answered = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
    for operator, is_batchable in (("DynamicQuantizeLinear", False), ("Relu", True)):
        nodes = [helper.make_node("Relu", ["x"], ["y"])]
        if not is_batchable:
            nodes = [
                helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
                helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
            ]
        path = tmp_path / operator / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        graph = helper.make_graph(nodes, "g", [given], [answered])
        opsets = [helper.make_opsetid("", 17)]
        path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
        signature = load_backend(backend).inspect(ModelFile(path, path.parents[1], 1), {})
        assert signature is not None
        assert signature.is_batchable == is_batchable
        assert (MIXED_ROWS_NOTE in signature.notes) == (not is_batchable)
