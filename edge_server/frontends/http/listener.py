"""One listening socket with aiohttp's low-level server behind it: no application, no middlewares, no access log."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from edge_server.errors import ServingFault

# Larger than aiohttp's 64 KiB: a camera image then comes in fewer turns of the loop.
_READ_BUFFER_BYTES = 1 << 20
_BACKLOG = 1024
# Longest header line, for keys of restricted endpoints and forwarded headers; aiohttp's default, stated.
_MAX_HEADER_BYTES = 8190


class _WithoutClientErrors(logging.Filter):
    """Passes over what is not HTTP: aiohttp logs it with a traceback, and any port scan would fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_WithoutClientErrors())


class Listener:
    """Serves `handler` on one address from `open` to `close`, on the event loop that called `open`."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        self._handler = handler
        self._runner: web.ServerRunner | None = None
        self._server: web.Server | None = None

    async def open(
        self, address: str, port: int, *, reuses_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen and return the bound port. Raises ServingFault when the address cannot be had."""
        # aiohttp's own inflating knows no bound, and a handler has to learn that its client left.
        self._server = web.Server(
            self._handler,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            logger=_LOG,
            read_bufsize=_READ_BUFFER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            max_line_size=_MAX_HEADER_BYTES,
        )
        self._runner = web.ServerRunner(self._server)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, address, port, reuse_port=reuses_port or None, ssl_context=tls, backlog=_BACKLOG
        )
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ServingFault(f"cannot listen on {address}, port {port}: {error}") from None
        return int(self._runner.addresses[0][1])

    async def close(self, grace_s: float) -> None:
        """Take no new connections, wait `grace_s` for answers under way, then cut what is left. May be called again."""
        runner, self._runner = self._runner, None
        if runner is None or self._server is None:
            return
        for site in list(runner.sites):
            await site.stop()
        self._server.pre_shutdown()
        await self._server.shutdown(grace_s)
        await runner.cleanup()


def server_tls(cert: str, key: str) -> ssl.SSLContext:
    """Return a context for a certificate chain and its key, both PEM files. Raises ServingFault."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:
        raise ServingFault(f"TLS certificate '{cert}' and key '{key}' cannot be used: {error}") from None
    return context
