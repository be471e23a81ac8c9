"""HTTP listener of one address: accepts connections, and asks the front end that owns it for the handler of each
request."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from edge_server.errors import ServingFault
from edge_server.frontends.connection_limit import ConnectionLimit
from edge_server.frontends.http.accept_loop import MAX_DEFAULT_CONNECTIONS, Acceptor, ConnectionSetup
from edge_server.frontends.http.connection import Connections, NoDrainDelay, RequestTarget, ServerState
from edge_server.frontends.http.cors import CorsPolicy
from edge_server.frontends.http.host_check import HostCheck, HostNames
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse
from edge_server.frontends.listen_error import listen_error
from edge_server.frontends.memory_budget import MIN_DEFAULT_BYTES, MemoryBudget

_Result = TypeVar("_Result")


class LoopThread:
    """Event loop that runs on a thread of its own until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on this loop, and wait for it on the caller's."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        """*Blocking* for a moment. The work of the loop must have ended."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HttpServer:
    """Serves one address from `open` to `close`, on the event loop that calls `open`, and on those of further threads.

    `route` returns the target of a request, or the response that refuses it. It is called on the loop of the
    connection. On a loopback address, `names` are the only hosts that requests may name.
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
        self._setups: list[ConnectionSetup] = []

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
        threads: Sequence[LoopThread] = (),
    ) -> int:
        """Listen and return the bound port.

        `budget` limits the memory of all request bodies together, `limit` the connections of all listeners together,
        `max_connections` those of this one. `threads` serve connections besides this loop, and outlive `close`. Raises
        ServingFault when the address cannot be used.
        """
        shared_budget = budget or MemoryBudget(MIN_DEFAULT_BYTES, MIN_DEFAULT_BYTES)

        async def set_up() -> ConnectionSetup:
            connections = Connections(self._route, shared_budget, self._server_state, self._cors, self._host_check)
            return ConnectionSetup(connections, tls)

        self._setups = [await set_up(), *[await thread.run(set_up()) for thread in threads]]
        self._acceptor = Acceptor(self._name, self._setups, limit or ConnectionLimit())
        try:
            return await self._acceptor.open(
                address, port, reuses_port=reuses_port, is_tls=tls is not None, max_connections=max_connections
            )
        except OSError as error:
            raise listen_error(self._name, address, port, error) from None

    def drop_cached_headers(self) -> None:
        """Forget soon which target each header gets, see Connections. For any thread, also before `open` and after
        `close`."""
        for setup in self._setups:
            setup.run_soon(setup.connections.drop_cached_headers)

    async def close(self, grace_s: float) -> None:
        """Accept no new connections, wait `grace_s` for open requests, then abort the rest. May be called again."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor.close()
            await asyncio.gather(*(setup.close(grace_s) for setup in self._setups))


def server_tls(cert: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    """Return a TLS context for a certificate chain and its key, both PEM files. Raises ServingFault.

    With `client_ca`, also a PEM file, each client needs a certificate signed by it.
    """
    from edge_server.default_tls import make_default_tls_context

    context = make_default_tls_context(ssl.Purpose.CLIENT_AUTH)
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
