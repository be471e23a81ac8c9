"""TLS session of a client: turns bytes to send into records, and received records into bytes.

Two threads may not use an `ssl.SSLSocket` at once. Here the caller holds its lock around `encrypt` and `decrypt`, which
do not wait for the network.
"""

from __future__ import annotations

import socket
import ssl
import time

_READ_BYTES = 64 << 10


class TlsSession:
    """One session. The server's certificate must be for `host`."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self.is_ended = False
        """Whether the server ended the session: no bytes follow."""

    def connect(self, sock: socket.socket, timeout_s: float) -> None:
        """Agree on the session over a new connection. *Blocking.* Raises OSError, which includes ssl.SSLError."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                self._session.do_handshake()
            except ssl.SSLWantReadError:
                self._exchange(sock, end_s)
                continue
            break
        sock.sendall(self._outgoing.read())
        sock.settimeout(None)
        if self._session.selected_alpn_protocol() != "h2":
            raise OSError("the server offers no HTTP/2 over TLS there; is it the gRPC port?")

    def _exchange(self, sock: socket.socket, end_s: float) -> None:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left_s)
        sock.sendall(self._outgoing.read())
        data = sock.recv(_READ_BYTES)
        if not data:
            raise OSError("the server closed the connection while TLS began")
        self._incoming.write(data)

    def encrypt(self, data: bytes) -> bytes:
        """Return the records of some bytes, after those that are due."""
        if data:
            self._session.write(data)
        return self._outgoing.read()

    def decrypt(self, records: memoryview) -> bytes:
        """Return the bytes of received records. An incomplete record is kept. Raises ssl.SSLError."""
        self._incoming.write(records)
        found = bytearray()
        try:
            while data := self._session.read(_READ_BYTES):
                found += data
            self.is_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_ended = True
        return bytes(found)
