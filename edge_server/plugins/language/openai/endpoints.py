"""HTTP handlers of OpenAI's API: chat/completions, completions, embeddings, rerank and models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from edge_server.errors import NotReady, UnknownModel
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.plugins.language.openai.api_endpoints import CallRunner
from edge_server.plugins.language.openai.completion_request import read_completion_request
from edge_server.plugins.language.openai.completion_response import OPENAI_ERRORS, OpenAiEncoder
from edge_server.plugins.language.openai.embedding_request import embedding_response, read_embedding_request
from edge_server.plugins.language.openai.rerank_request import read_rerank_request, rerank_response
from edge_server.service import InferenceService


class OpenAiEndpoints:
    """The handlers. `may_change_models` returns whether the sender of a request may load and unload models."""

    def __init__(self, service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> None:
        self._runner = CallRunner(service, may_change_models, OPENAI_ERRORS, is_openai=True)

    async def chat(self, request: HttpRequest) -> HttpResponse | None:
        return await self._runner.respond(request, partial(self._generate, request, is_chat=True))

    async def complete(self, request: HttpRequest) -> HttpResponse | None:
        return await self._runner.respond(request, partial(self._generate, request, is_chat=False))

    async def embed(self, request: HttpRequest) -> HttpResponse | None:
        embed = partial(self._runner.embed, request, read_embedding_request, embedding_response)
        return await self._runner.respond(request, embed)

    async def rerank(self, request: HttpRequest) -> HttpResponse | None:
        rerank = partial(self._runner.rerank, request, read_rerank_request, rerank_response)
        return await self._runner.respond(request, rerank)

    async def models(self, request: HttpRequest) -> HttpResponse:
        request.release_body()
        return json_response({"object": "list", "data": [self._model(name) for name in self._runner.model_names()]})

    async def model(self, request: HttpRequest) -> HttpResponse | None:
        request.release_body()
        return await self._runner.respond(request, partial(self._show, request.names["model"]))

    async def _show(self, name: str) -> HttpResponse:
        if not self._runner.is_for_calls(name):
            raise UnknownModel(f"no model '{name}' gives text, embeddings or scores")
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        found = {"id": name, "object": "model", "created": 0, "owned_by": "edge-server"}
        with contextlib.suppress(UnknownModel, NotReady):  # removed since
            handle, adapter = self._runner.find(name)
            if adapter:
                found["parent"] = handle.spec.name
        return found

    async def _generate(self, request: HttpRequest, *, is_chat: bool) -> HttpResponse | None:
        call = await self._runner.read(request, partial(read_completion_request, is_chat=is_chat))
        return await self._runner.complete(request, call, OpenAiEncoder)
