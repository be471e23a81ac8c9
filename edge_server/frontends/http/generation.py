"""A model's responses as server-sent events: one event each, to a client that may read slowly, or leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from functools import partial

from aiohttp import web

from edge_server.core.message import Request, Response
from edge_server.errors import InvalidRequest
from edge_server.frontends.http.homecoming import Homecoming
from edge_server.frontends.v2.generate import encode_generate
from edge_server.frontends.v2.json_text import to_json
from edge_server.service import InferenceService

MAX_BACKLOG = 65_536
"""Responses waiting for a client that does not read its events; one with more loses its connection."""

_IN_A_ROW = 32
"""Events of one stream written before the loop looks after everything else."""


async def send_responses(
    request: web.BaseRequest, inference: Request, service: InferenceService, homecoming: Homecoming
) -> web.StreamResponse:
    """Submit `inference` and answer `request` with its responses; the first one decides the status.

    A client that leaves takes its request back. Raises what the first response failed with.
    """
    responses: asyncio.Queue[Response] = asyncio.Queue()

    def receive(response: Response) -> None:
        responses.put_nowait(response)
        # The task may be waiting for this very client to read: closing the connection ends that.
        if responses.qsize() > MAX_BACKLOG and request.transport is not None:
            request.transport.abort()

    ticket = service.submit(inference, partial(homecoming.deliver, receive))
    try:
        response = await responses.get()
        if response.error is not None:
            raise response.error
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        # A client that left has its request taken back below, and is nothing to log.
        with contextlib.suppress(ConnectionResetError):
            await _send_events(reply, response, responses)
        return reply
    finally:
        ticket.cancel()


async def _send_events(reply: web.StreamResponse, response: Response, responses: asyncio.Queue[Response]) -> None:
    """Send `response` and those after it, up to the final one. Raises ConnectionResetError when the client left."""
    for count in itertools.count(1):
        if not response.is_empty:
            await reply.write(b"data: " + to_json(_event(response)) + b"\n\n")
        if response.is_final:
            return
        if count % _IN_A_ROW == 0:
            # While responses come and the client reads, nothing here waits: others must get their turn.
            await asyncio.sleep(0)
        response = await responses.get()


def _event(response: Response) -> dict[str, object]:
    if response.error is not None:
        return {"error": response.error.message}
    try:
        return encode_generate(response)
    except InvalidRequest as error:
        return {"error": error.message}
