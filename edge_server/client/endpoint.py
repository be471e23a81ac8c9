"""Connection settings of a client: the server's address, TLS files, credentials and gRPC channel options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

KEEPALIVE_S = 10.0
"""gRPC sends a keepalive ping if a frame is in flight and the server has sent nothing for this time."""

_INDEX_TIMEOUT_S = 5.0

_CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Each attempt has its own channel and connection: gRPC would delay attempts on a shared one by its own back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's limit for one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for a server with TLS. Without files: the certificates trusted by this machine, no client certificate.

    `server_name` replaces the address in the check of the server's certificate.
    """

    root_certificates: str | Path = ""
    client_certificate: str | Path = ""
    client_key: str | Path = ""
    server_name: str = ""

    def credentials(self) -> Any:
        """Return grpcio's channel credentials. Raises OSError when a file cannot be read."""
        root, key, chain = (
            Path(path).read_bytes() if path else None
            for path in (self.root_certificates, self.client_key, self.client_certificate)
        )
        return grpc.ssl_channel_credentials(root, key, chain)


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """Address and channel options. `address` is "host:port" or "unix:/path". `credentials` of grpcio replace `tls`."""

    address: str
    tls: Tls | None = None
    credentials: Any = None
    metadata: Sequence[tuple[str, str]] = ()
    options: Sequence[tuple[str, Any]] = field(default=())

    def channel(self, library: Any) -> Any:
        """Return a new channel of `library`: grpc or grpc.aio."""
        options = [*_CHANNEL_OPTIONS, *self.options]
        credentials = self.credentials
        if self.tls is not None:
            credentials = credentials or self.tls.credentials()
            if self.tls.server_name:
                options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        if credentials is None:
            return library.insecure_channel(self.address, options)
        return library.secure_channel(self.address, credentials, options)

    def model_names(self) -> list[str]:
        """Ask the server for the names of its models. Return [] if it does not answer, or not to this client."""
        from edge_server.protocol import messages  # protobuf, which streams do not need

        with self.channel(grpc) as channel:
            ask = channel.unary_unary(
                f"/{messages.GRPC_SERVICE}/RepositoryIndex", None, messages.RepositoryIndexResponse.FromString
            )
            try:
                index = ask(b"", timeout=_INDEX_TIMEOUT_S, metadata=tuple(self.metadata) or None)
            except grpc.RpcError:
                return []
        return [item.name for item in index.models]
