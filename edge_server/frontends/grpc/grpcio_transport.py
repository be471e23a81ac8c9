"""gRPC transport over grpcio's own server: `--grpc-transport=grpcio`.

Each call holds a thread, a stream two. The reference that the contract tests compare with, and the way out should a
client be met that over_http2.py does not understand.
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
from edge_server.frontends.grpc.call import (
    MAX_MESSAGE_BYTES,
    CallHandler,
    CallStatus,
    Metadata,
    Methods,
    Pieces,
    RpcMethod,
    ending,
    known,
)
from edge_server.frontends.grpc.tls import tls_context
from edge_server.service import READING_THREAD_HOLD_US

_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}
"""grpc_compression_level of grpc/impl/compression_types.h."""

_MOST_PENDING = 1 << 20

_NO_DEADLINE_S = 1e8
"""Without a deadline grpcio tells a moment many years ahead."""

_STATUS_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

_trials = itertools.count()


class GrpcioTransport(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """A listener on grpcio's server. `start` once, then `stop` once."""

    def __init__(self, methods: Methods, config: GrpcConfig, max_calls: int, max_streams: int) -> None:
        self._methods = methods
        self._config = config
        self._max_calls = max_calls
        self._max_streams = max_streams
        self._lock = threading.Lock()
        self._streams: set[CallHandler] = set()
        self._stream_count = 0
        self._is_stopping = False
        # The core takes out of a configuration what it holds, so each is given once; only the newest waits for that.
        self._next_tls: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)
        self._server: grpc.Server | None = None

    def start(self) -> int:
        """Listen and return the bound port. Raises ServingFault (address taken, certificate unreadable)."""
        config = self._config
        server = grpc.server(
            ThreadPoolExecutor(self._max_calls, "grpc"),
            handlers=(self,),
            options=channel_options(config),
            maximum_concurrent_rpcs=self._max_calls,
        )
        is_tls = config.is_tls or config.is_mutual_tls
        first = _certificates(config, config.is_mutual_tls) if is_tls else None
        host = f"[{config.address}]" if ":" in config.address and config.address[0] != "[" else config.address
        target = f"{host}:{config.port}"
        # Asked first: gRPC's own library would print a refusal of its own besides ours.
        refused = "" if config.port == 0 or config.reuses_port else _why_not(config)
        if refused:
            raise ServingFault(f"gRPC cannot listen on {target}: {refused}")
        try:
            if first is not None:
                tls = grpc.dynamic_ssl_server_credentials(first, self._take_tls, config.is_mutual_tls)
                port = server.add_secure_port(target, tls)
            else:
                port = server.add_insecure_port(target)
        except RuntimeError:
            port = 0
        if not port:
            reason = "gRPC's TLS library does not take the certificate and its key" if is_tls else "it is not available"
            raise ServingFault(f"gRPC cannot listen on {target}: {_why_not(config) or reason}")
        server.start()
        self._server = server
        return int(port)

    def renew_tls(self, config: GrpcConfig) -> None:
        """Use the TLS files that `config` names for handshakes that begin from now on. *Blocking.*

        Whether clients are asked for a certificate stays as it was at the start. Raises ServingFault, and changes
        nothing then.
        """
        if not (self._config.is_tls or self._config.is_mutual_tls):
            return
        is_mutual = self._config.is_mutual_tls
        # gRPC itself would keep the old ones too, but not say why: what it is given it must take.
        if not _is_taken(_certificates(config, is_mutual)):
            raise ServingFault(
                f"TLS certificate '{config.server_cert}' and key '{config.server_key}' for gRPC cannot be used: "
                "they fit each other, but gRPC's TLS library does not take them"
            )
        self._next_tls.append(_certificates(config, is_mutual))

    def _take_tls(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, under a lock of its own; None: the same as before."""
        try:
            return self._next_tls.pop()
        except IndexError:
            return None

    def begin_drain(self) -> None:
        """Nothing: grpcio tells clients to go elsewhere only when it stops."""

    def end_drain(self) -> None:
        """Nothing, likewise."""

    def stop(self, grace_s: float) -> None:
        """See GrpcFrontend.stop."""
        server, self._server = self._server, None
        if server is None:
            return
        stopped = server.stop(grace_s)
        with self._lock:
            self._is_stopping = True
            streams = list(self._streams)
        for side in streams:
            side.on_server_stopping()
        stopped.wait()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
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
            error = Throttled(f"{self._max_streams} streams are open, which is as many as are served at once")
            _abort(context, ending(error))
        try:
            side = _opened(method, call, context)
            with self._lock:
                self._streams.add(side)
                is_stopping = self._is_stopping
            try:
                if not context.add_callback(side.on_client_left):
                    side.on_client_left()
                if is_stopping:
                    side.on_server_stopping()
                threading.Thread(target=call.read, args=(side, requests), name="grpc-stream", daemon=True).start()
                while not isinstance(item := call.outbox.get(), CallStatus):
                    if item is None:
                        side.on_woken()
                        continue
                    yield item
                    side.on_sent()
                if item.code:
                    _abort(context, item)
            finally:
                call.stop_reading()
                with self._lock:
                    self._streams.discard(side)
        finally:
            with self._lock:
                self._stream_count -= 1


class _Call:
    """What both kinds of calls know of theirs."""

    hold_us = math.inf

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.metadata: Metadata = tuple((str(key), value) for key, value in context.invocation_metadata())
        left_s = context.time_remaining()
        has_deadline = left_s is not None and left_s < _NO_DEADLINE_S
        self.deadline_ns = time.monotonic_ns() + int(left_s * 1e9) if has_deadline else 0
        self.peer: str = context.peer()
        self.outbox: SimpleQueue[bytes | CallStatus | None] = SimpleQueue()

    def answer(self, message: Pieces) -> None:
        self.outbox.put(b"".join(message))

    def end(self, done: CallStatus) -> None:
        self.outbox.put(done)

    def wake(self) -> None:
        self.outbox.put(None)

    def receive(self) -> None:
        raise AssertionError("a unary call has one message")

    def send(self, message: Pieces) -> bool:
        self.outbox.put(b"".join(message))
        return False


class _StreamCall(_Call):
    """A call whose messages are read on a thread of its own, and sent by the thread that runs it."""

    hold_us = READING_THREAD_HOLD_US

    def __init__(self, context: grpc.ServicerContext) -> None:
        super().__init__(context)
        self._wanted = threading.Semaphore(1)
        self._is_over = False

    def receive(self) -> None:
        self._wanted.release()

    def read(self, side: CallHandler, requests: Iterator[bytes]) -> None:
        while True:
            self._wanted.acquire()
            if self._is_over:
                return
            try:
                message = next(requests, None)
            except Exception:  # noqa: BLE001 - grpcio raises errors of its own when a call is cancelled or breaks
                return  # `on_client_left` was told
            if message is None:
                side.on_last_message()
                return
            side.on_message(message)
            del message

    def stop_reading(self) -> None:
        self._is_over = True
        self._wanted.release()


def _run_unary(method: RpcMethod, message: bytes, context: grpc.ServicerContext) -> bytes:
    call = _Call(context)
    side = _opened(method, call, context)
    if not context.add_callback(side.on_client_left):
        side.on_client_left()
    side.on_message(message)
    item = call.outbox.get()
    if isinstance(item, CallStatus):
        _abort(context, item)
    assert isinstance(item, bytes)
    return item


def _opened(method: RpcMethod, call: _Call, context: grpc.ServicerContext) -> CallHandler:
    try:
        return method.open(call)
    except Exception as error:  # noqa: BLE001 - the boundary: `known` logs and maps
        failure = ending(known(error))
    _abort(context, failure)
    raise AssertionError("abort returned")


def _abort(context: grpc.ServicerContext, done: CallStatus) -> None:
    if done.trailers:
        context.set_trailing_metadata(tuple(done.trailers))
    context.abort(_STATUS_CODES[int(done.code)], done.details)


def channel_options(config: GrpcConfig) -> list[tuple[str, int]]:
    """Return grpcio's channel arguments for a configuration; 0 for a connection age leaves gRPC's default, no limit."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", int(config.reuses_port)),
        # Beyond these the core would answer CANCELLED by itself: it is for `maximum_concurrent_rpcs` to refuse calls.
        ("grpc.server.max_pending_requests", _MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
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
    """Return the files' contents. Raises ServingFault: one cannot be read, or they do not fit each other."""
    tls_context(config, is_mutual)
    pair = Path(config.server_key).read_bytes(), Path(config.server_cert).read_bytes()
    root = Path(config.root_cert).read_bytes() if config.root_cert else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=root)


def _is_taken(certificates: grpc.ServerCertificateConfiguration) -> bool:
    """Return whether gRPC takes them for a port: tried on an abstract socket of a server that nobody is told of."""
    server = grpc.server(ThreadPoolExecutor(1))
    try:
        port = server.add_secure_port(
            f"unix-abstract:edge-server-tls-{os.getpid()}-{next(_trials)}",
            grpc.dynamic_ssl_server_credentials(certificates, lambda: None),
        )
        # A server that was never started would keep the socket.
        server.start()
    except RuntimeError:
        return False
    finally:
        server.stop(0).wait()
    return bool(port)


def _why_not(config: GrpcConfig) -> str:
    """Return the system's word for why the address cannot be bound, "" when it can."""
    host = config.address.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return str(error)
    return ""
