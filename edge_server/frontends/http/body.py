"""Request bodies, read within bounds: nothing is reserved or inflated beyond the configured size."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Executor
from typing import TypeAlias, TypeVar

import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader

from edge_server.errors import Refusal
from edge_server.frontends.http.budget import Share
from edge_server.frontends.http.compression import inflate, request_encoding
from edge_server.frontends.http.pace import STALL_S, ClosingRefusal, Pace, StalledBody, stalled_text

Body: TypeAlias = bytes | memoryview
Read = TypeVar("Read")

MAX_CHUNKS = 65536
"""Most chunks of a chunked body, as Triton: each costs bookkeeping that its bytes do not pay for."""

ALIGNMENT = 16


async def read_body(request: web.BaseRequest, share: Share, executor: Executor, *, aligned_at: int = 0) -> Body:
    """Return the whole body, inflated if it was compressed.

    Byte `aligned_at` of a large body that is not compressed lies at an address that suits every number type, so that
    tensors behind a JSON text of that length need no copy. What comes in more than one piece counts in `share`. Raises
    InvalidRequest (too large, too many chunks, damaged), Unsupported (encoding) and Refusal (gave way to others).
    """
    limit = share.limit
    encoding = request_encoding(request.headers.get("Content-Encoding"))
    declared = _declared_length(request)
    if declared is not None and declared > limit:
        raise ClosingRefusal(f"request body of {declared} bytes is larger than the limit of {limit} bytes")
    _send_continue(request)
    try:
        if declared is None:
            body: Body = await _read_chunks(request.content, share)
        else:
            body = await _read_sized(request.content, declared, aligned_at, share)
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise ClosingRefusal(f"request body cannot be read: {error}") from None
    share.settle()
    if encoding is None:
        return body
    inflated = await asyncio.get_running_loop().run_in_executor(executor, inflate, body, encoding, limit)
    share.grow(len(inflated))
    return inflated


def _declared_length(request: web.BaseRequest) -> int | None:
    """Return the body's byte count, 0 when there is no body, None when it comes in chunks."""
    if "Transfer-Encoding" in request.headers:
        return None
    return request.content_length or 0


def _send_continue(request: web.BaseRequest) -> None:
    """Tell a client that waits for permission (Expect: 100-continue; curl does above 1 MiB) to send its body."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _read_sized(content: StreamReader, size: int, aligned_at: int, share: Share) -> Body:
    if size == 0:
        return b""
    data = await _moving(content.readany(), 0, size)
    if len(data) == size:
        return data
    pad = -aligned_at % ALIGNMENT
    try:
        # Left uninitialised: pages of a body that never comes are never touched.
        share.buffer = np.empty(size + pad, np.uint8).data[pad:]
    except MemoryError:
        raise Refusal(f"there is no memory for a request body of {size} bytes") from None
    filled = 0
    pace = Pace(STALL_S)
    while data:
        share.grow(len(data))
        share.buffer[filled : filled + len(data)] = data
        filled += len(data)
        if filled == size:
            break
        pace.check(filled, size)
        data = await _moving(content.readany(), filled, size)
    if filled != size:
        raise ClosingRefusal(f"request body has {filled} bytes where Content-Length says {size}")
    return memoryview(share.buffer).toreadonly()


async def _moving(read: Coroutine[object, object, Read], filled: int, size: int | None) -> Read:
    try:
        return await asyncio.wait_for(read, STALL_S)
    except asyncio.TimeoutError:
        raise StalledBody(stalled_text(filled, size, STALL_S)) from None


async def _read_chunks(content: StreamReader, share: Share) -> Body:
    limit = share.limit
    filled = chunks = 0
    pace = Pace(STALL_S)
    while not content.at_eof():
        data, is_chunk_end = await _moving(content.readchunk(), filled, None)
        share.grow(len(data))
        assert isinstance(share.buffer, bytearray)
        share.buffer += data
        filled += len(data)
        chunks += is_chunk_end
        if not content.at_eof():
            pace.check(filled, None)
        if filled > limit:
            raise ClosingRefusal(f"request body is larger than the limit of {limit} bytes")
        if chunks > MAX_CHUNKS:
            raise ClosingRefusal(f"request body comes in more than {MAX_CHUNKS} chunks")
    return memoryview(share.buffer).toreadonly()
