"""The gRPC listener: grpcio's synchronous server with this package's handlers, bound, started and stopped.

The synchronous server under a pool of threads answers about twice as many unary calls as grpcio's asyncio server, and a
handler thread may run a model itself. A message is copied twice on its way in (grpcio joins the pieces that arrived
into one bytes object) and twice on its way out (tensors into the message, the message into grpcio's buffer): a request
of 2 GiB needs room for two such copies for a moment.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from edge_server.config import GrpcConfig
from edge_server.errors import ServingFault
from edge_server.frontends.grpc.credentials import Certificates
from edge_server.frontends.grpc.direct import DirectDoor, offer
from edge_server.frontends.grpc.direct_check import may_be_direct
from edge_server.frontends.grpc.encode import MAX_MESSAGE_BYTES
from edge_server.frontends.grpc.handlers import Handlers, StreamService
from edge_server.frontends.grpc.pool import HandlerPool
from edge_server.frontends.tokens import Tokens

if TYPE_CHECKING:
    from edge_server.service import InferenceService

MAX_CALLS = 1024
"""Calls at once, each on a thread of its own; threads are made when first needed, and an idle one costs some 30 KB.
Further calls are refused RESOURCE_EXHAUSTED at once, rather than queued behind calls that may never end."""

MAX_STREAMS = 768
"""Streams at once. They hold their thread as long as they are open; the rest of the threads is left to unary calls."""

_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}
"""grpc_compression_level of grpc/impl/compression_types.h."""


class GrpcFrontend:
    """Serves Triton's GRPCInferenceService, health checking, reflection and the `guests`. `start` once, then `stop`
    once."""

    def __init__(
        self,
        service: InferenceService,
        config: GrpcConfig,
        guests: Sequence[StreamService] = (),
        *,
        allows_code_upload: bool = False,
        tokens: Tokens | None = None,
    ) -> None:
        self._config = config
        self._handlers = Handlers(
            service, config, MAX_STREAMS, guests, allows_code_upload=allows_code_upload, tokens=tokens
        )
        self._pool = HandlerPool("grpc")
        self._server: grpc.Server | None = None
        self._door: DirectDoor | None = None
        self._certificates: Certificates | None = None

    @property
    def is_direct(self) -> bool:
        """Whether inference comes through the direct door; known once it was started."""
        return self._door is not None

    def start(self) -> int:
        """Listen and return the bound port. Raises ServingFault (address taken, certificate unreadable)."""
        config = self._config
        server = grpc.server(
            self._pool,
            handlers=(self._handlers,),
            options=channel_options(config),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        if config.is_tls or config.is_mutual_tls:
            self._certificates = Certificates(config)
        calls = self._handlers.direct_calls()
        door = offer(server, list(calls)) if config.may_be_direct and may_be_direct() else None
        port = _bind(server, config, self._certificates)
        server.start()
        if door is not None:
            door.start(calls, MAX_CALLS)
        self._door = door
        self._server = server
        return port

    def renew_tls(self, config: GrpcConfig) -> None:
        """Use the TLS files that `config` names for connections from now on. *Blocking.* Without TLS, do nothing.

        Raises ServingFault, and changes nothing then.
        """
        if self._certificates is not None:
            self._certificates.renew(config)

    def stop(self, grace_s: float) -> None:
        """Take no new calls, wait up to `grace_s` for running ones, cancel what is left. *Blocking.*

        Streams end as soon as nothing is outstanding on them.
        """
        server, self._server = self._server, None
        if server is None:
            return
        stopped = server.stop(grace_s)
        self._handlers.stop_streams()
        stopped.wait()
        if self._door is not None:
            self._door.join()
        self._pool.shutdown()


def channel_options(config: GrpcConfig) -> list[tuple[str, int]]:
    """Return grpcio's channel arguments for a configuration; 0 for a connection age leaves gRPC's default, no limit."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", int(config.reuses_port)),
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


def _bind(server: grpc.Server, config: GrpcConfig, certificates: Certificates | None) -> int:
    host = f"[{config.address}]" if ":" in config.address and config.address[0] != "[" else config.address
    target = f"{host}:{config.port}"
    # Asked first: gRPC's own library would print a refusal of its own besides ours.
    refused = "" if config.port == 0 or config.reuses_port else _why_not(config)
    if refused:
        raise ServingFault(f"gRPC cannot listen on {target}: {refused}")
    try:
        if certificates is not None:
            port = server.add_secure_port(target, certificates.credentials())
        else:
            port = server.add_insecure_port(target)
    except RuntimeError:
        port = 0
    if not port:
        reason = "the address is not available"
        if certificates is not None:
            reason = "gRPC's TLS library does not take the certificate and its key"
        raise ServingFault(f"gRPC cannot listen on {target}: {_why_not(config) or reason}")
    return int(port)


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
