"""Routes of OpenAI's HTTP API (/v1/chat/completions and others, and the same under /v3/), and OpenAI's format of
errors.

The endpoints are imported for the first request.
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
    from edge_server.plugins.language.openai.endpoints import OpenAiEndpoints

_SCHEMAS = "edge_server.plugins.language.openai.schemas"


def openai_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    """Return the routes. `may_change_models` returns whether the sender of a request may load and unload models."""

    def make() -> OpenAiEndpoints:
        from edge_server.plugins.language.openai.endpoints import OpenAiEndpoints

        return OpenAiEndpoints(service, may_change_models)

    handler = DeferredEndpoints(make).handler
    lines: list[Route] = []
    completion = f"{_SCHEMAS}:COMPLETION"
    post = partial(Route, "POST", category="inference")
    get = partial(Route, "GET", category="metadata")
    for base in ("/v1", "/v3"):  # OpenVINO Model Server has this API under /v3
        lines += (
            post(
                f"{base}/chat/completions",
                summary="Continue a chat, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.chat),
                schema=completion,
            ),
            post(
                f"{base}/completions",
                summary="Complete a text, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.complete),
                schema=completion,
            ),
            post(
                f"{base}/embeddings",
                summary="Embed texts, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.embed),
                schema=f"{_SCHEMAS}:EMBEDDING",
            ),
            get(
                f"{base}/models",
                summary="List the models for text, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.models),
            ),
            get(
                f"{base}/models/{{model}}",
                summary="One model, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.model),
            ),
        )
    return lines


def refusal_body(head: RequestHead, error: EdgeServerError) -> bytes | None:
    """Return OpenAI's form of an error for each of its paths, also if no route has this path; None for other paths."""
    if not head.target.startswith(("/v1/", "/v3/")) or head.target.startswith("/v1/vision/"):  # DeepStack's
        return None
    from edge_server.frontends.v2.json_parser import to_json
    from edge_server.plugins.language.openai.completion_response import UnknownPath, error_object

    if isinstance(error, NoSuchPath):
        error = UnknownPath(head.method, head.target)
    return to_json(error_object(error))
