"""Reader of the time at which the certificates in a PEM file expire. Python's ssl module gives it only for verified
peers."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_INTEGER, _UTC_TIME, _EXPLICIT_VERSION = 0x02, 0x17, 0xA0


def read_expiry(path: str) -> float:
    """Return the unix time at which the first of the file's certificates expires; NaN if none can be read.
    *Blocking.*"""
    try:
        ends_s = [_not_after(base64.b64decode(text)) for text in _CERTIFICATE.findall(Path(path).read_bytes())]
    except (OSError, ValueError, IndexError):
        return math.nan
    return min(ends_s, default=math.nan)


def _not_after(der: bytes) -> float:
    """Return notAfter of a certificate (RFC 5280, section 4.1). Raises ValueError or IndexError."""
    from datetime import datetime, timezone  # only a server with TLS needs them

    _, certificate, _ = _read_element(der)
    _, body, _ = _read_element(certificate)
    tag, _, rest = _read_element(body)
    if tag == _EXPLICIT_VERSION:
        tag, _, rest = _read_element(rest)
    if tag != _INTEGER:
        raise ValueError("no serial number")
    _, _, rest = _read_element(rest)  # signature algorithm
    _, _, rest = _read_element(rest)  # issuer
    _, validity, _ = _read_element(rest)
    _, _, rest = _read_element(validity)  # notBefore
    tag, text, _ = _read_element(rest)
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("19" if digits >= "50" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()


def _read_element(data: bytes) -> tuple[int, bytes, bytes]:
    """Return (tag, content, rest) of the first DER element."""
    tag, length, start = data[0], data[1], 2
    if length >= 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    return tag, data[start : start + length], data[start + length :]
