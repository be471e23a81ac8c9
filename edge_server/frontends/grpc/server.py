"""gRPC front end: opens and closes the port, and serves the RPCs with the chosen transport (grpcio, or this server's
own HTTP/2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_server.config import GrpcConfig
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.connection_limit import ConnectionLimit
from edge_server.frontends.grpc.call import MAX_MESSAGE_BYTES
from edge_server.frontends.grpc.rpc_table import StreamService, served_methods
from edge_server.frontends.memory_budget import MemoryBudget, budget_bytes
from edge_server.lazy_import import run_deferred_import
from edge_server.protocol import messages

if TYPE_CHECKING:
    from edge_server.frontends.grpc.grpcio_transport import GrpcioTransport
    from edge_server.frontends.grpc.http2_transport import Http2Transport
    from edge_server.service import InferenceService

MAX_CALLS = 1024
"""Maximum number of simultaneous calls. Further calls fail at once with RESOURCE_EXHAUSTED: in a queue they would wait
for calls that may never end."""

MAX_STREAMS = 768
"""Maximum number of streaming calls among them. The others are for unary calls."""


class GrpcFrontend:
    """Serves Triton's GRPCInferenceService, health checking, reflection and the `stream_services`.

    Call `start` once, then `stop` once.
    """

    def __init__(
        self,
        service: InferenceService,
        config: GrpcConfig,
        stream_services: Sequence[StreamService] = (),
        *,
        allows_code_upload: bool = False,
        tokens: Tokens | None = None,
        budget: MemoryBudget | None = None,
        limit: ConnectionLimit | None = None,
        thread_count: int = 1,
    ) -> None:
        """`budget` limits the memory of incomplete messages. None creates a budget sized by the machine's memory.
        `limit` is that of all listeners' connections, `thread_count` the number of reading threads; grpcio's transport
        uses neither."""
        self._config = config
        self._limit = limit
        self._budget = budget or MemoryBudget(budget_bytes(0, MAX_MESSAGE_BYTES), MAX_MESSAGE_BYTES)
        # A table for each reading thread, with caches of its own: without an interpreter lock, Python locks a
        # dictionary to read what another thread has put into it. With common caches, two threads served less than one.
        self._methods = [
            served_methods(service, config, stream_services, allows_code_upload=allows_code_upload, tokens=tokens)
            for _ in range(thread_count)
        ]
        self._transport: GrpcioTransport | Http2Transport | None = None

    def start(self, *, accepts: bool = True) -> int:
        """Bind the address and return the port. `accepts` False: connections are refused until `accept_connections`.

        Raises ServingFault (address taken, certificate unreadable).
        """
        config = self._config
        transport: GrpcioTransport | Http2Transport
        if config.transport == "grpcio":
            from edge_server.frontends.grpc.grpcio_transport import GrpcioTransport

            transport = GrpcioTransport(self._methods[0], config, MAX_CALLS, MAX_STREAMS)
        else:
            from edge_server.frontends.grpc.http2_transport import Http2Transport

            transport = Http2Transport(self._methods, config, MAX_CALLS, MAX_STREAMS, self._budget, self._limit)
        port = transport.start(accepts=accepts)
        self._transport = transport
        return port

    def prepare(self) -> None:
        """Import protobuf and hpack, so that the first message need not wait for them. Call this on a thread, when the
        server is ready: the start does not wait for them either."""
        run_deferred_import("hpack")
        messages.message_class("inference.ModelInferRequest")

    def accept_connections(self) -> None:
        """Accept connections, after `start` without `accepts`. Not after `end_drain`.

        Raises ServingFault if another program listens at the address by now.
        """
        if self._transport is not None:
            self._transport.accept_connections()

    def renew_tls(self, config: GrpcConfig) -> None:
        """Use the TLS files of `config` for new connections. *Blocking.* Without TLS, do nothing.

        Raises ServingFault, and changes nothing then.
        """
        if self._transport is not None:
            self._transport.renew_tls(config)

    def begin_drain(self) -> None:
        """Ask clients to use another server, but still serve their calls. grpcio's transport does nothing."""
        if self._transport is not None:
            self._transport.begin_drain()

    def end_drain(self, timeout_s: float) -> None:
        """Accept no further connections, and no calls from clients that know that they shall use another server.
        *Blocking* until all know it, for a few seconds and for `timeout_s` at most.

        grpcio's transport accepts both until `stop`.
        """
        if self._transport is not None:
            self._transport.end_drain(timeout_s)

    def stop(self, grace_s: float) -> None:
        """Accept no new calls, wait up to `grace_s` for running ones, then cancel the rest. *Blocking.*

        Streams end as soon as nothing is outstanding on them.
        """
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.stop(grace_s)
