"""HTTP handlers of `embed` of both versions of Cohere's API."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse
from edge_server.plugins.language.cohere.embed_request import (
    embed_response,
    embed_v2_response,
    read_embed_request,
    read_embed_v2_request,
)
from edge_server.plugins.language.openai.call_runner import CallRunner
from edge_server.plugins.language.openai.completion_response import OPENAI_ERRORS
from edge_server.service import InferenceService


class CohereEndpoints:
    """The handlers. Errors have OpenAI's form, whose message Cohere's client shows."""

    def __init__(self, service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> None:
        self._runner = CallRunner(service, may_change_models, OPENAI_ERRORS)

    async def embed(self, request: HttpRequest) -> HttpResponse | None:
        embed = partial(self._runner.embed, request, read_embed_request, embed_response)
        return await self._runner.respond(request, embed)

    async def embed_v2(self, request: HttpRequest) -> HttpResponse | None:
        embed = partial(self._runner.embed, request, read_embed_v2_request, embed_v2_response)
        return await self._runner.respond(request, embed)
