"""ONNX files, read without a runtime. No external data that the library `onnx` sees may be missed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto, helper
from stubs import new_folder, result_of

from edge_server.backends import onnx_file_info
from edge_server.errors import LoadError

_PATH = new_folder("onnx_file") / "model.onnx"
_WEIGHTS = "weights.bin"


def seeds() -> Iterable[bytes]:
    (_PATH.parent / _WEIGHTS).write_bytes(bytes(64))
    outside = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value=_WEIGHTS)
    outside.external_data.add(key="length", value="16")
    inside = helper.make_tensor("v", TensorProto.INT64, [2], [1, 2])
    given = helper.make_tensor_value_info("x", TensorProto.INT64, ["n", 2])
    found = helper.make_tensor_value_info("y", TensorProto.INT64, None)
    divide = helper.make_node("Div", ["v", "x"], ["y"])
    constant = helper.make_node("Constant", [], ["c"], value=outside)
    branch = helper.make_graph([constant], "b", [], [found], [outside])
    choose = helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch)
    for nodes in ([divide], [divide, choose], [constant]):
        graph = helper.make_graph(nodes, "g", [given], [found], [inside, outside])
        model = helper.make_model(graph)
        helper.set_model_props(model, {"names": "{0: 'a'}"})
        yield model.SerializeToString()


def check(data: bytes) -> None:
    _PATH.write_bytes(data or b"\0")
    result_of(lambda: onnx_file_info.arithmetic(_PATH), ValueError)
    result_of(lambda: onnx_file_info.metadata(_PATH), ValueError)
    result_of(lambda: onnx_file_info.has_operator(_PATH, frozenset((b"Div",))), ValueError)
    divisor = result_of(lambda: onnx_file_info.integer_divisor(_PATH), ValueError)
    declared = result_of(lambda: onnx_file_info.declared(_PATH), ValueError)
    assert divisor is None or (declared is not None and divisor in {item.name for item in declared[0]})
    files = result_of(lambda: onnx_file_info.external_files(_PATH, "file"), (ValueError, LoadError))
    model = result_of(lambda: onnx.ModelProto.FromString(data or b"\0"), DecodeError)
    if files is not None and model is not None:
        assert {name for tensor in _tensors(model) for name in _locations(tensor)} <= set(files)


def _tensors(message: Message) -> Iterator[TensorProto]:
    for field, value in message.ListFields():
        for item in value if field.label == field.LABEL_REPEATED else (value,):
            if isinstance(item, TensorProto):
                yield item
            elif isinstance(item, Message):
                yield from _tensors(item)


def _locations(tensor: Any) -> Iterator[str]:
    for entry in tensor.external_data:
        if entry.key == "location":
            yield entry.value
