"""HTTP handlers of vLLM's `tokenize`, `detokenize` and `classify`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from edge_server.core.request_response import Request, Response
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.plugins.language.openai.call_runner import CallRunner
from edge_server.plugins.language.openai.completion_response import OPENAI_ERRORS
from edge_server.plugins.language.vllm.classification_request import (
    classification_response,
    read_classification_request,
)
from edge_server.plugins.language.vllm.token_requests import (
    detokenize_request,
    detokenize_response,
    read_detokenize_request,
    read_tokenize_request,
    tokenize_request,
    tokenize_response,
)
from edge_server.service import Handle, InferenceService


class VllmEndpoints:
    """The handlers. Errors have OpenAI's form."""

    def __init__(self, service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> None:
        self._runner = CallRunner(service, may_change_models, OPENAI_ERRORS)

    async def tokenize(self, request: HttpRequest) -> HttpResponse | None:
        return await self._runner.respond(request, partial(self._tokenize, request))

    async def detokenize(self, request: HttpRequest) -> HttpResponse | None:
        return await self._runner.respond(request, partial(self._detokenize, request))

    async def classify(self, request: HttpRequest) -> HttpResponse | None:
        classify = partial(self._runner.classify, request, read_classification_request, classification_response)
        return await self._runner.respond(request, classify)

    async def _tokenize(self, request: HttpRequest) -> HttpResponse:
        call = await self._runner.read(request, read_tokenize_request)
        handle, _ = self._runner.find(call.model)
        return json_response(tokenize_response(await self._infer(request, handle, tokenize_request(call, handle.spec))))

    async def _detokenize(self, request: HttpRequest) -> HttpResponse:
        model, tokens = await self._runner.read(request, read_detokenize_request)
        handle, _ = self._runner.find(model)
        response = await self._infer(request, handle, detokenize_request(tokens, handle.spec))
        return json_response(detokenize_response(response))

    async def _infer(self, request: HttpRequest, handle: Handle, inference: Request) -> Response:
        (response,) = await self._runner.submit_all(handle, request.context.dispatch, [inference])
        return response
