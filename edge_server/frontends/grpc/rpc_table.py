"""Table of the RPCs of all gRPC services, by HTTP/2 path, with the keys that restrict access to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from google.protobuf.message import DecodeError

from edge_server.config import GrpcConfig
from edge_server.errors import InvalidRequest
from edge_server.frontends.access_control import is_this_machine
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.grpc.call import (
    CallHandler,
    Message,
    Metadata,
    Methods,
    Opener,
    RpcCall,
    RpcMethod,
    UnaryHandler,
    call_status,
    client_error,
    run_blocking,
)
from edge_server.frontends.grpc.control_rpcs import ControlRpcs
from edge_server.frontends.grpc.health_and_reflection import HealthWatches, Reflection, health_check
from edge_server.frontends.grpc.restricted_protocols import (
    REFLECTION_CATEGORY,
    Restriction,
    find_restriction,
    find_restrictions,
)
from edge_server.frontends.grpc.stream_inference import InferStream
from edge_server.frontends.grpc.unary_inference import InferContext, UnaryInferCall
from edge_server.protocol import messages
from edge_server.protocol.messages import ServiceMethod

if TYPE_CHECKING:
    from edge_server.service import InferenceService

_AT_ONCE = frozenset(("ServerLive", "ServerReady", "ServerMetadata", "Check"))
"""Control RPCs that run on the transport's thread: they neither wait nor compute much."""


class StreamService(NamedTuple):
    """A service of bidirectional streams that a plugin serves: its full name, and the opener of each RPC.

    protocol/descriptors.binpb describes its messages. `category` is its restriction category.
    """

    name: str
    openers: Mapping[str, Opener]
    category: str = "inference"


def served_methods(
    service: InferenceService,
    config: GrpcConfig,
    stream_services: Sequence[StreamService] = (),
    *,
    allows_code_upload: bool = False,
    tokens: Tokens | None = None,
) -> Methods:
    """Return all served RPCs: Triton's GRPCInferenceService, health, reflection and the `stream_services`."""
    tokens = tokens or Tokens()
    guards = find_restrictions(config.restricted, tokens)
    inference = InferContext(service, config.header_pattern)
    rpcs = ControlRpcs(service)
    control = dict(rpcs.table())
    control["Check"] = health_check(service.is_ready)
    found: dict[str, RpcMethod] = {}
    described = [*messages.service_methods(messages.GRPC_SERVICE), *messages.service_methods(messages.HEALTH_SERVICE)]
    for method in described:
        check = _check(guards.get(method.name))
        if method.name == "ModelInfer":
            found[method.path] = RpcMethod(partial(UnaryInferCall, inference), is_stream=False, check=check)
        elif method.name == "ModelStreamInfer":
            found[method.path] = RpcMethod(partial(InferStream, inference), is_stream=True, check=check)
        elif method.name == "Watch":
            found[method.path] = RpcMethod(HealthWatches(service.is_ready).open, is_stream=True, check=check)
        elif method.name == "RepositoryModelLoad":
            found[method.path] = RpcMethod(_load_opener(rpcs, method, allows_code_upload), False, check)
        elif method.name in control:
            found[method.path] = RpcMethod(partial(ControlCall, method, control[method.name]), False, check)
    for stream_service in stream_services:
        for method in messages.service_methods(stream_service.name):
            guard = find_restriction(method.name, stream_service.category, config.restricted, tokens)
            found[method.path] = RpcMethod(stream_service.openers[method.name], True, _check(guard))
    services = (messages.GRPC_SERVICE, *(item.name for item in stream_services), messages.HEALTH_SERVICE)
    for name in messages.REFLECTION_SERVICES:
        for method in messages.service_methods(name):
            guard = find_restriction(method.name, REFLECTION_CATEGORY, config.restricted, tokens)
            opener = partial(Reflection, name, (*services, *messages.REFLECTION_SERVICES))
            found[method.path] = RpcMethod(opener, True, _check(guard))
    return found


def _check(guard: Restriction | None) -> Callable[[Metadata], None] | None:
    return None if guard is None else guard.check


class ControlCall(UnaryHandler):
    """One call of a control RPC or a health check."""

    __slots__ = ("_call", "_method", "_rpc")

    def __init__(self, method: ServiceMethod, rpc: Callable[[Any], Any], call: RpcCall) -> None:
        self._method = method
        self._rpc = rpc
        self._call = call

    def on_message(self, message: Message) -> None:
        if self._method.name in _AT_ONCE:
            self._run(message)
        else:
            run_blocking(self._call, partial(self._run, message))

    def _run(self, message: Message) -> None:
        try:
            try:
                request = self._method.input_class.FromString(bytes(message))
            except (DecodeError, UnicodeDecodeError) as error:
                raise InvalidRequest(f"the request is not a valid message of {self._method.name}") from error
            del message
            response: bytes = self._rpc(request).SerializeToString()
        except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
            self._call.end(call_status(client_error(error)))
        else:
            self._call.respond((response,))


def _load_opener(rpcs: ControlRpcs, method: ServiceMethod, allows_code_upload: bool) -> Opener:
    """Return the opener of load calls. Clients on this machine may upload code, others only if configured."""

    def open_load(call: RpcCall) -> CallHandler:
        may_carry_code = allows_code_upload or is_this_machine(_address(call.peer))
        return ControlCall(method, partial(rpcs.load, may_carry_code=may_carry_code), call)

    return open_load


def _address(peer: str) -> str:
    """Return the address in gRPC's peer format, as "ipv4:10.0.0.7:40112" or "ipv6:%5Bfe80::1%25eth0%5D:40112"."""
    return unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]")
