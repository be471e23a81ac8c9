"""Base of the HTTP handlers of all text APIs: submits requests, streams or joins the responses, and answers errors.

Each API has a parser, which makes a CompletionRequest or an EmbeddingRequest of a body, and an encoder for its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from edge_server.core.request_response import Request, Response, SubmittedRequest
from edge_server.errors import EdgeServerError, InvalidRequest, NotReady, ServingFault, UnknownModel
from edge_server.frontends.http.generate_endpoints import MAX_BACKLOG
from edge_server.frontends.http.inference_route import TEXT_ON_LOOP_BYTES
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import JSON_TYPE, HttpResponse, error_response, json_response
from edge_server.frontends.json_text import parse_object, to_json
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.plugins.language.engines.lora_adapters import adapter_names
from edge_server.plugins.language.openai.completion_request import BadMember, CompletionRequest, read_model
from edge_server.plugins.language.openai.completion_response import CompletionChoice, CompletionEncoder, ErrorFormat
from edge_server.plugins.language.openai.embedding_codec import EmbeddingRequest, embedding_tensors
from edge_server.plugins.language.openai.rerank_codec import RerankRequest, is_cross_encoder
from edge_server.protocol.raw_tensors import Buffer
from edge_server.service import Handle, InferenceService

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
Api = TypeVar("Api", bound="ApiEndpoints")
Answer: TypeAlias = Callable[[Api, HttpRequest], Awaitable["HttpResponse | None"]]
Call = TypeVar("Call", CompletionRequest, EmbeddingRequest, RerankRequest)
TextsCall = TypeVar("TextsCall", EmbeddingRequest, RerankRequest)

_KEEP_ALIVE_S = 15.0
"""Time without an event after which something without effect is sent, so that proxies keep the stream open."""

_MAX_NAMES = 8
"""Maximum number of models that an error names."""

_KEEP_ALIVE_IGNORED = (
    "keep_alive is ignored: this request may not load and unload models (access category model-repository)"
)

_MAX_EMBEDDING_REQUESTS = 16
"""Most requests of one call for embeddings in the server at the same time, so that it does not fill a model's queue."""


def answering(handle: Answer[Api]) -> Answer[Api]:
    """Decorator of a handler: any error before the first byte of a stream is a response in the form of its API, a later
    one the last piece of the stream. The body is released at the end."""

    async def respond(endpoints: Api, request: HttpRequest) -> HttpResponse | None:
        try:
            return await handle(endpoints, request)
        except ConnectionError:
            raise
        except UnknownModel as error:
            failure = endpoints.with_names(error)
        except EdgeServerError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the boundary: the client gets a response for any error
            _LOG.exception("request %s %s failed", request.head.method, request.head.target)
            failure = ServingFault(f"internal error: {type(error).__name__}: {error}")
        finally:
            request.release_body()
        if request.is_streaming:
            await request.write(endpoints.errors.event(failure))
            return None
        response = error_response(failure)
        response.body = to_json(endpoints.errors.body(failure))
        return response

    return respond


