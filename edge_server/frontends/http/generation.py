"""A model's responses as server-sent events: one event each, to a client that may read slowly, or leave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from functools import partial

from aiohttp import web

from edge_server.core.message import Request, Response
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.frontends.http.homecoming import Homecoming
from edge_server.frontends.http.reply import begin_reply, error_reply
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

    What is refused before it has any response is raised; what a response failed with is an event, also of the first
    one, beside a status that is not 200 (as in Triton's HTTPAPIServer::GenerateRequestClass::InferResponseComplete).
    A client that leaves takes its request back.
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
        event = _event(response)
        reply = _reply(request, event)
        await reply.prepare(request)
        # A client that left has its request taken back below, and is nothing to log.
        with contextlib.suppress(ConnectionResetError):
            for count in itertools.count(1):
                if not response.is_empty:
                    await reply.write(b"data: " + to_json(_told(event)) + b"\n\n")
                if response.is_final:
                    break
                if count % _IN_A_ROW == 0:
                    # While responses come and the client reads, nothing here waits: others must get their turn.
                    await asyncio.sleep(0)
                response = await responses.get()
                event = _event(response)
        return reply
    finally:
        ticket.cancel()


def _reply(request: web.BaseRequest, first: Mapping[str, object] | EdgeServerError) -> web.StreamResponse:
    """Return what begins a stream: with the status and the headers of the error where the first event is one."""
    reply = begin_reply(request, {})
    if isinstance(first, EdgeServerError):
        plain = error_reply(first)
        reply.set_status(plain.status)
        reply.headers.update(plain.headers)
    reply.headers["Content-Type"] = "text/event-stream; charset=utf-8"
    return reply


def _event(response: Response) -> Mapping[str, object] | EdgeServerError:
    """Return what an event tells; the error of a response that has one, or that JSON cannot carry."""
    if response.error is not None:
        return response.error
    try:
        return encode_generate(response)
    except InvalidRequest as error:
        return error


def _told(event: Mapping[str, object] | EdgeServerError) -> Mapping[str, object]:
    return {"error": event.message} if isinstance(event, EdgeServerError) else event
