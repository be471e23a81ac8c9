"""HTTP handlers of OpenAI's API: chat/completions, completions, embeddings, rerank and models."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from edge_server.errors import NotReady, UnknownModel
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.plugins.language.openai.api_endpoints import ApiEndpoints, answering
from edge_server.plugins.language.openai.completion_request import read_completion_request
from edge_server.plugins.language.openai.completion_response import OPENAI_ERRORS, OpenAiEncoder
from edge_server.plugins.language.openai.embedding_codec import embedding_response, read_embedding_request
from edge_server.plugins.language.openai.rerank_codec import read_rerank_request, rerank_response


class OpenAiEndpoints(ApiEndpoints):
    errors = OPENAI_ERRORS

    @answering
    async def chat(self, request: HttpRequest) -> HttpResponse | None:
        call = await self.read(request, partial(read_completion_request, is_chat=True))
        return await self.run_completion(request, call, OpenAiEncoder)

    @answering
    async def complete(self, request: HttpRequest) -> HttpResponse | None:
        call = await self.read(request, partial(read_completion_request, is_chat=False))
        return await self.run_completion(request, call, OpenAiEncoder)

    @answering
    async def embed(self, request: HttpRequest) -> HttpResponse:
        return await self.run_on_texts(request, read_embedding_request, embedding_response)

    @answering
    async def rerank(self, request: HttpRequest) -> HttpResponse:
        return await self.run_on_texts(request, read_rerank_request, rerank_response)

    @answering
    async def models(self, request: HttpRequest) -> HttpResponse:
        return json_response({"object": "list", "data": [self._model(name) for name in self.model_names()]})

    @answering
    async def model(self, request: HttpRequest) -> HttpResponse:
        name = request.names["model"]
        if not self.is_for_calls(name):
            raise UnknownModel(f"no model '{name}' gives text, embeddings or scores")
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        found = {"id": name, "object": "model", "created": 0, "owned_by": "edge-server"}
        with contextlib.suppress(UnknownModel, NotReady):  # removed since
            handle, adapter = self.find(name)
            if adapter:
                found["parent"] = handle.spec.name
        return found
