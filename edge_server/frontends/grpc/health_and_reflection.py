"""gRPC health checking and server reflection, for standard gRPC tools.

Protocols: grpc.health.v1 (github.com/grpc/grpc/blob/master/doc/health-checking.md) and grpc.reflection v1, v1alpha.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from edge_server.errors import Draining, InvalidRequest
from edge_server.frontends.error_status import GrpcStatus
from edge_server.frontends.grpc.call import OK, Message, RpcCall, call_status
from edge_server.protocol import messages


def health_check(is_ready: Callable[[], bool]) -> Callable[[Any], Any]:
    """Return Health/Check: for any service, SERVING if and only if the server is ready, as in Triton."""
    response_class = messages.message_class("grpc.health.v1.HealthCheckResponse")

    def check(request: Any) -> Any:
        return response_class(status="SERVING" if is_ready() else "NOT_SERVING")

    return check


class Reflection:
    """One call of a version of grpc.reflection. `services` are the full names to list."""

    def __init__(self, service_name: str, services: Sequence[str], call: RpcCall) -> None:
        package = service_name.rpartition(".")[0]
        self._request = messages.message_class(f"{package}.ServerReflectionRequest")
        self._response = messages.message_class(f"{package}.ServerReflectionResponse")
        self._services = services
        self._call = call

    def on_message(self, message: Message) -> None:
        try:
            request = self._request.FromString(bytes(message))
        except DecodeError:
            error = InvalidRequest("the request is not a valid ServerReflectionRequest message")
            self._call.end(call_status(error))
            return
        response = self._response(valid_host=request.host, original_request=request)
        self._fill(request, response)
        if self._call.send((response.SerializeToString(),)):
            self._call.receive()

    def on_sent(self) -> None:
        self._call.receive()

    def on_woken(self) -> None:
        """Do nothing: this call never calls `wake`."""

    def on_last_message(self) -> None:
        self._call.end(OK)

    def on_client_left(self) -> None:
        """Do nothing: the call holds no resources."""

    def on_server_stopping(self) -> None:
        self._call.end(call_status(Draining("Server is stopping")))

    def _fill(self, request: Any, response: Any) -> None:
        question = request.WhichOneof("message_request")
        if question == "list_services":
            for name in self._services:
                response.list_services_response.service.add(name=name)
            return
        find = {
            "file_by_filename": messages.file_by_name,
            "file_containing_symbol": messages.file_containing_symbol,
        }.get(question)
        if find is None:
            self._refuse(response, GrpcStatus.UNIMPLEMENTED, "the schema has no extensions to ask for")
            return
        wanted = getattr(request, question)
        try:
            response.file_descriptor_response.file_descriptor_proto.extend(find(wanted))
        except KeyError:
            self._refuse(response, GrpcStatus.NOT_FOUND, f"'{wanted}' is not known")

    def _refuse(self, response: Any, status: GrpcStatus, reason: str) -> None:
        response.error_response.error_code = int(status)
        response.error_response.error_message = reason
