"""Handlers of the standard gRPC services for health checking and server reflection.

Protocols: grpc.health.v1 (github.com/grpc/grpc/blob/master/doc/health-checking.md) and grpc.reflection v1, v1alpha.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from edge_server.errors import Draining, InvalidRequest
from edge_server.frontends.error_status import GrpcStatus
from edge_server.frontends.grpc.call import OK, CallHandler, Message, RpcCall, call_status
from edge_server.protocol import messages

_WATCH_INTERVAL_S = 0.1
"""Interval at which Health/Watch looks for a change, which its clients then get."""

_STOPPING = call_status(Draining("Server is stopping"))


def health_check(is_ready: Callable[[], bool]) -> Callable[[Any], Any]:
    """Return Health/Check: for any service, SERVING if and only if the server is ready, as in Triton."""

    def check(request: Any) -> Any:
        return _health_response(is_ready())

    return check


class HealthWatches:
    """The open calls of Health/Watch. For any service they get the state of the server: SERVING if and only if it is
    ready.

    Each call gets the state at once, then every change. While there are calls, a thread compares the state.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.is_ready = is_ready
        self._lock = threading.Lock()
        self._calls: set[_HealthWatch] = set()
        self._has_thread = False

    def open(self, call: RpcCall) -> CallHandler:
        """Return the handler of a call."""
        return _HealthWatch(self, call)

    def add(self, watch: _HealthWatch) -> None:
        with self._lock:
            self._calls.add(watch)
            needs_thread, self._has_thread = not self._has_thread, True
        if needs_thread:
            threading.Thread(target=self._run, name="grpc-health", daemon=True).start()

    def remove(self, watch: _HealthWatch) -> None:
        """Remove a call. It may be unknown."""
        with self._lock:
            self._calls.discard(watch)

    def _run(self) -> None:
        while True:
            time.sleep(_WATCH_INTERVAL_S)
            is_ready = self.is_ready()
            with self._lock:
                self._has_thread = bool(self._calls)
                if not self._calls:
                    return
                changed = [watch for watch in self._calls if watch.sent is not is_ready]
            for watch in changed:
                watch.call.wake()


class _HealthWatch:
    """One call of Health/Watch. It sends on one thread only: in `on_woken` and `on_sent`."""

    def __init__(self, watches: HealthWatches, call: RpcCall) -> None:
        self._watches = watches
        self.call = call
        self.sent: bool | None = None
        """The state that the client has, None before the first response."""
        self._may_send = True
        self._is_stopping = False

    def on_message(self, message: Message) -> None:
        try:
            messages.message_class("grpc.health.v1.HealthCheckRequest").FromString(bytes(message))
        except (DecodeError, UnicodeDecodeError):
            self.call.end(call_status(InvalidRequest("the request is not a valid HealthCheckRequest message")))
            return
        self._watches.add(self)
        self.call.wake()

    def on_woken(self) -> None:
        is_ready = not self._is_stopping and self._watches.is_ready()
        if self._may_send and self.sent is not is_ready:
            self.sent = is_ready
            self._may_send = self.call.send((_health_response(is_ready).SerializeToString(),))
        if self._is_stopping:
            self.call.end(_STOPPING)

    def on_sent(self) -> None:
        self._may_send = True
        self.on_woken()

    def on_last_message(self) -> None:
        """Do nothing: a client that sends no more still receives."""

    def on_client_left(self) -> None:
        self._watches.remove(self)

    def on_server_stopping(self) -> None:
        self._watches.remove(self)
        self._is_stopping = True
        self.call.wake()


def _health_response(is_ready: bool) -> Any:
    response_class = messages.message_class("grpc.health.v1.HealthCheckResponse")
    return response_class(status="SERVING" if is_ready else "NOT_SERVING")


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
        except (DecodeError, UnicodeDecodeError):
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
        self._call.end(_STOPPING)

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
