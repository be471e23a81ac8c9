"""TLS for gRPC: certificate, key and client root certificates, taken anew for new connections while old ones go on."""

from __future__ import annotations

import itertools
import os
import ssl
from collections import deque
from pathlib import Path
from typing import NamedTuple

import grpc

from edge_server.config import GrpcConfig
from edge_server.errors import ServingFault
from edge_server.frontends.grpc.pool import HandlerPool

_EVERY_STRENGTH = "DEFAULT:@SECLEVEL=0"
"""OpenSSL's level at which keys are refused for what is wrong with them, not for being short: gRPC takes short ones."""

_trials = itertools.count()


class Certificates:
    """The TLS files of one gRPC listener. `credentials` is for one port; `renew` may be called by any thread."""

    def __init__(self, config: GrpcConfig) -> None:
        """Read the files. Raises ServingFault: one cannot be read, or they do not fit each other."""
        self._is_mutual = config.is_mutual_tls
        self._first = _read(config, self._is_mutual).configuration()
        # The core takes out of a configuration what it holds, so each is given once; only the newest waits for that.
        self._next: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(self._first, self._take_next, self._is_mutual)

    def renew(self, config: GrpcConfig) -> None:
        """Use these files for handshakes that begin from now on. *Blocking.*

        Whether clients are asked for a certificate stays as it was at the start. Raises ServingFault (unreadable, not
        fitting, not to gRPC's liking), and changes nothing then.
        """
        # gRPC itself would keep the old ones too, but not say why: what it is given it must take.
        pems = _read(config, self._is_mutual)
        if not _is_taken(pems.configuration()):
            raise ServingFault(
                f"TLS certificate '{config.server_cert}' and key '{config.server_key}' for gRPC cannot be used: "
                "they fit each other, but gRPC's TLS library does not take them"
            )
        self._next.append(pems.configuration())

    def _take_next(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, under a lock of its own; None: the same as before."""
        try:
            return self._next.pop()
        except IndexError:
            return None


class _Pems(NamedTuple):
    key: bytes
    cert: bytes
    root: bytes | None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.root)


def _read(config: GrpcConfig, is_mutual: bool) -> _Pems:
    key, cert = _pem("server key", config.server_key), _pem("server certificate", config.server_cert)
    root = _pem("root certificate", config.root_cert) if config.root_cert or is_mutual else None
    _check(config)
    return _Pems(key, cert, root)


def _pem(what: str, path: str) -> bytes:
    if not path:
        raise ServingFault(f"TLS for gRPC needs a {what} file, but none is configured")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ServingFault(f"{what} '{path}' for gRPC cannot be read: {error}") from None


def _check(config: GrpcConfig) -> None:
    """Have OpenSSL look at the files: gRPC says of bad ones only that the port cannot be had."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers(_EVERY_STRENGTH)
    try:
        # Without a password of ours, OpenSSL would ask for that of an encrypted key on the terminal, and wait.
        context.load_cert_chain(config.server_cert, config.server_key, password="")
    except (OSError, ValueError) as error:
        raise ServingFault(
            f"TLS certificate '{config.server_cert}' and key '{config.server_key}' for gRPC cannot be used: {error}"
        ) from None
    if not config.root_cert:
        return
    try:
        context.load_verify_locations(config.root_cert)
    except (OSError, ValueError) as error:
        raise ServingFault(f"root certificate '{config.root_cert}' for gRPC cannot be used: {error}") from None


def _is_taken(certificates: grpc.ServerCertificateConfiguration) -> bool:
    """Return whether gRPC takes them for a port: tried on an abstract socket of a server that nobody is told of."""
    pool = HandlerPool("grpc-tls-check")
    server = grpc.server(pool)
    try:
        port = server.add_secure_port(
            f"unix-abstract:edge-server-tls-{os.getpid()}-{next(_trials)}",
            grpc.dynamic_ssl_server_credentials(certificates, _no_change),
        )
        # A server that was never started would keep the socket.
        server.start()
    except RuntimeError:
        return False
    finally:
        server.stop(0).wait()
        pool.shutdown()
    return bool(port)


def _no_change() -> None:
    return None
