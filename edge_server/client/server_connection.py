"""Connection settings of a client: the server's address, TLS files, credentials and gRPC channel options."""

from __future__ import annotations

import re
import socket
import ssl
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from edge_server.client.tls_session import TlsSession
from edge_server.errors import InvalidRequest

KEEPALIVE_S = 10.0
"""A keepalive ping is sent if a frame is in flight and the server has sent nothing for this time."""

KEEPALIVE_TIMEOUT_S = 5.0
"""Longest time to wait for the answer to a keepalive ping."""

CONNECT_TIMEOUT_S = 5.0
"""Longest time to connect, and then again to agree on TLS."""

_PROXIES = {"grpc", "http", "https"}
"""Schemes of the proxies that grpcio uses: those of the variables `grpc_proxy`, `http_proxy` and `https_proxy`."""

_INDEX_TIMEOUT_S = 5.0
_HOST_AND_PORT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_METADATA_NAME, _METADATA_VALUE = re.compile(r"[a-z0-9_.-]+"), re.compile(r"[\x20-\x7e]*")

_CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Each attempt has its own channel and connection: gRPC would delay attempts on a shared one by its own back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's limit for one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
]


def _is_plain(name: object, value: object) -> bool:
    """Return whether a pair of metadata is text that can be sent as it is."""
    return (
        isinstance(name, str)
        and isinstance(value, str)
        and not name.endswith("-bin")
        and not name.startswith("grpc-")
        and _METADATA_NAME.fullmatch(name) is not None
        and _METADATA_VALUE.fullmatch(value) is not None
    )


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
        root, key, chain = self._read_files()
        return grpc.ssl_channel_credentials(root, key, chain)

    def context(self) -> ssl.SSLContext:
        """Return the settings of TLS sessions. Raises OSError when a file cannot be read, InvalidRequest for a wrong
        one."""
        root, key, chain = self._read_files()
        if key is not None and chain is None:
            raise InvalidRequest(f"{self.client_key}: expected a client certificate beside its key, given none")
        try:
            context = ssl.create_default_context(cadata=None if root is None else root.decode("ascii", "replace"))
        except ssl.SSLError:
            raise InvalidRequest(f"{self.root_certificates}: expected certificates in a PEM file") from None
        context.set_alpn_protocols(["h2"])
        if chain is not None:
            try:
                # Without the password OpenSSL would ask for one at the terminal.
                context.load_cert_chain(self.client_certificate, self.client_key or None, password="")
            except ssl.SSLError as error:
                raise InvalidRequest(
                    f"{self.client_certificate}: expected a client certificate in a PEM file and its key without a "
                    f"password in {self.client_key or 'the same file'}: {error.reason or error}"
                ) from None
        return context

    def _read_files(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return root certificates, client key and client certificate; None for a file that is not stated."""
        root, key, chain = (
            Path(path).read_bytes() if path else None
            for path in (self.root_certificates, self.client_key, self.client_certificate)
        )
        return root, key, chain


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

    @property
    def needs_grpcio(self) -> bool:
        """Whether only grpcio can connect: with credentials, channel options, a proxy or binary metadata, to an address
        of another kind than "host:port" and "unix:/path", and on Windows."""
        return bool(
            not hasattr(socket, "MSG_DONTWAIT")
            or self.credentials is not None
            or self.options
            or _PROXIES & urllib.request.getproxies().keys()
            or not all(_is_plain(*item) for item in self.metadata)
            or (not self._unix_path and self._host_and_port is None)
        )

    @property
    def authority(self) -> str:
        """The value of the header `:authority`."""
        if self.tls is not None and self.tls.server_name:
            return self.tls.server_name
        return "localhost" if self._unix_path else self.address

    def tls_session(self) -> TlsSession | None:
        """Return a new TLS session, or None without TLS. Raises the errors of `Tls.context`."""
        if self.tls is None:
            return None
        host = "localhost" if self._host_and_port is None else self._host_and_port[0]
        return TlsSession(self.tls.context(), self.tls.server_name or host)

    def connect(self) -> socket.socket:
        """Return a new connection, before TLS. *Blocking.* Raises OSError."""
        if self._unix_path:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self._unix_path)
            except OSError:
                sock.close()
                raise
            return sock
        assert self._host_and_port is not None
        sock = socket.create_connection(self._host_and_port, CONNECT_TIMEOUT_S)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    @property
    def _unix_path(self) -> str:
        scheme, _, path = self.address.partition(":")
        return path if scheme == "unix" and path.startswith("/") and not path.startswith("//") else ""

    @property
    def _host_and_port(self) -> tuple[str, int] | None:
        found = _HOST_AND_PORT.fullmatch(self.address)
        return None if found is None else (found[1].strip("[]"), int(found[2]))

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

    def register_region(self, name: str, key: str, byte_size: int) -> bool:
        """Have the server map a segment of POSIX shared memory, for the RegionSlices of frames. Return whether it does:
        only on the same machine, and if it allows it to clients."""
        return self._ask_about_regions("Register", name=name, key=key, offset=0, byte_size=byte_size) is not None

    def unregister_region(self, name: str) -> bool:
        """Have the server forget a segment. Return whether it answered."""
        return self._ask_about_regions("Unregister", name=name) is not None

    def region_names(self) -> list[str]:
        """Ask the server for the names of its segments, of all clients. Return [] if it does not answer, or not to this
        client."""
        status = self._ask_about_regions("Status")
        return [] if status is None else list(status.regions)

    def _ask_about_regions(self, action: str, **fields: str | int) -> Any:
        """Return the response, None if the server gives none."""
        from edge_server.protocol import messages  # as in model_names

        method = f"SystemSharedMemory{action}"
        request = messages.message_class(f"inference.{method}Request")(**fields)
        response = messages.message_class(f"inference.{method}Response")
        with self.channel(grpc) as channel:
            ask = channel.unary_unary(f"/{messages.GRPC_SERVICE}/{method}", None, response.FromString)
            try:
                return ask(request.SerializeToString(), timeout=_INDEX_TIMEOUT_S, metadata=tuple(self.metadata) or None)
            except grpc.RpcError:
                return None
