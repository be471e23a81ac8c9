"""Protobuf message classes and services of all protocols of the server, made from `descriptors.binpb` at first use.

Every top-level message of package `inference` is also an attribute of this module: `messages.ModelInferRequest`. Safe
from any thread. Each message has exactly one class.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from edge_server.protocol.protobuf_wire_format import VARINT, read_varint

MessageClass: TypeAlias = Any
"""A generated class. Type checkers do not see its attributes, which come from the .proto files."""

GRPC_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICES = (
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)


class ServiceMethod(NamedTuple):
    """One RPC of a service. `path` is the HTTP/2 path: "/package.Service/Method"."""

    name: str
    path: str
    input_name: str
    output_name: str
    client_streaming: bool
    server_streaming: bool

    @property
    def input_class(self) -> MessageClass:
        return message_class(self.input_name)

    @property
    def output_class(self) -> MessageClass:
        return message_class(self.output_name)


class _Catalog:
    """The descriptors in a separate pool, and the classes made from them so far."""

    def __init__(self) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool

        self.pool: Any = descriptor_pool.DescriptorPool()
        self.classes: dict[str, MessageClass] = {}
        self.files = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(_read_set()).file}
        for file in self.files.values():
            self.pool.AddSerializedFile(file.SerializeToString())


def _read_set() -> bytes:
    return Path(__file__).with_name("descriptors.binpb").read_bytes()


_lock = threading.Lock()
_made: list[_Catalog] = []


def _catalog() -> _Catalog:
    if not _made:
        with _lock:
            if not _made:
                _made.append(_Catalog())
    return _made[0]


def message_class(full_name: str) -> MessageClass:
    """Return the class of a message: `message_class("inference.ModelInferRequest")`. KeyError for an unknown name."""
    catalog = _catalog()
    found = catalog.classes.get(full_name)
    if found is None:
        from google.protobuf import message_factory

        with _lock:
            descriptor = catalog.pool.FindMessageTypeByName(full_name)
            found = catalog.classes.setdefault(full_name, message_factory.GetMessageClass(descriptor))
    return found


def __getattr__(name: str) -> MessageClass:
    if name.startswith("_"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        found = message_class(f"inference.{name}")
    except KeyError:
        raise AttributeError(f"package 'inference' has no message '{name}'") from None
    globals()[name] = found  # the next access finds it in the module, without this function
    return found


def service_methods(full_name: str) -> tuple[ServiceMethod, ...]:
    """Return a service's RPCs in the order of its .proto file. Raises KeyError for an unknown service.

    Decodes the descriptors without protobuf, which takes 15 ms to import: a server lists its RPCs at the start, and a
    message may come much later. The field numbers are those of descriptor.proto.
    """
    for number, file in _fields(memoryview(_read_set())):
        members = list(_fields(file)) if number == 1 else []
        package = next((_text(value) for member, value in members if member == 2), "")
        for member, service in members:
            if member == 6 and f"{package}.{_text(next(_fields(service))[1])}" == full_name:
                return tuple(_method(full_name, dict(_fields(value))) for kind, value in _fields(service) if kind == 2)
    raise KeyError(full_name)


def _method(service: str, fields: dict[int, Any]) -> ServiceMethod:
    name = _text(fields[1])
    return ServiceMethod(
        name=name,
        path=f"/{service}/{name}",
        input_name=_text(fields[2]).removeprefix("."),
        output_name=_text(fields[3]).removeprefix("."),
        client_streaming=bool(fields.get(5)),
        server_streaming=bool(fields.get(6)),
    )


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a descriptor: an integer, or a view of text or of a message."""
    position = 0
    while position < len(message):
        tag, position = read_varint(message, position)
        value, position = read_varint(message, position)
        if tag & 7 != VARINT:
            start, position = position, position + value
            yield tag >> 3, message[start:position]
        else:
            yield tag >> 3, value


def _text(value: memoryview) -> str:
    return bytes(value).decode()


def service_names() -> tuple[str, ...]:
    """Return the full names of all described services, including those that are not offered."""
    return tuple(f"{file.package}.{service.name}" for file in _catalog().files.values() for service in file.service)


def file_by_name(name: str) -> list[bytes]:
    """Return the serialized FileDescriptorProto of a file, then those of its dependencies. KeyError for an unknown
    name."""
    files = _catalog().files
    found: dict[str, bytes] = {}
    wanted = [name]
    while wanted:
        current = wanted.pop()
        if current not in found:
            found[current] = files[current].SerializeToString()
            wanted.extend(files[current].dependency)
    return list(found.values())


def file_containing_symbol(symbol: str) -> list[bytes]:
    """Return the file that defines a fully qualified message, field, enum, service or RPC, as `file_by_name` does.

    Raises KeyError when no file defines it.
    """
    pool = _catalog().pool
    try:
        return file_by_name(pool.FindFileContainingSymbol(symbol).name)
    except KeyError:
        service_name, _, method = symbol.rpartition(".")
        service = pool.FindServiceByName(service_name)  # some protobuf runtimes do not find an RPC by its name
        if method not in service.methods_by_name:
            raise
        return file_by_name(service.file.name)
