"""Answers on their way out: JSON, errors, and large bodies written without being joined."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Executor

from aiohttp import web

from edge_server.errors import EdgeServerError, ServingFault, Throttled, Unauthenticated
from edge_server.frontends.http.compression import ENCODINGS, UnknownEncoding, accepted_encoding, compress
from edge_server.frontends.http.pace import ClosingRefusal, StalledBody
from edge_server.frontends.http.wire import SERVER
from edge_server.frontends.status import http_status, retry_after
from edge_server.frontends.v2.json_text import to_json

_LOG = logging.getLogger(__name__)

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"

GOVERNOR_HEADER = "Edge-Governor"
"""Tells the state of the box, NORMAL to CRITICAL, with refusals and with the answer to whether the server is ready."""

# Below, one joined write is cheaper than several system calls; above, the copy costs more than they do.
JOIN_BELOW_BYTES = 256 * 1024
# What the socket does not take at once is copied by the transport (before Python 3.12): keep that piece small.
WRITE_BYTES = 512 * 1024
_COMPRESS_ON_LOOP_BYTES = 16 * 1024


CLOSES_CONNECTION = "edge_server.closes_connection"
"""Key of a request whose answer is the last one on its connection."""


def begin_reply(request: web.BaseRequest, headers: Mapping[str, str]) -> web.StreamResponse:
    """Return a 200 answer that is written piece by piece; not yet prepared."""
    reply = web.StreamResponse(headers={**headers, "Server": SERVER})
    if CLOSES_CONNECTION in request:
        reply.force_close()
    return reply


def empty_reply() -> web.Response:
    return web.Response()


def json_reply(value: object, status: int = 200) -> web.Response:
    return web.Response(body=to_json(value), status=status, headers={"Content-Type": JSON_TYPE})


def plain_error(message: str, status: int) -> web.Response:
    return json_reply({"error": message}, status)


def error_reply(error: EdgeServerError) -> web.Response:
    """Return the answer to a failed request: the one place where an error becomes a status and headers."""
    status = 408 if isinstance(error, StalledBody) else http_status(error)
    reply = plain_error(error.message, status)
    wait = retry_after(error)
    if wait is not None:
        reply.headers["Retry-After"] = wait
    if isinstance(error, Throttled) and error.state:
        reply.headers[GOVERNOR_HEADER] = error.state
    if isinstance(error, UnknownEncoding):
        reply.headers["Accept-Encoding"] = ", ".join(ENCODINGS)
    if isinstance(error, Unauthenticated):
        reply.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, ClosingRefusal):
        reply.force_close()
    return reply


def failure_reply(error: Exception, what: str) -> web.Response:
    """Return the answer to whatever went wrong with `what`; to be called where the error is handled. Logs a fault."""
    if isinstance(error, EdgeServerError):
        return error_reply(error)
    _LOG.exception("%s failed", what)
    return error_reply(ServingFault(f"internal error: {type(error).__name__}: {error}"))


async def send_chunks(
    request: web.BaseRequest,
    headers: Mapping[str, str],
    chunks: list[bytes | memoryview],
    executor: Executor,
) -> web.StreamResponse:
    """Return, or start and write, a 200 answer made of `chunks`, compressed as the request's Accept-Encoding asks."""
    size = sum(len(chunk) for chunk in chunks)
    encoding = accepted_encoding(request.headers.get("Accept-Encoding"))
    if encoding is not None:
        body = (
            compress(chunks, encoding)
            if size <= _COMPRESS_ON_LOOP_BYTES
            else await asyncio.get_running_loop().run_in_executor(executor, compress, chunks, encoding)
        )
        return web.Response(body=body, headers={**headers, "Content-Encoding": encoding})
    if size < JOIN_BELOW_BYTES:
        return web.Response(body=b"".join(chunks), headers=headers)
    reply = begin_reply(request, {**headers, "Content-Length": str(size)})
    await reply.prepare(request)
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, len(view), WRITE_BYTES):
            await reply.write(view[start : start + WRITE_BYTES])
    return reply
