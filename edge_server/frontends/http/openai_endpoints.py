"""OpenAI's API on the HTTP port, under /v1/ and /v3/: chat/completions, completions, embeddings and models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from edge_server.core.request_response import Response
from edge_server.errors import EdgeServerError, NotReady, ServingFault, UnknownModel
from edge_server.frontends.http.generate_endpoints import MAX_BACKLOG, GenerationRequest
from edge_server.frontends.http.inference_route import LoopDispatch
from edge_server.frontends.http.response import HttpResponse, error_response, json_response
from edge_server.frontends.openai.embedding_call import read_embedding_call
from edge_server.frontends.openai.text_answer import (
    TextChoice,
    chunks,
    error_object,
    first_chunk,
    usage_chunk,
    whole_answer,
)
from edge_server.frontends.openai.text_call import TextCall, read_call
from edge_server.frontends.v2.json_parser import to_json
from edge_server.protocol.raw_tensors import Buffer
from edge_server.service import InferenceService

Call = TypeVar("Call")

_LOG = logging.getLogger(__name__)

_KEEP_ALIVE_S = 15.0
"""Time without an event after which a comment is sent, so that proxies keep the stream open."""

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # else nginx keeps events until a buffer is full
}


class OpenAiEndpoints:
    """The handlers. Live on one event loop."""

    def __init__(self, service: InferenceService, dispatch: LoopDispatch) -> None:
        self._service = service
        self._dispatch = dispatch

    async def chat(self, request: GenerationRequest) -> HttpResponse | None:
        return await self._respond(request, partial(self._generate, is_chat=True))

    async def complete(self, request: GenerationRequest) -> HttpResponse | None:
        return await self._respond(request, partial(self._generate, is_chat=False))

    async def embed(self, request: GenerationRequest) -> HttpResponse | None:
        return await self._respond(request, self._embed)

    async def models(self, request: GenerationRequest) -> HttpResponse:
        request.release_body()
        return json_response({"object": "list", "data": [_model(name) for name in self._text_models()]})

    async def model(self, request: GenerationRequest) -> HttpResponse:
        request.release_body()
        name = request.target.names["model"]
        if name not in self._text_models():
            return _error_response(UnknownModel(f"no language model '{name}'"))
        return json_response(_model(name))

    def _text_models(self) -> list[str]:
        names = sorted({entry.name for entry in self._service.repository_index()})
        return [name for name in names if self._gives_text(name)]

    def _gives_text(self, name: str) -> bool:
        try:
            return self._service.model_spec(name, None).output("text_output") is not None
        except (UnknownModel, NotReady):
            return False

    async def _generate(self, request: GenerationRequest, *, is_chat: bool) -> HttpResponse | None:
        call = await _read(request, partial(read_call, is_chat=is_chat))
        return await _TextCallRun(self._service, self._dispatch, request, call).run()

    async def _embed(self, request: GenerationRequest) -> HttpResponse:
        call = await _read(request, read_embedding_call)
        spec = self._service.model_spec(call.model, None)
        responses: asyncio.Queue[tuple[int, Response]] = asyncio.Queue()
        found: dict[int, Response] = {}
        tickets = []
        try:
            for number, batch in enumerate(call.requests(spec)):
                receive = partial(lambda number, response: responses.put_nowait((number, response)), number)
                tickets.append(self._service.submit(batch, partial(self._dispatch.deliver, receive)))
            while len(found) < len(tickets):
                number, response = await responses.get()
                if response.error is not None:
                    raise response.error
                found[number] = response
        finally:
            for ticket in tickets:
                ticket.cancel()
        return json_response(call.answer(spec, [found[number] for number in range(len(found))]))

    async def _respond(
        self, request: GenerationRequest, run: Callable[[GenerationRequest], Awaitable[HttpResponse | None]]
    ) -> HttpResponse | None:
        """Run a call. An error before the first byte of a stream becomes a response with OpenAI's error object."""
        connection = request.connection
        try:
            return await run(request)
        except ConnectionError:
            raise
        except EdgeServerError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the client gets a response for any error
            _LOG.exception("request %s %s failed", request.target.head.method, request.target.head.target)
            failure = ServingFault(f"internal error: {type(error).__name__}: {error}")
        if connection.is_streaming:
            await connection.write(_event(error_object(failure)))
            return None
        return _error_response(failure)


async def _read(request: GenerationRequest, read: Callable[[Buffer], Call]) -> Call:
    """Return the call of a request's body, and release the body."""
    try:
        return read(await request.read_body())
    finally:
        request.release_body()


class _TextCallRun:
    """One call while it is answered: its choices run at the same time, each as a request."""

    def __init__(
        self, service: InferenceService, dispatch: LoopDispatch, request: GenerationRequest, call: TextCall
    ) -> None:
        self._service = service
        self._dispatch = dispatch
        self._connection = request.connection
        self._call = call
        self._requests = call.requests(service.model_spec(call.model, None))
        self._choices = [TextChoice(index) for index in range(len(self._requests))]
        self._responses: asyncio.Queue[tuple[TextChoice, Response]] = asyncio.Queue()

    async def run(self) -> HttpResponse | None:
        """Return the response, or None after a stream. Raises the first error of a choice."""
        tickets = []
        if self._call.keep_alive_s is not None:
            self._service.set_keep_alive(self._call.model, self._call.keep_alive_s)
        try:
            for choice, request in zip(self._choices, self._requests, strict=True):
                deliver = partial(self._dispatch.deliver, partial(self._receive, choice))
                tickets.append(self._service.submit(request, deliver))
            if self._call.is_stream:
                await self._stream()
                return None
            left = len(tickets)
            while left:
                choice, response = await self._responses.get()
                self._add(choice, response)
                left -= response.is_final
            return json_response(whole_answer(self._call, self._choices))
        finally:
            for ticket in tickets:
                ticket.cancel()

    def _receive(self, choice: TextChoice, response: Response) -> None:
        self._responses.put_nowait((choice, response))
        # The task may be waiting until this client reads; aborting the connection ends the wait.
        if self._responses.qsize() > MAX_BACKLOG:
            self._connection.abort()

    @staticmethod
    def _add(choice: TextChoice, response: Response) -> None:
        if response.error is not None:
            raise response.error
        if not response.is_empty:
            choice.add(response)
        elif choice.finish_reason is None:
            choice.delta, choice.finish_reason = "", "stop"

    async def _stream(self) -> None:
        call, connection = self._call, self._connection
        left = len(self._choices)
        while left:
            try:
                choice, response = await asyncio.wait_for(self._responses.get(), _KEEP_ALIVE_S)
            except asyncio.TimeoutError:
                self._begin()
                await connection.write(b": the model is still busy with the prompt\n\n")
                continue
            self._add(choice, response)
            is_new = not connection.is_streaming
            self._begin()
            if is_new:
                for index in range(len(self._choices)):
                    if (first := first_chunk(call, index)) is not None:
                        await connection.write(_event(first))
            for chunk in chunks(call, choice):
                await connection.write(_event(chunk))
            left -= response.is_final
        if call.includes_usage:
            await connection.write(_event(usage_chunk(call, self._choices)))
        await connection.write(b"data: [DONE]\n\n")

    def _begin(self) -> None:
        if not self._connection.is_streaming:
            self._connection.begin_stream(200, _STREAM_HEADERS)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "edge-server"}


def _event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def _error_response(error: EdgeServerError) -> HttpResponse:
    response = error_response(error)
    response.body = to_json(error_object(error))
    return response
