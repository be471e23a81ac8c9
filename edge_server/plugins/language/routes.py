"""Routes of the text APIs, and their forms of errors: OpenAI's (/v1/chat/completions, /v1/responses and others, and the
same under /v3/), Jina's and Cohere's rerank, Anthropic's (/v1/messages) and ollama's (/api/chat and others).

The endpoints of an API are imported for its first request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from edge_server.errors import EdgeServerError
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.routes import DeferredEndpoints, NoSuchPath, Route
from edge_server.service import InferenceService

_SCHEMAS = "edge_server.plugins.language.schemas"
_JSON_BODY = "edge_server.frontends.http.schemas:JSON_BODY"

_COMPLETION = f"{_SCHEMAS}:COMPLETION"
_LINE_STREAM = f"{_SCHEMAS}:LINE_STREAM"

_OPENAI = "edge_server.plugins.language.openai.endpoints:OpenAiEndpoints"
_RESPONSES = "edge_server.plugins.language.openai.responses_api_endpoints:ResponseEndpoints"
_ANTHROPIC = "edge_server.plugins.language.anthropic.endpoints:AnthropicEndpoints"
_OLLAMA = "edge_server.plugins.language.ollama.endpoints:OllamaEndpoints"

_RERANK = "Sort documents by their relevance to a query, as in Jina's and Cohere's APIs"
_CANCEL = "Refused, because no response is made in the background, as in OpenAI's API"

_Line: TypeAlias = tuple[str, str, str, str, str, str]

# fmt: off
_OF_OPENAI: Sequence[_Line] = (
    ("POST", "/chat/completions", "inference", f"{_OPENAI}.chat", _COMPLETION, "Continue a chat, as in OpenAI's API"),
    ("POST", "/completions", "inference", f"{_OPENAI}.complete", _COMPLETION, "Complete a text, as in OpenAI's API"),
    ("POST", "/embeddings", "inference", f"{_OPENAI}.embed", _JSON_BODY, "Embed texts, as in OpenAI's API"),
    ("POST", "/rerank", "inference", f"{_OPENAI}.rerank", _JSON_BODY, _RERANK),
    ("GET", "/models", "metadata", f"{_OPENAI}.models", "", "List the models for text, as in OpenAI's API"),
    ("GET", "/models/{model}", "metadata", f"{_OPENAI}.model", "", "One model, as in OpenAI's API"),
    ("POST", "/responses", "inference", f"{_RESPONSES}.create", _COMPLETION,
     "Continue a chat, as in OpenAI's API for responses"),
    # Who may make responses may read and delete those whose ids it knows.
    ("GET", "/responses/{response}", "inference", f"{_RESPONSES}.show", "", "A stored response, as in OpenAI's API"),
    ("DELETE", "/responses/{response}", "inference", f"{_RESPONSES}.delete", "",
     "Delete a stored response, as in OpenAI's API"),
    ("GET", "/responses/{response}/input_items", "inference", f"{_RESPONSES}.input_items", "",
     "What a stored response was made from, as in OpenAI's API"),
    ("POST", "/responses/{response}/cancel", "inference", f"{_RESPONSES}.cancel", "", _CANCEL),
)
_OF_OTHERS: Sequence[_Line] = (
    # Cohere's newer clients, and those of vLLM
    ("POST", "/v2/rerank", "inference", f"{_OPENAI}.rerank", _JSON_BODY, _RERANK),
    ("POST", "/rerank", "inference", f"{_OPENAI}.rerank", _JSON_BODY, _RERANK),
    ("POST", "/v1/messages", "inference", f"{_ANTHROPIC}.create", _COMPLETION,
     "Continue a chat, as in Anthropic's API"),
    ("POST", "/v1/messages/count_tokens", "inference", f"{_ANTHROPIC}.count_tokens", _JSON_BODY,
     "Count the tokens of a chat, as in Anthropic's API"),
    ("POST", "/api/chat", "inference", f"{_OLLAMA}.chat", _LINE_STREAM, "Continue a chat, as in ollama's API"),
    ("POST", "/api/generate", "inference", f"{_OLLAMA}.generate", _LINE_STREAM, "Answer a prompt, as in ollama's API"),
    ("POST", "/api/embed", "inference", f"{_OLLAMA}.embed", _JSON_BODY, "Embed texts, as in ollama's API"),
    ("POST", "/api/embeddings", "inference", f"{_OLLAMA}.embed_prompt", _JSON_BODY,
     "Embed a text, as in ollama's older API"),
    ("GET", "/api/tags", "metadata", f"{_OLLAMA}.tags", "", "List the models for text, as in ollama's API"),
    ("GET", "/api/ps", "metadata", f"{_OLLAMA}.loaded", "", "List the loaded models for text, as in ollama's API"),
    ("POST", "/api/show", "metadata", f"{_OLLAMA}.show", _JSON_BODY, "One model, as in ollama's API"),
    ("GET", "/api/version", "metadata", f"{_OLLAMA}.version", "", "Version of ollama whose API this is"),
)
# fmt: on


def language_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    """Return the routes. `may_change_models` returns whether the sender of a request may load and unload models."""
    handler = DeferredEndpoints(service, may_change_models).handler
    # OpenVINO Model Server has OpenAI's API under /v3.
    return [
        Route(method, base + path, category, summary, handler(name), schema=schema)
        for base, lines in (("/v1", _OF_OPENAI), ("/v3", _OF_OPENAI), ("", _OF_OTHERS))
        for method, path, category, name, schema, summary in lines
    ]


def refusal_body(head: RequestHead, error: EdgeServerError) -> bytes | None:
    """Return an API's form of an error for each of its paths, also if no route has this path; None for other paths and
    where the form is the usual one."""
    from edge_server.frontends.json_text import to_json

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
