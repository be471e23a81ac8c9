"""Protobuf message classes and services of all protocols of the server, made from `descriptors.binpb` at first use.

Every top-level message of package `inference` is also an attribute of this module: `messages.ModelInferRequest`. Safe
from any thread. Each message has exactly one class.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
    input_class: MessageClass
    output_class: MessageClass
    client_streaming: bool
    server_streaming: bool


class _Catalog:
    """The descriptors in a separate pool, and the classes made from them so far."""

    def __init__(self) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool

        self.pool: Any = descriptor_pool.DescriptorPool()
        self.classes: dict[str, MessageClass] = {}
        content = Path(__file__).with_name("descriptors.binpb").read_bytes()
        self.files = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(content).file}
        for file in self.files.values():
            self.pool.AddSerializedFile(file.SerializeToString())


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
    """Return a service's RPCs in the order of its .proto file. Raises KeyError for an unknown service."""
    service = _catalog().pool.FindServiceByName(full_name)
    return tuple(
        ServiceMethod(
            name=method.name,
            path=f"/{full_name}/{method.name}",
            input_class=message_class(method.input_type.full_name),
            output_class=message_class(method.output_type.full_name),
            client_streaming=bool(method.client_streaming),
            server_streaming=bool(method.server_streaming),
        )
        for method in service.methods
    )


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
