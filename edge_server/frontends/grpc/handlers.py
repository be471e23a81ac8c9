"""The RPCs of this server by their HTTP/2 paths, each behind the boundary where errors become statuses.

All handlers take and return bytes, so that nothing is parsed before the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from edge_server.config import GrpcConfig
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.frontends.access import is_this_machine
from edge_server.frontends.grpc.access import Restriction, restriction, restrictions
from edge_server.frontends.grpc.boundary import abort, known
from edge_server.frontends.grpc.control import ControlRpcs
from edge_server.frontends.grpc.direct import MakeCall
from edge_server.frontends.grpc.direct_infer import DirectInfer
from edge_server.frontends.grpc.direct_stream import DirectStreams
from edge_server.frontends.grpc.discovery import Reflection, health_check
from edge_server.frontends.grpc.infer import UnaryInfer, forwarded_metadata
from edge_server.frontends.grpc.open_streams import OpenStreams
from edge_server.frontends.grpc.read import InferReader
from edge_server.frontends.tokens import Tokens
from edge_server.protocol import messages
from edge_server.protocol.messages import Method
from edge_server.records import dataclass

if TYPE_CHECKING:
    from edge_server.service import InferenceService

UnaryAnswer = Callable[[bytes, grpc.ServicerContext], "bytes | EdgeServerError"]
StreamAnswers = Callable[["Iterator[bytes]", grpc.ServicerContext], "Iterator[bytes]"]


@dataclass(frozen=True, slots=True)
class StreamService:
    """A service of bidirectional streams that another front end answers: its full name, and each RPC's answers.

    Its messages are described in protocol/descriptors.binpb; `category` is what it can be restricted by.
    """

    name: str
    answers: Mapping[str, StreamAnswers]
    category: str = "inference"


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Finds the handler of a call. `max_streams` bounds how many calls of unlimited length run at once."""

    def __init__(
        self,
        service: InferenceService,
        config: GrpcConfig,
        max_streams: int,
        guests: Sequence[StreamService] = (),
        *,
        allows_code_upload: bool = False,
        tokens: Tokens | None = None,
    ) -> None:
        self._tokens = tokens or Tokens()
        self._allows_code_upload = allows_code_upload
        self._service = service
        self._config = config
        self._reader = InferReader()
        self._restrictions = restrictions(config.restricted, self._tokens)
        self._opened = OpenStreams(max_streams)
        self._by_path: dict[str, grpc.RpcMethodHandler] = {}
        self._add_inference()
        self._add_health()
        for guest in guests:
            self._add_guest(guest)
        self._add_reflection([guest.name for guest in guests])

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._by_path.get(handler_call_details.method)

    def direct_calls(self) -> dict[str, MakeCall]:
        """Return what answers inference at the direct door, by the paths it is called by."""
        paths = {method.name: method.path for method in messages.service_methods(messages.GRPC_SERVICE)}
        pattern, guards = self._config.header_pattern, self._restrictions
        unary = DirectInfer(self._service, self._reader, pattern, guards.get("ModelInfer"))
        streams = DirectStreams(self._service, self._reader, pattern, guards.get("ModelStreamInfer"), self._opened)
        return {paths["ModelInfer"]: unary.call, paths["ModelStreamInfer"]: streams.call}

    def stop_streams(self) -> None:
        """End every inference stream as soon as nothing is outstanding on it."""
        self._opened.stop()

    def _add_inference(self) -> None:
        unary = UnaryInfer(self._service, self._reader, self._config.header_pattern)
        rpcs = ControlRpcs(self._service)
        control = rpcs.table()
        for method in messages.service_methods(messages.GRPC_SERVICE):
            if method.name == "ModelInfer":
                self._add_unary(method, unary.answer)
            elif method.name == "ModelStreamInfer":
                self._add_stream(method, self._infer_on_stream, self._restrictions.get(method.name))
            elif method.name == "RepositoryModelLoad":
                self._add_unary(method, self._load(method, rpcs))
            else:
                self._add_unary(method, _parsed(method, control[method.name]))

    def _load(self, method: Method, rpcs: ControlRpcs) -> UnaryAnswer:
        """Return the handler of loads: code is taken from this machine, and from others where that is allowed."""

        def answer(data: bytes, context: grpc.ServicerContext) -> bytes | EdgeServerError:
            may_carry_code = self._allows_code_upload or is_this_machine(_address(context.peer()))
            return _parsed(method, partial(rpcs.load, may_carry_code=may_carry_code))(data, context)

        return answer

    def _add_health(self) -> None:
        for method in messages.service_methods(messages.HEALTH_SERVICE):
            if method.name == "Check":
                self._add_unary(method, _parsed(method, health_check(self._service.is_ready)))

    def _add_guest(self, guest: StreamService) -> None:
        for method in messages.service_methods(guest.name):
            guard = restriction(method.name, guest.category, self._config.restricted, self._tokens)
            self._add_stream(method, guest.answers[method.name], guard)

    def _add_reflection(self, guests: Sequence[str]) -> None:
        offered = (messages.GRPC_SERVICE, *guests, messages.HEALTH_SERVICE, *messages.REFLECTION_SERVICES)
        for name in messages.REFLECTION_SERVICES:
            for method in messages.service_methods(name):
                self._add_stream(method, Reflection(name, offered).answers, None)

    def _add_unary(self, method: Method, answer: UnaryAnswer) -> None:
        behavior = _guarded(answer, self._restrictions.get(method.name))
        self._by_path[method.path] = grpc.unary_unary_rpc_method_handler(behavior)

    def _add_stream(self, method: Method, answers: StreamAnswers, guard: Restriction | None) -> None:
        def behavior(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                if guard is not None:
                    guard.check(context)
                self._opened.enter()
                try:
                    yield from answers(requests, context)
                finally:
                    self._opened.leave()
                return
            except grpc.RpcError:
                raise  # the client left, as grpcio tells itself
            except Exception as error:  # noqa: BLE001 - the boundary: `known` logs and maps
                failure = known(error)
            abort(context, failure)

        self._by_path[method.path] = grpc.stream_stream_rpc_method_handler(behavior)

    def _infer_on_stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        # Imported by the first stream that comes this way.
        from edge_server.frontends.grpc.stream import StreamInfer

        headers = forwarded_metadata(context, self._config.header_pattern)
        stream = StreamInfer(self._service, self._reader, context, headers)
        self._opened.add(stream)
        try:
            yield from stream.responses(requests)
        finally:
            self._opened.remove(stream)


def _address(peer: str) -> str:
    """Return the address in grpcio's name of a peer, as "ipv4:10.0.0.7:40112" or "ipv6:%5Bfe80::1%25eth0%5D:40112"."""
    return unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]")


def _guarded(answer: UnaryAnswer, restriction: Restriction | None) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    def behavior(data: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            if restriction is not None:
                restriction.check(context)
            answered = answer(data, context)
            if not isinstance(answered, EdgeServerError):
                return answered
            failure = answered
        except Exception as error:  # noqa: BLE001 - the boundary: `known` logs and maps
            failure = known(error)
        return abort(context, failure)

    return behavior


def _parsed(method: Method, answer: Callable[[Any], Any]) -> UnaryAnswer:
    """Return a handler of bytes around one of messages."""

    def answer_bytes(data: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            request = method.input_class.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"the request is not a valid message of {method.name}") from error
        serialized: bytes = answer(request).SerializeToString()
        return serialized

    return answer_bytes
