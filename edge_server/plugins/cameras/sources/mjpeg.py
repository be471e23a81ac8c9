"""Source that reads JPEG pictures from a camera over HTTP (Motion JPEG, multipart/x-mixed-replace).

The pictures are passed on as they come; only those that run are decoded. The parts have no stamps.
"""

from __future__ import annotations

import http.client
import re
import ssl
import urllib.request
from functools import partial
from urllib.parse import unquote, urlsplit

from edge_server.bounded_http import HttpClient, TooSlow
from edge_server.config.setting import shown_url
from edge_server.plugins.cameras.failure_reason import connection_failure
from edge_server.plugins.cameras.sources.camera_tls import describe_certificate_error, make_tls_context
from edge_server.plugins.cameras.sources.source_interface import Camera, SourceError, SourcePicture

TIMEOUT_S = 5.0
"""Longest time without a byte, to connect, and for the head of a response. A picture may take twice as long."""

_MAX_PICTURE_BYTES = 32 << 20
_MAX_LINE_BYTES = 4096
_MAX_HEADER_LINES = 64
_PICTURE_STARTS = b"\xff\xd8"


def _origin(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a URL. Raises ValueError."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def follows_redirect(title: str, url: str, next_url: str) -> bool:
    """Return True for a redirect on the camera itself, at the same port, or from http on port 80 to https on 443.

    Another host in the network may be one that the sender of the redirect cannot reach, but this server can. Raises
    SourceError.
    """
    old, new = _origin(url), _origin(next_url)
    if new not in (old, ("https", old[1], 443) if old[::2] == ("http", 80) else old):
        raise SourceError(
            f"{title}: the camera redirects to {'{}://{}:{}'.format(*new)[:200]!r}, and only redirects to the same "
            "host are followed; is this the address that is wanted?"
        )
    return True


class MjpegCamera(Camera):
    """A camera with Motion JPEG. User and password of the URL are sent as the camera asks for: Basic or Digest."""

    def __init__(self, url: str, ca: str = "") -> None:
        """Connect. `ca`: PEM file of certificates to trust instead of the system's. Raises SourceError."""
        self.title = self._address = shown_url(url)
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        if parts.username is not None:
            places = [f"{parts.scheme}://{host}/"]
            if _origin(url)[::2] == ("http", 80):
                places.append(f"https://{host.removesuffix(':80')}/")
            passwords.add_password(None, places, unquote(parts.username), unquote(parts.password or ""))
        client = HttpClient(
            partial(follows_redirect, self.title),
            tls=make_tls_context(url, ca) if ca else None,
            uses_proxy=False,  # a camera is on the machine's own network
            handlers=(urllib.request.HTTPBasicAuthHandler(passwords), urllib.request.HTTPDigestAuthHandler(passwords)),
        )
        address = parts._replace(netloc=host, fragment="").geturl()
        try:
            self._response = client.open(address, timeout_s=TIMEOUT_S)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SourceError(f"{self.title}: {_failure(error, address)}") from None
        if not self._response.is_success:
            self.close()
            status = self._response.status
            reason = f"the camera answered with status {status}" + ("; is the path right?" if status == 404 else "")
            if status in (401, 403):
                reason = f"the camera refuses user and password (status {status})"
            raise SourceError(f"{self.title}: {reason}")
        kind = self._response.headers.get_content_type()
        if kind != "multipart/x-mixed-replace":
            self.close()
            raise SourceError(
                f"{self.title}: expected Motion JPEG, a response of the type multipart/x-mixed-replace, given "
                f"{kind[:80]!r}; is the path that of the video?"
            )
        # Some cameras count the leading dashes as part of the boundary, some do not, some declare none.
        self._boundary = (self._response.headers.get_boundary() or "").strip("-").encode("latin-1", "replace")
        self._pending = b""
        """Line with the boundary that ended the previous part."""

    def read(self) -> SourcePicture | None:
        self._response.set_deadline(2 * TIMEOUT_S)
        try:
            data = self._read_part()
        except TooSlow:
            raise SourceError(f"{self.title}: a picture took longer than {2 * TIMEOUT_S:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SourceError(f"{self.title}: {_failure(error)}") from None
        if data is None:
            raise SourceError(f"{self.title}: the camera closed the connection")
        if not data.startswith(_PICTURE_STARTS):
            raise SourceError(f"{self.title}: expected JPEG pictures, given a part that begins with {data[:8].hex()}")
        return SourcePicture(file=data, format="jpeg")

    def close(self) -> None:
        self._response.close()

    def _read_part(self) -> bytes | None:
        """Return the next part, or None at the end."""
        line = b"\n"
        while line in (b"\r\n", b"\n"):
            line = self._line()
        if not line:
            return None
        self._boundary = self._boundary or line.strip(b"-\r\n ") or b"-"
        if not self._is_boundary(line):
            raise SourceError(f"{self.title}: expected the boundary of a part, given other data")
        length = None
        for _ in range(_MAX_HEADER_LINES):
            line = self._line().strip()
            if not line:
                break
            found = re.fullmatch(rb"(?i)content-length\s*:\s*([0-9]{1,9})", line)
            length = int(found[1]) if found else length
        else:
            raise SourceError(f"{self.title}: a part has more than {_MAX_HEADER_LINES} lines of header")
        if length is None:
            return self._read_to_boundary()
        if length > _MAX_PICTURE_BYTES:
            raise SourceError(f"{self.title}: expected pictures of at most {_MAX_PICTURE_BYTES} bytes, given {length}")
        data = bytearray()
        while len(data) < length:
            piece = self._response.read1(length - len(data))
            if not piece:
                return None
            data += piece
        return bytes(data)

    def _read_to_boundary(self) -> bytes | None:
        data = bytearray()
        while True:
            line = self._response.readline(1 << 16)
            if not line:
                return None
            if self._is_boundary(line):
                self._pending = line
                return bytes(data.removesuffix(b"\n").removesuffix(b"\r"))
            data += line
            if len(data) > _MAX_PICTURE_BYTES:
                raise SourceError(
                    f"{self.title}: expected pictures of at most {_MAX_PICTURE_BYTES} bytes, given more without an end"
                )

    def _is_boundary(self, line: bytes) -> bool:
        return line.startswith(b"--") and line.lstrip(b"-").startswith(self._boundary)

    def _line(self) -> bytes:
        line, self._pending = self._pending or self._response.readline(_MAX_LINE_BYTES), b""
        if len(line) == _MAX_LINE_BYTES:
            raise SourceError(f"{self.title}: expected the header of a part, given a line without an end")
        return line


def _failure(error: Exception, url: str = "") -> str:
    """Return why a connection broke, or why the one to `url` was not made."""
    if isinstance(error, TooSlow):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no data within {TIMEOUT_S:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return describe_certificate_error(error, url)
    if isinstance(error, ValueError):
        # urllib raises it for schemes of authentication that it does not know.
        return "the response cannot be read, or asks for a kind of authentication other than Basic and Digest"
    return connection_failure(error, urlsplit(url).hostname, TIMEOUT_S)
