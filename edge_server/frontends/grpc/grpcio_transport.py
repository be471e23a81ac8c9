"""gRPC transport on the library grpcio, chosen by `--grpc-transport=grpcio`: passes calls to the handlers of RPCs.

A unary call uses one thread, a stream two. This transport is the reference for the contract tests, and the fallback
for clients that do not work with http2_transport.py.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import grpc

from edge_server.config import GrpcConfig
from edge_server.errors import ServingFault, Throttled
from edge_server.frontends.bound_sockets import bind_sockets, share_address
from edge_server.frontends.error_status import GrpcStatus
from edge_server.frontends.grpc.call import (
    MAX_MESSAGE_BYTES,
    CallHandler,
    CallStatus,
    Metadata,
    Methods,
    Pieces,
    RpcMethod,
    call_status,
    client_error,
)
from edge_server.frontends.grpc.tls import tls_context
from edge_server.frontends.listen_error import listen_error
from edge_server.service import READING_THREAD_HOLD_US

_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}
"""grpc_compression_level of grpc/impl/compression_types.h."""

_MAX_PENDING = 1 << 20

_NO_DEADLINE_S = 1e8
"""A longer remaining time means no deadline: grpcio then reports many years."""

_STATUS_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

_MAX_STREAMS = 256
"""Maximum number of streaming calls with this transport, however many the server allows: the two threads of each take
about 70 KB, and many that are refused at once take memory too."""

_CANCELLED = CallStatus(GrpcStatus.CANCELLED, "the client left")

_probe_ids = itertools.count()


class GrpcioTransport(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """A listener on grpcio's server. `start` once, then `stop` once."""

    def __init__(self, methods: Methods, config: GrpcConfig, max_calls: int, max_streams: int) -> None:
        self._methods = methods
        self._config = config
        self._max_calls = max_calls
        self._max_streams = min(max_streams, _MAX_STREAMS)
        self._lock = threading.Lock()
        self._streams: set[CallHandler] = set()
        self._stream_count = 0
        self._is_stopping = False
        # gRPC's core empties a configuration that it receives, so each is passed only once. The newest one is kept.
        self._next_tls: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)
        self._first_tls: grpc.ServerCertificateConfiguration | None = None
        self._bound: list[socket.socket] = []
        """Sockets that keep the address until grpcio's server listens."""
        self._server: grpc.Server | None = None

    def start(self, *, accepts: bool) -> int:
        """See GrpcFrontend.start."""
        config = self._config
        if config.is_tls or config.is_mutual_tls:
            self._first_tls = _certificates(config, config.is_mutual_tls)
            # Checked now, because the server that uses them is made later.
            if not _accepts_certificates(_certificates(config, config.is_mutual_tls)):
                reason = "gRPC's TLS library does not accept the certificate and its key"
                raise listen_error("gRPC", config.address, config.port, reason)
        # grpcio can only listen at once. Besides, its own error for an address that is taken does not say so.
        try:
            self._bound = bind_sockets(config.address, config.port, reuses_port=config.reuses_port)
        except OSError as error:
            raise listen_error("gRPC", config.address, config.port, error) from None
        port = int(self._bound[0].getsockname()[1])
        if accepts:
            self.accept_connections()
        return port

    def accept_connections(self) -> None:
        """See GrpcFrontend.accept_connections."""
        config = self._config
        port = self._bound[0].getsockname()[1]
        host = f"[{config.address}]" if ":" in config.address and config.address[0] != "[" else config.address
        server = grpc.server(
            ThreadPoolExecutor(self._max_calls, "grpc"),
            handlers=(self,),
            options=channel_options(config),
            maximum_concurrent_rpcs=self._max_calls,
        )
        for item in self._bound:
            share_address(item)
        try:
            if self._first_tls is not None:
                tls = grpc.dynamic_ssl_server_credentials(
                    self._first_tls, self._take_new_certificates, config.is_mutual_tls
                )
                is_open = server.add_secure_port(f"{host}:{port}", tls)
            else:
                is_open = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            is_open = 0
        finally:
            self._close_bound()
        if not is_open:
            raise listen_error("gRPC", config.address, port, "it is not available")
        server.start()
        self._server = server

    def _close_bound(self) -> None:
        for item in self._bound:
            item.close()
        self._bound = []

    def renew_tls(self, config: GrpcConfig) -> None:
        """Use the TLS files of `config` for new handshakes. *Blocking.*

        Whether clients need a certificate does not change. Raises ServingFault, and changes nothing then.
        """
        if not (self._config.is_tls or self._config.is_mutual_tls):
            return
        is_mutual = self._config.is_mutual_tls
        # Checked first, because gRPC would silently keep the old files.
        if not _accepts_certificates(_certificates(config, is_mutual)):
            raise ServingFault(
                f"TLS certificate '{config.server_cert}' and key '{config.server_key}' for gRPC cannot be used: "
                "they match, but gRPC's TLS library does not accept them"
            )
        self._next_tls.append(_certificates(config, is_mutual))

    def _take_new_certificates(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration, or None for no change. gRPC calls this before each handshake, under its lock."""
        try:
            return self._next_tls.pop()
        except IndexError:
            return None

    def begin_drain(self) -> None:
        """Do nothing: grpcio asks clients to use another server only when it stops."""

    def end_drain(self, timeout_s: float) -> None:
        """Do nothing, for the same reason."""

    def stop(self, grace_s: float) -> None:
        """See GrpcFrontend.stop."""
        self._close_bound()
        server, self._server = self._server, None
        if server is None:
            return
        stopped = server.stop(grace_s)
        with self._lock:
            self._is_stopping = True
            streams = list(self._streams)
        for handler in streams:
            handler.on_server_stopping()
        stopped.wait()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
        if method.check is not None:
            metadata = tuple((str(key), value) for key, value in handler_call_details.invocation_metadata)
            try:
                method.check(metadata)
            except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
                # As a stream: the library receives the message of a unary call before it runs the handler.
                return grpc.stream_stream_rpc_method_handler(partial(_refuse, call_status(client_error(error))))
        if method.is_stream:
            return grpc.stream_stream_rpc_method_handler(partial(self._run_stream, method))
        return grpc.unary_unary_rpc_method_handler(partial(_run_unary, method))

    def _run_stream(
        self, method: RpcMethod, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        call = _StreamCall(context)
        with self._lock:
            is_full = self._stream_count >= self._max_streams
            self._stream_count += not is_full
        if is_full:
            error = Throttled(f"{self._max_streams} streams are open, which is the maximum")
            _abort(context, call_status(error))
        try:
            handler = _open_handler(method, call, context)
            with self._lock:
                self._streams.add(handler)
                is_stopping = self._is_stopping
            try:
                if not context.add_callback(partial(call.leave, handler)):
                    call.leave(handler)
                if is_stopping:
                    handler.on_server_stopping()
                threading.Thread(target=call.read, args=(handler, requests), name="grpc-stream", daemon=True).start()
                while not isinstance(item := call.outbox.get(), CallStatus):
                    if item is None:
                        handler.on_woken()
                        continue
                    yield item
                    handler.on_sent()
                if item.code:
                    _abort(context, item)
            finally:
                call.stop_reading()
                with self._lock:
                    self._streams.discard(handler)
        finally:
            with self._lock:
                self._stream_count -= 1


class _Call:
    """A unary call, and the base of streaming calls."""

    hold_us = math.inf

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.metadata: Metadata = tuple((str(key), value) for key, value in context.invocation_metadata())
        left_s = context.time_remaining()
        has_deadline = left_s is not None and left_s < _NO_DEADLINE_S
        self.deadline_ns = time.monotonic_ns() + int(left_s * 1e9) if has_deadline else 0
        self.peer: str = context.peer()
        self.outbox: SimpleQueue[bytes | CallStatus | None] = SimpleQueue()

    def respond(self, message: Pieces) -> None:
        self.outbox.put(b"".join(message))

    def end(self, status: CallStatus) -> None:
        self.outbox.put(status)

    def wake(self) -> None:
        self.outbox.put(None)

    def receive(self) -> None:
        raise AssertionError("a unary call has one message")

    def send(self, message: Pieces) -> bool:
        self.outbox.put(b"".join(message))
        return False


class _StreamCall(_Call):
    """A streaming call. A separate thread receives its messages; the thread that runs the call sends."""

    hold_us = READING_THREAD_HOLD_US

    def __init__(self, context: grpc.ServicerContext) -> None:
        super().__init__(context)
        self._requested = threading.Semaphore(1)
        self._is_over = False

    def leave(self, handler: CallHandler) -> None:
        """Tell `handler` that the client left, and free the thread that runs the call."""
        handler.on_client_left()
        self.end(_CANCELLED)

    def receive(self) -> None:
        self._requested.release()

    def read(self, handler: CallHandler, requests: Iterator[bytes]) -> None:
        while True:
            self._requested.acquire()
            if self._is_over:
                return
            try:
                message = next(requests, None)
            except Exception:  # noqa: BLE001 - grpcio raises its own errors when a call is cancelled or breaks
                return  # `on_client_left` reports this
            if message is None:
                handler.on_last_message()
                return
            handler.on_message(message)
            del message

    def stop_reading(self) -> None:
        self._is_over = True
        self._requested.release()


def _run_unary(method: RpcMethod, message: bytes, context: grpc.ServicerContext) -> bytes:
    call = _Call(context)
    handler = _open_handler(method, call, context)
    if not context.add_callback(handler.on_client_left):
        handler.on_client_left()
    handler.on_message(message)
    item = call.outbox.get()
    if isinstance(item, CallStatus):
        _abort(context, item)
    assert isinstance(item, bytes)
    return item


def _refuse(status: CallStatus, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    _abort(context, status)
    raise AssertionError("abort returned")


def _open_handler(method: RpcMethod, call: _Call, context: grpc.ServicerContext) -> CallHandler:
    try:
        return method.open(call)
    except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
        failure = call_status(client_error(error))
    _abort(context, failure)
    raise AssertionError("abort returned")


def _abort(context: grpc.ServicerContext, status: CallStatus) -> None:
    if status.trailers:
        context.set_trailing_metadata(tuple(status.trailers))
    context.abort(_STATUS_CODES[int(status.code)], status.details)


def channel_options(config: GrpcConfig) -> list[tuple[str, int]]:
    """Return grpcio's channel arguments. A connection age of 0 keeps gRPC's default, which is no limit."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", int(config.reuses_port)),
        # Above these limits gRPC's core ends calls with CANCELLED. They are high, so that `maximum_concurrent_rpcs`
        # refuses the calls instead, with RESOURCE_EXHAUSTED.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
        ("grpc.default_compression_level", _COMPRESSION_LEVELS[config.compression_level]),
        ("grpc.keepalive_time_ms", config.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", config.keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(config.keepalive_permit_without_calls)),
        ("grpc.http2.max_pings_without_data", config.http2_max_pings_without_data),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            config.http2_min_recv_ping_interval_without_data_ms,
        ),
        ("grpc.http2.max_ping_strikes", config.http2_max_ping_strikes),
    ]
    if config.max_connection_age_ms:
        options.append(("grpc.max_connection_age_ms", config.max_connection_age_ms))
    if config.max_connection_age_grace_ms:
        options.append(("grpc.max_connection_age_grace_ms", config.max_connection_age_grace_ms))
    return options


def _certificates(config: GrpcConfig, is_mutual: bool) -> grpc.ServerCertificateConfiguration:
    """Return the contents of the TLS files. Raises ServingFault if one is unreadable or they do not match."""
    tls_context(config, is_mutual)
    pair = Path(config.server_key).read_bytes(), Path(config.server_cert).read_bytes()
    root = Path(config.root_cert).read_bytes() if config.root_cert else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=root)


def _accepts_certificates(certificates: grpc.ServerCertificateConfiguration) -> bool:
    """Return whether gRPC accepts the certificates. Tests this with a temporary server on an abstract socket."""
    server = grpc.server(ThreadPoolExecutor(1))
    try:
        port = server.add_secure_port(
            f"unix-abstract:edge-server-tls-{os.getpid()}-{next(_probe_ids)}",
            grpc.dynamic_ssl_server_credentials(certificates, lambda: None),
        )
        # A server that never starts would keep the socket.
        server.start()
    except RuntimeError:
        return False
    finally:
        server.stop(0).wait()
    return bool(port)
