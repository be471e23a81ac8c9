"""HTTP handlers of OpenAI's API: chat/completions, completions, embeddings and models, under /v1/ and /v3/."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from edge_server.core.request_response import Request, Response, SubmittedRequest
from edge_server.errors import EdgeServerError, NotReady, ServingFault, UnknownModel
from edge_server.frontends.http.generate_endpoints import MAX_BACKLOG
from edge_server.frontends.http.inference_route import TEXT_ON_LOOP_BYTES
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import JSON_TYPE, HttpResponse, error_response, json_response
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.frontends.v2.json_parser import to_json
from edge_server.plugins.language.openai.completion_request import BadMember, CompletionRequest, read_completion_request
from edge_server.plugins.language.openai.completion_response import (
    CompletionChoice,
    chunks,
    completion_response,
    error_object,
    first_chunk,
    usage_chunk,
)
from edge_server.plugins.language.openai.embedding_request import (
    EmbeddingRequest,
    embedding_tensors,
    read_embedding_request,
)
from edge_server.service import Handle, InferenceService

_LOG = logging.getLogger(__name__)

Call = TypeVar("Call", CompletionRequest, EmbeddingRequest)

_KEEP_ALIVE_S = 15.0
"""Time without an event after which a comment is sent, so that proxies keep the stream open."""

_KEEP_ALIVE_IGNORED = (
    "keep_alive is ignored: this request may not load and unload models (access category model-repository)"
)

_MAX_EMBEDDING_REQUESTS = 16
"""Most requests of one call for embeddings in the server at the same time, so that it does not fill a model's queue."""

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
}


