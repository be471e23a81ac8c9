"""TLS settings of the gRPC port: makes an SSL context from the files of certificate, key and client root
certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

from edge_server.config import GrpcConfig
from edge_server.errors import ServingFault

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=0"
"""TLS 1.2 cipher suites that HTTP/2 allows (RFC 9113, section 9.2.2); those of TLS 1.3 are all allowed. OpenSSL's
security level 0 accepts short keys."""


def tls_context(config: GrpcConfig, is_mutual: bool) -> ssl.SSLContext:
    """Return a TLS context for client connections. *Blocking.*

    Raises ServingFault if a file is missing or unreadable, or certificate and key do not match.
    """
    _check_readable("server key", config.server_key)
    _check_readable("server certificate", config.server_cert)
    if config.root_cert or is_mutual:
        _check_readable("root certificate", config.root_cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["h2"])
    # RFC 9113, section 9.2.1.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        # Without a password argument, OpenSSL prompts on the terminal for that of an encrypted key, and waits.
        context.load_cert_chain(config.server_cert, config.server_key, password="")
    except (OSError, ValueError) as error:
        raise ServingFault(
            f"TLS certificate '{config.server_cert}' and key '{config.server_key}' for gRPC cannot be used: {error}"
        ) from None
    if not config.root_cert:
        return context
    try:
        context.load_verify_locations(config.root_cert)
    except (OSError, ValueError) as error:
        raise ServingFault(f"root certificate '{config.root_cert}' for gRPC cannot be used: {error}") from None
    if is_mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(file_kind: str, path: str) -> None:
    if not path:
        raise ServingFault(f"TLS for gRPC needs a {file_kind} file, but none is configured")
    try:
        with Path(path).open("rb"):
            return
    except OSError as error:
        raise ServingFault(f"{file_kind} '{path}' for gRPC cannot be read: {error}") from None
