"""HTTP handlers of ollama's API under /api/."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from edge_server.errors import UnknownModel
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.json_text import parse_object
from edge_server.plugins.language.ollama.generation_request import (
    GenerationRequest,
    model_name,
    read_chat_request,
    read_generate_request,
)
from edge_server.plugins.language.ollama.generation_response import OllamaEncoder, error_object, line, opening
from edge_server.plugins.language.ollama.model_reports import list_models, show_model
from edge_server.plugins.language.openai.api_endpoints import ApiEndpoints, answering
from edge_server.plugins.language.openai.completion_request import (
    BadMember,
    check_names,
    make_completion_request,
    read_boolean,
    read_model,
    read_object,
)
from edge_server.plugins.language.openai.completion_response import ErrorFormat, warnings_member
from edge_server.plugins.language.openai.embedding_codec import EmbeddingRequest, Embeddings, make_embedding_request
from edge_server.protocol.raw_tensors import Buffer

_API_VERSION = "0.12.0"
"""Version of ollama whose API this is. Clients compare it with the one that brought what they need."""

_OF_EMBEDDINGS = {"model", "input", "prompt", "truncate", "options", "keep_alive", "dimensions"}


class OllamaEndpoints(ApiEndpoints):
    errors = ErrorFormat(error_object, lambda error: line(error_object(error)))
    has_scores_and_speech = False

    @answering
    async def chat(self, request: HttpRequest) -> HttpResponse | None:
        return await self._generate(request, read_chat_request)

    @answering
    async def generate(self, request: HttpRequest) -> HttpResponse | None:
        return await self._generate(request, partial(read_generate_request, takes_chats=self._takes_chats))

    @answering
    async def embed(self, request: HttpRequest) -> HttpResponse:
        begin_ns = time.monotonic_ns()

        def encode(call: EmbeddingRequest, embeddings: Embeddings) -> dict[str, Any]:
            return {
                "model": call.model,
                "embeddings": [row.tolist() for row in embeddings.rows],
                "total_duration": time.monotonic_ns() - begin_ns,
                "prompt_eval_count": embeddings.tokens,
                **warnings_member(call.warnings),
            }

        return await self.run_on_texts(request, _read_embed_request, encode)

    @answering
    async def embed_prompt(self, request: HttpRequest) -> HttpResponse:
        """Answer `embeddings`, the older form of `embed`."""
        read = partial(_read_embed_request, source="prompt")
        return await self.run_on_texts(request, read, lambda call, found: {"embedding": found.rows[0].tolist()})

    @answering
    async def tags(self, request: HttpRequest) -> HttpResponse:
        return await self._list(request, only_loaded=False)

    @answering
    async def loaded(self, request: HttpRequest) -> HttpResponse:
        return await self._list(request, only_loaded=True)

    @answering
    async def show(self, request: HttpRequest) -> HttpResponse:
        members = await request.read_members()
        name = model_name(read_model({"model": members.get("model") or members.get("name")}))
        if not self.is_for_calls(name):
            raise UnknownModel(f"no model '{name}' gives text or embeddings")
        check_names(members, {"model", "name", "verbose"})
        return json_response(show_model(self.find(name)[0].spec))

    @answering
    async def version(self, request: HttpRequest) -> HttpResponse:
        return json_response({"version": _API_VERSION})

    async def _generate(
        self, request: HttpRequest, parse: Callable[[Buffer], GenerationRequest]
    ) -> HttpResponse | None:
        call = await self.read(request, parse)
        if call.completion is None:
            return await self._load(request, call)
        return await self.run_completion(request, call.completion, partial(OllamaEncoder, call))

    async def _load(self, request: HttpRequest, call: GenerationRequest) -> HttpResponse:
        """Load a model, or unload it if `keep_alive` is 0."""
        name, seconds = model_name(call.model), call.keep_alive_s
        model = self.find(name)[0].spec.name
        is_loaded = any(report.name == model and report.state == "READY" for report in self.service.versions())
        if seconds != 0 and not is_loaded:
            # A request loads the model, and waits for it.
            members = {"model": name, "messages": [{"role": "user", "content": "-"}], "max_tokens": 1}
            if not self._takes_chats(name):
                members = {"model": name, "prompt": "-", "max_tokens": 1}
            first = make_completion_request(members, is_chat="messages" in members)
            await self.run_completion(request, first, partial(OllamaEncoder, call))
        warnings = self.keep_alive_warnings(request, seconds)
        if seconds is not None and not warnings:
            self.service.set_keep_alive(model, seconds)
        reason = "unload" if seconds == 0 else "load"
        answer = {**opening(call, ""), "done": True, "done_reason": reason}
        return json_response({**answer, **warnings_member(warnings)})

    def _takes_chats(self, name: str) -> bool:
        spec = self.find(name)[0].spec
        return spec.chat_template is not None or spec.input("messages") is not None

    async def _list(self, request: HttpRequest, *, only_loaded: bool) -> HttpResponse:
        request.release_body()
        names = self.model_names()
        models = await request.run_blocking(
            partial(list_models, self.service, self.find, names, only_loaded=only_loaded)
        )
        return json_response({"models": models})


def _read_embed_request(body: Buffer, *, source: str = "input") -> EmbeddingRequest:
    """Return the call of a body of `embed`, or of `embeddings`, whose text is the member `prompt`.

    `options` and `truncate` have no effect: they concern the load of a model, and texts that are refused here.
    """
    members = parse_object(body)
    check_names(members, _OF_EMBEDDINGS)
    read_object(members, "options")
    read_boolean(members, "truncate")
    translated: Mapping[str, Any] = {
        "model": model_name(read_model(members)),
        "input": members.get(source),
        "dimensions": members.get("dimensions"),
        "keep_alive": members.get("keep_alive"),
    }
    try:
        return make_embedding_request(translated)
    except BadMember as error:
        raise error.renamed({"input": source}) from None