class OpenAiEndpoints:
    """The handlers. `may_change_models` returns whether the sender of a request may load and unload models."""

    def __init__(self, service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> None:
        self._service = service
        self._may_change_models = may_change_models

    async def chat(self, request: HttpRequest) -> HttpResponse | None:
        return await self._respond(request, partial(self._generate, request, is_chat=True))

    async def complete(self, request: HttpRequest) -> HttpResponse | None:
        return await self._respond(request, partial(self._generate, request, is_chat=False))

    async def embed(self, request: HttpRequest) -> HttpResponse | None:
        return await self._respond(request, partial(self._embed, request))

    async def models(self, request: HttpRequest) -> HttpResponse:
        request.release_body()
        names = sorted({entry.name for entry in self._service.repository_index()})
        return json_response({"object": "list", "data": [_model(name) for name in names if self._is_for_calls(name)]})

    async def model(self, request: HttpRequest) -> HttpResponse:
        request.release_body()
        name = request.names["model"]
        if not self._is_for_calls(name):
            return _error_response(UnknownModel(f"no model '{name}' gives text or embeddings"))
        return json_response(_model(name))

    def _is_for_calls(self, name: str) -> bool:
        """Return whether a model gives text or embeddings."""
        try:
            spec = self._service.find(name, None).spec
            if spec.output("text_output") is None:
                embedding_tensors(spec)
        except (UnknownModel, NotReady, BadMember):
            return False
        return True

    async def _generate(self, request: HttpRequest, *, is_chat: bool) -> HttpResponse | None:
        try:
            call = read_completion_request(await request.read_body(), is_chat=is_chat)
        finally:
            request.release_body()
        return await _CompletionRun(self._service, request, self._admitted(request, call)).run()

    def _admitted(self, request: HttpRequest, call: Call) -> Call:
        """Return the call without a `keep_alive` that its sender has no right to, but with a warning."""
        if call.keep_alive_s is None or self._may_change_models(request.head):
            return call
        return replace(call, keep_alive_s=None, warnings=(_KEEP_ALIVE_IGNORED,))

    async def _embed(self, request: HttpRequest) -> HttpResponse:
        try:
            body = await request.read_body()
            read = partial(read_embedding_request, body)
            call = await request.run_on_worker(read) if len(body) > TEXT_ON_LOOP_BYTES else read()
            del body, read  # the memory budget counts the body no longer
        finally:
            request.release_body()
        handle = self._service.find(call.model, None)
        requests = call.inference_requests(handle.spec)
        call = self._admitted(request, call)
        if call.keep_alive_s is not None:
            self._service.set_keep_alive(call.model, call.keep_alive_s)
        responses = await self._submit_all(handle, request.context.dispatch, requests)
        encode = partial(call.response_body, requests, responses)
        # A number of 4 bytes becomes about 20 characters.
        text_bytes = 5 * sum(tensor.nbytes for response in responses for tensor in response.outputs)
        text = await request.run_on_worker(encode) if text_bytes > TEXT_ON_LOOP_BYTES else encode()
        return HttpResponse(text, headers={"Content-Type": JSON_TYPE})

    async def _submit_all(self, handle: Handle, dispatch: LoopDispatch, requests: list[Request]) -> list[Response]:
        """Return the final response to each request. Raises the first error, and cancels the other requests."""
        waiting = deque(enumerate(requests))
        running: dict[int, SubmittedRequest] = {}
        arrived: asyncio.Queue[tuple[int, Response]] = asyncio.Queue()
        found: dict[int, Response] = {}

        def receive(index: int, response: Response) -> None:
            arrived.put_nowait((index, response))

        try:
            while waiting or running:
                while waiting and len(running) < _MAX_EMBEDDING_REQUESTS:
                    index, request = waiting.popleft()
                    deliver = partial(dispatch.deliver, partial(receive, index))
                    running[index] = handle.submit(request, deliver)
                index, response = await arrived.get()
                if response.error is not None:
                    raise response.error
                if response.is_final:
                    del running[index]
                    found[index] = response
        finally:
            for ticket in running.values():
                ticket.cancel()
        return [found[index] for index in range(len(requests))]

    async def _respond(
        self, request: HttpRequest, run: Callable[[], Awaitable[HttpResponse | None]]
    ) -> HttpResponse | None:
        """Answer a call. Any error before the first byte of a stream is a response with OpenAI's error object."""
        try:
            return await run()
        except ConnectionError:
            raise
        except EdgeServerError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the boundary: the client gets a response for any error
            _LOG.exception("request %s %s failed", request.head.method, request.head.target)
            failure = ServingFault(f"internal error: {type(error).__name__}: {error}")
        if request.is_streaming:
            await request.write(_event(error_object(failure)))
            return None
        return _error_response(failure)


class _CompletionRun:
    """One call while it is answered: its choices run at the same time, each as a request."""

    def __init__(self, service: InferenceService, request: HttpRequest, call: CompletionRequest) -> None:
        self._service = service
        self._request = request
        self._call = call
        self._handle = handle = service.find(call.model, None)
        self._requests = call.inference_requests(handle.spec)
        self._choices = [CompletionChoice(index, call.has_parallel_calls) for index in range(len(self._requests))]
        self._responses: asyncio.Queue[tuple[CompletionChoice, Response]] = asyncio.Queue()

    async def run(self) -> HttpResponse | None:
        """Raises EdgeServerError: a refusal, or the first error of a choice."""
        tickets = []
        dispatch = self._request.context.dispatch
        if self._call.keep_alive_s is not None:
            self._service.set_keep_alive(self._call.model, self._call.keep_alive_s)
        try:
            for choice, request in zip(self._choices, self._requests, strict=True):
                deliver = partial(dispatch.deliver, partial(self._receive, choice))
                tickets.append(self._handle.submit(request, deliver))
            if self._call.is_stream:
                await self._stream()
                return None
            left = len(tickets)
            while left:
                choice, response = await self._responses.get()
                self._add(choice, response)
                left -= response.is_final
            return json_response(completion_response(self._call, self._choices))
        finally:
            for ticket in tickets:
                ticket.cancel()

    def _receive(self, choice: CompletionChoice, response: Response) -> None:
        self._responses.put_nowait((choice, response))
        # The task may be waiting until this client reads; aborting the connection ends the wait.
        if self._responses.qsize() > MAX_BACKLOG:
            self._request.connection.abort()

    @staticmethod
    def _add(choice: CompletionChoice, response: Response) -> None:
        if response.error is not None:
            raise response.error
        if not response.is_empty:
            choice.add(response)
        elif choice.finish_reason is None:
            choice.delta, choice.finish_reason = "", "stop"

    async def _stream(self) -> None:
        call, request = self._call, self._request
        left = len(self._choices)
        opening = [first_chunk(call, index) for index in range(len(self._choices))] if call.is_chat else []
        while left:
            try:
                choice, response = await asyncio.wait_for(self._responses.get(), _KEEP_ALIVE_S)
            except asyncio.TimeoutError:
                await self._begin()
                await request.write(b": the model is still busy with the prompt\n\n")
                continue
            self._add(choice, response)
            await self._begin()
            events, opening = opening + chunks(call, choice), []
            for chunk in events:
                await request.write(_event(chunk))
            left -= response.is_final
        if call.includes_usage:
            await request.write(_event(usage_chunk(call, self._choices)))
        await request.write(b"data: [DONE]\n\n")

    async def _begin(self) -> None:
        if not self._request.is_streaming:
            await self._request.begin_stream(200, _STREAM_HEADERS)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "edge-server"}


def _event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def _error_response(error: EdgeServerError) -> HttpResponse:
    response = error_response(error)
    response.body = to_json(error_object(error))
    return response
