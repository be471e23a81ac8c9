"""Redirects of RTSP cameras, followed only to the same host and port, so that a password goes nowhere else.

The server asks a camera by a DESCRIBE of its own: a decoder follows a redirect to any host, with the user and the
password of the URL, or, if it can be told so, none at all.
"""

from __future__ import annotations

import base64
import email
import hashlib
import re
import secrets
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from email.message import Message
from urllib.parse import SplitResult, unquote, urlsplit

from edge_server.config.setting import shown_url
from edge_server.plugins.cameras.failure_reason import connection_failure
from edge_server.plugins.cameras.sources.camera_tls import describe_certificate_error, make_tls_context
from edge_server.plugins.cameras.sources.source_interface import SourceError

MAX_REDIRECTS = 3

_PORTS = {"rtsp": 554, "rtsps": 322}
"""Default ports, as registered."""

_MAX_BYTES = 1 << 16
"""Largest response: its head and the body together."""

_FIELD = re.compile(r'\b(\w+)=(?:"([^"]*)"|([^\s,]*))')
"""Field of a challenge: its name, and its value in quotes or without."""


def follow_redirects(url: str, ca: str, timeout_s: float) -> str:
    """Ask a camera for its stream, and return the URL at which it answers without a redirect.

    Redirects are followed on the same scheme, host and port, at most `MAX_REDIRECTS` times. User and password of the
    URL are sent as the camera asks for: Basic or Digest. `ca` is that of `make_tls_context`. Raises SourceError for any
    other redirect, and if the camera gives no answer in RTSP within `timeout_s`, all connections together.
    """
    title = shown_url(url)
    end_s = time.monotonic() + timeout_s
    context = make_tls_context(url, ca) if url.startswith("rtsps://") else None
    for _ in range(MAX_REDIRECTS + 1):
        try:
            status, headers = _describe(url, context, end_s)
            if not 300 <= status < 400:
                return url
            location = urlsplit(headers.get("Location", ""))
            is_same = _origin(location) == _origin(urlsplit(url))
        except TimeoutError:
            raise SourceError(f"{title}: no data within {timeout_s:g} s") from None
        except (OSError, ValueError) as error:
            raise SourceError(f"{title}: {_failure(error, url, timeout_s)}") from None
        if not is_same:
            raise SourceError(
                f"{title}: the camera redirects to {shown_url(location.geturl())[:200]!r}, and only redirects to the "
                "same host and port are followed; is this the address that is wanted?"
            )
        url = location._replace(netloc=urlsplit(url).netloc).geturl()
    raise SourceError(f"{title}: the camera redirects more than {MAX_REDIRECTS} times")


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _describe(url: str, context: ssl.SSLContext | None, end_s: float) -> tuple[int, Message]:
    """Return status and headers of the response to DESCRIBE. Raises OSError and ValueError."""
    parts = urlsplit(url)
    _, host, port = _origin(parts)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    with socket.create_connection((host or "", port or 0), _left_s(end_s)) as plain:
        peer = plain if context is None else context.wrap_socket(plain, server_hostname=host)
        with peer:
            status, headers = _request(peer, f"DESCRIBE {address} RTSP/1.0\r\nCSeq: 1\r\n", end_s)
            if status == 401 and (login := _login(parts, address, headers.get_all("WWW-Authenticate", []))):
                # On the same connection, as a camera may keep its challenge for the connection.
                head = f"DESCRIBE {address} RTSP/1.0\r\nCSeq: 2\r\nAuthorization: {login}\r\n"
                status, headers = _request(peer, head, end_s)
            return status, headers


def _left_s(end_s: float) -> float:
    return max(end_s - time.monotonic(), 0.001)


def _request(peer: socket.socket, head: str, end_s: float) -> tuple[int, Message]:
    """Send a request, and receive the response with its body."""
    peer.settimeout(_left_s(end_s))
    peer.sendall(f"{head}Accept: application/sdp\r\nUser-Agent: edge_server\r\n\r\n".encode())
    data, headers, length = b"", Message(), _MAX_BYTES
    while len(data) < length:
        peer.settimeout(_left_s(end_s))
        piece = peer.recv(4096)
        if not piece:
            raise ConnectionError("the camera closed the connection")
        data += piece
        if length == _MAX_BYTES and (end := data.find(b"\r\n\r\n")) >= 0:
            headers = email.message_from_string(data[data.find(b"\n") + 1 : end].decode("latin-1"))
            length = min(end + 4 + int(headers.get("Content-Length", "0")), _MAX_BYTES)
    found = re.match(rb"RTSP/1\.[0-9] ([0-9]{3})\b", data)
    if found is None:
        raise ConnectionError("the data is not that of RTSP; is this an RTSP port?")
    return int(found[1]), headers


def _login(parts: SplitResult, address: str, challenges: Sequence[str]) -> str:
    """Return the value of the header Authorization for Digest with MD5 or Basic, which FFmpeg knows too; "" for other
    challenges, and without a password."""
    if parts.password is None:
        return ""
    user, password = unquote(parts.username or ""), unquote(parts.password)
    for challenge in challenges:
        fields = {name.lower(): quoted or bare for name, quoted, bare in _FIELD.findall(challenge)}
        if challenge.lower().startswith("digest ") and fields.get("algorithm", "MD5").upper() == "MD5":
            return _digest(user, password, address, fields)
    if any(challenge.lower().startswith("basic") for challenge in challenges):
        return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
    return ""


def _digest(user: str, password: str, address: str, fields: Mapping[str, str]) -> str:
    """Return the response to a challenge of Digest, see RFC 2617, section 3.2.2."""

    def md5(text: str) -> str:
        return hashlib.md5(text.encode()).hexdigest()

    realm, nonce = fields.get("realm", ""), fields.get("nonce", "")
    once, more = nonce, ""
    if "auth" in fields.get("qop", ""):
        client_nonce = secrets.token_hex(8)
        once = f"{nonce}:00000001:{client_nonce}:auth"
        more = f', qop=auth, nc=00000001, cnonce="{client_nonce}"'
    if "opaque" in fields:
        more += f', opaque="{fields["opaque"]}"'
    response = md5(f"{md5(f'{user}:{realm}:{password}')}:{once}:{md5(f'DESCRIBE:{address}')}")
    return f'Digest username="{user}", realm="{realm}", nonce="{nonce}", uri="{address}", response="{response}"{more}'


def _failure(error: Exception, url: str, timeout_s: float) -> str:
    """Return why a connection was not made, or broke. Texts of other exceptions may hold the URL."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return describe_certificate_error(error, url)
    if isinstance(error, ssl.SSLError):
        return f"TLS fails: {error.reason or 'the camera closed the connection'}"
    if isinstance(error, ValueError):
        return "the URL or the camera's answer cannot be read"
    # Without a number, the text is one of this file.
    return (
        str(error)
        if isinstance(error, OSError) and not error.strerror
        else connection_failure(error, urlsplit(url).hostname, timeout_s)
    )
