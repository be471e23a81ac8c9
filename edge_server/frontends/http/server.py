"""HTTP listener of one address: accepts connections, and asks the front end that owns it for the handler of each
request."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from edge_server.errors import ServingFault
from edge_server.frontends.connection_limit import ConnectionLimit
from edge_server.frontends.http.accept_loop import MAX_DEFAULT_CONNECTIONS, Acceptor
from edge_server.frontends.http.connection import Connections, NoDrainDelay, RequestTarget, ServerState
from edge_server.frontends.http.cors import CorsPolicy
from edge_server.frontends.http.host_check import HostCheck, HostNames
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse
from edge_server.frontends.listen_error import listen_error
from edge_server.frontends.memory_budget import MIN_DEFAULT_BYTES, MemoryBudget


class HttpServer:
    """Serves one address from `open` to `close`, on the event loop that calls `open`.

    `route` returns the target of a request, or the response that refuses it. On a loopback address, `names` are the
    only hosts that requests may name.
    """

    def __init__(
        self,
        name: str,
        route: Callable[[RequestHead], RequestTarget | HttpResponse],
        names: HostNames,
        server_state: ServerState | None = None,
        cors: CorsPolicy | None = None,
    ) -> None:
        self._name = name
        self._route = route
        self._host_check = HostCheck(names)
        self._cors = cors
        self._server_state = server_state or NoDrainDelay()
        self._acceptor: Acceptor | None = None
        self._connections: Connections | None = None

    async def open(
        self,
        address: str,
        port: int,
        *,
        reuses_port: bool = False,
        tls: ssl.SSLContext | None = None,
        budget: MemoryBudget | None = None,
        limit: ConnectionLimit | None = None,
        max_connections: int = MAX_DEFAULT_CONNECTIONS,
    ) -> int:
        """Listen and return the bound port.

        `budget` limits the memory of all request bodies together, `limit` the connections of all listeners together,
        `max_connections` those of this one. Raises ServingFault when the address cannot be used.
        """
        budget = budget or MemoryBudget(MIN_DEFAULT_BYTES, MIN_DEFAULT_BYTES)
        self._connections = connections = Connections(
            self._route, budget, self._server_state, self._cors, self._host_check
        )
        self._acceptor = Acceptor(self._name, connections, limit or ConnectionLimit())
        try:
            return await self._acceptor.open(
                address, port, reuses_port=reuses_port, tls=tls, max_connections=max_connections
            )
        except OSError as error:
            raise listen_error(self._name, address, port, error) from None

    def drop_cached_headers(self) -> None:
        """Forget which target each header gets, see Connections. May be called before `open` and after `close`."""
        if self._connections is not None:
            self._connections.drop_cached_headers()

    async def close(self, grace_s: float) -> None:
        """Accept no new connections, wait `grace_s` for open requests, then abort the rest. May be called again."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is None or self._connections is None:
            return
        acceptor.close()
        await self._connections.finish(grace_s)


def server_tls(cert: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    """Return a TLS context for a certificate chain and its key, both PEM files. Raises ServingFault.

    With `client_ca`, also a PEM file, each client needs a certificate signed by it.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # With an empty password, OpenSSL does not ask for the password of an encrypted key on the terminal.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise ServingFault(f"TLS certificate '{cert}' and key '{key}' cannot be used: {error}") from None
    if client_ca:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ValueError) as error:
            raise ServingFault(f"certificates of client authorities '{client_ca}' cannot be used: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
