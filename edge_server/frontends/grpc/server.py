"""gRPC front end: binds, starts, drains and stops the RPCs over one of two transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_server.config import GrpcConfig
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.grpc.call import MAX_MESSAGE_BYTES
from edge_server.frontends.grpc.rpc_table import StreamService, served_methods
from edge_server.frontends.memory_budget import MemoryBudget, budget_bytes

if TYPE_CHECKING:
    from edge_server.frontends.grpc.grpcio_transport import GrpcioTransport
    from edge_server.frontends.grpc.http2_transport import Http2Transport
    from edge_server.service import InferenceService

MAX_CALLS = 1024
"""Calls open at once. Further ones are refused RESOURCE_EXHAUSTED at once, not queued behind calls that may not end."""

MAX_STREAMS = 768
"""Calls of unlimited length among them; the rest is left to unary calls."""


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
        budget: MemoryBudget | None = None,
    ) -> None:
        """`budget` bounds what messages that are not whole hold; None for one of its own, by the memory there is."""
        self._config = config
        self._budget = budget or MemoryBudget(budget_bytes(0, MAX_MESSAGE_BYTES), MAX_MESSAGE_BYTES)
        self._methods = served_methods(service, config, guests, allows_code_upload=allows_code_upload, tokens=tokens)
        self._transport: GrpcioTransport | Http2Transport | None = None

    def start(self) -> int:
        """Listen and return the bound port. Raises ServingFault (address taken, certificate unreadable)."""
        config = self._config
        transport: GrpcioTransport | Http2Transport
        if config.transport == "grpcio":
            from edge_server.frontends.grpc.grpcio_transport import GrpcioTransport

            transport = GrpcioTransport(self._methods, config, MAX_CALLS, MAX_STREAMS)
        else:
            from edge_server.frontends.grpc.http2_transport import Http2Transport

            transport = Http2Transport(self._methods, config, MAX_CALLS, MAX_STREAMS, self._budget)
        port = transport.start()
        self._transport = transport
        return port

    def renew_tls(self, config: GrpcConfig) -> None:
        """Use the TLS files that `config` names for connections from now on. *Blocking.* Without TLS, do nothing.

        Raises ServingFault, and changes nothing then.
        """
        if self._transport is not None:
            self._transport.renew_tls(config)

    def begin_drain(self) -> None:
        """Tell clients to connect elsewhere, and answer everything until `stop`. grpcio's transport cannot tell."""
        if self._transport is not None:
            self._transport.begin_drain()

    def end_drain(self) -> None:
        """Take no further connections and calls, which clients then try elsewhere. *Blocking* for a moment. grpcio's
        transport takes them until `stop`."""
        if self._transport is not None:
            self._transport.end_drain()

    def stop(self, grace_s: float) -> None:
        """Take no new calls, wait up to `grace_s` for running ones, cancel what is left. *Blocking.*

        Streams end as soon as nothing is outstanding on them.
        """
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.stop(grace_s)
