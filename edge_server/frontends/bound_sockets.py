"""Creation of sockets that are bound but do not listen yet: the server reserves its address at start, and accepts
clients when ready."""

from __future__ import annotations

import errno
import socket


def bind_sockets(address: str, port: int, *, reuses_port: bool = False) -> list[socket.socket]:
    """Return a bound socket for each address of a host name, or for "unix:PATH". The caller closes them.

    Port 0: the system chooses one, the same for all. No other program can take the address until they are closed or
    `share_address` is called. Raises OSError, and leaves nothing open then.
    """
    sockets: list[socket.socket] = []
    try:
        if address.startswith("unix:"):
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sockets[0].bind(address.removeprefix("unix:"))
            return sockets
        name = address.strip("[]")
        # Python encodes a text by the codec IDNA, whose tables take a millisecond and half a megabyte.
        host = (name.encode("ascii") if name.isascii() else name) or None
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in dict.fromkeys(found):
            item = socket.socket(family, kind, protocol)
            sockets.append(item)
            if reuses_port:
                item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                item.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            _bind(item, (where[0], port, *where[2:]))
            port = port or item.getsockname()[1]
    except OSError:
        for item in sockets:
            item.close()
        raise
    return sockets


def _bind(item: socket.socket, where: tuple[str | int, ...]) -> None:
    try:
        item.bind(where)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Closed connections of an earlier server still have the address. Set for longer, the option would let every
        # program with the same option take the address of a socket that does not listen.
        share_address(item)
        item.bind(where)
        item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def share_address(item: socket.socket) -> None:
    """Let other sockets have the address too, unless one listens. Connections of `item` inherit this: a later server
    can then bind the address while they are being closed."""
    item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
