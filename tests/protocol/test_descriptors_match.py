"""The committed descriptors match the .proto files, and those of Triton's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from edge_server.protocol import compile_descriptors as protocol_compile

pytestmark = pytest.mark.full

EXCUSED: dict[str, str] = {}
"""Symbol -> reason why it may differ from tritonclient's descriptors."""


def _committed() -> dict[str, Any]:
    content = protocol_compile.DESCRIPTORS.read_bytes()
    return {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(content).file}


def _facts(file: Any) -> Iterator[tuple[str, object]]:
    """Yield every symbol of a file with all that matters on the wire and in text."""
    for enum in file.enum_type:
        yield from _enum_facts(enum, file.package)
    for message in file.message_type:
        yield from _message_facts(message, file.package)
    for service in file.service:
        for method in service.method:
            types = (method.input_type, method.output_type, method.client_streaming, method.server_streaming)
            yield f"{file.package}.{service.name}.{method.name}", types


def _enum_facts(enum: Any, scope: str) -> Iterator[tuple[str, object]]:
    for value in enum.value:
        yield f"{scope}.{enum.name}.{value.name}", value.number


def _message_facts(message: Any, scope: str) -> Iterator[tuple[str, object]]:
    name = f"{scope}.{message.name}"
    yield name, ("map entry" if message.options.map_entry else "message")
    for field in message.field:
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        yield f"{name}.{field.name}", (field.number, field.type, field.type_name, field.label, oneof)
    for enum in message.enum_type:
        yield from _enum_facts(enum, name)
    for nested in message.nested_type:
        yield from _message_facts(nested, name)


def test_committed_descriptors_match_the_compiled_proto_files() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed: nothing to compile with")
    compiled = descriptor_pb2.FileDescriptorSet.FromString(protocol_compile.compile_protos())
    assert {file.name: file for file in compiled.file} == _committed()


@pytest.mark.parametrize("name", ["model_config.proto", "grpc_service.proto"])
def test_every_symbol_equals_that_of_tritonclient(name: str) -> None:
    pytest.importorskip("tritonclient.grpc", exc_type=ImportError)
    from tritonclient.grpc import model_config_pb2, service_pb2

    theirs = descriptor_pb2.FileDescriptorProto()
    {"model_config.proto": model_config_pb2, "grpc_service.proto": service_pb2}[name].DESCRIPTOR.CopyToProto(theirs)
    ours = dict(_facts(_committed()[name]))
    expected = dict(_facts(theirs))
    assert len(expected) > 100
    different = {
        symbol: (fact, ours.get(symbol))
        for symbol, fact in expected.items()
        if ours.get(symbol) != fact and symbol not in EXCUSED
    }
    assert different == {}
    assert set(ours) - set(expected) == set()


def test_health_and_reflection_have_the_public_field_numbers() -> None:
    files = _committed()
    health = dict(_facts(files["health.proto"]))
    assert health["grpc.health.v1.HealthCheckRequest.service"][0] == 1  # type: ignore[index]
    assert health["grpc.health.v1.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN"] == 3
    for file, package in (("reflection.proto", "v1"), ("reflection_v1alpha.proto", "v1alpha")):
        facts = dict(_facts(files[file]))
        scope = f"grpc.reflection.{package}"
        numbers = {
            "ServerReflectionRequest.host": 1,
            "ServerReflectionRequest.file_by_filename": 3,
            "ServerReflectionRequest.file_containing_symbol": 4,
            "ServerReflectionRequest.file_containing_extension": 5,
            "ServerReflectionRequest.all_extension_numbers_of_type": 6,
            "ServerReflectionRequest.list_services": 7,
            "ServerReflectionResponse.valid_host": 1,
            "ServerReflectionResponse.original_request": 2,
            "ServerReflectionResponse.file_descriptor_response": 4,
            "ServerReflectionResponse.all_extension_numbers_response": 5,
            "ServerReflectionResponse.list_services_response": 6,
            "ServerReflectionResponse.error_response": 7,
        }
        assert {key: facts[f"{scope}.{key}"][0] for key in numbers} == numbers  # type: ignore[index]


def test_no_source_locations_are_shipped() -> None:
    assert not any(file.HasField("source_code_info") for file in _committed().values())
