"""Routes of the text APIs, and their forms of errors: OpenAI's (/v1/chat/completions, /v1/responses and others, and the
same under /v3/), Jina's and Cohere's rerank, Anthropic's (/v1/messages) and ollama's (/api/chat and others).

The endpoints of an API are imported for its first request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.routes import DeferredEndpoints, NoSuchPath, Route
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.plugins.language.anthropic.endpoints import AnthropicEndpoints
    from edge_server.plugins.language.ollama.endpoints import OllamaEndpoints
    from edge_server.plugins.language.openai.endpoints import OpenAiEndpoints
    from edge_server.plugins.language.responses.endpoints import ResponseEndpoints

_SCHEMAS = "edge_server.plugins.language.schemas"
_JSON_BODY = "edge_server.frontends.http.schemas:JSON_BODY"

_post = partial(Route, "POST", category="inference")
_get = partial(Route, "GET", category="metadata")


def language_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    """Return the routes. `may_change_models` returns whether the sender of a request may load and unload models."""
    return (
        *_openai_routes(service, may_change_models),
        *_response_routes(service, may_change_models),
        *_anthropic_routes(service, may_change_models),
        *_ollama_routes(service, may_change_models),
    )


def _openai_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    def make() -> OpenAiEndpoints:
        from edge_server.plugins.language.openai.endpoints import OpenAiEndpoints

        return OpenAiEndpoints(service, may_change_models)

    handler = DeferredEndpoints(make).handler
    lines: list[Route] = []
    completion = f"{_SCHEMAS}:COMPLETION"
    for base in ("/v1", "/v3"):  # OpenVINO Model Server has this API under /v3
        lines += (
            _post(
                f"{base}/chat/completions",
                summary="Continue a chat, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.chat),
                schema=completion,
            ),
            _post(
                f"{base}/completions",
                summary="Complete a text, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.complete),
                schema=completion,
            ),
            _post(
                f"{base}/embeddings",
                summary="Embed texts, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.embed),
                schema=_JSON_BODY,
            ),
            _post(
                f"{base}/rerank",
                summary="Sort documents by their relevance to a query, as in Jina's and Cohere's APIs",
                handler=handler(lambda endpoints: endpoints.rerank),
                schema=_JSON_BODY,
            ),
            _get(
                f"{base}/models",
                summary="List the models for text, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.models),
            ),
            _get(
                f"{base}/models/{{model}}",
                summary="One model, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.model),
            ),
        )
    # Cohere's newer clients, and those of vLLM
    for path in ("/v2/rerank", "/rerank"):
        lines.append(
            _post(
                path,
                summary="Sort documents by their relevance to a query, as in Cohere's API",
                handler=handler(lambda endpoints: endpoints.rerank),
                schema=_JSON_BODY,
            )
        )
    return lines


def _response_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    def make() -> ResponseEndpoints:
        from edge_server.plugins.language.responses.endpoints import ResponseEndpoints

        return ResponseEndpoints(service, may_change_models)

    handler = DeferredEndpoints(make).handler
    lines: list[Route] = []
    for base in ("/v1", "/v3"):
        lines += (
            _post(
                f"{base}/responses",
                summary="Continue a chat, as in OpenAI's API for responses",
                handler=handler(lambda endpoints: endpoints.create),
                schema=f"{_SCHEMAS}:COMPLETION",
            ),
            # Who may make responses may read and delete those whose ids it knows.
            Route(
                "GET",
                f"{base}/responses/{{response}}",
                category="inference",
                summary="A stored response, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.show),
            ),
            Route(
                "DELETE",
                f"{base}/responses/{{response}}",
                category="inference",
                summary="Delete a stored response, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.delete),
            ),
            Route(
                "GET",
                f"{base}/responses/{{response}}/input_items",
                category="inference",
                summary="What a stored response was made from, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.input_items),
            ),
            _post(
                f"{base}/responses/{{response}}/cancel",
                summary="Refused, because no response is made in the background, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.cancel),
            ),
        )
    return lines


def _anthropic_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    def make() -> AnthropicEndpoints:
        from edge_server.plugins.language.anthropic.endpoints import AnthropicEndpoints

        return AnthropicEndpoints(service, may_change_models)

    handler = DeferredEndpoints(make).handler
    return (
        _post(
            "/v1/messages",
            summary="Continue a chat, as in Anthropic's API",
            handler=handler(lambda endpoints: endpoints.create),
            schema=f"{_SCHEMAS}:COMPLETION",
        ),
        _post(
            "/v1/messages/count_tokens",
            summary="Count the tokens of a chat, as in Anthropic's API",
            handler=handler(lambda endpoints: endpoints.count_tokens),
            schema=_JSON_BODY,
        ),
    )


def _ollama_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    def make() -> OllamaEndpoints:
        from edge_server.plugins.language.ollama.endpoints import OllamaEndpoints

        return OllamaEndpoints(service, may_change_models)

    handler = DeferredEndpoints(make).handler
    generation = f"{_SCHEMAS}:LINE_STREAM"
    return (
        _post(
            "/api/chat",
            summary="Continue a chat, as in ollama's API",
            handler=handler(lambda endpoints: endpoints.chat),
            schema=generation,
        ),
        _post(
            "/api/generate",
            summary="Answer a prompt, as in ollama's API",
            handler=handler(lambda endpoints: endpoints.generate),
            schema=generation,
        ),
        _post(
            "/api/embed",
            summary="Embed texts, as in ollama's API",
            handler=handler(lambda endpoints: endpoints.embed),
            schema=_JSON_BODY,
        ),
        _post(
            "/api/embeddings",
            summary="Embed a text, as in ollama's older API",
            handler=handler(lambda endpoints: endpoints.embed_prompt),
            schema=_JSON_BODY,
        ),
        _get(
            "/api/tags",
            summary="List the models for text, as in ollama's API",
            handler=handler(lambda endpoints: endpoints.tags),
        ),
        _get(
            "/api/ps",
            summary="List the loaded models for text, as in ollama's API",
            handler=handler(lambda endpoints: endpoints.loaded),
        ),
        Route(
            "POST",
            "/api/show",
            category="metadata",
            summary="One model, as in ollama's API",
            handler=handler(lambda endpoints: endpoints.show),
            schema=_JSON_BODY,
        ),
        _get(
            "/api/version",
            summary="Version of ollama whose API this is",
            handler=handler(lambda endpoints: endpoints.version),
        ),
    )


def refusal_body(head: RequestHead, error: EdgeServerError) -> bytes | None:
    """Return an API's form of an error for each of its paths, also if no route has this path; None for other paths and
    where the form is the usual one."""
    from edge_server.frontends.v2.json_parser import to_json

    if head.target.startswith("/api/") and isinstance(error, NoSuchPath):
        from edge_server.plugins.language.ollama.generation_response import unknown_path

        return to_json({"error": unknown_path(head.method, head.target)})
    path = head.target.partition("?")[0]
    if path not in ("/rerank", "/v2/rerank") and (
        not path.startswith(("/v1/", "/v3/")) or path.startswith("/v1/vision/")  # DeepStack's
    ):
        return None
    if path in ("/v1/messages", "/v1/messages/count_tokens"):
        from edge_server.plugins.language.anthropic.message_response import error_object as anthropic_error

        return to_json(anthropic_error(error))
    from edge_server.plugins.language.openai.completion_response import UnknownPath, error_object

    if isinstance(error, NoSuchPath):
        error = UnknownPath(head.method, head.target)
    return to_json(error_object(error))
