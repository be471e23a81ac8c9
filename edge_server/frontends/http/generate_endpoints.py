"""HTTP handlers of Triton's generate endpoints: take one JSON object, and answer with one JSON object or a stream of
server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from edge_server.core.request_response import Request, Response
from edge_server.errors import EdgeServerError, InvalidRequest, ServingFault
from edge_server.frontends.http.inference_route import TEXT_ON_LOOP_BYTES
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, error_response, json_response
from edge_server.frontends.http.routes import Route, model_paths
from edge_server.frontends.json_text import to_json
from edge_server.frontends.v2.generate_codec import decode_generate, encode_generate
from edge_server.frontends.v2.header_forwarding import header_parameters
from edge_server.frontends.v2.version_text import parse_version
from edge_server.service import Handle, InferenceService

if TYPE_CHECKING:
    from edge_server.telemetry.trace_record import TracedRequest

MAX_BACKLOG = 65_536
"""Maximum number of responses that wait for a client; at more, the client is disconnected."""

_MAX_EVENTS_PER_TURN = 32
"""Maximum number of events of one stream written in one turn of the event loop."""

_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


_SCHEMAS = "edge_server.frontends.http.schemas"


class GenerationEndpoints:
    """The handlers. Headers that `header_pattern` matches become parameters of the request."""

    def __init__(self, service: InferenceService, header_pattern: re.Pattern[str] | None) -> None:
        self._service = service
        self._traces = service.traces
        self._header_pattern = header_pattern

    def routes(self) -> Sequence[Route]:
        one = "Run a model on a flat JSON object, for one response"
        many = "Run a model on a flat JSON object; each response is a server-sent event"
        line = partial(Route, "POST", category="inference")
        body, stream = f"{_SCHEMAS}:JSON_BODY", f"{_SCHEMAS}:GENERATE_STREAM"
        streams = model_paths("/generate_stream")
        return (
            *(line(path, summary=one, handler=self.generate, schema=body) for path in model_paths("/generate")),
            *(line(path, summary=many, handler=self.generate_stream, schema=stream) for path in streams),
        )

    async def generate(self, request: HttpRequest) -> HttpResponse:
        """Respond with one JSON object; the model must send exactly one response."""
        with self._trace(request) as trace:
            handle, inference = await self._decode(request, trace)
            done: asyncio.Future[list[Response]] = request.context.loop.create_future()
            responses: list[Response] = []

            def receive(response: Response) -> None:
                if not response.is_empty:
                    responses.append(response)
                if response.is_final and not done.done():
                    done.set_result(responses)

            ticket = handle.submit(inference, partial(request.context.dispatch.deliver, receive))
            try:
                await done
            except asyncio.CancelledError:
                ticket.cancel()
                raise
            if trace is not None:
                trace.stamp("INFER_RESPONSE_COMPLETE")
            for response in responses:
                if response.error is not None:
                    raise response.error
            if len(responses) != 1:
                raise ServingFault(f"{_ONE_RESPONSE}, got {len(responses)}")
            return json_response(encode_generate(responses[0]))

    async def generate_stream(self, request: HttpRequest) -> None:
        """Respond with one server-sent event for each response of the model.

        Raises the errors before the first response. The error of a response is sent as an event. The first response
        decides the status: it is not 200 for an error, as in Triton's GenerateRequestClass::InferResponseComplete. If
        the client disconnects, the request is cancelled.
        """
        with self._trace(request) as trace:
            await self._send_events(request, *await self._decode(request, trace))

    async def _send_events(self, request: HttpRequest, handle: Handle, inference: Request) -> None:
        responses: asyncio.Queue[Response] = asyncio.Queue()

        def receive(response: Response) -> None:
            responses.put_nowait(response)
            # The task may be waiting until this client reads; aborting the connection ends the wait.
            if responses.qsize() > MAX_BACKLOG:
                request.connection.abort()

        ticket = handle.submit(inference, partial(request.context.dispatch.deliver, receive))
        try:
            response = await responses.get()
            event = _event_data(response)
            first = error_response(event) if isinstance(event, EdgeServerError) else HttpResponse()
            headers = {**first.headers, "Content-Type": "text/event-stream; charset=utf-8"}
            await request.begin_stream(first.status, headers)
            for count in itertools.count(1):
                if not response.is_empty:
                    data = {"error": event.message} if isinstance(event, EdgeServerError) else event
                    await request.write(b"data: " + to_json(data) + b"\n\n")
                if response.is_final:
                    return
                if count % _MAX_EVENTS_PER_TURN == 0:
                    # While responses arrive and the client reads, this loop never waits: let other tasks run.
                    await asyncio.sleep(0)
                response = await responses.get()
                event = _event_data(response)
        finally:
            ticket.cancel()

    @contextlib.contextmanager
    def _trace(self, request: HttpRequest) -> Iterator[TracedRequest | None]:
        """Yield the request's trace or, for most requests, None. The trace ends with the block."""
        trace = None
        if self._traces.is_on:
            began_ns = request.connection.began_ns
            trace = self._traces.sample(request.names["model"], request.head.headers.items(), began_ns)
        if trace is None:
            yield None
            return
        trace.stamp("HTTP_RECV_START", request.connection.began_ns)
        trace.stamp("HTTP_RECV_END")
        try:
            yield trace
        finally:
            trace.finish()

    async def _decode(self, request: HttpRequest, trace: TracedRequest | None) -> tuple[Handle, Request]:
        """Decode the body, a long one on a worker thread."""
        version = parse_version(request.names.get("version", ""))
        handle = self._service.find(request.names["model"], version)
        extra = header_parameters(request.head.headers.items(), self._header_pattern)
        try:
            body = await request.read_body()
            decode = partial(decode_generate, body, handle.spec, version=version, extra=extra)
            is_long = len(body) > TEXT_ON_LOOP_BYTES
            inference = await request.run_on_worker(decode) if is_long else decode()
        finally:
            request.release_body()
        inference.trace = None if trace is None else trace.first
        return handle, inference


def _event_data(response: Response) -> Mapping[str, object] | EdgeServerError:
    """Return the JSON object of an event, or the error of the response, also when JSON cannot represent it."""
    if response.error is not None:
        return response.error
    try:
        return encode_generate(response)
    except InvalidRequest as error:
        return error