class ApiEndpoints:
    """HTTP handlers of one API, each `answering`, and how their calls run."""

    errors: ErrorFormat
    has_scores_and_speech = True
    """Whether the API has calls for models that score texts, and for those that hear or speak."""

    def __init__(self, service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> None:
        """`may_change_models` returns whether the sender of a request may load and unload models."""
        self.service = service
        self._may_change_models = may_change_models

    def with_names(self, error: UnknownModel) -> EdgeServerError:
        """Return the error with the models that serve, if every client may list them."""
        if not self.service.suggests_models:
            return error
        names = self.model_names()
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return UnknownModel(f"{error.message}; models that serve here: {', '.join(names[:_MAX_NAMES]) or 'none'}{more}")

    async def read(self, request: HttpRequest, parse: Callable[[Buffer], T]) -> T:
        """Return the call that `parse` reads from the body, and release the body. Raises the errors of both, but
        UnknownModel for a wrong body that names such a model.

        `parse` runs on a worker thread if the body is large.
        """
        try:
            body = await request.read_body()
            read = partial(self.parse, partial(parse, body), lambda: read_model(parse_object(body)))
            return await request.run_on_worker(read) if len(body) > TEXT_ON_LOOP_BYTES else read()
        finally:
            request.release_body()

    def parse(self, parse: Callable[[], T], read_name: Callable[[], str]) -> T:
        """Return the call that `parse` reads; `read_name` reads only the name of its model. Raises their errors, and
        UnknownModel instead of another error if there is no such model."""
        try:
            return parse()
        except InvalidRequest:
            # A client that asks for the wrong model is not sent from one wrong member to the next.
            with contextlib.suppress(InvalidRequest, NotReady):
                self.find(read_name().removesuffix(":latest"))
            raise

    def model_names(self) -> list[str]:
        """Return the models for which the API has calls."""
        names = sorted({entry.name for entry in self.service.repository_index()})
        return [whole for name in names if self.is_for_calls(name) for whole in (name, *self._with_adapters(name))]

    def find(self, name: str) -> tuple[Handle, str]:
        """Return a model, and the LoRA adapter in its name, `MODEL:ADAPTER`, or "". Raises UnknownModel, NotReady."""
        try:
            return self.service.find(name, None), ""
        except UnknownModel:
            model, _, adapter = name.rpartition(":")
            with contextlib.suppress(UnknownModel):
                handle = self.service.find(model, None)
                if adapter in adapter_names(handle.spec.parameters):
                    return handle, adapter
            raise

    def _with_adapters(self, name: str) -> list[str]:
        try:
            return [f"{name}:{adapter}" for adapter in adapter_names(self.service.find(name, None).spec.parameters)]
        except (UnknownModel, NotReady):  # removed since
            return []

    def is_for_calls(self, name: str) -> bool:
        """Return whether the API has calls for a model."""
        try:
            spec = self.find(name)[0].spec
            audio = spec.input("audio")
            takes_speech = audio is not None and not audio.is_optional
            gives_speech = spec.input("text") is not None and spec.output("audio") is not None
            if takes_speech or gives_speech or is_cross_encoder(spec):
                return self.has_scores_and_speech
            if spec.output("text_output") is None:
                embedding_tensors(spec)
        except (UnknownModel, NotReady, BadMember):
            return False
        return True

    def keep_alive_warnings(self, request: HttpRequest, seconds: float | None) -> tuple[str, ...]:
        """Return why the `keep_alive` of a request is ignored, or nothing if its sender may set it."""
        return () if seconds is None or self._may_change_models(request.head) else (_KEEP_ALIVE_IGNORED,)

    def _admit(self, request: HttpRequest, call: Call) -> Call:
        """Return the call without a `keep_alive` that its sender has no right to, but with a warning."""
        ignored: tuple[str, ...] = self.keep_alive_warnings(request, call.keep_alive_s)
        return replace(call, keep_alive_s=None, warnings=(*call.warnings, *ignored)) if ignored else call

    async def run_completion(
        self, request: HttpRequest, call: CompletionRequest, encoder: Callable[[CompletionRequest], CompletionEncoder]
    ) -> HttpResponse | None:
        """Raises EdgeServerError: a refusal, or the first error of a choice."""
        call = self._admit(request, call)
        if any(isinstance(image, str) for image in call.images):
            call = replace(call, images=await self._fetch_pictures(request, call))
        handle, adapter = self.find(call.model)
        if adapter:
            call = replace(call, sampling={**call.sampling, "lora_name": adapter})
        return await _CompletionRun(self.service, handle, request, call, encoder(call)).run()

    async def _fetch_pictures(self, request: HttpRequest, call: CompletionRequest) -> tuple[bytes, ...]:
        """Return the pictures of a call. Raises BadMember for one that cannot be had."""
        # Imported only for calls with URLs.
        from edge_server.plugins.language.openai.remote_pictures import HOSTS, fetch_pictures, read_hosts

        spec = self.find(call.model)[0].spec
        call.check_takes_pictures(spec)
        hosts = read_hosts(spec.name, spec.parameters.get(HOSTS, ""))
        try:
            return await request.run_blocking(partial(fetch_pictures, call.images, hosts))
        except InvalidRequest as error:
            raise BadMember("messages", f"'messages': {error.message}") from None

    async def run_on_texts(
        self, request: HttpRequest, parse: Callable[[Buffer], TextsCall], encode: Callable[[TextsCall, Any], object]
    ) -> HttpResponse:
        """Answer a call whose parser is `parse` with the JSON that `encode` returns for the call and its results.
        Raises EdgeServerError."""
        call = await self.read(request, parse)
        handle = self.service.find(call.model, None)
        requests = call.inference_requests(handle.spec)
        call = self._admit(request, call)
        responses = await self.submit_all(handle, request.context.dispatch, requests)
        if call.keep_alive_s is not None:
            self.service.set_keep_alive(call.model, call.keep_alive_s)

        def encode_body() -> bytes:
            return to_json(encode(call, call.results(handle.spec, requests, responses)))

        # A number of 4 bytes becomes about 20 characters.
        text_bytes = 5 * sum(tensor.nbytes for response in responses for tensor in response.outputs)
        text = await request.run_on_worker(encode_body) if text_bytes > TEXT_ON_LOOP_BYTES else encode_body()
        return HttpResponse(text, headers={"Content-Type": JSON_TYPE})

    async def submit_all(self, handle: Handle, dispatch: LoopDispatch, requests: list[Request]) -> list[Response]:
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


class _CompletionRun:
    """One call while it is answered: its choices run at the same time, each as a request."""

    def __init__(
        self,
        service: InferenceService,
        handle: Handle,
        request: HttpRequest,
        call: CompletionRequest,
        encoder: CompletionEncoder,
    ) -> None:
        self._service = service
        self._request = request
        self._call = call
        self._encoder = encoder
        self._handle = handle
        self._requests = call.inference_requests(handle.spec)
        self._choices = [CompletionChoice(index, call.has_parallel_calls) for index in range(len(self._requests))]
        self._responses: deque[tuple[CompletionChoice, Response]] = deque()
        self._arrival: asyncio.Future[None] | None = None
        """Of a response, while the task waits for one."""

    async def run(self) -> HttpResponse | None:
        """Raises EdgeServerError: a refusal, or the first error of a choice."""
        tickets = []
        dispatch = self._request.context.dispatch
        try:
            for choice, request in zip(self._choices, self._requests, strict=True):
                deliver = partial(dispatch.deliver, partial(self._receive, choice))
                tickets.append(self._handle.submit(request, deliver))
            if self._call.keep_alive_s is not None:
                self._service.set_keep_alive(self._handle.spec.name, self._call.keep_alive_s)
            if self._call.is_stream:
                await self._stream()
                return None
            left = len(tickets)
            while left:
                if not self._responses:
                    await self._wait(None)
                    continue
                choice, response = self._responses.popleft()
                self._add(choice, response)
                left -= response.is_final
            return json_response(self._encoder.body(self._choices))
        finally:
            for ticket in tickets:
                ticket.cancel()

    def _receive(self, choice: CompletionChoice, response: Response) -> None:
        self._responses.append((choice, response))
        self._end_wait()
        # The task may be waiting until this client reads; aborting the connection ends the wait.
        if len(self._responses) > MAX_BACKLOG:
            self._request.connection.abort()

    def _end_wait(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _wait(self, limit_s: float | None) -> None:
        """Wait for a response, at most `limit_s`. A task for each token, as `asyncio.wait_for` makes, costs more."""
        loop = asyncio.get_running_loop()
        self._arrival = loop.create_future()
        limit = None if limit_s is None else loop.call_later(limit_s, self._end_wait)
        try:
            await self._arrival
        finally:
            if limit is not None:
                limit.cancel()

    @staticmethod
    def _add(choice: CompletionChoice, response: Response) -> None:
        if response.error is not None:
            raise response.error
        if not response.is_empty:
            choice.add(response)
        elif choice.finish_reason is None:
            choice.delta, choice.delta_reasoning, choice.finish_reason = "", "", "stop"

    async def _stream(self) -> None:
        encoder, request = self._encoder, self._request
        left = len(self._choices)
        while left:
            if not self._responses:
                await self._wait(_KEEP_ALIVE_S)
                if not self._responses:
                    await self._begin()
                    await request.write(encoder.idle_piece())
                    continue
            choice, response = self._responses.popleft()
            self._add(choice, response)
            await self._begin()
            for piece in encoder.pieces(choice):
                await request.write(piece)
            left -= response.is_final
        for piece in encoder.last_pieces(self._choices):
            await request.write(piece)

    async def _begin(self) -> None:
        if not self._request.is_streaming:
            await self._request.begin_stream(200, self._encoder.stream_headers)
