"""Checks of the certificates of network cameras: by an authority, or pinned.

Most cameras have a certificate that they signed themselves and that does not name their address. It is trusted if the
file `ca` of the source holds this very certificate. Authorities in the file vouch for names, as everywhere.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from edge_server.config.setting import shown_url
from edge_server.default_tls import make_default_tls_context
from edge_server.plugins.cameras.failure_reason import connection_failure
from edge_server.plugins.cameras.sources.source_interface import SourceError

TIMEOUT_S = 5.0
"""Longest time to connect, and for each step of the handshake."""

_RTSPS_PORT = 322
"""Default port of rtsps://, as registered."""

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

_PINNABLE = frozenset({18, 19, 20, 21, 62, 64})
"""OpenSSL's X509_V_ERR_ codes that a pinned certificate avoids: of unknown issuers, and of other names."""


class PinnedCertificate(NamedTuple):
    """A camera's certificate that its source trusts. `name` is one that it holds, "" if it holds none in ASCII."""

    pem: str
    name: str


class _NamelessContext(ssl.SSLContext):
    """TLS context of a client that checks no names. It trusts the certificates of a file, also one that no authority
    signed. With `only`, a certificate in DER, it accepts no other one."""

    only = b""

    def __init__(self, protocol: int) -> None:
        super().__init__()
        self.check_hostname = False
        self.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self.set_ciphers("DEFAULT:@SECLEVEL=1")  # old cameras have RSA keys of 1024 bits

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        secured = super().wrap_socket(*arguments, **options)
        if self.only and secured.getpeercert(binary_form=True) != self.only:
            secured.close()
            raise ssl.SSLError(1, "the camera shows another certificate than just before")
        return secured


def make_tls_context(url: str, ca: str) -> ssl.SSLContext:
    """Return the context for a camera's URL. `ca` is a PEM file, or "" for the authorities of the system.

    Connects to the camera if there is a `ca`. Raises SourceError.
    """
    pinned = find_pinned_certificate(url, ca) if ca else None
    if pinned is None:
        with _naming_the_file(ca):
            return make_default_tls_context(cafile=ca or None)
    context = _NamelessContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=pinned.pem)
    context.only = ssl.PEM_cert_to_DER_cert(pinned.pem)
    return context


def find_pinned_certificate(url: str, ca: str) -> PinnedCertificate | None:
    """Connect to a camera, and return its certificate if the PEM file `ca` holds it and it is valid at this time.

    None also if TLS fails: the caller's connection fails for the same reason. Raises SourceError if the file or the
    camera cannot be used.
    """
    try:
        return _find_pinned_certificate(url, ca)
    except ssl.SSLError:
        return None
    except OSError as error:
        is_late = not error.strerror
        reason = (
            f"no data within {TIMEOUT_S:g} s" if is_late else connection_failure(error, _address(url)[0], TIMEOUT_S)
        )
        raise SourceError(f"{shown_url(url)}: {reason}") from None


def describe_certificate_error(error: ssl.SSLCertVerificationError, url: str) -> str:
    """Return why a camera's certificate is refused, and how to trust it nevertheless."""
    problem = f"the certificate is not valid: {error.verify_message}"
    if error.verify_code not in _PINNABLE:
        return problem
    host, port = _address(url)
    address = shlex.quote(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return (
        f"{problem}. If it is the camera's own, save it and name the file as ca: "
        f"openssl s_client -connect {address} </dev/null | openssl x509 -out camera.pem"
    )


def _find_pinned_certificate(url: str, ca: str) -> PinnedCertificate | None:
    context = _NamelessContext(ssl.PROTOCOL_TLS_CLIENT)
    with _naming_the_file(ca):
        context.load_verify_locations(ca)
        trusted = Path(ca).read_text("latin-1")
    host, port = _address(url)
    with (
        socket.create_connection((host, port), TIMEOUT_S) as peer,
        context.wrap_socket(peer, server_hostname=host) as secured,
    ):
        certificate, fields = secured.getpeercert(binary_form=True), dict[str, Any](secured.getpeercert() or {})
    for pem in _CERTIFICATE.findall(trusted):
        if ssl.PEM_cert_to_DER_cert(pem) == certificate:
            return PinnedCertificate(pem, _first_name(fields))
    return None


@contextlib.contextmanager
def _naming_the_file(ca: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError:
        raise SourceError(f"ca: {ca}: expected certificates in PEM") from None
    except OSError as error:
        raise SourceError(f"ca: {ca}: {error.strerror}") from None


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme == "http":
        return parts.hostname or "", 443  # where a redirect led
    return parts.hostname or "", parts.port or (_RTSPS_PORT if parts.scheme == "rtsps" else 443)


def _first_name(fields: Mapping[str, Any]) -> str:
    """Return a name to which a certificate applies: an alternative name, else the common name of the subject."""
    names = [name for kind, name in fields.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    names = names or [value for part in fields["subject"] for kind, value in part if kind == "commonName"]
    return next((name.replace("*", "x") for name in names if name.isascii()), "")
