"""Routes of OpenAI's API for audio: /v1/audio/transcriptions, translations and speech, and the same under /v3/.

The endpoints are imported for the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.routes import DeferredEndpoints, Route
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.plugins.speech.endpoints import AudioEndpoints
    from edge_server.plugins.speech.synthesis.speech_endpoint import SpeechEndpoint


def speech_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    """Return the routes. `may_change_models` returns whether the sender of a request may load and unload models."""

    def make() -> AudioEndpoints:
        from edge_server.plugins.speech.endpoints import AudioEndpoints

        return AudioEndpoints(service, may_change_models)

    def make_speech() -> SpeechEndpoint:
        from edge_server.plugins.speech.synthesis.speech_endpoint import SpeechEndpoint

        return SpeechEndpoint(service, may_change_models)

    handler = DeferredEndpoints(make).handler
    speech_handler = DeferredEndpoints(make_speech).handler
    lines: list[Route] = []
    for base in ("/v1", "/v3"):  # OpenVINO Model Server has this API under /v3
        lines += (
            Route(
                "POST",
                f"{base}/audio/transcriptions",
                category="inference",
                summary="Text of speech, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.transcribe),
                schema="edge_server.plugins.speech.schemas:AUDIO",
            ),
            Route(
                "POST",
                f"{base}/audio/translations",
                category="inference",
                summary="English text of speech, as in OpenAI's API",
                handler=handler(lambda endpoints: endpoints.translate),
                schema="edge_server.plugins.speech.schemas:AUDIO",
            ),
            Route(
                "POST",
                f"{base}/audio/speech",
                category="inference",
                summary="Speech of a text, as in OpenAI's API",
                handler=speech_handler(lambda endpoint: endpoint.speak),
                schema="edge_server.plugins.speech.schemas:SPEECH",
            ),
        )
    return lines
