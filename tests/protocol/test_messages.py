"""Message classes come from a pool of our own, once, from any thread; reflection finds every symbol."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.protobuf import descriptor_pb2

from edge_server.protocol import messages


def test_a_message_class_is_an_attribute_and_always_the_same() -> None:
    assert messages.ModelInferRequest is messages.message_class("inference.ModelInferRequest")


@pytest.mark.parametrize("name", ["inference.Nope", "", "inference", "inference.DataType"])
def test_an_unknown_message_is_a_key_error(name: str) -> None:
    with pytest.raises(KeyError):
        messages.message_class(name)


@pytest.mark.parametrize("name", ["NoSuchMessage", "_private", "__path__"])
def test_an_unknown_attribute_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError):
        getattr(messages, name)


def test_encoded_bytes_equal_those_of_tritonclient() -> None:
    service_pb2 = pytest.importorskip("tritonclient.grpc", exc_type=ImportError).service_pb2
    theirs = service_pb2.ModelInferRequest(model_name="m", id="1", raw_input_contents=[b"\x00\x01"])
    theirs.inputs.add(name="x", datatype="FP32", shape=[1, -1])
    theirs.parameters["priority"].uint64_param = 2**63
    ours = messages.ModelInferRequest.FromString(theirs.SerializeToString())
    assert list(ours.inputs[0].shape) == [1, -1]
    assert ours.parameters["priority"].uint64_param == 2**63
    assert type(theirs).FromString(ours.SerializeToString()) == theirs


@pytest.mark.parametrize("order", [("tritonclient.grpc", "ours"), ("ours", "tritonclient.grpc")])
def test_tritonclient_can_be_imported_before_and_after_ours(order: tuple[str, str]) -> None:
    pytest.importorskip("tritonclient.grpc", exc_type=ImportError)
    lines = {
        "ours": "from edge_server.protocol.messages import ModelInferRequest; ModelInferRequest()",
        "tritonclient.grpc": "import tritonclient.grpc as t; t.service_pb2.ModelInferRequest()",
    }
    done = subprocess.run([sys.executable, "-c", "\n".join(lines[step] for step in order)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_importing_the_module_does_not_import_protobuf() -> None:
    code = "import sys, edge_server.protocol.messages; sys.exit('google.protobuf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_concurrent_first_accesses_return_one_class() -> None:
    code = """
import threading
from edge_server.protocol import messages
gate, found = threading.Barrier(8), []
def ask():
    gate.wait()
    found.append(messages.message_class("inference.ModelInferRequest"))
threads = [threading.Thread(target=ask) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(found) == 8 and len(set(map(id, found))) == 1
"""
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: subprocess.run([sys.executable, "-c", code]).returncode, range(4)))
    assert done == [0, 0, 0, 0]


def test_the_inference_service_has_twenty_methods_of_which_one_streams() -> None:
    methods = messages.service_methods(messages.GRPC_SERVICE)
    assert len(methods) == 20
    assert [m.name for m in methods if m.client_streaming or m.server_streaming] == ["ModelStreamInfer"]
    infer = next(m for m in methods if m.name == "ModelInfer")
    assert infer.path == "/inference.GRPCInferenceService/ModelInfer"
    assert infer.input_class is messages.ModelInferRequest
    assert infer.output_class is messages.ModelInferResponse


def test_health_offers_check_and_a_streaming_watch() -> None:
    methods = {m.name: m for m in messages.service_methods(messages.HEALTH_SERVICE)}
    assert (methods["Check"].server_streaming, methods["Watch"].server_streaming) == (False, True)


def test_both_reflection_services_stream_in_both_directions() -> None:
    for name in messages.REFLECTION_SERVICES:
        (method,) = messages.service_methods(name)
        assert method.client_streaming
        assert method.server_streaming
    assert set(messages.REFLECTION_SERVICES) < set(messages.service_names())


@pytest.mark.parametrize(
    ("symbol", "files"),
    [
        ("inference.ModelInferRequest", ["grpc_service.proto", "model_config.proto"]),
        ("inference.GRPCInferenceService", ["grpc_service.proto", "model_config.proto"]),
        ("inference.GRPCInferenceService.ModelInfer", ["grpc_service.proto", "model_config.proto"]),
        ("inference.ModelInferRequest.InferInputTensor", ["grpc_service.proto", "model_config.proto"]),
        ("inference.DataType", ["model_config.proto"]),
        ("grpc.health.v1.Health", ["health.proto"]),
    ],
)
def test_reflection_returns_the_file_of_a_symbol_and_its_dependencies(symbol: str, files: list[str]) -> None:
    found = [descriptor_pb2.FileDescriptorProto.FromString(data) for data in messages.file_containing_symbol(symbol)]
    assert [file.name for file in found] == files


@pytest.mark.sample(3)
@pytest.mark.parametrize("symbol", ["", ".", "inference", "inference.GRPCInferenceService.Nope", "x.y.z", "é", "a\0b"])
def test_reflection_of_an_unknown_symbol_is_a_key_error(symbol: str) -> None:
    with pytest.raises(KeyError):
        messages.file_containing_symbol(symbol)


def test_reflection_of_an_unknown_file_is_a_key_error() -> None:
    assert messages.file_by_name("model_config.proto")
    with pytest.raises(KeyError):
        messages.file_by_name("../descriptors.binpb")
