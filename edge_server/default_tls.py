"""TLS contexts with Python's defaults, which accept the same certificates in every version of Python."""

from __future__ import annotations

import ssl
from os import PathLike


def make_default_tls_context(
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, cafile: str | PathLike[str] | None = None
) -> ssl.SSLContext:
    """Return a context as `ssl.create_default_context` does, with its errors.

    From Python 3.13 on that also refuses authorities without the extension keyUsage, and certificates without
    authorityKeyIdentifier: `openssl req -x509` and `openssl x509 -req` make such ones, before OpenSSL 3.2 by default.
    """
    context = ssl.create_default_context(purpose, cafile=cafile)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
